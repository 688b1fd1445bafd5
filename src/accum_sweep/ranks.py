"""Several processes that train one model, seen from inside a window: DistributedDataParallel and FSDP2 (`fully_shard`).

torch only. A model that is not wrapped is one rank, whatever runs beside it, and nothing here costs it anything.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_ALONE = nullcontext()


def world_of(model: nn.Module) -> int:
    """Return how many ranks train this model together.

    Raises ValueError where only a part of it is wrapped: nobody could tell when that is to be synchronized.
    """
    if isinstance(model, DistributedDataParallel) or _sharded(model):
        return dist.get_world_size()
    if dist.is_initialized():
        for name, module in model.named_modules():
            if isinstance(module, DistributedDataParallel) or _sharded(module):
                raise ValueError(
                    f"{name} is wrapped for several ranks, the model around it is not; wrap the whole model"
                )
    return 1


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without DistributedDataParallel, or what torch.compile put, around it."""
    return model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", model)


def synchronizing(model: nn.Module, wanted: bool) -> AbstractContextManager[Any]:
    """Return a context in which forward and backward average gradients over the ranks, or leave each rank its own."""
    if isinstance(model, DistributedDataParallel):
        return _ALONE if wanted else model.no_sync()
    if _sharded(model):
        model.set_requires_gradient_sync(wanted)  # type: ignore[operator]  # of FSDPModule
    return _ALONE


def check_same(number: int, model: nn.Module, what: str) -> None:
    """Raise ValueError, on every rank, where ranks have different numbers: they would wait for each other for ever."""
    most, least = _over_all([number, -number], _device(model), dist.ReduceOp.MAX)
    if most != -least:
        span = f"from {int(-least)} to {int(most)}"
        raise ValueError(f"ranks have different numbers of {what}, {span}; give empty ones where there are less")


def check_synchronized(model: nn.Module) -> None:
    """Raise ValueError where DistributedDataParallel has averaged nothing, waiting for a parameter without gradient."""
    if isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph):
        waiting = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
        if waiting:
            remedy = "freeze it (requires_grad_(False)), or wrap the model with find_unused_parameters=True"
            raise ValueError(f"parameter {waiting[0]} has no gradient, and DDP waits for it: {remedy}")


def largest(number: float, model: nn.Module) -> int:
    """Return the largest of the ranks' numbers; raise OutOfMemoryElsewhere where one has left the window."""
    most = _over_all([number], _device(model), dist.ReduceOp.MAX)[0]
    if most == math.inf:
        raise OutOfMemoryElsewhere("memory ran out on another rank")
    return int(most)


class OutOfMemoryElsewhere(MemoryError):  # noqa: N818 - as torch.OutOfMemoryError
    """Another rank has run out of memory and left the window, so this one leaves it too."""


class Agreement:
    """Lets the ranks of a DistributedDataParallel model leave a window together where memory runs out on one.

    Each asks the others before it does what all of them take part in: forward passes that may send buffers, backward
    passes that synchronize. An error inside of these is `late`: the others wait there for what will not come.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.late = False
        model.module.register_forward_pre_hook(self._in_time)  # all that forward passes send is sent before

    def begin(self) -> None:
        """Say that a window begins."""
        self.late = False

    def ask(self, model: nn.Module) -> None:
        """Wait for all ranks; raise OutOfMemoryElsewhere where one has left the window."""
        self.late = False
        largest(0, model)
        self.late = True

    def leave(self, model: nn.Module, tell: bool) -> None:
        """Leave a window; `tell` the others, who wait in `ask` or `largest`. Every rank must leave.

        A forward pass that no backward pass follows is forgotten: DistributedDataParallel would take the next backward
        pass for that one's, and synchronize under no_sync (torch 2.13).
        """
        if tell:
            _over_all([math.inf], _device(model), dist.ReduceOp.MAX)
        assert isinstance(model, DistributedDataParallel), "others cannot leave a window"
        model._update_process_group(model.process_group)  # type: ignore[no-untyped-call]

    def _in_time(self, *_: object) -> None:
        self.late = False


def totals(numbers: Sequence[float], model: nn.Module) -> list[float]:
    """Return the sums over all ranks; counts below 2**53 stay exact."""
    return _over_all(numbers, _device(model), dist.ReduceOp.SUM)


def highest(number: int, device: torch.device) -> int:
    """Return the largest of the processes' numbers, outside a model."""
    return int(_over_all([number], device, dist.ReduceOp.MAX)[0])


def _over_all(numbers: Sequence[float], device: torch.device, how: Any) -> list[float]:
    tensor = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, how)
    return tensor.tolist()


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that is sharded over ranks as one; every rank must ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")
