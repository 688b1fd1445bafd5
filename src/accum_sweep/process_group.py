"""The processes that torchrun has started, brought together for one run and apart again. torch only."""

import ctypes
import functools
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

# For another process, in one exchange. One that has failed may not be heard of sooner: gloo's connections outlive it
# in caches of FSDP's (torch 2.13).
PATIENCE = timedelta(minutes=5)
_runs = itertools.count()
_last: list[object] = []  # the process group of the run before, see `disband`


@contextmanager
def joined(device: torch.device, world: int) -> Iterator[None]:
    """Let the processes train together, for one run.

    Where one of them fails, the others' next word to it is an error, at the latest after PATIENCE; all of them then
    raise what failed first, and meet again in the next run.
    """
    if world == 1:
        yield
        return
    disband()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store, rank = _rendezvous()
    # A name of its own for each run: under the last one's, processes would find each other's old addresses.
    store = PrefixStore(f"run {next(_runs)}", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    _meet(store, "arrived", world)
    dist.init_process_group(backend, timeout=PATIENCE, store=store, rank=rank, world_size=world)
    group = dist.group.WORLD
    _last.append(group)
    _meet(store, "connected", world)  # who leaves sooner keeps others waiting for a connection
    try:
        yield
    except KeyboardInterrupt:
        # Kept for ever: gloo waits for its threads where it ends, and one of them may wait for another process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        raise
    except BaseException as error:
        whose, _, first = (
            store.compare_set("failed", "", f"{rank} {type(error).__name__}: {error}").decode().partition(" ")
        )
        if int(whose) == rank:
            raise
        raise RuntimeError(f"another process failed: {first}") from error
    finally:
        dist.destroy_process_group()


def disband() -> None:
    """Let the last run's connections end: the others hear of it. Call it where nothing of that run is left.

    gloo waits for its threads where its last reference goes, and they may wait for Python's lock to let go of a tensor.
    Python's own reference gives up that lock first; were it a DDP model's, both would wait for ever (torch 2.13).
    """
    _last.clear()


def first_says(about: str, words: Sequence[str]) -> list[str]:
    """Return, in all processes, what the first one passes as `words`; each subject once."""
    store, rank = _rendezvous()
    if rank == 0:
        store.set(about, json.dumps(list(words)))
    until = time.monotonic() + PATIENCE.total_seconds()
    while not store.check([about]) and time.monotonic() < until:
        time.sleep(0.05)  # not store.wait, which no signal ends: the first one may refuse to go on
    return list(json.loads(store.get(about)))


def _meet(store: Store, where: str, world: int) -> None:
    """Wait until all processes are here, be it that some still wait for one that has failed."""
    if store.add(where, 1) == world:
        store.set(f"all {where}", "")
    store.wait([f"all {where}"], 2 * PATIENCE)


@functools.lru_cache(maxsize=1)
def _rendezvous() -> tuple[Store, int]:
    """Return the store that torchrun's processes share, and this one's rank."""
    store, rank, _ = next(rendezvous("env://"))
    return store, rank
