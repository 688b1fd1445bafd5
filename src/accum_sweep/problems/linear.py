"""The textbook problem: a linear layer, mini-batches written out in the config, mean squared error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationInfo, field_validator, model_validator

from accum_sweep.problems.base import Problem, ProblemParams
from accum_sweep.problems.held_out import test_loss

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


BY_RULE = [[0.5, -0.5], [-0.5, 0.5], [1.0, 0.5], [-1.0, 1.0]]  # held out


class MiniBatch(BaseModel):
    """Samples that one forward pass sees: x is (samples, features), y is (samples,)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    x: list[Annotated[list[FiniteFloat], Field(min_length=1)]] = Field(min_length=1)
    y: list[FiniteFloat] = Field(min_length=1)


class Params(ProblemParams):
    """Keys of `problem=linear`."""

    batches: list[MiniBatch] = Field(min_length=1, description="the mini-batches, in the order they are seen")
    bias: bool = Field(default=True, description="whether the layer has a bias")
    initial_weight: list[FiniteFloat] | None = Field(
        default=None, description="one number a feature; null: torch's own, by seed"
    )
    initial_bias: FiniteFloat | None = Field(default=None, description="null: torch's own, by seed")
    held_out: MiniBatch | None = Field(
        default=None, description="samples for test/loss, or rule for some of y = x1 + 2 x2; null: none are held out"
    )

    @field_validator("held_out", mode="before")
    @classmethod
    def _by_rule(cls, held_out: object, info: ValidationInfo) -> object:
        """Take "rule" for samples of the shipped batches' rule, where that is what these batches follow."""
        if held_out != "rule":
            return held_out
        rows = [(row, y) for batch in info.data.get("batches", []) for row, y in zip(batch.x, batch.y, strict=False)]
        return {"x": BY_RULE, "y": list(map(_rule, BY_RULE))} if all(_rule(row) == y for row, y in rows) else None

    @field_validator("held_out")
    @classmethod
    def _held_out_fits(cls, held_out: MiniBatch | None, info: ValidationInfo) -> MiniBatch | None:
        batches = info.data.get("batches")
        if held_out and batches and (fault := _shape_fault(held_out, len(batches[0].x[0]))):
            raise ValueError(f"{fault}; mend it, or set problem.held_out=null")
        return held_out

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        features = len(self.batches[0].x[0])
        for number, batch in enumerate(self.batches):
            if fault := _shape_fault(batch, features):
                raise ValueError(f"batches[{number}] {fault}")
        if self.initial_weight is not None and len(self.initial_weight) != features:
            raise ValueError(f"initial_weight has {len(self.initial_weight)} numbers for {features} features")
        if self.initial_bias is not None and not self.bias:
            raise ValueError("initial_bias is given, but bias=false")
        return self

    @property
    def train_samples(self) -> int:
        """Number of samples in all mini-batches."""
        return sum(self.written_micro_batch_sizes)

    @property
    def written_micro_batch_sizes(self) -> tuple[int, ...]:
        """Samples of each mini-batch."""
        return tuple(len(batch.y) for batch in self.batches)

    def build(self, dtype: torch.dtype) -> Problem:
        """Build `nn.Linear(features, 1)` over the mini-batches, which keep their order."""
        import torch
        from torch import nn

        model = nn.Linear(len(self.batches[0].x[0]), 1, bias=self.bias).to(dtype)
        with torch.no_grad():
            if self.initial_weight is not None:
                model.weight.copy_(torch.tensor([self.initial_weight], dtype=dtype))
            if self.initial_bias is not None:
                model.bias.fill_(self.initial_bias)
        evaluate = test_loss(squared_error, _columns([self.held_out], dtype)) if self.held_out else None
        return Problem(model, _columns(self.batches, dtype), squared_error, shuffle=False, evaluate=evaluate)


def _rule(row: list[float]) -> float | None:
    """Return x1 + 2 x2, what the shipped mini-batches are made by; None where there are not two features."""
    return row[0] + 2 * row[1] if len(row) == 2 else None


def _shape_fault(batch: MiniBatch, features: int) -> str | None:
    """Say what is wrong with a mini-batch's shape; None if nothing is."""
    if len(batch.x) != len(batch.y):
        return f"has {len(batch.x)} rows in x but {len(batch.y)} values in y"
    if any(len(row) != features for row in batch.x):
        return f"has rows of another length; every row of x needs {features}"
    return None


def squared_error(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """Sum of squared errors and number of samples; x is (samples, features), y is (samples, 1)."""
    from torch.nn import functional as F

    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), y.shape[0]


def _columns(batches: list[MiniBatch], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """All samples of the mini-batches in their order: x (samples, features) and y (samples, 1)."""
    import torch

    x = torch.tensor([row for batch in batches for row in batch.x], dtype=dtype)
    y = torch.tensor([value for batch in batches for value in batch.y], dtype=dtype)
    return x, y.unsqueeze(1)
