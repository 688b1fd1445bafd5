"""The micro-batches of a training, gathered from a problem's data and sent to the device when their turn comes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accum_sweep import windows

if TYPE_CHECKING:
    from accum_sweep.config import Config
    from accum_sweep.problems.base import Problem


def gather(problem: Problem, index: Tensor, device: torch.device) -> Any:
    """Return the samples at `index` as one batch, in the form of the problem's data."""

    def pick(column: Tensor) -> Tensor:
        return column[index].to(device)

    if isinstance(problem.train, Mapping):
        return {name: pick(column) for name, column in problem.train.items()}
    return tuple(map(pick, problem.train))


class Batches(Sequence[Any]):
    """Batches made one at a time."""

    def __init__(self, problem: Problem, indices: Sequence[Tensor], device: torch.device) -> None:
        self.problem, self.indices, self.device = problem, indices, device  # each index (samples,)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: Any) -> Any:
        return gather(self.problem, self.indices[number], self.device)

    def __iter__(self) -> Iterator[Any]:
        # Sequence's own would keep each batch while it makes the next, and take an IndexError for the end.
        return map(self.__getitem__, range(len(self)))


class MicroBatches(Batches):
    """One rank's micro-batches of a window; it knows the others' too, to compute the window again."""

    def __init__(self, problem: Problem, window: list[Tensor], device: torch.device, rank: int, world: int) -> None:
        super().__init__(problem, windows.share(window, rank, world), device)
        self.window, self._rank, self._world = window, rank, world

    def recut(self, size: int) -> None:
        """Cut the window's samples into micro-batches of at most `size`, in the same order."""
        self.window = windows.cut(self.window, size)
        self.indices = windows.share(self.window, self._rank, self._world)

    def whole(self, device: torch.device) -> Any:
        """Return all samples of the window, on all ranks, as one batch."""
        return gather(self.problem, torch.cat(self.window), device)

    def pieces(self, device: torch.device) -> Batches:
        """Return the micro-batches of all ranks."""
        return Batches(self.problem, self.window, device)


def training_windows(config: Config, problem: Problem) -> Iterator[list[Tensor]]:
    """Yield the sample indices of each micro-batch of each window, those of all ranks."""
    orders = windows.sample_order(config.problem.train_samples, config.seed if problem.shuffle else None)
    if config.steps is not None:
        return windows.windows_by_steps(orders, config.plan, config.steps)
    assert config.epochs is not None, "check() leaves one of steps and epochs"
    return windows.windows_by_epochs(orders, config.plan, config.epochs, config.last_window)


def count_windows(config: Config) -> int:
    """Return the number of windows of the whole training."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None, "check() leaves one of steps and epochs"
    order = torch.empty(config.problem.train_samples)  # only its length matters
    orders = (order for _ in range(config.epochs))
    return sum(1 for _ in windows.windows_by_epochs(orders, config.plan, config.epochs, config.last_window))
