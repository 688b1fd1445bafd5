"""Which samples each micro-batch of each window holds. Depends on the seed and the sizes, never on accum_steps alone.

Windows are cut from one stream of samples, so runs of one seed and one effective batch see the same samples in each
step, however many micro-batches, and processes, share them.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

LastWindow = Literal["flush", "drop", "carry"]
Plan = Callable[[int], Iterator[tuple[int, ...]]]
"""(step) -> for it, at the start of an epoch, and for those after it: the sizes of the window's micro-batches."""


def sample_order(samples: int, seed: int | None) -> Iterator[Tensor]:
    """Yield for each epoch, without end, the order of the samples: (samples,) indices.

    `seed` None keeps the order of the data. The generator is this function's own: nothing else moves it.
    """
    generator = torch.Generator()
    if seed is not None:
        generator.manual_seed(seed)
    while True:
        yield torch.arange(samples) if seed is None else torch.randperm(samples, generator=generator)


def windows_by_steps(orders: Iterable[Tensor], plan: Plan, steps: int) -> Iterator[list[Tensor]]:
    """Yield `steps` windows, each its micro-batches' (micro_batch_size,) indices.

    The data begins anew where it ends, within a window too, so every window is full.
    """
    stream = _Stream(orders)
    for sizes in islice(plan(0), steps):
        yield stream.take(sizes)


def windows_by_epochs(
    orders: Iterable[Tensor], plan: Plan, epochs: int, last_window: LastWindow
) -> Iterator[list[Tensor]]:
    """Yield the windows of `epochs` epochs.

    With `last_window` "flush" a window ends with its epoch, and the last one steps with what is there; "drop" leaves a
    short one out; "carry" goes on with the next epoch's samples, so that only the very last window can be short.
    """
    if last_window == "carry":
        yield from _until_empty(_Stream(islice(orders, epochs)), plan(0))
        return
    step = 0
    for order in islice(orders, epochs):
        for sizes, window in zip(plan(step), _until_empty(_Stream([order]), plan(step)), strict=False):
            if last_window == "flush" or sum(map(len, window)) == sum(sizes):
                step += 1
                yield window


def share(window: list[Tensor], rank: int, world: int) -> list[Tensor]:
    """Return a rank's part of a window: every `world`-th micro-batch, and empty ones where there are too few."""
    share = window[rank::world]
    missing = -(-len(window) // world) - len(share)
    return share + [window[0][:0]] * missing


def cut(window: list[Tensor], size: int) -> list[Tensor]:
    """Return the same samples in micro-batches of at most `size`."""
    return [piece for micro_batch in window for piece in torch.split(micro_batch, size)]


class _Stream:
    """Samples in their order, epoch after epoch, to be taken in pieces."""

    def __init__(self, orders: Iterable[Tensor]) -> None:
        self._epochs = iter(orders)
        self._rest = next(self._epochs)

    def take(self, sizes: Iterable[int]) -> list[Tensor]:
        """Take pieces of these sizes; at the end of the stream the last one may be shorter, and there may be less."""
        pieces = []
        for size in sizes:
            while len(self._rest) < size and (order := next(self._epochs, None)) is not None:
                self._rest = torch.cat([self._rest, order])
            if len(self._rest):
                pieces.append(self._rest[:size])
            self._rest = self._rest[size:]
        return pieces


def _until_empty(stream: _Stream, plans: Iterable[tuple[int, ...]]) -> Iterator[list[Tensor]]:
    for sizes in plans:
        window = stream.take(sizes)
        if not window:
            return
        yield window
