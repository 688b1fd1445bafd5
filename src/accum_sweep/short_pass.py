"""The peak of a run's memory, from the few windows of its training that reach it."""

import copy
from dataclasses import dataclass
from itertools import islice
from math import gcd

import torch
from torch import Tensor

from accum_sweep import launch, ranks, windows
from accum_sweep.batches import MicroBatches, training_windows
from accum_sweep.boundary import train
from accum_sweep.config import Config
from accum_sweep.device import free_bytes
from accum_sweep.memory import Peak, measure_peak
from accum_sweep.preparation import accumulation, boundary, in_precision, prepare
from accum_sweep.problems import Problem

PATIENCE = 64  # windows that may hold no item before the memory of a step is given up on


@dataclass(frozen=True)
class Measured:
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


def measure(config: Config, problem: Problem, device: torch.device) -> Measured:
    """Measure the peak of model, gradients, optimizer state, activations and micro-batches; the data set is not in it.

    A copy of the model is trained just long enough to reach the run's peak. Of several ranks the largest peak counts.
    """
    short, needed = short_windows(config, problem)  # here: the order of the data is no part of the peak
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
        for step in train(model, end, batches, accumulation(config, loss, end.scaler)):
            taken += step.outcome == "stepped"
            if taken == needed:
                break
        states = [value for state in end.optimizers[0].state.values() for value in state.values()]
        tensors = [*model.parameters(), *model.parameters(), *filter(torch.is_tensor, states)]
        fixed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    peak = measure_peak(short_pass, device)
    if config.processes > 1 and peak.allocated_bytes is not None:
        peak = Peak(*(size and ranks.highest(size, device) for size in (peak.allocated_bytes, peak.reserved_bytes)))
    return Measured(peak, fixed)


def short_windows(config: Config, problem: Problem) -> tuple[list[list[Tensor]], int]:
    """Return windows, and how many steps it takes of them to reach the peak of the whole training.

    That takes two steps, the second with the optimizer's state in place, of two micro-batches each, the second with
    gradients in place; the first ones of a window are the largest. Where a problem's own mini-batches are of unequal
    size it takes whole windows, until their pattern comes again.
    """
    if config.micro_batch_size is None:
        written = len(config.problem.written_micro_batch_sizes or ())
        repeat = written // gcd(written, config.accum_steps_at(0) * config.processes)
        return list(islice(training_windows(config, problem), 1 + repeat)), 1 + repeat
    longest = max(config.accum_schedule, key=lambda pair: pair[1])[0] if config.accum_schedule else 0
    orders = windows.sample_order(config.problem.train_samples, None)
    plan = config.plan(longest)
    found = (
        windows.windows_by_steps(orders, lambda _: plan, PATIENCE)
        if config.accum_schedule
        else islice(training_windows(config, problem), PATIENCE)
    )
    return [window[: 2 * config.processes] for window in found], 2
