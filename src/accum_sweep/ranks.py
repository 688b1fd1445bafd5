"""Several processes that train one model, seen from inside a window: DistributedDataParallel and FSDP2 (`fully_shard`).

torch only. A model that is not wrapped is one rank, whatever runs beside it, and nothing here costs it anything.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

_ALONE = nullcontext()


_runs = itertools.count()


@contextmanager
def joined(device: torch.device, world: int) -> Iterator[None]:
    """Let the processes that torchrun has started train together, for one run.

    Where one of them fails, it leaves, and the others' next word to it is an error, not a wait for ever.
    """
    if world == 1:
        yield
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank = _rendezvous()
    # A name of its own for each run: under the last one's, processes would find each other's old addresses.
    store = PrefixStore(f"run {next(_runs)}", store)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    try:
        yield
    except Exception as error:
        if store.check(["failed"]):
            first = store.get("failed").decode()
            raise RuntimeError(f"another process failed: {first}") from error
        store.set("failed", f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


@functools.lru_cache(maxsize=1)
def _rendezvous() -> tuple[Store, int]:
    """Return the store that torchrun's processes share, and this one's rank."""
    store, rank, _ = next(rendezvous("env://"))
    return store, rank


def world_of(model: nn.Module) -> int:
    """Return how many ranks train this model together."""
    return dist.get_world_size() if isinstance(model, DistributedDataParallel) or _sharded(model) else 1


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
        span = f"from {-least:.0f} to {most:.0f}"
        raise ValueError(f"ranks have different numbers of {what}, {span}; give empty ones where there are less")


def check_synchronized(model: nn.Module) -> None:
    """Raise ValueError where DistributedDataParallel has averaged nothing, waiting for a parameter without gradient."""
    if isinstance(model, DistributedDataParallel) and not (model.find_unused_parameters or model.static_graph):
        waiting = [name for name, p in model.module.named_parameters() if p.requires_grad and p.grad is None]
        if waiting:
            remedy = "freeze it (requires_grad_(False)), or wrap the model with find_unused_parameters=True"
            raise ValueError(f"parameter {waiting[0]} has no gradient, and DDP waits for it: {remedy}")


def largest(number: int, model: nn.Module) -> int:
    """Return the largest of the ranks' numbers."""
    return highest(number, _device(model))


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
