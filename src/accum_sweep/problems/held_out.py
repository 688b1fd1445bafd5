"""Metrics on data that is not trained on: the model in eval mode, and as it was afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from accum_sweep.accumulate import Loss
    from accum_sweep.problems.base import Columns

PIECE = 128  # samples that one forward pass sees, so that a long held-out set needs no more memory than a short one


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, without gradients; afterwards each submodule is in the mode it had."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def test_loss(loss: Loss, held_out: Columns) -> Callable[[nn.Module, torch.device], dict[str, float]]:
    """Return the `evaluate` of a problem whose one metric is the mean loss over the items of `held_out`."""
    return lambda model, device: {"test/loss": mean(model, loss, held_out, device)}


def mean(model: nn.Module, measure: Loss, held_out: Columns, device: torch.device) -> float:
    """Mean of `measure` over all items of `held_out`, taken a piece at a time.

    `measure` is called as a loss is: it returns the sum over a piece's items, and their number.
    """
    total, items = 0.0, 0
    with evaluating(model):
        for piece in _pieces(held_out, device):
            piece_sum, piece_items = measure(model, piece)
            total += float(piece_sum)
            items += int(piece_items)
    return total / items


def _pieces(columns: Columns, device: torch.device) -> Iterator[Columns]:
    """Yield PIECE samples of all columns at a time, in the form of `columns`."""
    samples = len(next(iter(columns.values() if isinstance(columns, Mapping) else columns)))
    for start in range(0, samples, PIECE):
        part = slice(start, start + PIECE)
        if isinstance(columns, Mapping):
            yield {name: column[part].to(device) for name, column in columns.items()}
        else:
            yield tuple(column[part].to(device) for column in columns)
