"""One process at a time: a lock that ends with its process, however that ends. Standard library only."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

if sys.platform != "win32":
    import fcntl


@contextmanager
def held(path: Path) -> Iterator[bool]:
    """Hold the lock that the file `path` stands for, made where it is not there; False where another process has it.

    The file stays: whoever removed it could remove another's. On Windows nobody is kept apart.
    """
    with path.open("w") as file:
        if sys.platform != "win32":
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
        yield True
