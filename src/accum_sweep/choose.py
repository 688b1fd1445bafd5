"""The fewest micro-batches that fit a budget of memory: predicted, then confirmed by a few probes. No torch.

From two micro-batches on, the peak falls as their number grows: it is a function of the largest micro-batch, about a
maximum of lines, hence convex. A single micro-batch is outside of that: no gradients are alive during its forward, so
it may need less than two do. It is therefore probed by itself, whatever the others say.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from accum_sweep.units import show_bytes

log = logging.getLogger(__name__)

ENOUGH = 7  # probes with which a convex peak is searched; from there on bisection alone, for peaks that are not
GUIDED = 2  # probes that a prediction may place; after that it has shown that it misleads


@dataclass(frozen=True)
class Probe:
    """One short pass."""

    accum_steps: int
    micro_batch_size: int
    peak_bytes: int | None  # None: memory ran out, or was sure to


@dataclass(frozen=True)
class Choice:
    """What was chosen, a sentence that says why, and the probes in their order."""

    accum_steps: int
    why: str
    probes: tuple[Probe, ...]


class NothingFits(Exception):  # noqa: N818 - the caller has the words for it
    """No number of micro-batches fits; the smallest micro-batch is among the `probes`, and a single one if allowed."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        super().__init__("no number of micro-batches fits")
        self.probes = tuple(probes)


def candidates(effective: int, processes: int, largest: int) -> dict[int, int]:
    """Return each number of micro-batches a process that is worth a probe, with the size of the largest micro-batch.

    Of the numbers that give the same sizes, the fewest. `largest` is what a micro-batch may hold at most. A window's
    second micro-batch, the first with gradients alive, is one sample smaller than its first where only the first ones
    take what does not divide (see `sizes.split`): such a number is a candidate of its own.
    """
    found = {}
    most, number = effective // processes, -(-effective // (largest * processes))
    while number <= most:
        micro = -(-effective // (number * processes))
        found[number] = micro
        if micro == 1:
            break
        last = min(most, (effective - 1) // ((micro - 1) * processes))  # with micro-batches as large
        if effective - (micro - 1) * last * processes <= processes:
            found[last] = micro
        number = last + 1
    return found


def fewest_micro_batches(
    predicted: Callable[[int], int | None],
    probe: Callable[[int], int | None],
    budget_bytes: int,
    sizes: Mapping[int, int],
) -> Choice:
    """Return the fewest micro-batches that fit, of those in `sizes`: their numbers, ascending, with the largest size.

    `predicted(number)` is a guess of the peak, or None; it decides where to look, never what is chosen. `probe(number)`
    measures the peak; None says that memory ran out. The choice is probed, and so are the next fewer and a single
    micro-batch, or nothing would say that there are no fewer. Raises NothingFits.
    """
    probes: list[Probe] = []

    def fits(number: int) -> bool:
        peak = probe(number)
        probes.append(Probe(number, sizes[number], peak))
        found = peak is not None and peak <= budget_bytes
        need = "more memory than there is" if peak is None else show_bytes(peak)
        verdict = "fits" if found else "does not fit"
        log.info("probe: %s: %s of %s: %s", in_words(number, sizes[number]), need, show_bytes(budget_bytes), verdict)
        return found

    expected = predicted(1) if 1 in sizes else None
    single_first = expected is not None and expected <= budget_bytes
    if single_first and fits(1):
        return Choice(1, _why(probes, 1, budget_bytes), tuple(probes))
    numbers = sorted(number for number in sizes if number > 1)
    fitting = _first_fitting(numbers, sizes, predicted, fits, probes, budget_bytes)
    if 1 in sizes and not single_first and fits(1):
        fitting = 1
    if fitting is None:
        raise NothingFits(probes)
    return Choice(fitting, _why(probes, fitting, budget_bytes), tuple(probes))


def in_words(number: int, size: int) -> str:
    """Return "4 micro-batches of 16"."""
    return f"{number} micro-batch{'es' * (number != 1)} of {size}"


def _why(probes: Sequence[Probe], chosen: int, budget_bytes: int) -> str:
    by_number = {probe.accum_steps: probe for probe in probes}
    fewer = max((number for number in by_number if number < chosen), default=None)
    peak = by_number[chosen].peak_bytes
    assert peak is not None, "what is chosen was measured"
    words = in_words(chosen, by_number[chosen].micro_batch_size)
    why = f"accum_steps={chosen}: {words} need{'s' * (chosen == 1)} {show_bytes(peak)} of {show_bytes(budget_bytes)}"
    if fewer is None:
        return why
    more = by_number[fewer].peak_bytes
    return f"{why}, {in_words(fewer, by_number[fewer].micro_batch_size)} " + (
        "more than there is" if more is None else show_bytes(more)
    )


def _first_fitting(
    numbers: Sequence[int],
    sizes: Mapping[int, int],
    predicted: Callable[[int], int | None],
    fits: Callable[[int], bool],
    probes: Sequence[Probe],
    budget_bytes: int,
) -> int | None:
    """Return the first of `numbers` that fits; None where none does."""
    contradictions = 0
    below, above = -1, len(numbers)  # known not to fit; known to fit, or the end
    by_size = [sizes[number] for number in numbers]
    while above - below > 1:
        points = {p.micro_batch_size: p.peak_bytes for p in probes if p.accum_steps > 1 and p.peak_bytes is not None}
        first, last = _plausible(by_size, points, below + 1, above, budget_bytes)
        turn = sum(p.accum_steps > 1 for p in probes)
        if contradictions or not below < first <= last:  # not as convex as it should be: rounding, other kernels
            contradictions += 1
            slack = 2**contradictions
            first, last = max(min(first, last) - slack, below + 1), min(max(first, last) + slack, above)
        guess = None
        if turn < GUIDED:
            guess = _by_prediction(numbers, predicted, probes, below, above, budget_bytes)
        if guess is None:
            guess = _by_line(by_size, points, first, last, budget_bytes, turn)
        if contradictions > 1:
            guess = (first + last) // 2
        guess = min(max(guess, first), last, above - 1)
        if turn >= ENOUGH:
            guess = (below + above) // 2
        if fits(numbers[guess]):
            above = guess
        else:
            below = guess
    return numbers[above] if above < len(numbers) else None


def _by_prediction(
    numbers: Sequence[int],
    predicted: Callable[[int], int | None],
    probes: Sequence[Probe],
    below: int,
    above: int,
    budget_bytes: int,
) -> int | None:
    """Return where the edge is by the predictions, corrected by as much as the last one was off; None without any."""
    factor = 1.0
    for probe in reversed(probes):
        if probe.accum_steps > 1 and probe.peak_bytes is not None and (expected := predicted(probe.accum_steps)):
            factor = probe.peak_bytes / expected
            break
    while above - below > 1:
        middle = (below + above) // 2
        expected = predicted(numbers[middle])
        if expected is None:
            return None
        if expected * factor <= budget_bytes:
            above = middle
        else:
            below = middle
    return above


def _by_line(
    by_size: Sequence[int], points: Mapping[int, int], first: int, last: int, budget_bytes: int, turn: int
) -> int:
    """Return where the edge is by the peaks found so far, or the middle of where it can be, in turns."""
    middle = (first + last) // 2
    if not points:
        return last  # the smallest micro-batch: it needs least, and tells whether there is any hope
    if len(points) == 1:
        ((size, peak),) = points.items()
        return _index(by_size, size * budget_bytes // peak)  # no more than fits, if all of the peak grows with it
    if len(set(points.values())) == 1:  # flat so far: no telling how much more a much larger one needs
        return middle
    return first if turn % 2 == 0 else middle


def _plausible(
    by_size: Sequence[int], points: Mapping[int, int], first: int, last: int, budget_bytes: int
) -> tuple[int, int]:
    """Narrow down where the first that fits can be, from `first` to `last`, if the peak is convex in the size.

    Between two points the peak is at most their line, beyond them at least. Where that is contradicted by what is
    known, nothing is narrowed.
    """
    low, high = last, first
    for left, right in pairwise(sorted(points)):
        rise = points[right] - points[left]
        if rise <= 0:
            continue
        crossing = left + (budget_bytes - points[left]) * (right - left) // rise  # whole numbers: exact
        if left <= crossing < right:
            low = min(low, _index(by_size, crossing))
        else:
            high = max(high, _index(by_size, crossing))
    return high, low


def _index(by_size: Sequence[int], size: float) -> int:
    """Return where in the falling sizes the first is that is no larger than `size`."""
    return next((index for index, own in enumerate(by_size) if own <= size), len(by_size))
