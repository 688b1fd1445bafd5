"""What every problem gives: its parameters as read from `conf/problem/`, and from them a model, data and a loss.

This module and the `Params` classes import torch late, so that a configuration is checked in a blink.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from accum_sweep.accumulate import Loss

    Columns = tuple[Tensor, ...] | Mapping[str, Tensor]  # each (samples, ...)


@dataclass(frozen=True)
class Problem:
    """A model, its data and its loss, all on the CPU; the run moves them to its device."""

    model: nn.Module
    train: Columns  # what a micro-batch is cut from, and has the form of
    loss: Loss
    shuffle: bool = True  # a new order each epoch, by the seed; False: the order of the data
    evaluate: Callable[[nn.Module, torch.device], dict[str, float]] | None = None  # held-out metrics after training
    blocks: tuple[str, ...] = ()  # names of the submodules that are checkpointed, or sharded over ranks, one by one


class ProblemParams(BaseModel):
    """Base of the `Params` of a problem: the keys under `problem`, with their types and rules."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    libraries: ClassVar[tuple[str, ...]] = ()  # what `build` imports; no part of what memory_limit counts

    name: str = Field(description="the module that holds the problem")
    default_accum_steps: int | None = Field(
        default=None,
        ge=1,
        description="accum_steps where it does not follow; null: the written mini-batches, else 1",
    )
    default_micro_batch_size: int | None = Field(
        default=None, ge=1, description="micro_batch_size where no size gives it"
    )
    default_steps: int | None = Field(default=1, ge=1, description="steps where neither steps nor epochs is given")
    default_epochs: int | None = Field(default=None, ge=1, description="epochs, likewise; wins over default_steps")

    @property
    def train_samples(self) -> int:
        """Number of training samples."""
        raise NotImplementedError(f"problem {self.name} must say how many training samples it has")

    @property
    def written_micro_batch_sizes(self) -> tuple[int, ...] | None:
        """Sizes of the micro-batches the problem itself is written in, used where no size is given; None: no such."""
        return None

    def build(self, dtype: torch.dtype) -> Problem:
        """Make the problem; random numbers come from torch's global generator, seeded by the run."""
        raise NotImplementedError(f"problem {self.name} must build its model, data and loss")
