"""How this process was started: alone, or by torchrun as one of several. Standard library only."""

import contextlib
import gc
import logging
import os
import sys
from typing import NoReturn

from accum_sweep.errors import UserError


def world_size() -> int:
    """Return how many processes train together; raise UserError where torchrun's variables do not agree."""
    world = _number("WORLD_SIZE", 1)
    if world > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            found = f"WORLD_SIZE={world} is set, but not {' and '.join(missing)}"
            raise UserError(f"{found}: start several processes with torchrun, or unset WORLD_SIZE")
        if not 0 <= _number("RANK", 0) < world:
            raise UserError(f"RANK={os.environ['RANK']} must be from 0 to {world - 1}: start with torchrun")
    return world


def rank() -> int:
    """Return this process's number among them, from 0; that one writes what there is to write."""
    return _number("RANK", 0) if world_size() > 1 else 0


def local_world_size() -> int:
    """Return how many of them run on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1)


def local_rank() -> int:
    """Return this process's number on its machine, from 0: that of its GPU."""
    return _number("LOCAL_RANK", 0)


def end(code: int) -> NoReturn:
    """End this process. One of several ends at once, without the interpreter's own end.

    gloo's threads may still hold the last tensors they sent; where they let go of them while Python goes down, they
    abort the process (torch 2.13).
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        gc.freeze()  # the interpreter's own end would look through all there is, for a second where MLflow is loaded
        sys.exit(code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # whoever read it has gone
            stream.flush()
    os._exit(code)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise UserError(f"{name}={text} must be a whole number: start several processes with torchrun, or unset {name}")
    return int(text)
