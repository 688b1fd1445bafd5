"""Which samples a step sees: by the seed and the effective batch, however it is split."""

from collections.abc import Iterator
from itertools import chain, count, cycle, islice

import pytest
import torch

from accum_sweep.windows import LastWindow, Plan, sample_order, share, windows_by_epochs, windows_by_steps


def plan(accum_steps: int, sizes: tuple[int, ...]) -> Plan:
    """Windows of `accum_steps` micro-batches whose sizes come in turns."""

    def windows(_: int) -> Iterator[tuple[int, ...]]:
        turns = cycle(sizes)
        while True:
            yield tuple(islice(turns, accum_steps))

    return windows


def by_steps(samples: int, accum_steps: int, sizes: tuple[int, ...], steps: int, seed: int | None = 0):
    windows = windows_by_steps(sample_order(samples, seed), plan(accum_steps, sizes), steps)
    return [[index.tolist() for index in window] for window in windows]


def by_epochs(
    samples: int, accum_steps: int, sizes: tuple[int, ...], epochs: int, last: LastWindow, seed: int | None = None
):
    windows = windows_by_epochs(sample_order(samples, seed), plan(accum_steps, sizes), epochs, last)
    return [[index.tolist() for index in window] for window in windows]


def test_windows_are_the_data_in_order_where_it_is_not_shuffled() -> None:
    assert by_steps(8, 2, (2,), 2, seed=None) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_by_steps_the_data_begins_anew_inside_a_window() -> None:
    assert by_steps(5, 2, (2,), 2, seed=None) == [[[0, 1], [2, 3]], [[4, 0], [1, 2]]]


def test_micro_batches_as_written_keep_their_sizes_when_the_data_begins_anew() -> None:
    assert by_steps(6, 4, (1, 2, 3), 1, seed=None) == [[[0], [1, 2], [3, 4, 5], [0]]]


def test_an_epoch_ends_with_a_short_window_that_is_flushed_or_dropped() -> None:
    assert by_epochs(7, 2, (2,), 1, "flush") == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    assert by_epochs(7, 2, (2,), 1, "drop") == [[[0, 1], [2, 3]]]
    assert by_epochs(8, 2, (2,), 2, "drop") == by_epochs(8, 2, (2,), 2, "flush")
    assert by_epochs(3, 8, (2,), 1, "flush") == [[[0, 1], [2]]]


def test_a_short_last_window_is_carried_into_the_next_epoch() -> None:
    assert by_epochs(5, 2, (2,), 2, "carry") == [[[0, 1], [2, 3]], [[4, 0], [1, 2]], [[3, 4]]]
    # An epoch may be shorter than a window, and all samples are seen, however often that happens.
    assert by_epochs(3, 4, (2,), 3, "carry") == [[[0, 1], [2, 0], [1, 2], [0, 1]], [[2]]]


def growing(first_step: int) -> Iterator[tuple[int, ...]]:
    """Windows of 1, 2, 3, ... micro-batches of one sample."""
    return ((1,) * (step + 1) for step in count(first_step))


def test_a_window_s_length_follows_the_step_also_after_an_epoch_s_end() -> None:
    assert [len(window) for window in windows_by_steps(sample_order(4, None), growing, 4)] == [1, 2, 3, 4]
    flushed = windows_by_epochs(sample_order(4, None), growing, 2, "flush")
    assert [len(window) for window in flushed] == [1, 2, 1, 4], "the third is short, and a step all the same"
    dropped = windows_by_epochs(sample_order(4, None), growing, 2, "drop")
    assert [len(window) for window in dropped] == [1, 2, 3], "one that is dropped is no step"


def test_ranks_share_a_window_and_the_rest_of_a_short_one_is_empty() -> None:
    window = list(torch.arange(6).split([2, 2, 1, 1]))
    assert [piece.tolist() for piece in share(window, 0, 2)] == [[0, 1], [4]]
    assert [piece.tolist() for piece in share(window, 1, 2)] == [[2, 3], [5]]
    assert [piece.tolist() for piece in share(window[:3], 1, 2)] == [[2, 3], []]
    assert share(window, 0, 1) == window


def test_written_micro_batches_of_unequal_size_make_a_full_window() -> None:
    assert by_epochs(3, 2, (2, 1), 1, "drop") == [[[0, 1], [2]]]


@pytest.mark.parametrize("last_window", ["flush", "drop", "carry"])
def test_each_step_sees_the_same_samples_however_the_window_is_split(last_window: LastWindow) -> None:
    def steps(accum_steps: int, micro: int) -> list[list[int]]:
        windows = by_epochs(1437, accum_steps, (micro,), 2, last_window, seed=3)
        return [[sample for micro_batch in window for sample in micro_batch] for window in windows]

    whole = steps(1, 64)
    assert steps(2, 32) == steps(4, 16) == steps(8, 8) == whole
    assert len(whole) == {"flush": 46, "drop": 44, "carry": 45}[last_window]
    # And it is the data, each sample once an epoch.
    if last_window == "flush":
        assert sorted(sample for step in whole[: len(whole) // 2] for sample in step) == list(range(1437))


def test_each_step_sees_the_same_samples_across_epochs_too() -> None:
    def steps(accum_steps: int, micro: int) -> list[list[int]]:
        return [list(chain(*window)) for window in by_steps(10, accum_steps, (micro,), 7, seed=1)]

    assert steps(1, 4) == steps(2, 2) == steps(4, 1)


def test_the_order_is_the_seeds_own() -> None:
    def orders(seed: int | None) -> list[list[int]]:
        return [order.tolist() for order in islice(sample_order(50, seed), 2)]

    first = orders(0)
    torch.manual_seed(99)
    torch.rand(5)
    assert orders(0) == first, "nothing else moves it"
    assert orders(1) != first
    assert first[0] != first[1], "every epoch has an order of its own"
    assert orders(None) == [list(range(50))] * 2
