"""A limit on what this process takes from the system: the kernel refuses what goes beyond. Standard library only.

It is Linux's RLIMIT_DATA, which counts private writable memory, touched or not: never less than the process really
uses, so a limit that fits into the machine keeps it alive. Not RLIMIT_AS, which also counts the code of libraries (of
torch with CUDA many GB) and files that are only looked at.
"""

import mmap
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accum_sweep.errors import UserError

STATUS = Path("/proc/self/status")
EVENTS = Path("/proc/vmstat")

# For the environment of a process that is to be limited. The GNU C library keeps blocks that were given back, and what
# lies between blocks, for more of the same size: it would use up a limit with what nobody holds. Above 128 KiB each
# block is then taken from the system and given back to it, which costs a block that much more time.
EXACT_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def supported() -> bool:
    """Tell whether this system has such a limit."""
    return sys.platform == "linux" and STATUS.exists()


@contextmanager
def limited(more: int | None) -> Iterator[int]:
    """Let this process take so many bytes more than it holds now, and no more; None: as many as there are.

    Yields what it holds now; 0 where nothing is limited. A limit that is there already and lower stays. Raises
    UserError where the kernel does not keep it.
    """
    if more is None:
        yield 0
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    held = held_bytes()
    limits = [held + more, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), before[1]))
    try:
        if not _kept(more):
            raise UserError("memory_limit: this system does not keep it (RLIMIT_DATA, Linux 4.7); leave it out")
        yield held
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def held_bytes() -> int:
    """Return what RLIMIT_DATA counts: private writable memory, as given by the system, touched or not."""
    return _status("VmData")


def resident_bytes() -> int | None:
    """Return how much of the machine's memory this process uses; None where that cannot be told."""
    return _status("VmRSS") if supported() else None


def left_bytes() -> int | None:
    """Return what the limit in force still lets this process take; None where there is none."""
    if not supported():
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    return None if limit == resource.RLIM_INFINITY else max(0, limit - held_bytes())


def killed_for_memory() -> int:
    """Return how many processes of this machine the system has killed for want of memory; 0 where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", EVENTS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _kept(more: int) -> bool:
    """Tell whether the system refuses what is beyond the limit; nothing is used up by asking."""
    try:
        mmap.mmap(-1, more + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError, OverflowError):
        return True
    return False


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
