"""Who holds memory, by hand; and the trace between two sizes."""

import functools

import pytest
import torch
from torch import nn

from accum_sweep import lines
from accum_sweep.ledger import KINDS, Ledger, Trace

FP32 = 4  # bytes


def parts(**sizes: int) -> dict[str, int]:
    return dict.fromkeys(KINDS, 0) | sizes


def test_a_block_is_what_it_is_when_its_phase_ends() -> None:
    with Ledger() as ledger:
        weight = torch.zeros(10)
        ledger.begin("data")
        batch = torch.zeros(20)
        ledger.begin("forward")
        activation = torch.zeros(30)
        torch.zeros(5)  # gone at once
        ledger.begin("backward")
        gradient = torch.zeros(10)
        loss = torch.zeros(())  # a single number that lives on is no gradient
        ledger.begin("step")
        state = torch.zeros(10)
        temporary = torch.zeros(7)
        del temporary
        ledger.begin("start")
    found = ledger.trace().statement()
    assert found.phase == "step"
    assert found.parts == parts(
        parameters=10 * FP32,
        data=20 * FP32,
        activations=30 * FP32,
        gradients=10 * FP32,
        optimizer=10 * FP32,
        temporaries=7 * FP32 + FP32,
    )
    assert found.peak_bytes == sum(found.parts.values())
    del weight, batch, activation, gradient, loss, state


def test_the_peak_is_where_most_is_held_and_not_at_the_end() -> None:
    with Ledger() as ledger:
        ledger.begin("forward")
        large = torch.zeros(1000)
        del large
        ledger.begin("step")
        torch.zeros(10)
    found = ledger.trace().statement()
    assert (found.peak_bytes, found.phase) == (4000, "forward")


def test_views_and_what_was_there_before_take_nothing() -> None:
    before = torch.zeros(100)
    with Ledger() as ledger:
        view = before[:50]
        before.add_(1)
        own = torch.zeros(3)
        again = own.view(3, 1)
    assert ledger.trace().statement().peak_bytes == 3 * FP32
    del view, again


def test_what_goes_at_once_goes_in_one_order() -> None:
    def gone(order: list[int]) -> list[tuple[int, int]]:
        with Ledger() as ledger:
            held = {number: torch.zeros(1 + number) for number in range(3)}
            for number in order:
                del held[number]
            torch.zeros(9)
        return ledger.trace().events

    assert gone([2, 0, 1]) == gone([0, 1, 2])
    assert gone([2, 0, 1])[:6] == [(0, FP32), (1, 2 * FP32), (2, 3 * FP32), (0, 0), (1, 0), (2, 0)]


def test_what_is_held_from_before_counts_when_it_is_said_and_once() -> None:
    tied = nn.Parameter(torch.zeros(8))
    with Ledger() as ledger:
        ledger.hold([tied, tied], "parameters")
        tied.detach().clone()
    assert ledger.trace().statement().parts == parts(parameters=8 * FP32, temporaries=8 * FP32)


def test_a_planted_buffer_is_seen() -> None:
    def step(planted: int) -> int:
        x = torch.rand(4, 8)
        layer = nn.Linear(8, 8)
        with Ledger() as ledger:
            output = layer(x)
            buffer = torch.empty(planted, dtype=torch.uint8)
            output.sum().backward()
        del buffer
        return ledger.trace().statement().peak_bytes

    assert step(1000) - step(0) == 1000


def test_what_a_kernel_takes_for_itself_is_there_for_a_moment() -> None:
    def own_bytes(func: object, *_: object) -> int:
        return 500 if "add" in str(func) else 0

    x = torch.zeros(10)
    with Ledger(own_bytes) as ledger:
        y = x + 1
        z = torch.zeros(20)
    found = ledger.trace().statement()
    assert (found.peak_bytes, ledger.trace().events[-1][1]) == (10 * FP32 + 500, 20 * FP32)
    del y, z


# Lines


def trace_of(function: object, size: int) -> Trace:
    with Ledger() as ledger:
        function(size)  # type: ignore[operator]
    return ledger.trace()


def affine(asked: list[int], size: int) -> Trace:
    asked.append(size)

    def work(size: int) -> None:
        held = torch.zeros(7), torch.zeros(3 * size)
        torch.zeros(size, 5)
        del held

    return trace_of(work, size)


def quadratic(asked: list[int], size: int) -> Trace:
    asked.append(size)
    return trace_of(lambda size: torch.zeros(size, size), size)


@pytest.mark.parametrize("sizes", [(2, 4, 8, 16, 32), (2, 3, 5, 30), (7, 7, 9)])
def test_between_sizes_a_trace_is_what_it_would_be(sizes: tuple[int, ...]) -> None:
    asked: list[int] = []
    found = lines.traces(sizes, functools.partial(affine, asked))
    assert found == {size: affine([], size) for size in sizes}
    assert len(asked) == min(3, len(set(sizes)))


def test_one_sample_may_lie_on_no_line() -> None:
    def traced(size: int) -> Trace:
        asked.append(size)
        return trace_of(lambda size: torch.zeros(8 if size == 1 else 3 * size), size)

    asked: list[int] = []
    found = lines.traces((1, 2, 4, 8, 16, 32), traced)
    assert sorted(asked) == [1, 2, 8, 32]
    assert found == {size: traced(size) for size in (1, 2, 4, 8, 16, 32)}


def test_where_samples_meet_every_size_is_asked_for() -> None:
    asked: list[int] = []
    found = lines.traces((2, 4, 8, 16, 32), functools.partial(quadratic, asked))
    assert found == {size: quadratic([], size) for size in (2, 4, 8, 16, 32)}
    assert sorted(asked) == [2, 4, 8, 16, 32]
