"""How this process was started: alone, or by torchrun as one of several. Standard library only."""

import os


def world_size() -> int:
    """Return how many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return this process's number among them, from 0; that one writes what there is to write."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's number on its machine, from 0: that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))
