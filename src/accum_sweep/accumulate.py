"""The heart: one window of micro-batches becomes one gradient, one gradient becomes one optimizer step.

torch only: no config, no clock, no tracker. The gradient the optimizer sees is, for micro-batches i = 1..k with n_i
items and mean loss l_i each,

    sum     grad l_1 + ... + grad l_k                                  the textbook loop: nothing is divided
    mean    (grad l_1 + ... + grad l_k) / k                            a mean of means
    items   (n_1 grad l_1 + ... + n_k grad l_k) / (n_1 + ... + n_k)    the full batch's gradient, always

where k and n_i are what was really there, also in a short last window.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Any], tuple[Tensor, int]]  # (model, batch) -> (loss summed over items, number of items)
Normalization = Literal["sum", "mean", "items"]


@dataclass(frozen=True)
class Window:
    """What one window computed. Nothing here waits for the device."""

    loss_sums: tuple[Tensor, ...]  # one scalar a micro-batch, detached: its loss summed over its items
    items: tuple[int, ...]  # one a micro-batch


@dataclass(frozen=True)
class Step:
    """One optimizer step: its window, and the norm of the gradient that the optimizer saw."""

    window: Window
    grad_norm: Tensor  # scalar, L2 over all parameters


def accumulate_gradients(
    model: nn.Module, micro_batches: Sequence[Any], loss: Loss, normalization: Normalization = "items"
) -> Window:
    """Run forward and backward on every micro-batch of one window and leave the window's gradient in `.grad`.

    Gradients must be empty (None or zero) before: they are added to and, under `items` with unequal micro-batches,
    scaled as a whole. Weights do not move. `micro_batches` may make its items as they are asked for; one is held at a
    time. `loss` is called as `loss(model, micro_batch)` and returns the loss summed over its items, and their number, 1
    or more. Raises ValueError for an empty window or a micro-batch without items.
    """
    if not micro_batches:
        raise ValueError("a window needs at least one micro-batch")
    loss_sums, counts = [], []
    expected = 0  # items of the window if all micro-batches are as large as the first
    scale, scale_items = None, 0
    for micro_batch in micro_batches:
        loss_sum, items = loss(model, micro_batch)
        items = int(items)  # a tensor's, if the loss gave one
        if items < 1:
            raise ValueError(f"the loss counted {items} items in a micro-batch; it takes at least 1")
        expected = expected or items * len(micro_batches)
        if scale is None or items != scale_items:
            divisor = {"sum": items, "mean": items * len(micro_batches), "items": expected}[normalization]
            scale, scale_items = torch.full_like(loss_sum, 1 / divisor), items
        loss_sum.backward(gradient=scale)  # type: ignore[no-untyped-call]
        # A copy: the scalar that `mse_loss` and others return sits on a buffer as large as the model's output.
        loss_sums.append(loss_sum.detach().clone())
        counts.append(items)
        del micro_batch, loss_sum  # or they would still be there while the next one is made
    total = sum(counts)
    if normalization == "items" and total != expected:
        # Known only now: what the loss counted. One multiplication a window, none where micro-batches are equal.
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(expected / total)
    return Window(tuple(loss_sums), tuple(counts))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    windows: Iterable[Sequence[Any]],
    loss: Loss,
    normalization: Normalization = "items",
) -> Iterator[Step]:
    """Take one optimizer step a window, and yield it."""
    optimizer.zero_grad()
    for micro_batches in windows:
        window = accumulate_gradients(model, micro_batches, loss, normalization)
        grad_norm = gradient_norm(model)
        optimizer.step()
        optimizer.zero_grad()
        yield Step(window, grad_norm)


def gradient_norm(model: nn.Module) -> Tensor:
    """L2 norm of all gradients taken together, a scalar; 0 where no parameter has one."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients)
