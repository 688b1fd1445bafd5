"""A configuration trained and measured: first a short pass for the peak of memory, then the real thing, timed."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from accum_sweep import optimizers, windows
from accum_sweep.accumulate import train
from accum_sweep.config import Config
from accum_sweep.device import Clock
from accum_sweep.errors import UserError
from accum_sweep.history import History
from accum_sweep.memory import Peak, measure_peak
from accum_sweep.problems import Problem

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

State = dict[str, Tensor]  # a model's weights and buffers by name, on the CPU


@dataclass
class Training:
    """What there is of a training so far: filled as it goes, so that an interrupted one loses nothing."""

    history: History = field(default_factory=History)
    samples: list[int] = field(default_factory=list)  # by step
    seconds: list[float] = field(default_factory=list)  # by step; empty until the end
    peak: Peak | None = None
    parameters: int | None = None
    initial: State | None = None
    final: State | None = None
    held_out: dict[str, float] = field(default_factory=dict)  # metrics on data not trained on


@dataclass(frozen=True)
class MicroBatches(Sequence[tuple[Tensor, ...]]):
    """The micro-batches of one window, each gathered and sent to the device only when its turn comes."""

    columns: tuple[Tensor, ...]  # each (samples, ...)
    indices: Sequence[Tensor]  # each (micro_batch_size,)
    device: torch.device

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: Any) -> Any:
        index = self.indices[number]
        return tuple(column[index].to(self.device) for column in self.columns)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        # Sequence's own would keep each micro-batch while it makes the next, and take an IndexError for the end.
        return map(self.__getitem__, range(len(self)))


def train_and_measure(config: Config, device: torch.device, so_far: Training) -> None:
    """Train as `config` says and fill `so_far`. Seeds torch's global generator."""
    torch.manual_seed(config.seed)
    problem = config.problem.build(DTYPES[config.precision])
    _check_data(config, problem)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        so_far.peak = _peak(config, problem, device)
    model = problem.model.to(device)
    so_far.parameters = sum(parameter.numel() for parameter in model.parameters())
    so_far.initial = _state(model)
    optimizer = optimizers.build(config.optimizer, config.lr, model.parameters())
    clock = Clock(device)
    clock.mark()
    for step in train(model, optimizer, _batches(config, problem, device, so_far), problem.loss, config.normalization):
        clock.mark()
        so_far.history.add(step)  # between two marks of its own: it is no part of a step
        clock.mark()
    so_far.seconds = clock.seconds()[::2]
    if problem.evaluate is not None:
        so_far.held_out = {key: float(value) for key, value in problem.evaluate(model, device).items()}
    so_far.final = _state(model)


def _check_data(config: Config, problem: Problem) -> None:
    """Raise UserError where a problem's data is not as long as its parameters said."""
    for number, column in enumerate(problem.train):
        if len(column) != config.problem.train_samples:
            said = f"{config.problem.name} says that it has {config.problem.train_samples} training samples"
            raise UserError(
                f"{said}, but column {number} of its data has {len(column)}; mend its train_samples or build"
            )


def _batches(config: Config, problem: Problem, device: torch.device, so_far: Training) -> Iterator[MicroBatches]:
    for window in _windows(config, problem):
        so_far.samples.append(sum(map(len, window)))
        yield MicroBatches(problem.train, window, device)


def _windows(config: Config, problem: Problem) -> Iterator[list[Tensor]]:
    """Yield the sample indices of each micro-batch of each window."""
    orders = windows.sample_order(config.problem.train_samples, config.seed if problem.shuffle else None)
    assert config.accum_steps is not None, "check() derives accum_steps"
    sizes = config.accum_steps, config.micro_batch_sizes
    if config.steps is not None:
        return windows.windows_by_steps(orders, *sizes, config.steps)
    assert config.epochs is not None, "check() leaves one of steps and epochs"
    return windows.windows_by_epochs(orders, *sizes, config.epochs, config.last_window)


def _peak(config: Config, problem: Problem, device: torch.device) -> Peak:
    """Measure the peak of model, gradients, optimizer state, activations and micro-batches; the data set is not in it.

    A copy of the model is trained just long enough to reach the run's peak. That takes two steps, the second with the
    optimizer's state in place, of two micro-batches each, the second with gradients in place. Where micro-batches are
    of unequal size it takes whole windows, until their pattern comes again.
    """
    equal = config.micro_batch_size is not None
    steps = 2 if equal else 1 + len(config.micro_batch_sizes)
    first = [window[: 2 if equal else None] for window in islice(_windows(config, problem), steps)]

    def short_pass() -> None:
        model = copy.deepcopy(problem.model).to(device)
        optimizer = optimizers.build(config.optimizer, config.lr, model.parameters())
        batches = (MicroBatches(problem.train, window, device) for window in first)
        for _ in train(model, optimizer, batches, problem.loss, config.normalization):
            pass

    return measure_peak(short_pass, device)


def _state(model: nn.Module) -> State:
    """Return a copy of all weights and buffers on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in model.state_dict().items()}
