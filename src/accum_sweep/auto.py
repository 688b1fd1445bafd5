"""accum_steps=auto: into how many micro-batches a run's effective batch is split, found before the run begins.

The run itself then is the one with that number given by hand: it builds its problem and its random state anew.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from accum_sweep import choose, launch, precision, ranks
from accum_sweep.choose import Choice, NothingFits, Probe
from accum_sweep.config import Config
from accum_sweep.device import HEADROOM, free_bytes
from accum_sweep.errors import Fault, UserError
from accum_sweep.memory import out_of_memory, release
from accum_sweep.pace import samples_per_second
from accum_sweep.predict import try_to_predict
from accum_sweep.problems import Problem
from accum_sweep.process_group import disband, joined
from accum_sweep.short_pass import Measured, measure
from accum_sweep.units import show_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")
NEAR = 0.95  # of the best speed: as fast, for auto.objective=fastest
TRIED = 4  # numbers of micro-batches that are timed at most

Prediction = Callable[[Config, str], int | None]
"""(configuration, type of device) -> bytes it must hold, None where that cannot be predicted; equal on all ranks."""


class DoesNotFit(UserError):  # noqa: N818 - a run's outcome
    """No split of the effective batch fits the budget. The message says what the least is, and what it consists of."""

    def __init__(self, message: str, found: dict[str, Any]) -> None:
        super().__init__(message)
        self.found = found  # see Decision.found


@dataclass(frozen=True)
class Decision:
    """The configuration with its split, and what it was decided on, for the record."""

    config: Config
    found: dict[str, Any]  # "objective", "budget_bytes", "budget", "why", "probes", and for fastest "speeds"


def decide(config: Config, device: torch.device, prediction: Prediction | None = None) -> Decision:
    """Choose how the effective batch of a configuration that is `automatic` is split. Moves the global random state.

    Of several processes each calls this, outside of a process group, and all of them choose the same. Raises
    DoesNotFit where no split fits, UserError where the device cannot tell what it uses.
    """
    effective = config.effective_batch_size
    assert effective is not None, "check() lets nothing be chosen without it"
    torch.manual_seed(config.seed)
    problem = config.problem.build(precision.weights_dtype(config.precision))
    budget, said = _budget(config, device)
    found: dict[str, Any] = {"objective": config.auto.objective, "budget_bytes": budget, "budget": said}
    log.info("accum_steps=auto: %s", said)
    prober = _Prober(config, problem, device, prediction)
    sizes = choose.candidates(effective, config.processes, config.problem.train_samples)
    try:
        choice = choose.fewest_micro_batches(prober.predicted, prober.probe, budget, sizes)
    except NothingFits as nothing:
        found["probes"] = _plain(nothing.probes)
        raise DoesNotFit(_too_small(config, budget, said, nothing.probes, prober), found) from None
    if config.auto.objective == "fastest":
        choice, found["speeds"] = _fastest(choice, prober, budget, effective // config.processes)
    found |= {"why": f"{choice.why} ({said})", "probes": _plain(choice.probes)}
    log.info("%s", found["why"])
    return Decision(config.chosen(choice.accum_steps), found)


def _budget(config: Config, device: torch.device) -> tuple[int, str]:
    """Return the bytes a process may use, and where they come from; the least of all processes'."""
    if config.memory_budget is not None:
        return config.memory_budget, f"memory_budget={show_bytes(config.memory_budget)}"
    free = _agreed(config, device, _free(device))
    if free is None:
        fault = Fault(
            "accum_steps", "auto", f"the device {device} cannot tell how much memory is free", "give a number"
        )
        raise UserError(str(fault))
    said, leave = f"free on {device}: {show_bytes(free)}", f"{HEADROOM:.0%} left as head-room"
    if config.memory_limit is not None:  # which this process is under: it is what free_bytes tells, or more
        said = f"left of memory_limit={show_bytes(config.memory_limit)}: {show_bytes(free)}"
    return int(free * (1 - HEADROOM)), f"{said}, {leave}"


def _free(device: torch.device) -> int | None:
    """Return what is free for this process: on the CPU, its share."""
    free = free_bytes(device)
    return free // launch.local_world_size() if free is not None and device.type == "cpu" else free


def _agreed(config: Config, device: torch.device, number: int | None) -> int | None:
    """Return the least of the processes' numbers."""
    if config.processes == 1 or number is None:
        return number
    with joined(device, config.processes):
        return -ranks.highest(-number, device)


class _Prober:
    """Peaks by number of micro-batches: predicted, and measured once each."""

    def __init__(self, config: Config, problem: Problem, device: torch.device, prediction: Prediction | None) -> None:
        self._config, self._problem, self._device, self._prediction = config, problem, device, prediction
        self._predicted: dict[int, int | None] = {}
        self.measured: dict[int, Measured | None] = {}  # None: memory ran out

    def predicted(self, number: int) -> int | None:
        if number not in self._predicted:
            config = self._config.chosen(number)
            if self._prediction is not None:
                self._predicted[number] = self._prediction(config, self._device.type)
            else:
                found = try_to_predict(config, self._problem, self._device)
                self._predicted[number] = None if found is None else found.needed_bytes
        return self._predicted[number]

    def probe(self, number: int) -> int | None:
        """Return the peak; None where memory runs out, or is sure to: on the CPU that could end the process."""
        if number not in self.measured:
            least, free = self._least(number), self.free()
            # Elsewhere it is safe to try, and an error that is caught.
            hopeless = self._device.type == "cpu" and least is not None and free is not None and least > free
            self.measured[number] = None if hopeless else self._measure(number)
        found = self.measured[number]
        return None if found is None else self.peak(found)

    def free(self) -> int | None:
        """Return what is free now, the least of all processes'."""
        return _agreed(self._config, self._device, _free(self._device))

    def pace(self, number: int) -> float | None:
        return self._unless_out_of_memory(samples_per_second, number)

    def peak(self, measured: Measured) -> int:
        needed = measured.peak.needed_bytes
        if needed is None:
            fault = Fault("accum_steps", "auto", f"the device {self._device} cannot tell what it uses", "give a number")
            raise UserError(str(fault))
        return needed

    def _least(self, number: int) -> int | None:
        """Return what so many micro-batches need at the least: by the prediction, or by a line through what is known.

        The peak is convex in the size, so beyond two points it is above their line; one micro-batch does without the
        gradients, half of what is always there at most.
        """
        micro = self._micro(number)
        known = sorted((self._micro(n), self.peak(m), m.fixed_bytes) for n, m in self.measured.items() if m is not None)
        expected = self.predicted(number)
        if expected is not None or len(known) < 2:
            return expected
        (size, peak, _), (larger, higher, fixed) = known[-2:]
        if not size < larger < micro:
            return None
        return peak + (higher - peak) * (micro - size) // (larger - size) - (fixed // 2 if number == 1 else 0)

    def _micro(self, number: int) -> int:
        size = self._config.chosen(number).micro_batch_size
        assert size is not None, "a choice has a size"
        return size

    def _measure(self, number: int) -> Measured | None:
        return self._unless_out_of_memory(measure, number)

    def _unless_out_of_memory(self, do: Callable[[Config, Problem, torch.device], T], number: int) -> T | None:
        try:
            with self._together():
                return do(self._config.chosen(number), self._problem, self._device)
        except Exception as error:
            # Of several processes the others say what the first said.
            limited = self._config.memory_limit is not None
            if not out_of_memory(error, limited) and "MemoryError" not in str(error):
                raise
        release(self._device)  # here, not in the except block: until that is left, the traceback holds the tensors
        disband()
        return None

    def _together(self) -> AbstractContextManager[None]:
        """Return a process group for one pass only: where memory runs out in one process, all of them hear of it."""
        return joined(self._device, self._config.processes) if self._config.processes > 1 else nullcontext()


def _fastest(choice: Choice, prober: _Prober, budget: int, most: int) -> tuple[Choice, list[dict[str, Any]]]:
    """Return the choice of the least memory among those as fast as the fastest, and the speeds.

    Timed are the fewest micro-batches that fit, and twice, four and eight times as many.
    """
    first = choice.accum_steps
    speeds = []
    for number in (first * 2**power for power in range(TRIED)):
        if number > most:
            break
        peak = prober.probe(number)
        if peak is None or peak > budget:
            continue
        pace = prober.pace(number)
        speeds.append({"accum_steps": number, "peak_bytes": peak, "samples_per_second": pace})
        log.info("timed: accum_steps=%d: %.4g samples/s at %s", number, pace or 0, show_bytes(peak))
    best = max(speed["samples_per_second"] or 0 for speed in speeds)
    near = [speed for speed in speeds if (speed["samples_per_second"] or 0) >= NEAR * best]
    taken = min(near, key=lambda speed: (speed["peak_bytes"], speed["accum_steps"]))
    rates = ", ".join(f"{speed['accum_steps']}: {speed['samples_per_second'] or 0:.4g}" for speed in speeds)
    why = f"accum_steps={taken['accum_steps']}: the least memory, {show_bytes(taken['peak_bytes'])}, within"
    why += f" {1 - NEAR:.0%} of the best speed (samples/s of {rates}); fewest that fit is {choice.why}"
    return replace(choice, accum_steps=taken["accum_steps"], why=why), speeds


def _too_small(config: Config, budget: int, said: str, probes: tuple[Probe, ...], prober: "_Prober") -> str:
    """Say that nothing fits, what the least budget is, and what it consists of."""
    given = config.memory_budget is not None
    key, value, remedy = "accum_steps", "auto", "free some memory"
    if config.memory_limit is not None:
        key, value, remedy = "memory_limit", show_bytes(config.memory_limit), "raise it"
    known = [probe for probe in probes if probe.peak_bytes is not None]
    needs = f"no split of effective_batch_size={config.effective_batch_size} fits"
    if not known:  # be the budget what it may, memory itself ran out
        smallest = min(probes, key=lambda probe: probe.micro_batch_size)
        expected, free = prober.predicted(smallest.accum_steps), prober.free()
        rule = f"{needs}: micro-batches of {smallest.micro_batch_size} need more than is left"
        if free is not None:
            rule += f", {show_bytes(free)}"
        if expected is not None:
            rule += f"; their tensors alone take {show_bytes(expected)}"
        return str(Fault(key, value, rule, f"{remedy}, or take a smaller model"))
    if given:
        key, value = "memory_budget", show_bytes(budget)
    least = min(known, key=lambda probe: probe.peak_bytes or 0)
    found = prober.measured[least.accum_steps]
    assert found is not None, "its peak is known"
    assert least.peak_bytes is not None, "its peak is known"
    fixed = min(found.fixed_bytes, least.peak_bytes)
    words = choose.in_words(least.accum_steps, least.micro_batch_size)
    parts = f"weights, gradients and optimizer state {show_bytes(fixed)}"
    parts += f", activations and the micro-batch {show_bytes(least.peak_bytes - fixed)}"
    rule = f"{needs}{'' if given else f' ({said})'}: the least is {show_bytes(least.peak_bytes)}, for {words} ({parts})"
    raise_it = f"give memory_budget={least.peak_bytes}B or more" if given else remedy
    return str(Fault(key, value, rule, f"{raise_it}, or take a smaller model"))


def _plain(probes: tuple[Probe, ...]) -> list[dict[str, int | None]]:
    return [vars(probe) for probe in probes]
