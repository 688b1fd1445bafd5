"""Real data, small: handwritten digits (see digits.py) and a convolutional network.

With `norm=batch` the network is the classic exception to accumulation: BatchNorm takes its statistics from each
micro-batch, so that split and full batch are not the same function, whatever is done to the gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, ValidationInfo, field_validator

from accum_sweep.problems.base import Problem
from accum_sweep.problems.digits import CLASSES, DigitsParams, cross_entropy, evaluation, split

if TYPE_CHECKING:
    import torch
    from torch import nn

SIDE = 8  # pixels


class Params(DigitsParams):
    """Keys of `problem=digits_cnn`."""

    norm: Literal["batch", "group", "none"] = Field(default="group", description="what follows each convolution")
    groups: int = Field(default=4, ge=1, description="groups of channels that norm=group normalizes over")
    channels: int = Field(
        default=16, ge=1, description="channels of the first convolution; the second has two times it"
    )

    @field_validator("channels")
    @classmethod
    def _groups_divide(cls, channels: int, info: ValidationInfo) -> int:
        groups = info.data.get("groups")
        if info.data.get("norm") == "group" and groups and channels % groups:
            raise ValueError(f"must be a multiple of problem.groups={groups} for norm=group; change one of them")
        return channels

    def build(self, dtype: torch.dtype) -> Problem:
        """Build two stages of convolution, norm, ReLU and pooling, and a linear layer; split the images."""
        from torch import nn

        first, second = self.channels, 2 * self.channels
        model = nn.Sequential(
            nn.Unflatten(1, (1, SIDE, SIDE)),
            self._stage(1, first),
            self._stage(first, second),
            nn.Flatten(),
            nn.Linear(second * (SIDE // 4) ** 2, CLASSES),
        ).to(dtype)
        train, test = split(self.test_samples, dtype)
        # A checkpointed block runs forward twice: BatchNorm would count each micro-batch twice in its running mean.
        blocks = () if self.norm == "batch" else ("1", "2")
        return Problem(model, train, cross_entropy, evaluate=evaluation(test), blocks=blocks)

    def _stage(self, inputs: int, outputs: int) -> nn.Module:
        """From (samples, inputs, side, side) to (samples, outputs, side / 2, side / 2)."""
        from torch import nn

        norm: nn.Module = nn.Identity()
        if self.norm == "batch":
            norm = nn.BatchNorm2d(outputs)
        elif self.norm == "group":
            norm = nn.GroupNorm(self.groups, outputs)
        return nn.Sequential(nn.Conv2d(inputs, outputs, kernel_size=3, padding=1), norm, nn.ReLU(), nn.MaxPool2d(2))
