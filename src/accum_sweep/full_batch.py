"""The gradient of one full batch, in one forward and backward: what an accumulated one is compared with. torch only."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accum_sweep.accumulate import Loss
from accum_sweep.gradients import Gradient, dense, trainable


@dataclass(frozen=True)
class Reference:
    """The gradient of the mean loss of one full batch, in one forward and backward."""

    gradient: Gradient
    loss: float  # mean over items
    items: int
    draws: bool  # whether the model drew random numbers on the way
    moved: tuple[str, ...] = ()  # buffers that it changed on the way, other than BatchNorm's


def full_batch(model: nn.Module, batch: Any, loss: Loss, scale: float = 1.0) -> Reference:
    """Compute the reference. `.grad` is left as it is; buffers and random state may move."""
    parameters = trainable(model)
    before, buffers = random_state(), {name: buffer.clone() for name, buffer in _own_buffers(model)}
    loss_sum, items = loss(model, batch)
    draws = any(not torch.equal(a, b) for a, b in zip(before, random_state(), strict=True))
    moved = tuple(name for name, buffer in _own_buffers(model) if not torch.equal(buffer, buffers[name]))
    weight = torch.full_like(loss_sum, scale / int(items))
    found = torch.autograd.grad(loss_sum, parameters, weight, allow_unused=True)
    gradient = [dense(g, p).div_(scale) for g, p in zip(found, parameters, strict=True)]
    return Reference(gradient, float(loss_sum.detach()) / int(items), int(items), draws, moved)


def _own_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            yield from module.named_buffers(prefix, recurse=False)


def finite_full_batch(model: nn.Module, batch: Any, loss: Loss, scale: float) -> tuple[Reference, float]:
    """Compute the reference with `scale`, or the next lower one, by halves, at which it does not overflow."""
    while True:
        state = random_state()
        reference = full_batch(model, batch, loss, scale)
        if scale <= 1 or all(bool(gradient.isfinite().all()) for gradient in reference.gradient):
            return reference, scale
        set_random_state(state)
        scale /= 2


def random_state() -> list[Tensor]:
    """Return the state of torch's global generators, the CPU's first."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def set_random_state(state: list[Tensor]) -> None:
    """Put torch's global generators into a state that `random_state` returned."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])
