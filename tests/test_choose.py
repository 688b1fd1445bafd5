"""The search finds what trying every number finds, in a few probes, whatever it was told to expect."""

import random
from collections.abc import Callable

import pytest

from accum_sweep.choose import Choice, NothingFits, candidates, fewest_micro_batches
from accum_sweep.sizes import split

Peak = Callable[[int], int]
MOST_PROBES = 8


def peaks(generator: random.Random, effective: int) -> Peak:
    """A maximum of lines over the micro-batch's size; one micro-batch alone does without its gradients."""
    lines = [(generator.randint(0, 10**6), generator.randint(1, 10**4)) for _ in range(generator.randint(1, 4))]
    gradients = generator.randint(0, max(a + b for a, b in lines) // 2)

    def peak(number: int) -> int:
        size = -(-effective // number)
        return max(a + b * size for a, b in lines) - (gradients if number == 1 else 0)

    return peak


def case(seed: int) -> tuple[int, Peak, int]:
    """An effective batch, its peaks, and a budget, which may be just one of them, or too small for all."""
    generator = random.Random(seed)
    effective = generator.choice([generator.randint(1, 30), generator.randint(1, 300), generator.randint(1, 9999)])
    peak = peaks(generator, effective)
    between = generator.randint(int(0.9 * peak(effective)), int(1.1 * max(peak(1), peak(min(2, effective)))))
    return effective, peak, generator.choice([between, peak(generator.randint(1, effective))])


def exhaustive(effective: int, peak: Peak, budget: int) -> int | None:
    return next((number for number in range(1, effective + 1) if peak(number) <= budget), None)


def predictions(kind: str, peak: Peak, seed: int) -> Callable[[int], int | None]:
    generator = random.Random(seed)
    factor = {"exact": 1.0, "half": 0.5, "twice": 2.0}.get(kind)
    if kind == "absent":
        return lambda _: None
    if kind == "noise":
        return lambda number: int(peak(number) * generator.uniform(0.5, 2))
    return lambda number: int(peak(number) * (factor or 1.0))


def found(
    effective: int, peak: Callable[[int], int | None], budget: int, predicted: Callable[[int], int | None]
) -> Choice:
    return fewest_micro_batches(predicted, peak, budget, candidates(effective, 1, effective))


@pytest.mark.parametrize("kind", ["exact", "half", "twice", "absent", "noise"])
def test_the_answer_is_that_of_an_exhaustive_search_within_eight_probes(kind: str) -> None:
    none = 0
    for seed in range(200):
        effective, peak, budget = case(seed)
        expected = exhaustive(effective, peak, budget)
        choice: Choice | None = None
        try:
            choice = found(effective, peak, budget, predictions(kind, peak, seed))
            probes = choice.probes
        except NothingFits as nothing:
            probes = nothing.probes
        assert (choice and choice.accum_steps) == expected, seed
        assert len(probes) <= (3 if kind == "exact" else MOST_PROBES), seed
        assert all(probe.peak_bytes == peak(probe.accum_steps) for probe in probes)
        if choice is None:
            none += 1
            assert {probe.accum_steps for probe in probes} >= {1, effective}
        else:
            assert choice.accum_steps in {probe.accum_steps for probe in probes}
    assert 0 < none < 100, "both ends are tried"


def test_the_control_one_look_at_a_line_is_not_enough() -> None:
    """A search that believes a line through the smallest and the largest micro-batch."""
    wrong = 0
    for seed in range(200):
        effective, peak, budget = case(seed)
        if effective < 3:
            continue
        least, size = peak(effective), -(-effective // 2)
        slope = (peak(2) - least) / max(1, size - 1)
        largest = 1 + (budget - least) / slope
        guess = max(1, -(-effective // max(1, int(largest))))
        wrong += guess != exhaustive(effective, peak, budget)
    assert wrong > 20


def test_a_single_micro_batch_that_needs_less_than_two_is_found() -> None:
    peak = {1: 100, 2: 120, 3: 110, 4: 105}.__getitem__
    assert found(4, peak, 100, lambda _: None).accum_steps == 1
    assert found(4, peak, 104, peak).accum_steps == 1
    dear = {1: 130, 2: 120, 3: 110, 4: 105}.__getitem__
    assert found(4, dear, 120, lambda _: None).accum_steps == 2


def test_memory_that_runs_out_in_a_probe_is_a_size_that_does_not_fit() -> None:
    choice = found(64, lambda number: None if number < 7 else 100 - number, 10**6, lambda _: None)
    assert choice.accum_steps == 7
    assert "more than there is" in choice.why
    with pytest.raises(NothingFits):
        found(64, lambda _: None, 10**6, lambda _: None)


def test_peaks_that_are_not_convex_are_searched_to_the_end_all_the_same() -> None:
    for seed in range(100):
        generator = random.Random(seed)
        effective = generator.randint(1, 9999)
        steps = [(generator.randint(1, effective), generator.randint(1, 1000)) for _ in range(5)]

        def peak(number: int, effective: int = effective, steps: list[tuple[int, int]] = steps) -> int:
            return 1000 + sum(rise for size, rise in steps if -(-effective // number) >= size)

        budget = generator.randint(1000, 5000)
        choice = found(effective, peak, budget, lambda _: None)
        assert choice.accum_steps == exhaustive(effective, peak, budget)
        assert len(choice.probes) <= 16


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_form_of_window_is_a_candidate_and_forms_only_shrink(processes: int) -> None:
    """The form: the largest of the first micro-batches, and of the second, which have gradients alive."""
    for effective in range(processes, 150):
        forms: dict[tuple[int, int], int] = {}
        before = (effective, effective)
        for number in range(1, effective // processes + 1):
            micro = -(-effective // (number * processes))
            sizes = split(effective, micro, number * processes)
            form = (sizes[0], sizes[processes] if number > 1 else effective)
            assert form <= before
            assert form[1] <= before[1]
            before = form
            forms.setdefault(form, number)
        assert set(forms.values()) <= set(candidates(effective, processes, effective))


def test_a_micro_batch_holds_no_more_than_the_data() -> None:
    assert candidates(100, 1, 30) == {4: 25, **{k: m for k, m in candidates(100, 1, 100).items() if k > 4}}
    assert candidates(7, 2, 7)[3] == 2
