"""A small GPT on characters: sentences of unequal length (see corpus.py), so that micro-batches differ in items.

An item is a character that is predicted, or the sentence's end; padding is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field, ValidationInfo, field_validator

from accum_sweep.problems.base import Problem
from accum_sweep.problems.corpus import END, IGNORED, VOCABULARY, CorpusParams, split, token_cross_entropy
from accum_sweep.problems.held_out import test_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Params(CorpusParams):
    """Keys of `problem=char_gpt`."""

    layers: int = Field(default=2, ge=1, description="transformer blocks")
    heads: int = Field(default=4, ge=1, description="attention heads of each block")
    width: int = Field(default=64, ge=1, description="features of each token")
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="share of features dropped in training; above 0 no two splits agree"
    )

    @field_validator("width")
    @classmethod
    def _heads_divide(cls, width: int, info: ValidationInfo) -> int:
        heads = info.data.get("heads")
        if heads and width % heads:
            nearest = max(1, round(width / heads)) * heads
            raise ValueError(f"must be a multiple of problem.heads={heads}; the nearest that is one is {nearest}")
        return width

    def build(self, dtype: torch.dtype) -> Problem:
        """Build the transformer, and (inputs, targets) from the sentences, each (sentences, context)."""
        from accum_sweep.problems.transformer import Transformer

        model = Transformer(VOCABULARY, self.context, self.layers, self.heads, self.width, self.dropout).to(dtype)
        texts = split(self.train_sequences, self.test_sequences, self.context + 1)
        train, test = map(_columns, texts)
        blocks = tuple(f"blocks.{number}" for number in range(self.layers))
        evaluate = test_loss(next_token_loss, test)
        return Problem(model, train, next_token_loss, evaluate=evaluate, blocks=blocks)


def next_token_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies and number of tokens predicted; the batch is (inputs, targets), see `_columns`.

    One without sequences, which fused attention on CUDA does not take, is replaced by a sequence without targets.
    """
    inputs, targets = batch
    if len(inputs) == 0:
        inputs, targets = inputs.new_full((1, inputs.shape[1]), END), targets.new_full((1, inputs.shape[1]), IGNORED)
    return token_cross_entropy(model(inputs), targets)


def _columns(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """From tokens (sentences, context + 1) make inputs and the tokens that follow them, each (sentences, context)."""
    return tokens[:, :-1].where(tokens[:, :-1] != IGNORED, END), tokens[:, 1:]
