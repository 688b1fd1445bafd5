"""The caching allocator's model: cases worked by hand, a slow model written on its own, and a real allocator's record.

Run as a program, this file trains on a CUDA device under that record and prints what the device and the model say.
"""

import json
import os
import random
import subprocess
import sys
from bisect import bisect_left, insort
from dataclasses import asdict, astuple
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from accum_sweep import allocator
from accum_sweep.allocator import Event, Reserved, events_of, replay

KIB, MIB = 1 << 10, 1 << 20


def peaks(*events: Event, **options: Any) -> tuple[int, int]:
    """Return the peaks allocated and reserved."""
    peak = replay(events, **options)
    assert peak.out_of_memory is None
    return peak.allocated_bytes, peak.reserved_bytes


def held(*sizes: int) -> list[Event]:
    """Blocks 0, 1, 2... of these sizes, allocated in turn."""
    return list(enumerate(sizes))


# Rounding, pools, segments


@pytest.mark.parametrize(("request_bytes", "size"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1025, 1536)])
def test_a_request_is_rounded_up_to_512_bytes(request_bytes: int, size: int) -> None:
    peak = replay([(0, request_bytes)])
    assert peak == Reserved(request_bytes, size, 2 * MIB, retries=0, out_of_memory=None)


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [
        (1, 2 * MIB),
        (1 * MIB, 2 * MIB),  # the largest of the small pool
        (1 * MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounded first: 10 MiB, and that is not less than 10 MiB
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (12 * MIB, 12 * MIB),
        (20 * MIB + 1, 22 * MIB),
        (1000 * MIB + 1, 1002 * MIB),
    ],
)
def test_a_segment_has_the_size_of_its_kind(request_bytes: int, segment: int) -> None:
    assert replay([(0, request_bytes)]).reserved_bytes == segment


def test_nothing_reserves_nothing() -> None:
    assert replay([]) == Reserved(0, 0, 0, 0, None)


def test_small_blocks_share_a_segment_until_it_is_full() -> None:
    assert peaks(*held(1 * MIB, 1 * MIB)) == (2 * MIB, 2 * MIB)
    assert peaks(*held(1 * MIB, 1 * MIB, 1)) == (2 * MIB + 512, 4 * MIB)


def test_large_blocks_of_less_than_10_mib_share_a_segment_until_it_is_full() -> None:
    assert peaks(*held(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB)) == (20 * MIB, 20 * MIB)
    assert peaks(*held(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB)) == (25 * MIB, 40 * MIB)


def test_a_pool_does_not_serve_the_other_ones_requests() -> None:
    small_first = [*held(1 * MIB), (0, 0), (1, 1 * MIB + 512)]  # 2 MiB are free, and not for this
    assert peaks(*small_first) == (1 * MIB + 512, 2 * MIB + 20 * MIB)
    large_first = [*held(5 * MIB), (0, 0), (1, 1 * MIB)]
    assert peaks(*large_first) == (5 * MIB, 20 * MIB + 2 * MIB)


# What is left of a block


def test_a_small_block_is_split_when_512_bytes_are_left() -> None:
    almost = held(1 * MIB, 1 * MIB - 512)  # 2 MiB - 512 of 2 MiB
    assert peaks(*almost) == (2 * MIB - 512, 2 * MIB)
    assert peaks(*almost, (2, 512)) == (2 * MIB, 2 * MIB), "what was left serves"
    assert peaks(*almost, (2, 513)) == (2 * MIB - 512 + 1024, 4 * MIB), "and no more than that"


def test_a_large_block_is_split_when_more_than_1_mib_is_left() -> None:
    assert peaks(*held(19 * MIB)) == (20 * MIB, 20 * MIB), "1 MiB is left and counts as allocated"
    assert peaks(*held(19 * MIB - 512)) == (19 * MIB - 512, 20 * MIB), "1 MiB + 512 are left and do not"
    assert peaks(*held(19 * MIB - 512, 1 * MIB + 512)) == (20 * MIB, 20 * MIB), "and serve"
    assert peaks(*held(19 * MIB, 1 * MIB + 512)) == (20 * MIB + 1 * MIB + 512, 20 * MIB + 20 * MIB)


def test_a_block_that_was_not_split_gives_back_all_it_has() -> None:
    again = [*held(19 * MIB), (0, 0), (1, 20 * MIB)]
    assert peaks(*again) == (20 * MIB, 20 * MIB)


# Which block serves


def test_what_is_given_back_stays_reserved_and_serves_again() -> None:
    window: list[Event] = [(0, 12 * MIB), (1, 3 * KIB), (1, 0), (0, 0)]
    assert peaks(*window, *window, *window) == (12 * MIB + 3 * KIB, 12 * MIB + 2 * MIB)


def test_the_smallest_block_that_fits_serves_and_not_the_first() -> None:
    # 30 and 12 MiB are free. Had the first served 12, 18 of its 30 would be left, and 30 more be reserved: 72.
    events = [*held(30 * MIB, 12 * MIB), (0, 0), (1, 0), (2, 12 * MIB), (3, 30 * MIB)]
    assert peaks(*events) == (42 * MIB, 42 * MIB)


def test_of_blocks_of_one_size_the_one_with_the_lowest_address_serves() -> None:
    # Five times 4 MiB fill a segment; the first and the third are free. Once the first serves again and the fourth is
    # given back, third and fourth are 8 MiB. Had the third served, the free ones would be the first and the fourth.
    events = [*held(*[4 * MIB] * 5), (0, 0), (2, 0), (5, 4 * MIB), (3, 0), (6, 8 * MIB)]
    assert peaks(*events) == (20 * MIB, 20 * MIB)


def test_peaks_are_each_the_highest_there_was() -> None:
    events = [*held(12 * MIB), (0, 0), *((n, 1) for n in range(1, 4))]
    assert replay(events) == Reserved(12 * MIB, 12 * MIB, 12 * MIB + 2 * MIB, 0, None)


# Merging


@pytest.mark.parametrize(
    ("given_back", "then"),
    [
        ([0, 1], 8 * MIB),  # the second merges with the one before it
        ([1, 0], 8 * MIB),  # the first merges with the one after it
        ([0, 2, 1], 12 * MIB),  # the one in the middle with both
        ([4, 2, 0, 3, 1], 20 * MIB),
    ],
)
def test_free_neighbours_are_one_block(given_back: list[int], then: int) -> None:
    five = held(*[4 * MIB] * 5)
    assert peaks(*five, *((name, 0) for name in given_back), (5, then)) == (20 * MIB, 20 * MIB)


def test_a_block_in_use_keeps_its_neighbours_apart() -> None:
    five = held(*[4 * MIB] * 5)
    assert peaks(*five, (0, 0), (2, 0), (5, 8 * MIB))[1] == 20 * MIB + 20 * MIB


def test_segments_do_not_merge() -> None:
    events = [*held(10 * MIB, 10 * MIB), (0, 0), (1, 0), (2, 20 * MIB)]
    assert peaks(*events) == (20 * MIB, 10 * MIB + 10 * MIB + 20 * MIB)


# A limit


def test_the_limit_is_for_segments_and_may_be_reached() -> None:
    assert replay(held(2 * MIB), limit_bytes=20 * MIB) == Reserved(2 * MIB, 2 * MIB, 20 * MIB, 0, None)
    assert replay(held(2 * MIB), limit_bytes=20 * MIB - 1) == Reserved(0, 0, 0, retries=1, out_of_memory=2 * MIB)


def test_free_segments_are_released_for_one_that_would_not_fit() -> None:
    events = [*held(10 * MIB, 1), (0, 0), (1, 0), (2, 14 * MIB)]  # 10 + 2 are free; 10 + 2 + 14 > 15
    assert replay(events, limit_bytes=15 * MIB) == Reserved(14 * MIB, 14 * MIB, 14 * MIB, 1, None)
    assert replay(events).reserved_bytes == 26 * MIB


def test_a_segment_in_use_is_not_released() -> None:
    events = [*held(4 * MIB, 4 * MIB), (0, 0), (2, 14 * MIB)]  # 16 MiB of the 20 are free
    assert replay(events, limit_bytes=33 * MIB).out_of_memory == 14 * MIB
    assert replay([*events[:-1], (1, 0), events[-1]], limit_bytes=33 * MIB).out_of_memory is None


def test_out_of_memory_ends_the_replay() -> None:
    events = [*held(10 * MIB, 12 * MIB + 1), (0, 0), (2, 20 * MIB)]  # 10 + 14 > 20; the last would have fitted
    assert replay(events, limit_bytes=20 * MIB) == Reserved(10 * MIB, 10 * MIB, 10 * MIB, 1, 12 * MIB + 1)


def test_each_release_is_a_retry() -> None:
    events = [event for n in range(4) for event in [(n, (10 + 2 * n) * MIB), (n, 0)]]
    assert replay(events, limit_bytes=16 * MIB).retries == 3, "10, 12, 14, 16: each needs the room of the one before"
    assert replay(events, limit_bytes=38 * MIB).retries == 1, "10 + 12 + 14 fit"
    assert replay(events, limit_bytes=52 * MIB).retries == 0


# max_split_size_mb


def test_a_block_too_large_to_split_serves_only_requests_too_large_to_split() -> None:
    free_40 = [*held(40 * MIB), (0, 0)]
    assert peaks(*free_40, (1, 12 * MIB)) == (40 * MIB, 40 * MIB)
    assert peaks(*free_40, (1, 12 * MIB), max_split_bytes=32 * MIB) == (40 * MIB, 40 * MIB + 12 * MIB)
    assert peaks(*free_40, (1, 12 * MIB), max_split_bytes=42 * MIB) == (40 * MIB, 40 * MIB)
    assert peaks(*free_40, (1, 12 * MIB), max_split_bytes=40 * MIB) == (40 * MIB, 40 * MIB + 12 * MIB), (
        "40 is not below"
    )


def test_a_block_too_large_to_split_serves_whole_what_leaves_less_than_20_mib() -> None:
    free_60 = [*held(60 * MIB), (0, 0)]
    served = [*free_60, (1, 40 * MIB + 512), (2, 12 * MIB)]  # 20 MiB - 512 are left, and not for the 12
    assert peaks(*served, max_split_bytes=32 * MIB) == (60 * MIB + 12 * MIB, 60 * MIB + 12 * MIB)
    refused = [*free_60, (1, 40 * MIB)]  # 20 MiB would be left
    assert peaks(*refused, max_split_bytes=32 * MIB) == (60 * MIB, 60 * MIB + 40 * MIB)


def test_a_new_segment_for_a_request_too_large_to_split_is_not_split() -> None:
    assert peaks(*held(32 * MIB + 512)) == (32 * MIB + 512, 34 * MIB)
    assert peaks(*held(32 * MIB + 512), max_split_bytes=32 * MIB) == (34 * MIB, 34 * MIB)


FREE_40_50 = [*held(40 * MIB, 50 * MIB, 1), (0, 0), (1, 0), (2, 0)]  # and 2 MiB


@pytest.mark.parametrize(
    ("events", "limit", "expected"),
    [
        # 92 + 12 > 100: of those that must not be split, the smallest that has 32 MiB goes. 52 + 2 + 12 is no new peak.
        ([*FREE_40_50, (3, 12 * MIB)], 100, (92, 0, None)),
        # 122 + 46 > 150: the smallest that has 45 goes, the 80, and the 40 still serve. (45 of 80 would have left 35.)
        ([*held(40 * MIB, 80 * MIB, 1), (0, 0), (1, 0), (3, 45 * MIB), (4, 40 * MIB)], 150, (122, 0, None)),
        # 92 + 70 > 100: none has 70, so the largest go until they have: 50, 40. 2 + 70 fit, without a retry.
        ([*FREE_40_50, (3, 70 * MIB)], 100, (92, 0, None)),
        # 92 + 100 > 100: 50 + 40 are not 100, so all else goes too, and that is a retry.
        ([*FREE_40_50, (3, 100 * MIB)], 100, (100, 1, None)),
        # 12 + 40 + 42 > 54: 40 are not 41. All else goes too, though 12 + 42 would fit as it is: a retry.
        ([*held(12 * MIB, 40 * MIB), (1, 0), (2, 41 * MIB)], 54, (54, 1, None)),
        # 50 + 40 + 60 > 100, and 50 are in use.
        ([*held(50 * MIB, 40 * MIB), (1, 0), (2, 60 * MIB)], 100, (90, 1, 60)),
    ],
)
def test_blocks_too_large_to_split_are_released_first_and_no_more_of_them_than_it_takes(
    events: list[Event], limit: int, expected: tuple[int, int, int | None]
) -> None:
    peak = replay(events, limit_bytes=limit * MIB, max_split_bytes=32 * MIB)
    out = None if peak.out_of_memory is None else peak.out_of_memory // MIB
    assert (peak.reserved_bytes // MIB, peak.retries, out) == expected
    assert_as_reference(events, limit * MIB, 32 * MIB)


# Events that cannot be


def test_a_block_is_allocated_once_and_given_back_once() -> None:
    with pytest.raises(ValueError, match="block 7 is allocated and was not given back"):
        replay([(7, 1), (7, 1)])
    with pytest.raises(ValueError, match="block 7 is given back and was not allocated"):
        replay([(7, 1), (7, 0), (7, 0)])


# Against a slow model: segments are lists of [block or None, bytes], and every rule is a scan over all of them


def reference(events: list[Event], limit: int | None, max_split: int | None) -> Reserved:
    segments: list[tuple[bool, list[list[Any]]]] = []  # in the order of their addresses; is it small?
    requests: dict[int, int] = {}
    peak = [0, 0, 0]
    retries = 0

    def reserved() -> int:
        return sum(size for _, pieces in segments for _, size in pieces)

    def release(which: tuple[bool, list[list[Any]]]) -> int:
        segments[:] = [segment for segment in segments if segment is not which]
        return which[1][0][1]

    def wholly_free() -> list[tuple[bool, list[list[Any]]]]:
        return [segment for segment in segments if len(segment[1]) == 1 and segment[1][0][0] is None]

    def fits(segment: int) -> bool:
        return limit is None or reserved() + segment <= limit

    for name, request in events:
        if request == 0:
            del requests[name]
            for _, pieces in segments:
                for piece in pieces:
                    if piece[0] == name:
                        piece[0] = None
                for at in reversed(range(len(pieces) - 1)):
                    if pieces[at][0] is None and pieces[at + 1][0] is None:
                        pieces[at][1] += pieces.pop(at + 1)[1]
            continue
        size = request
        while size % 512:
            size += 1
        small = size <= 1048576
        candidates = [
            (pieces[at][1], number, at)
            for number, (is_small, pieces) in enumerate(segments)
            for at in range(len(pieces))
            if is_small == small and pieces[at][0] is None and pieces[at][1] >= size
        ]
        best = min(candidates, default=None)
        if best is not None and max_split is not None:
            whole = best[0] >= max_split if size < max_split else best[0] - size >= 20971520
            best = None if whole else best
        if best is None:
            segment = 2097152 if small else 20971520
            if size >= 10485760:
                segment = size
                while segment % 2097152:
                    segment += 512
            if not fits(segment):
                enough = False
                if max_split is not None:
                    wanted = max(size, max_split)
                    oversize = [one for one in wholly_free() if one[0] == small and one[1][0][1] >= max_split]
                    alone = [one for one in oversize if one[1][0][1] >= wanted]
                    if alone:
                        oversize = [min(alone, key=lambda one: one[1][0][1])]
                    gone = 0
                    for one in sorted(oversize, key=lambda one: one[1][0][1])[::-1]:  # the largest, the last first
                        if gone < wanted:
                            gone += release(one)
                    enough = gone >= wanted
                if not enough or not fits(segment):
                    retries += 1
                    for one in wholly_free():
                        release(one)
                if not fits(segment):
                    return Reserved(peak[0], peak[1], peak[2], retries, request)
            segments.append((small, [[None, segment]]))
            best = (segment, len(segments) - 1, 0)
        _, number, at = best
        pieces = segments[number][1]
        rest = pieces[at][1] - size
        split = rest >= 512 if small else rest > 1048576 and (max_split is None or size < max_split)
        pieces[at] = [name, size if split else size + rest]
        if split:
            pieces.insert(at + 1, [None, rest])
        requests[name] = request
        allocated = sum(size for _, pieces in segments for owner, size in pieces if owner is not None)
        peak = [max(pair) for pair in zip(peak, [sum(requests.values()), allocated, reserved()], strict=True)]
    return Reserved(peak[0], peak[1], peak[2], retries, None)


def assert_as_reference(events: list[Event], limit: int | None = None, max_split: int | None = None) -> None:
    peak = replay(events, limit_bytes=limit, max_split_bytes=max_split)
    assert peak == reference(events, limit, max_split)


def stream(seed: int) -> list[Event]:
    """Random events: sizes at and around every edge there is, and many between."""
    draw = random.Random(seed)
    edges = [512, 1 * MIB, 2 * MIB, 10 * MIB, 12 * MIB, 19 * MIB, 20 * MIB, 32 * MIB, 40 * MIB, 52 * MIB]
    often = draw.choice([0.35, 0.45, 0.5])  # how often one is given back
    live: list[int] = []
    events: list[Event] = []
    for name in range(draw.choice([40, 160])):
        while live and draw.random() < often:
            events.append((live.pop(draw.randrange(len(live))), 0))
        size = draw.choice(edges) + draw.choice([-512, -1, 0, 1, 512])
        if draw.random() < 0.5:
            size = int(2 ** draw.uniform(0, 25))
        live.append(name)
        events.append((name, max(size, 1)))
    return events


OPTIONS = [
    (limit, max_split)
    for limit in (None, 50 * MIB, 150 * MIB, 400 * MIB)
    for max_split in (None, 20 * MIB, 21 * MIB, 32 * MIB)
]
SEEDS = range(80)


@pytest.mark.parametrize(("limit", "max_split"), OPTIONS)
def test_random_events_give_what_the_slow_model_gives(limit: int | None, max_split: int | None) -> None:
    for seed in SEEDS:
        assert_as_reference(stream(seed), limit, max_split)


def test_the_random_events_reach_every_rule() -> None:
    seen = [replay(stream(seed), *option) for seed in SEEDS for option in OPTIONS]
    assert any(peak.retries > 1 and peak.out_of_memory is None for peak in seen)
    assert any(peak.out_of_memory is not None for peak in seen)
    assert any(replay(stream(seed), None, 20 * MIB) != replay(stream(seed), None, None) for seed in SEEDS)


def first_fit(pool: list[Any], size: int, max_split: int) -> Any:
    fits = [free for free in pool if free[0] >= size]
    if not fits:
        return None
    found = min(fits, key=lambda free: free[1])
    pool.remove(found)
    return found[2]


def highest_address(pool: list[Any], size: int, max_split: int) -> Any:
    at = bisect_left(pool, (size,))
    if at == len(pool):
        return None
    return pool.pop(bisect_left(pool, (pool[at][0] + 1,)) - 1)[2]


def merge_nothing(block: Any) -> None:
    block.requested = 0
    insort(block.pool, (block.size, block.address, block))


def release_nothing(*_: Any) -> int:
    return 0


def release_nothing_oversize(*_: Any) -> tuple[int, bool]:
    return 0, False


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("ROUNDING", 256),
        ("SMALL_REQUEST", 1 * MIB - 512),
        ("SMALL_SEGMENT", 4 * MIB),
        ("LARGE_SEGMENT", 22 * MIB),
        ("OWN_SEGMENT", 10 * MIB + 512),
        ("OWN_SEGMENT_ROUNDING", 1 * MIB),
        ("REST_SMALL", 1024),
        ("REST_LARGE", 1 * MIB - 512),
        ("REST_OVERSIZE", 20 * MIB + 512),
        ("_best_fit", first_fit),
        ("_best_fit", highest_address),
        ("_give_back", merge_nothing),
        ("_release", release_nothing),
        ("_release_oversize", release_nothing_oversize),
    ],
)
def test_a_wrong_rule_does_not_give_what_the_slow_model_gives(
    monkeypatch: pytest.MonkeyPatch, rule: str, wrong: object
) -> None:
    def same(limit: int | None, max_split: int | None) -> bool:
        return all(replay(events, limit, max_split) == reference(events, limit, max_split) for events in streams)

    streams = [stream(seed) for seed in SEEDS]
    assert same(*OPTIONS[-1])
    monkeypatch.setattr(allocator, rule, wrong)
    assert not all(same(*option) for option in OPTIONS)


# What holds for all events


@pytest.mark.parametrize("seed", SEEDS)
def test_more_is_reserved_than_allocated_than_requested(seed: int) -> None:
    events = stream(seed)
    every = [replay(events[:n]) for n in range(len(events) + 1)]
    for peak in every:
        assert peak.reserved_bytes >= peak.allocated_bytes >= peak.requested_bytes
        assert peak.reserved_bytes % (2 * MIB) == peak.allocated_bytes % 512 == 0
    assert all(astuple(before)[:3] <= astuple(after)[:3] for before, after in pairwise(every)), "peaks do not fall"


@pytest.mark.parametrize("seed", SEEDS)
def test_all_given_back_all_segments_are_whole_again(seed: int) -> None:
    """Only whole segments can be released, and only if all are does one as large as all of them fit."""
    events = stream(seed)
    live = dict(events)
    given_back: list[Event] = [(name, 0) for name, size in live.items() if size]
    limit = replay(events).reserved_bytes
    peak = replay([*events, *given_back, (-1, limit)], limit_bytes=limit)
    assert peak.out_of_memory is None
    assert peak.retries == 1
    if given_back:
        some = replay([*events, *given_back[1:], (-1, limit)], limit_bytes=limit)
        assert some.out_of_memory == limit, "one block is still in use"


# A real allocator


def test_a_snapshot_becomes_events() -> None:
    trace = [
        {"action": "free_requested", "addr": 4096, "size": 100},  # allocated before the record began
        {"action": "free_completed", "addr": 4096, "size": 100},
        {"action": "segment_alloc", "addr": 1 << 21, "size": 2 * MIB},
        {"action": "alloc", "addr": 1 << 21, "size": 1000, "stream": 0, "time_us": 1},
        {"action": "alloc", "addr": (1 << 21) + 1024, "size": 10},
        {"action": "free_requested", "addr": 1 << 21, "size": 1000},
        {"action": "alloc", "addr": (1 << 21) + 1536, "size": 20},
        {"action": "free_completed", "addr": 1 << 21, "size": 1000},  # only now may another have it
        {"action": "snapshot", "addr": 0, "size": 0},
        {"action": "alloc", "addr": 1 << 21, "size": 7},
        {"action": "segment_free", "addr": 1 << 30, "size": 2 * MIB},
        {"action": "oom", "size": 1 << 40, "device_free": 5},
    ]
    events = events_of({"device_traces": [[], trace], "segments": []}, device=1)
    a, b, c = 1 << 21, (1 << 21) + 1024, (1 << 21) + 1536
    assert events == [(a, 1000), (b, 10), (c, 20), (a, 0), (a, 7)]
    assert replay(events) == Reserved(1000 + 10 + 20, 1024 + 512 + 512, 2 * MIB, 0, None)
    assert events_of({"device_traces": [[], trace], "segments": []}) == []


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: its allocator's record is replayed")
def test_the_record_of_a_training_gives_the_devices_own_peaks() -> None:
    configured = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
    environment = {key: value for key, value in os.environ.items() if key not in configured}
    command = [sys.executable, __file__]  # a process of its own: the record must begin with the first allocation
    program = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert program.returncode == 0, program.stderr
    seen = json.loads(program.stdout)
    assert seen["device"]["reserved_bytes"] > 20 * MIB
    assert seen["model"] == seen["device"]


def main() -> None:
    """Print, as JSON, the peaks of a small training: the device's own, and those of its record, replayed."""
    torch.cuda.init()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    model = nn.Sequential(nn.Linear(300, 2000), nn.GELU(), nn.Linear(2000, 2000), nn.GELU(), nn.Linear(2000, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for samples in (64, 700, 3000, 128, 5000, 64):  # several sizes, so that blocks are split and merged
        for _ in range(4):
            model(torch.rand(samples, 300, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    statistics = torch.cuda.memory_stats()
    model_says = replay(events_of(torch.cuda.memory._snapshot()))
    device_says = Reserved(
        statistics["requested_bytes.all.peak"],
        torch.cuda.max_memory_allocated(),
        torch.cuda.max_memory_reserved(),
        statistics["num_alloc_retries"],
        None,
    )
    print(json.dumps({"model": asdict(model_says), "device": asdict(device_says)}))


if __name__ == "__main__":
    main()
