"""Real English text as sequences of characters of unequal length, and the loss of a model that predicts the next one.

The text is the language reference as it ships with Python for `help()` (`pydoc_data.topics`; Python Software Foundation
License), cut into sentences: 3359 with Python 3.11, a few more with each later one, 8 to some 3000 characters long. The
same Python gives the same sequences in the same order. The alphabet is fixed, so that a model's shape is the same
everywhere. torch is imported late.
"""

from __future__ import annotations

import functools
import random
import re
from typing import TYPE_CHECKING

from pydantic import Field, ValidationInfo, field_validator

from accum_sweep.errors import UserError
from accum_sweep.problems.base import ProblemParams

if TYPE_CHECKING:
    from torch import Tensor

END = 0  # the token after a sentence's last character; also what pads inputs
OTHER = 1  # any character that is not printable ASCII
FIRST = 2  # the token of the first printable character, the space
VOCABULARY = FIRST + ord("~") - ord(" ") + 1  # 97
IGNORED = -100  # a target that is none: torch's and Hugging Face's own word for padding
SHORTEST = 8  # characters


class CorpusParams(ProblemParams):
    """Keys that the problems on the corpus share."""

    context: int = Field(default=128, ge=2, description="tokens a sequence is cut or padded to")
    train_sequences: int = Field(default=2048, ge=1, description="sentences that are trained on")
    test_sequences: int = Field(default=256, ge=1, description="sentences held out for test/loss")

    @field_validator("test_sequences")
    @classmethod
    def _there_are_enough(cls, test: int, info: ValidationInfo) -> int:
        train, there = info.data.get("train_sequences", 0), len(sentences())
        if train + test > there:
            rule = f"with problem.train_sequences={train} is more than the {there} sentences there are"
            raise ValueError(f"{rule}; lower one of them")
        return test

    @property
    def train_samples(self) -> int:
        """Sentences that are trained on."""
        return self.train_sequences


@functools.lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    """All sentences, each once, in one fixed shuffled order, so that those held out are of the same kind.

    Raises UserError where this Python comes without the text.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        text = "this Python lacks pydoc_data, the text that problem=char_gpt and problem=causal_lm learn from"
        raise UserError(f"{text}; use a complete Python, or another problem") from error
    text = "\n\n".join(topics[name] for name in sorted(topics))
    text = re.sub(r"^([^\w\s])\1{2,}$", "", text, flags=re.MULTILINE)  # the lines under titles
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    found = (sentence for paragraph in paragraphs for sentence in re.split(r"(?<=[.!?])\s+", paragraph))
    unique = list(dict.fromkeys(sentence for sentence in found if len(sentence) >= SHORTEST))
    random.Random(0).shuffle(unique)
    return tuple(unique)


def split(train: int, test: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the first `train` and the last `test` sentences as tokens, each (sentences, length) int64.

    A sentence is its characters and END, cut at `length`, or padded with IGNORED.
    """
    import torch

    def tokens(chosen: tuple[str, ...]) -> Tensor:
        rows = [[*map(token, text[:length]), END][:length] for text in chosen]
        return torch.tensor([row + [IGNORED] * (length - len(row)) for row in rows])

    return tokens(sentences()[:train]), tokens(sentences()[-test:])


def token(character: str) -> int:
    """Return the token of a character."""
    return FIRST + ord(character) - ord(" ") if " " <= character <= "~" else OTHER


def token_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies over the targets that are not IGNORED, and their number.

    `logits` is (sequences, tokens, vocabulary), `targets` (sequences, tokens). In float32 at least: half precision has
    too few digits for a sum over thousands of tokens.
    """
    import torch
    from torch.nn import functional as F

    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    loss_sum = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss_sum, (targets != IGNORED).sum()
