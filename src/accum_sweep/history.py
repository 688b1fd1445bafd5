"""The losses and gradient norms of a training, kept on its device until asked for: no step waits for them."""

import math
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from accum_sweep.accumulate import Step

PACK_EVERY = 4096  # scalars; each loose one is a tensor of some 500 bytes


class History:
    """All steps so far. Good at any moment, also after an interrupt in the middle of `add`."""

    def __init__(self) -> None:
        self._items: list[tuple[int, ...]] = []  # by step, by micro-batch
        self._loss_sums = Scalars()
        self._grad_norms = Scalars()

    def add(self, step: Step) -> None:
        """Remember a step."""
        self._loss_sums.extend(step.window.loss_sums)
        self._grad_norms.extend([step.grad_norm])
        self._items.append(step.window.items)  # last: what it does not count, `series` leaves out

    def series(self) -> dict[str, list[float]]:
        """Return `train/loss` and `train/grad_norm` by step, and `train/micro_loss` by micro-batch.

        Losses are means over items: over those of the whole window, and over those of the micro-batch.
        """
        sums = iter(self._loss_sums.tolist())
        micro, window = [], []
        for items in self._items:
            window_sums = list(islice(sums, len(items)))
            micro += [loss_sum / count for loss_sum, count in zip(window_sums, items, strict=True)]
            window.append(math.fsum(window_sums) / sum(items) if all(map(math.isfinite, window_sums)) else math.nan)
        norms = self._grad_norms.tolist()[: len(self._items)]
        return {"train/loss": window, "train/grad_norm": norms, "train/micro_loss": micro}


class Scalars:
    """A growing list of scalar tensors of one device, packed now and then."""

    def __init__(self) -> None:
        self._loose: list[Tensor] = []
        self._packed: list[Tensor] = []

    def extend(self, scalars: Sequence[Tensor]) -> None:
        """Add scalars."""
        self._loose.extend(scalars)
        if len(self._loose) >= PACK_EVERY:
            self._pack()

    def tolist(self) -> list[float]:
        """Wait for the device and return the numbers."""
        self._pack()
        return [number for packed in self._packed for number in packed.tolist()]

    def _pack(self) -> None:
        if self._loose:
            self._packed.append(torch.stack(self._loose))
            self._loose = []
