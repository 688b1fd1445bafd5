"""The peak of a run's memory, from the few windows of its training that reach it."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from accum_sweep import launch, ranks
from accum_sweep import windows as cuts
from accum_sweep.accumulate import Loss, Window
from accum_sweep.batches import MicroBatches, training_windows
from accum_sweep.boundary import train
from accum_sweep.config import Config
from accum_sweep.device import free_bytes
from accum_sweep.ledger import Ledger, Statement
from accum_sweep.memory import Peak, measure_peak
from accum_sweep.preparation import accumulation, boundary, in_precision, prepare
from accum_sweep.problems import Problem

PATIENCE = 64  # windows that may hold no item before the memory of a step is given up on
ShortWindows = tuple[list[list[Tensor]], int]  # the samples of each micro-batch of each window; steps needed


@dataclass(frozen=True)
class Measured:
    """What the short pass found: the peak, who holds it, and what is there however large the micro-batches are."""

    peak: Peak
    fixed_bytes: int  # weights, gradients and the optimizer's state
    statement: Statement | None  # None where tensors cannot be followed

    def fits(self, micro_batches: int, device: torch.device) -> bool:
        """Tell whether a full batch of so many micro-batches has room on a device."""
        free = free_bytes(device)
        if free is None or self.peak.allocated_bytes is None:
            return True
        activations = max(0, self.peak.allocated_bytes - self.fixed_bytes)
        return self.fixed_bytes + micro_batches * activations < free


def measure(config: Config, problem: Problem, device: torch.device) -> Measured:
    """Measure the peak of model, gradients, optimizer state, activations and micro-batches; the data set is not in it.

    A copy of the model is trained just long enough to reach the run's peak. Of several ranks the largest peak counts.
    """
    windows = short_windows(config, problem)  # here: the order of the data is no part of the peak
    fixed = 0

    def work(ledger: Ledger | None = None) -> None:
        nonlocal fixed
        fixed = short_pass(config, problem, windows, copy.deepcopy(problem.model), device, ledger)

    statement = None
    if can_be_followed(config):
        with Ledger() as ledger:  # in a pass of its own: that we look on costs some bytes
            work(ledger)
        statement = ledger.trace().statement()
    peak = measure_peak(work, device)
    if config.processes > 1:
        peak = Peak(*(None if size is None else ranks.highest(size, device) for size in astuple(peak)))
    return Measured(peak, fixed, statement)


def can_be_followed(config: Config) -> bool:
    """Tell whether single tensors are seen: not where torch.compile or several processes are between us and them."""
    return not config.compile and config.processes == 1


def short_pass(
    config: Config,
    problem: Problem,
    windows: ShortWindows,
    model: nn.Module,
    device: torch.device,
    ledger: Ledger | None = None,
) -> int:
    """Train `model` for as long as it takes to reach the peak of the whole training, and no longer.

    Tells `ledger` which phase begins. Returns the bytes of weights, gradients and the optimizer's state.
    """
    short, needed = windows
    model = prepare(config, model, problem.blocks, device)
    end = boundary(config, model, device, max(1, config.warmup_steps))
    if end.scaler is not None:  # at a scale that does not overflow, or no step would be taken here
        end.scaler = torch.amp.GradScaler(device.type, init_scale=1.0, enabled=ledger is None or ledger.computes)
    loss = in_precision(config, problem.loss, device)
    accumulate = accumulation(config, loss if ledger is None else _told(loss, ledger), end.scaler)

    def accumulate_and_tell(model: nn.Module, micro_batches: Any) -> Window:
        if ledger is None:
            return accumulate(model, micro_batches)
        window = accumulate(model, _Told(micro_batches, ledger))
        ledger.mark((parameter.grad for parameter in model.parameters()), "gradients")
        ledger.begin("step")
        return window

    taken = 0
    batches = (MicroBatches(problem, window, device, launch.rank(), config.processes) for window in short)
    for step in train(model, end, batches, accumulate_and_tell):
        taken += step.outcome == "stepped"
        if taken == needed:
            break
    states = [value for state in end.optimizers[0].state.values() for value in state.values()]
    states = list(filter(torch.is_tensor, states))
    if ledger is not None:
        ledger.begin("start")
        ledger.mark(states, "optimizer")  # also where the step is taken inside backward
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)  # so many gradients
    tensors = [*model.parameters(), *trained, *states]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _told(loss: Loss, ledger: Ledger) -> Loss:
    """Return the loss; the ledger is told when its forward pass begins and ends."""

    def told(model: nn.Module, batch: Any) -> Any:
        ledger.begin("forward")
        found = loss(model, batch)
        ledger.begin("backward")
        return found

    return told


class _Told(Sequence[Any]):
    """Micro-batches; the ledger is told when each is made."""

    def __init__(self, micro_batches: Sequence[Any], ledger: Ledger) -> None:
        self._micro_batches, self._ledger = micro_batches, ledger

    def __len__(self) -> int:
        return len(self._micro_batches)

    def __getitem__(self, number: Any) -> Any:
        self._ledger.begin("data")
        return self._micro_batches[number]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))


def short_windows(config: Config, problem: Problem) -> ShortWindows:
    """Return windows, and how many steps it takes of them to reach the peak of the whole training.

    That takes two steps, the second with the optimizer's state in place, of two micro-batches each, the second with
    gradients in place; the first ones of a window are the largest. Where a problem's own mini-batches are of unequal
    size it takes whole windows, until their pattern comes again.
    """
    if config.micro_batch_size is None:
        written = len(config.problem.written_micro_batch_sizes or ())
        repeat = written // gcd(written, config.accum_steps_at(0) * config.processes)
        return list(islice(training_windows(config, problem), 1 + repeat)), 1 + repeat
    reached = [pair for pair in config.accum_schedule or () if config.steps is None or pair[0] < config.steps]
    longest = max(reached, key=lambda pair: pair[1])[0] if reached else 0
    most = min(PATIENCE, config.steps or PATIENCE)
    orders = cuts.sample_order(config.problem.train_samples, None)
    plan = config.plan(longest)
    found = (
        cuts.windows_by_steps(orders, lambda _: plan, most)
        if config.accum_schedule
        else islice(training_windows(config, problem), PATIENCE)
    )
    return [window[: 2 * config.processes] for window in found], 2
