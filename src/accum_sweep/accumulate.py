"""The heart: one window of micro-batches becomes one gradient.

torch only: no config, no clock, no tracker. The gradient is, for micro-batches i = 1..k with n_i items and mean loss
l_i each,

    sum     grad l_1 + ... + grad l_k                                  the textbook loop: nothing is divided
    mean    (grad l_1 + ... + grad l_k) / k                            a mean of means
    items   (n_1 grad l_1 + ... + n_k grad l_k) / (n_1 + ... + n_k)    the full batch's gradient, always

where k and n_i are what was really there, on all ranks: in a short last window too, without what holds no item.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from accum_sweep import ranks

Loss = Callable[[nn.Module, Any], tuple[Tensor, int | Tensor]]
"""(model, batch) -> (loss summed over the batch's items, number of items)."""

Normalization = Literal["sum", "mean", "items"]
_ALONE = nullcontext()


@dataclass(frozen=True)
class Window:
    """What one window computed."""

    loss_sums: tuple[Tensor, ...]  # this rank's, one scalar a micro-batch, detached: its loss summed over its items
    items: tuple[int, ...]  # this rank's, one a micro-batch
    total_items: int  # on all ranks
    total_loss_sum: float | None = None  # on all ranks; None on one rank, where it is the sum of `loss_sums`


def accumulate_gradients(
    model: nn.Module,
    micro_batches: Sequence[Any],
    loss: Loss,
    *,
    normalization: Normalization = "items",
    accumulator: torch.dtype | None = None,
    scaler: "torch.amp.GradScaler | None" = None,
    sync_every_micro_batch: bool = False,
    agreement: ranks.Agreement | None = None,
) -> Window:
    """Run forward and backward on every micro-batch of one window and leave the window's gradient in `.grad`.

    `micro_batches` holds whatever `loss` understands: tensors, tuples, dictionaries. It may make its items as they are
    asked for; one is held at a time. `loss` is called as `loss(model, micro_batch)` and returns the loss *summed* over
    its items, and their number (`accum_sweep.losses` has adapters for mean losses and Hugging Face models). A
    micro-batch without items counts for nothing; a window without any leaves no gradient, or a zero one on several
    ranks.

    `accumulator`, such as torch.float32, is the type in which gradients of a lower precision are summed; the sum is
    rounded to the parameter's type once, at the end; on one rank only. `scaler` scales the gradient for float16;
    unscale it before use.

    A model wrapped in DistributedDataParallel or `fully_shard` is synchronized once, in the last micro-batch's
    backward, or in each of them with `sync_every_micro_batch` (FSDP then keeps no unsharded gradients). Every rank
    needs the same number of micro-batches; give empty ones where a rank has less. With an `agreement` ranks ask each
    other on the way whether to go on, so that they can leave the window together.

    Weights do not move. Raises ValueError for a window without micro-batches, a negative number of items, ranks with
    different numbers of micro-batches, where a parameter holds a gradient already (it would be scaled along), and where
    DistributedDataParallel waits for a parameter that was not used.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in parameters):
        raise ValueError("the model holds gradients already; call optimizer.zero_grad() before a window")
    if normalization not in get_args(Normalization):
        raise ValueError(f"normalization must be one of {get_args(Normalization)}, not {normalization!r}")
    world = ranks.world_of(model)
    if world > 1:
        ranks.check_same(len(micro_batches), model, "micro-batches")
        if accumulator is not None:
            raise ValueError("an accumulator cannot be used on several ranks: they synchronize .grad themselves")
    if not micro_batches:
        raise ValueError("a window needs at least one micro-batch")
    micro_steps = len(micro_batches) * world
    loss_sums, counts = list[Tensor](), list[int]()
    sums = dict[nn.Parameter, Tensor]()  # with an accumulator
    expected = 1  # what the weights below divide by: right if every micro-batch is like the first
    weight, weight_items = None, -1
    for number, micro_batch in enumerate(micro_batches, start=1):
        synchronizes = world > 1 and (sync_every_micro_batch or number == len(micro_batches))
        if agreement is not None and (synchronizes or number == 1):  # DDP's forward pass may send buffers
            agreement.ask(model)
        with ranks.synchronizing(model, synchronizes) if world > 1 else _ALONE:
            loss_sum, items = _checked(loss(model, micro_batch))
            if number == 1 and normalization == "mean":
                expected = micro_steps
            elif number == 1 and normalization == "items":
                expected = micro_steps * ((ranks.largest(items, model) if world > 1 else items) or 1)
            if items != weight_items:
                divisor = expected if normalization == "items" else expected * items
                # Ranks are averaged when they synchronize, hence the factor.
                weight, weight_items = torch.full_like(loss_sum, world / divisor if items else 0.0), items
                if scaler is not None:
                    weight = scaler.scale(weight)
            if agreement is not None and synchronizes:
                agreement.ask(model)
            if items or world > 1:  # on several ranks all wait for each other in backward
                loss_sum.backward(gradient=weight)  # type: ignore[no-untyped-call]
        # A copy: the scalar that `mse_loss` and others return sits on a buffer as large as the model's output.
        loss_sums.append(loss_sum.detach().clone() if items else torch.zeros_like(loss_sum))
        counts.append(items)
        del micro_batch, loss_sum  # or they would still be there while the next one is made
        if accumulator is not None:
            _add_up(parameters, sums, accumulator)
    if world > 1:
        ranks.check_synchronized(model)
    window, divided_by = _totals(model, loss_sums, counts, normalization, world)
    # Known only now: what the losses counted. One multiplication a window, none where micro-batches are equal.
    correction = expected / divided_by if divided_by else 1.0
    for parameter in parameters:
        if parameter in sums:
            parameter.grad = sums.pop(parameter).mul_(correction).to(parameter.dtype)
        elif correction != 1 and parameter.grad is not None:
            parameter.grad.mul_(correction)
    return window


def gradient_norm(model: nn.Module) -> Tensor:
    """L2 norm of all gradients taken together, a scalar; 0 where no parameter has one."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return ranks.whole(nn.utils.get_total_norm(dense))


def exact_sum(numbers: Sequence[float]) -> float:
    """Return the exactly rounded sum; NaN where they are not all finite, which math.fsum would raise for."""
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else math.nan


def mean_loss(window: Window) -> float:
    """Return the mean loss over the window's items, on all ranks."""
    total = window.total_loss_sum
    if total is None:
        total = exact_sum(torch.stack(window.loss_sums).tolist())
    return total / max(1, window.total_items)


def _checked(returned: Any) -> tuple[Tensor, int]:
    """Return what a loss returned; raise TypeError where it is not a sum and a number of items."""
    pair = isinstance(returned, tuple | list) and len(returned) == 2
    if not pair or not isinstance(returned[0], Tensor) or returned[0].dim() > 0:
        raise TypeError("the loss must return its sum over the items, a tensor with one number, and how many there are")
    return returned[0], _count(returned[1])


def _count(items: int | Tensor) -> int:
    count = int(items)
    # A tensor of whole numbers is read once only: on CUDA each reading waits for the device.
    fractional = items.is_floating_point() if isinstance(items, Tensor) else isinstance(items, float)
    if count < 0 or (fractional and count != items):
        raise ValueError(f"the loss counted {items} items in a micro-batch; it must be a whole number, 0 or more")
    return count


def _add_up(parameters: Sequence[nn.Parameter], sums: dict[nn.Parameter, Tensor], dtype: torch.dtype) -> None:
    """Move the gradients just computed into their sums."""
    for parameter in parameters:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None and parameter in sums:
            sums[parameter].add_(gradient)
        elif gradient is not None:
            sums[parameter] = gradient.to(dtype)


def _totals(
    model: nn.Module, loss_sums: list[Tensor], counts: list[int], normalization: Normalization, world: int
) -> tuple[Window, int]:
    """Return the window, and by what its gradient must be divided: items, micro-batches that hold any, or 1."""
    total_items, filled, total_loss = sum(counts), sum(map(bool, counts)), None
    if world > 1:
        own = exact_sum(torch.stack(loss_sums).tolist())
        total_loss, *numbers = ranks.totals([own, total_items, filled], model)
        total_items, filled = map(int, numbers)
    divisor = {"sum": 1, "mean": filled, "items": total_items}[normalization]
    return Window(tuple(loss_sums), tuple(counts), total_items, total_loss), divisor
