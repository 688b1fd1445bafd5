"""Which samples each micro-batch of each window holds. Depends on the seed and the sizes, never on accum_steps alone.

Windows are cut from one stream of samples, so runs of one seed and one effective batch see the same samples in each
step, however many micro-batches share them.
"""

from collections.abc import Iterable, Iterator
from itertools import cycle, islice

import torch
from torch import Tensor


def sample_order(samples: int, seed: int | None) -> Iterator[Tensor]:
    """Yield for each epoch, without end, the order of the samples: (samples,) indices.

    `seed` None keeps the order of the data. The generator is this function's own: nothing else moves it.
    """
    generator = torch.Generator()
    if seed is not None:
        generator.manual_seed(seed)
    while True:
        yield torch.arange(samples) if seed is None else torch.randperm(samples, generator=generator)


def windows_by_steps(
    orders: Iterable[Tensor], accum_steps: int, micro_batch_sizes: tuple[int, ...], steps: int
) -> Iterator[list[Tensor]]:
    """Yield `steps` windows of `accum_steps` micro-batches, each (micro_batch_size,) indices.

    The data begins anew where it ends, within a window too, so every window is full.
    """
    micro_batches = _cut(orders, cycle(micro_batch_sizes))
    for _ in range(steps):
        yield list(islice(micro_batches, accum_steps))


def windows_by_epochs(
    orders: Iterable[Tensor], accum_steps: int, micro_batch_sizes: tuple[int, ...], epochs: int, last_window: str
) -> Iterator[list[Tensor]]:
    """Yield the windows of `epochs` epochs. A window ends with its epoch: the last one may be short.

    `last_window` "flush" takes a step with what is there, "drop" leaves those samples out.
    """
    for order in islice(orders, epochs):
        micro_batches = list(_cut([order], cycle(micro_batch_sizes)))
        sizes = list(islice(cycle(micro_batch_sizes), len(micro_batches)))
        for first in range(0, len(micro_batches), accum_steps):
            window = micro_batches[first : first + accum_steps]
            full = len(window) == accum_steps and len(window[-1]) == sizes[first + accum_steps - 1]
            if full or last_window == "flush":
                yield window


def _cut(orders: Iterable[Tensor], sizes: Iterable[int]) -> Iterator[Tensor]:
    """Cut the joined orders into pieces of the given sizes; the last piece may be shorter."""
    epochs = iter(orders)
    rest = next(epochs)
    for size in sizes:
        while len(rest) < size and (order := next(epochs, None)) is not None:
            rest = torch.cat([rest, order])
        if len(rest) == 0:
            return
        yield rest[:size]
        rest = rest[size:]
