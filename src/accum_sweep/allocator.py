"""PyTorch's CUDA caching allocator, replayed without a device: from the blocks a program asks for to what it reserves.

After c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h of torch 2.6 to 2.13. Their rules are the same;
newer ones have options for what was always 20 MiB, taken here as they are by default.

- A request is rounded up to 512 bytes. Up to 1 MiB it belongs to the small pool, otherwise to the large one.
- The smallest free block of the pool that is large enough serves it, of several the one with the lowest address.
- If none is, a segment is taken from the device: 2 MiB in the small pool; in the large one 20 MiB for less than 10 MiB,
  otherwise the request rounded up to 2 MiB.
- What is left of the block is split off if it is 512 bytes or more (small pool), or more than 1 MiB (large pool). If it
  is not, the whole block counts as allocated.
- A block given back merges with its free neighbours in the segment. Its segment stays reserved.
- A segment that would not fit into the limit has all segments that are wholly free released first: a retry. If it does
  not fit then, memory is out.

What is not here: expandable segments, `roundup_power2_divisions`, `garbage_collection_threshold`, more than one stream,
private pools (CUDA graphs), and what a process takes past the allocator (CUDA's context, NCCL's buffers). A device has
its own order of addresses; here each segment has a higher one than those before. That order decides between free blocks
of one size, and nothing else.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MIB = 1 << 20
ROUNDING = 512
SMALL_REQUEST = 1 * MIB  # the largest
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on, a segment is made to measure
OWN_SEGMENT_ROUNDING = 2 * MIB
REST_SMALL = 512  # a small block's rest from here on is split off
REST_LARGE = 1 * MIB  # a large block's rest above this is
REST_OVERSIZE = 20 * MIB  # the rest of a block that must not be split is below this

Event = tuple[int, int]  # any number for the block; the bytes requested for it, or 0 when it is given back


@dataclass(frozen=True)
class Reserved:
    """Peak bytes of a replay. Those allocated are those requested with what rounding and unsplit blocks add."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    retries: int  # how often the limit was met and what segments were free were released
    out_of_memory: int | None  # the bytes requested when memory was out; the replay ended there


def replay(events: Iterable[Event], limit_bytes: int | None = None, max_split_bytes: int | None = None) -> Reserved:
    """Replay `events` as the allocator would serve them.

    `limit_bytes` is what may be reserved. `max_split_bytes` is PyTorch's `max_split_size_mb` (20 MiB or more): a block
    of that size is not split, and serves only requests of that size or more.
    """
    limit = sys.maxsize if limit_bytes is None else limit_bytes
    max_split = sys.maxsize if max_split_bytes is None else max_split_bytes
    small: list[_Free] = []
    large: list[_Free] = []
    live: dict[int, _Block] = {}
    requested = allocated = reserved = address = retries = 0
    requested_peak = allocated_peak = reserved_peak = 0
    for name, request in events:
        if not request:
            block = live.pop(name, None)
            if block is None:
                raise ValueError(f"block {name} is given back and was not allocated")
            requested -= block.requested
            allocated -= block.size
            _give_back(block)
            continue
        if name in live:
            raise ValueError(f"block {name} is allocated and was not given back")
        size = rounded(request)
        pool = small if size <= SMALL_REQUEST else large
        found = _best_fit(pool, size, max_split)
        if found is None:
            segment = segment_bytes(size)
            if reserved + segment > limit:
                released, enough = _release_oversize(pool, max(size, max_split), max_split)
                reserved -= released
                if not enough or reserved + segment > limit:
                    retries += 1
                    reserved -= _release(small) + _release(large)
                if reserved + segment > limit:
                    return Reserved(requested_peak, allocated_peak, reserved_peak, retries, request)
            found = _Block(address, segment, pool)
            address += segment
            reserved += segment
            reserved_peak = max(reserved_peak, reserved)
        if _is_split(found.size - size, size, pool is small, max_split):
            _split(found, size)
        found.requested = request
        live[name] = found
        requested += request
        allocated += found.size
        requested_peak = max(requested_peak, requested)
        allocated_peak = max(allocated_peak, allocated)
    return Reserved(requested_peak, allocated_peak, reserved_peak, retries, None)


def events_of(snapshot: Mapping[str, Any], device: int = 0) -> list[Event]:
    """Return the events of a `torch.cuda.memory._snapshot()`, each block named by its address.

    The history must have been recorded from the first allocation on; blocks older than it are left out.
    """
    events: list[Event] = []
    live: set[int] = set()
    for entry in snapshot["device_traces"][device]:
        if entry["action"] == "alloc":
            live.add(entry["addr"])
            events.append((entry["addr"], entry["size"]))
        elif entry["action"] == "free_completed" and entry["addr"] in live:  # not when that was only requested
            live.remove(entry["addr"])
            events.append((entry["addr"], 0))
    return events


def rounded(request: int) -> int:
    """Return the bytes that a request takes up."""
    return -(-request // ROUNDING) * ROUNDING


def segment_bytes(size: int) -> int:
    """Return the bytes taken from the device for a rounded request that no free block can serve."""
    if size <= SMALL_REQUEST:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // OWN_SEGMENT_ROUNDING) * OWN_SEGMENT_ROUNDING


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment, in a chain with the segment's others. Of two neighbours at most one is free."""

    address: int
    size: int
    pool: "list[_Free]"
    requested: int = 0  # 0: it is free
    before: "_Block | None" = field(default=None, repr=False)
    after: "_Block | None" = field(default=None, repr=False)


_Free = tuple[int, int, _Block]  # a pool is a sorted list of its free blocks: size, address, and the block itself


def _best_fit(pool: list[_Free], size: int, max_split: int) -> _Block | None:
    """Take the smallest free block of at least `size` out of the pool, if it may serve."""
    index = bisect_left(pool, (size,))
    if index == len(pool):
        return None
    found = pool[index][0]
    if found >= (max_split if size < max_split else size + REST_OVERSIZE):
        return None
    return pool.pop(index)[2]


def _is_split(rest: int, size: int, small: bool, max_split: int) -> bool:
    if small:
        return rest >= REST_SMALL
    return rest > REST_LARGE and size < max_split


def _split(block: _Block, size: int) -> None:
    """Cut `block` down to `size` and put the rest into the pool."""
    rest = _Block(block.address + size, block.size - size, block.pool, before=block, after=block.after)
    if rest.after is not None:
        rest.after.before = rest
    block.size, block.after = size, rest
    insort(block.pool, (rest.size, rest.address, rest))


def _give_back(block: _Block) -> None:
    """Put `block` into the pool, as one with its free neighbours."""
    block.requested = 0
    before, after = block.before, block.after
    if before is not None and not before.requested:
        _take(before)
        block.address, block.size, block.before = before.address, block.size + before.size, before.before
        if block.before is not None:
            block.before.after = block
    if after is not None and not after.requested:
        _take(after)
        block.size, block.after = block.size + after.size, after.after
        if block.after is not None:
            block.after.before = block
    insort(block.pool, (block.size, block.address, block))


def _take(block: _Block) -> None:
    del block.pool[bisect_left(block.pool, (block.size, block.address))]


def _release(pool: list[_Free]) -> int:
    """Release the pool's segments that are wholly free and return their bytes."""
    whole = [free for free in pool if free[2].before is None and free[2].after is None]
    pool[:] = [free for free in pool if free[2].before is not None or free[2].after is not None]
    return sum(size for size, _, _ in whole)


def _release_oversize(pool: list[_Free], wanted: int, max_split: int) -> tuple[int, bool]:
    """Release a free segment that must not be split and has `wanted` bytes, else the largest until they have them.

    Return the bytes released, and whether they are as many as wanted.
    """
    index = bisect_left(pool, (wanted,))
    released = pool.pop(index)[0] if index < len(pool) else 0
    while released < wanted and pool and pool[-1][0] >= max_split:
        released += pool.pop()[0]
    return released, released >= wanted
