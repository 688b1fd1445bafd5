"""Out of memory, in words: which allocation failed, where, and what was in use then."""

import contextlib
import re
from dataclasses import dataclass

import torch

from accum_sweep import limit
from accum_sweep.device import free_bytes
from accum_sweep.units import UNITS, show_bytes

SIZE = r"(\d+(?:\.\d+)?) ?(bytes|B|[KMGT]iB)"


@dataclass(frozen=True)
class Shortage:
    """What is known of an allocation that failed. None: nobody says."""

    reason: str
    failed_allocation_bytes: int | None
    in_use_bytes: int | None  # CUDA: by torch; CPU: taken of the limit, or resident where there is none


def describe(
    error: BaseException, device: torch.device | None, where: str, taken: int | None, most: int | None
) -> Shortage:
    """Return what an error that says that memory ran out tells, and what this process finds; on one line.

    `where` is what the run was doing. `taken` is how much of its memory_limit `most` it had, None without a limit. Call
    it while the error is being handled: its traceback still holds what was in use.
    """
    said = " ".join(str(error).split())
    failed = _size(r"tried to allocate ", said)
    if failed is not None:
        what = f"no memory for {show_bytes(failed)} more"
    else:
        what = f"no memory ({type(error).__name__}{said and f': {said}'})"
    in_use, words = _on_cuda(said, device) if device is not None and device.type == "cuda" else _on_cpu(taken, most)
    return Shortage(f"{where}: {what}; in use: {words}", failed, in_use)


def _on_cuda(said: str, device: torch.device) -> tuple[int | None, str]:
    """Take it from the allocator's own words, which are of the moment; where they lack, from its books."""
    allocated = _size(r"", said, r" is allocated by PyTorch")
    unused = _size(r"", said, r" is reserved by PyTorch but unallocated")
    free, total = _size(r"of which ", said, r" is free"), _size(r"total capacity of ", said)
    with contextlib.suppress(RuntimeError, AssertionError, ValueError):  # a device that is lost tells nothing
        if allocated is None or unused is None:
            allocated = torch.cuda.memory_allocated(device)
            unused = torch.cuda.memory_reserved(device) - allocated
        if free is None or total is None:
            free, total = torch.cuda.mem_get_info(device)
    found = []
    if allocated is not None:
        reserved = "" if unused is None else f", {show_bytes(allocated + unused)} reserved"
        found.append(f"{show_bytes(allocated)} allocated{reserved}")
    if free is not None and total is not None:
        found.append(f"{show_bytes(free)} of {show_bytes(total)} free")
    return allocated, f"{', '.join(found) or 'unknown'} ({device})"


def _on_cpu(taken: int | None, most: int | None) -> tuple[int | None, str]:
    if taken is not None and most is not None:
        return taken, f"{show_bytes(taken)} of memory_limit={show_bytes(most)}"
    resident, free = limit.resident_bytes(), free_bytes(torch.device("cpu"))
    if resident is None or free is None:
        return None, "unknown"
    return resident, f"{show_bytes(resident)} by this process, {show_bytes(free)} free"


def _size(before: str, text: str, after: str = "") -> int | None:
    found = re.search(f"{before}{SIZE}{after}", text, re.IGNORECASE)
    if found is None:
        return None
    unit = {name.lower(): size for name, size in UNITS.items()}.get(found[2].lower(), 1)
    return int(float(found[1]) * unit)
