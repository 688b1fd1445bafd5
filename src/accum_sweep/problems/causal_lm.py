"""Any decoder of Hugging Face transformers on sentences of unequal length (see corpus.py); it never asks the network.

An item is a character that is predicted, or the sentence's end; padding is none. Characters are the tokens, whatever
tokenizer a model was made with. Needs the extra `accum-sweep[hf]`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from accum_sweep.errors import ConfigError, Fault
from accum_sweep.problems.base import Problem
from accum_sweep.problems.corpus import END, IGNORED, CorpusParams, split, token_cross_entropy
from accum_sweep.problems.held_out import test_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Params(CorpusParams):
    """Keys of `problem=causal_lm`."""

    libraries = ("accum_sweep.problems.hugging_face", "transformers.generation", "transformers.modeling_utils")
    model_config = ConfigDict(protected_namespaces=())  # pydantic 2.9 would keep names like model_type to itself

    model_type: str | None = Field(
        default=None, description="an architecture of transformers, such as llama, gpt2 or qwen2; null: llama"
    )
    config: dict[str, Any] | None = Field(
        default=None, description="what differs from a small model of that architecture, in its own keys"
    )
    config_file: str | None = Field(default=None, description="a config.json that describes the model")
    folder: str | None = Field(default=None, description="a local folder with a model's config.json")
    weights: Literal["random", "local"] = Field(default="random", description="random: by seed; local: the folder's")

    @field_validator("config_file", "folder")
    @classmethod
    def _is_there(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            path = Path(value, "config.json") if info.field_name == "folder" else Path(value)
            if not path.is_file():
                raise ValueError(f"there is no file {path} on this machine, and nothing is downloaded; mend the path")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = {
            "problem.folder": self.folder,
            "problem.config_file": self.config_file,
            "problem.model_type": self.model_type,
            "problem.config": self.config,
        }
        given = [key for key, value in sources.items() if value]
        faults = []
        if len(given) > 1 and given != ["problem.model_type", "problem.config"]:
            rule = f"excludes {' and '.join(given[1:])}: each says what the model is"
            faults.append(Fault(given[0], sources[given[0]], rule, "give one of them"))
        if self.weights == "local" and self.folder is None:
            faults.append(Fault("problem.weights", "local", "is of problem.folder, which is null", "give a folder"))
        if importlib.util.find_spec("transformers") is None:
            remedy = "pip install 'accum-sweep[hf]'"
            faults.append(Fault("problem", "causal_lm", "needs transformers, which is not installed", remedy))
        if faults:
            raise ConfigError(faults)
        return self

    def build(self, dtype: torch.dtype) -> Problem:
        """Build the model, and input_ids, attention_mask and labels from the sentences, each (sentences, context).

        Raises ConfigError where transformers refuses what the keys say.
        """
        from accum_sweep.problems import hugging_face

        if self.folder is not None:
            model = hugging_face.from_folder(Path(self.folder), self.weights, dtype, self.context)
        elif self.config_file is not None:
            model = hugging_face.from_file(Path(self.config_file), dtype, self.context)
        else:
            model = hugging_face.small(self.model_type or "llama", self.config or {}, dtype, self.context)
        train, test = map(_columns, split(self.train_sequences, self.test_sequences, self.context))
        evaluate = test_loss(next_token_loss, test)
        return Problem(model, train, next_token_loss, evaluate=evaluate, blocks=hugging_face.blocks(model))


def next_token_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies and number of tokens predicted: the logits of a token against the label after it.

    The batch is what `_columns` makes. One without sequences, at which many models stumble, is replaced by a sequence
    without labels: all gradients are zero, and every layer is passed, as sharded models need.
    """
    if len(batch["labels"]) == 0:
        batch = {name: column.new_full((1, column.shape[1]), FILL[name]) for name, column in batch.items()}
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return token_cross_entropy(logits[:, :-1], batch["labels"][:, 1:])


FILL = {"input_ids": END, "attention_mask": 1, "labels": IGNORED}  # of a sequence that is not there


def _columns(tokens: Tensor) -> dict[str, Tensor]:
    """From tokens (sentences, context) make what Hugging Face models are trained with, each of the same shape."""
    there = tokens != IGNORED
    return {"input_ids": tokens.where(there, END), "attention_mask": there.long(), "labels": tokens}
