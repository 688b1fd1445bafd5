"""Peak memory of a piece of work, in bytes.

CPU: torch keeps no peak of its CPU allocator, but its profiler reports every allocation and release; their running sum
is exact to the byte, kernels' own buffers included. It slows what it watches, so watch a short pass, not a timed one.
CUDA: the caching allocator's own statistics.

What the CPU's number leaves out: memory that does not come from torch's allocator (oneDNN's own descriptors, some tens
of kB), blocks that kernels take in worker threads, and that memory taken before the work may be released during it.
"""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile

# The words of allocators, libraries and the system that know no exception of their own for it.
OUT_OF_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "out of memory",
    "not enough memory",
    "_STATUS_ALLOC_FAILED",
    "bad_alloc",
    "failed to map segment",  # of a library that is loaded
)
# All that oneDNN says, whatever its reason. Under a limit that reason is memory.
ONEDNN = ("could not create a primitive", "could not execute a primitive", "could not create a memory")


def out_of_memory(error: BaseException, limited: bool = False) -> bool:
    """Tell whether an error, or one that it was raised from, says that memory ran out; `limited`: of what was given."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).replace("Cannot", "cannot")
    if any(words in said for words in (*OUT_OF_MEMORY, *(ONEDNN if limited else ()))):
        return True
    return error.__cause__ is not None and out_of_memory(error.__cause__, limited)


def release(device: torch.device | None) -> None:
    """Give back what nobody holds any more. Call it outside of an except block: its traceback holds the tensors."""
    gc.collect()
    if device is not None and device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # a device that is lost cannot free anything
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class Peak:
    """Peak bytes above what was in use before. None: this device cannot tell."""

    allocated_bytes: int | None
    reserved_bytes: int | None = None  # by CUDA's caching allocator; the others below are CUDA's too
    requested_bytes: int | None = None  # before rounding
    allocation_retries: int | None = None  # how often cached memory was given back to serve a request
    baseline_bytes: int | None = None  # in use before, workspaces of libraries included
    free_bytes: int | None = None  # on the device, before

    @property
    def needed_bytes(self) -> int | None:
        """What the device must hold: what its allocator reserves, where it has one that does."""
        return self.allocated_bytes if self.reserved_bytes is None else self.reserved_bytes


def measure_peak(work: Callable[[], object], device: torch.device) -> Peak:
    """Run `work` once and return the peak of the memory it allocated on `device`.

    What `work` returns is released before this function returns.
    """
    if device.type == "cpu":
        return Peak(_cpu_peak(work))
    if device.type == "cuda":
        return _cuda_peak(work, device)
    work()
    return Peak(None)


def _cpu_peak(work: Callable[[], object]) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # some builds write a line to stderr at every start and stop
    with _no_garbage_of_before(), profile(use_kineto=True, profile_memory=True) as profiler:
        work()
    # Not `profiler.events()`: that folds allocations into the operators around them and loses their order.
    results = profiler.kineto_results
    assert results is not None, "the profiler has stopped"
    live = peak = 0
    for event in results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@contextlib.contextmanager
def _no_garbage_of_before() -> Iterator[None]:
    """Let no garbage be collected meanwhile that was there before: its memory would be counted as given back.

    It is collected now where most of what there is has been set aside, as in a sweep: that takes little time. Else all
    is set aside.
    """
    if gc.get_freeze_count():
        gc.collect()
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _cuda_peak(work: Callable[[], object], device: torch.device) -> Peak:
    work()  # the first time, libraries take workspaces (cuBLAS: 8.5 MB and more) and keep them: no part of the work
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)
    free = torch.cuda.mem_get_info(device)[0]
    work()
    torch.cuda.synchronize(device)
    after = torch.cuda.memory_stats(device)

    def above(name: str) -> int:
        return int(after[f"{name}.all.peak"] - before[f"{name}.all.current"])

    return Peak(
        above("allocated_bytes"),
        above("reserved_bytes"),
        above("requested_bytes"),
        after["num_alloc_retries"] - before["num_alloc_retries"],
        before["allocated_bytes.all.current"],
        free,
    )
