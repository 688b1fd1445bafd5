"""A configuration trained and measured: first a short pass for the peak of memory, then the real thing, timed."""

import copy
import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from accum_sweep import launch, optimizers, precision, ranks, windows
from accum_sweep.accumulate import Window, accumulate_gradients
from accum_sweep.batches import MicroBatches
from accum_sweep.boundary import train
from accum_sweep.config import Config
from accum_sweep.device import Clock, free_bytes
from accum_sweep.equivalence import Verdict
from accum_sweep.errors import UserError
from accum_sweep.history import History
from accum_sweep.memory import Peak, measure_peak
from accum_sweep.preparation import boundary, in_precision, notes, prepare, set_batchnorm
from accum_sweep.problems import Problem
from accum_sweep.referee import Referee

PATIENCE = 64  # windows that may hold no item before the memory of a step is given up on
State = dict[str, Tensor]  # a model's weights and buffers by name, on the CPU


@dataclass
class Training:
    """What there is of a training so far: filled as it goes, so that an interrupted one loses nothing."""

    stage: str = "building the problem"  # what is being done; "step": the one of the last window in `samples`
    history: History = field(default_factory=History)
    samples: list[int] = field(default_factory=list)  # by window
    data: Any = field(default_factory=hashlib.sha256)  # of which samples each window held, however they were split
    seconds: list[float] = field(default_factory=list)  # by window; empty until the end
    peak: Peak | None = None
    parameters: int | None = None
    initial: State | None = None
    final: State | None = None
    weights: list[str] = field(default_factory=list)  # names of what is trained in these, buffers left out
    held_out: dict[str, float] = field(default_factory=dict)  # metrics on data not trained on
    verdict: tuple[Verdict, int, list[float | None]] | None = None  # see Referee.verdict
    notes: list[str] = field(default_factory=list)  # what a user might not expect


@dataclass(frozen=True)
class _Memory:
    """What the short pass found: the peak, and how much of it is there however large the micro-batches are."""

    peak: Peak
    fixed_bytes: int  # weights, gradients and the optimizer's state

    def fits(self, micro_batches: int, device: torch.device) -> bool:
        """Tell whether a full batch of so many micro-batches has room on a device."""
        free = free_bytes(device)
        if free is None or self.peak.allocated_bytes is None:
            return True
        activations = max(0, self.peak.allocated_bytes - self.fixed_bytes)
        return self.fixed_bytes + micro_batches * activations < free


def train_and_measure(config: Config, device: torch.device, so_far: Training) -> None:
    """Train as `config` says and fill `so_far`. Seeds torch's global generator.

    Where several processes train together, each of them calls this, and what it fills is the same on all.
    """
    torch.manual_seed(config.seed)
    problem = config.problem.build(precision.weights_dtype(config.precision))
    _check_data(config, problem)
    so_far.notes = notes(config, problem.model)
    if launch.rank():
        torch.manual_seed((config.seed + launch.rank()) % 2**64)  # ranks see different samples, so other dropout
    so_far.stage = "measuring memory"
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        memory = _measure_memory(config, problem, device)
    so_far.peak = memory.peak
    so_far.stage = "setting up"
    twin = copy.deepcopy(problem.model).train() if config.equivalence != "off" else None
    model = prepare(config, problem.model, problem.blocks, device)
    so_far.parameters = sum(parameter.numel() for parameter in model.parameters())
    so_far.initial = _state(model)
    so_far.weights = [name for name, _ in ranks.unwrapped(model).named_parameters()]
    loss = in_precision(config, problem.loss, device)
    steps = _count_windows(config) if config.lr_schedule == "cosine" else 1  # the others do not ask
    lr_at = functools.partial(optimizers.lr_factor, config.lr_schedule, config.warmup_steps, steps)
    end = boundary(config, model, device, steps)
    clock = Clock(device)
    referee = None
    if twin is not None and config.equivalence != "off":
        set_batchnorm(config, twin)
        referee = Referee(
            model=twin,
            loss=functools.partial(in_precision, config, problem.loss),
            normalization=config.normalization,
            unit=precision.unit_roundoff(config.precision),
            when=config.equivalence,
            boundary=end,
            lr_at=lambda step: config.lr * lr_at(step),
            fits=memory.fits,
            aside=clock.paused,
            compiled=config.compile,
        )

    def watch(micro_batches: Any, window: Window) -> None:
        if referee is not None:
            with clock.paused():
                referee.watch(model, micro_batches, window)

    def batches() -> Iterator[MicroBatches]:
        for window in _windows(config, problem):
            so_far.samples.append(sum(map(len, window)))
            samples = torch.cat(window).sort().values
            so_far.data.update(len(samples).to_bytes(8, "big") + samples.numpy().tobytes())
            if referee is not None:
                referee.begins(model, tuple(map(len, window)))
            clock.resume()
            yield MicroBatches(problem, window, device, launch.rank(), config.processes)

    so_far.stage = "step"
    for step in train(model, end, batches(), functools.partial(_accumulate, config, loss, end.scaler), watch):
        clock.lap()  # what follows is no part of a step
        so_far.history.add(step)
        if referee is not None:
            referee.ended(step)
    so_far.seconds = clock.seconds()
    so_far.stage = "evaluating"
    if referee is not None:
        so_far.verdict = referee.verdict()
    if problem.evaluate is not None and "diverged" not in so_far.history.outcomes:
        with precision.arithmetic(config.precision, device):
            metrics = problem.evaluate(ranks.unwrapped(model), device)
        so_far.held_out = {key: float(value) for key, value in metrics.items()}
    so_far.final = _state(model)


def _accumulate(
    config: Config, loss: Any, scaler: torch.amp.GradScaler | None, model: nn.Module, micro_batches: Any
) -> Window:
    return accumulate_gradients(
        model,
        micro_batches,
        loss,
        normalization=config.normalization,
        accumulator=torch.float32 if config.accumulator else None,
        scaler=scaler,
        sync_every_micro_batch=config.sync_every_micro_batch,
    )


def _check_data(config: Config, problem: Problem) -> None:
    """Raise UserError where a problem's data is not as long as its parameters said."""
    train = problem.train
    columns = list(train.items()) if isinstance(train, Mapping) else list(enumerate(train))
    for name, column in columns:
        if len(column) != config.problem.train_samples:
            said = f"{config.problem.name} says that it has {config.problem.train_samples} training samples"
            raise UserError(f"{said}, but column {name} of its data has {len(column)}; mend its train_samples or build")


def _windows(config: Config, problem: Problem) -> Iterator[list[Tensor]]:
    """Yield the sample indices of each micro-batch of each window, those of all ranks."""
    orders = windows.sample_order(config.problem.train_samples, config.seed if problem.shuffle else None)
    if config.steps is not None:
        return windows.windows_by_steps(orders, config.plan, config.steps)
    assert config.epochs is not None, "check() leaves one of steps and epochs"
    return windows.windows_by_epochs(orders, config.plan, config.epochs, config.last_window)


def _count_windows(config: Config) -> int:
    """Return the number of windows of the whole training."""
    if config.steps is not None:
        return config.steps
    assert config.epochs is not None, "check() leaves one of steps and epochs"
    order = torch.empty(config.problem.train_samples)  # only its length matters
    orders = (order for _ in range(config.epochs))
    return sum(1 for _ in windows.windows_by_epochs(orders, config.plan, config.epochs, config.last_window))


def _measure_memory(config: Config, problem: Problem, device: torch.device) -> _Memory:
    """Measure the peak of model, gradients, optimizer state, activations and micro-batches; the data set is not in it.

    A copy of the model is trained just long enough to reach the run's peak. Of several ranks the largest peak counts.
    """
    short, needed = _short_windows(config, problem)  # here: the order of the data is no part of the peak
    fixed = 0

    def short_pass() -> None:
        nonlocal fixed
        model = prepare(config, copy.deepcopy(problem.model), problem.blocks, device)
        end = boundary(config, model, device, max(1, config.warmup_steps))
        if end.scaler is not None:  # at a scale that does not overflow, or no step would be taken here
            end.scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
        loss = in_precision(config, problem.loss, device)
        taken = 0
        batches = (MicroBatches(problem, window, device, launch.rank(), config.processes) for window in short)
        for step in train(model, end, batches, functools.partial(_accumulate, config, loss, end.scaler)):
            taken += step.outcome == "stepped"
            if taken == needed:
                break
        states = [value for state in end.optimizers[0].state.values() for value in state.values()]
        tensors = [*model.parameters(), *model.parameters(), *filter(torch.is_tensor, states)]
        fixed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    peak = measure_peak(short_pass, device)
    if config.processes > 1 and peak.allocated_bytes is not None:
        peak = Peak(*(size and ranks.highest(size, device) for size in (peak.allocated_bytes, peak.reserved_bytes)))
    return _Memory(peak, fixed)


def _short_windows(config: Config, problem: Problem) -> tuple[list[list[Tensor]], int]:
    """Return windows, and how many steps it takes of them to reach the peak of the whole training.

    That takes two steps, the second with the optimizer's state in place, of two micro-batches each, the second with
    gradients in place; the first ones of a window are the largest. Where a problem's own mini-batches are of unequal
    size it takes whole windows, until their pattern comes again.
    """
    if config.micro_batch_size is None:
        written = len(config.problem.written_micro_batch_sizes or ())
        repeat = written // gcd(written, config.accum_steps_at(0) * config.processes)
        return list(islice(_windows(config, problem), 1 + repeat)), 1 + repeat
    longest = max(config.accum_schedule, key=lambda pair: pair[1])[0] if config.accum_schedule else 0
    orders = windows.sample_order(config.problem.train_samples, None)
    plan = config.plan(longest)
    found = (
        windows.windows_by_steps(orders, lambda _: plan, PATIENCE)
        if config.accum_schedule
        else islice(_windows(config, problem), PATIENCE)
    )
    return [window[: 2 * config.processes] for window in found], 2


def _state(model: nn.Module) -> State:
    """Return a copy of all weights and buffers on the CPU."""
    state = ranks.unwrapped(model).state_dict()
    return {name: ranks.whole(tensor.detach()).to("cpu", copy=True).contiguous() for name, tensor in state.items()}
