"""How fast a configuration trains, from a few whole windows of a copy of its model."""

import copy
import itertools
import statistics
from collections.abc import Iterator

import torch

from accum_sweep import launch, ranks
from accum_sweep.batches import MicroBatches, training_windows
from accum_sweep.boundary import train
from accum_sweep.config import Config
from accum_sweep.device import Clock
from accum_sweep.preparation import accumulation, boundary, in_precision, prepare
from accum_sweep.problems import Problem

WARM_UP = 1  # windows that are not counted
WINDOWS = 5  # that are


def samples_per_second(config: Config, problem: Problem, device: torch.device) -> float | None:
    """Return the median over a few windows, of several ranks the slowest's; None where the training diverges at once.

    The windows are full, also where the training itself is shorter. Nothing but the random state is touched.
    """
    long = config.model_copy(update={"steps": WARM_UP + WINDOWS, "epochs": None})
    model = prepare(config, copy.deepcopy(problem.model), problem.blocks, device)
    end = boundary(config, model, device, max(WARM_UP + WINDOWS, config.warmup_steps))
    clock, samples = Clock(device), list[int]()

    def batches() -> Iterator[MicroBatches]:
        for window in training_windows(long, problem):
            samples.append(sum(map(len, window)))
            clock.resume()
            yield MicroBatches(problem, window, device, launch.rank(), config.processes)

    for _ in train(model, end, batches(), accumulation(config, in_precision(config, problem.loss, device), end.scaler)):
        clock.lap()
    timed = itertools.islice(zip(samples, clock.seconds(), strict=False), WARM_UP, None)
    pace = [seconds / number for number, seconds in timed]
    if not pace:
        return None
    nanoseconds = round(1e9 * statistics.median(pace))
    if config.processes > 1:
        nanoseconds = ranks.highest(nanoseconds, device)
    return 1e9 / max(1, nanoseconds)
