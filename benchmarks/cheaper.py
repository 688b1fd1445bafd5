"""What makes accumulation cheaper, and where: each way against the plain loop, in peak memory and time.

    python -m benchmarks.cheaper

Both loops of a pair take their steps in turn, so that what else the machine does hits both; the ratio is the median
over pairs of steps. Peaks are exact (`accum_sweep.memory`). One thread, CPU, float32.
"""

import copy
import gc
import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from accum_sweep.accumulate import accumulate_gradients
from accum_sweep.batches import MicroBatches
from accum_sweep.boundary import Boundary, Step, train
from accum_sweep.fused_linear import fuse_linears
from accum_sweep.memory import measure_peak
from accum_sweep.optimizers import build
from accum_sweep.problems import Problem, params_class
from accum_sweep.step_in_backward import step_in_backward
from benchmarks.peers import processor

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD"},
    "momentum": {"name": "SGD", "momentum": 0.9},
    "AdamW": {"name": "AdamW"},
}
# And micro-batches a window. The plain loop against itself is the control: how far what is measured is noise.
WAYS = [("plain", 2), ("fused", 1), ("fused", 2), ("fused", 8), ("in backward", 1)]
SECONDS = 2.0  # for each pair of loops; at least MIN_PAIRS steps of either
MIN_PAIRS, WARM_UP = 8, 2


@dataclass(frozen=True)
class Case:
    """A problem of the package, and the samples of a micro-batch."""

    name: str
    settings: dict[str, Any]
    micro: int

    @property
    def title(self) -> str:
        """What the table calls it."""
        sizes = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"{self.name} {sizes}, {self.micro} samples"

    def problem(self) -> Problem:
        """Build it, with the same weights at every call."""
        torch.manual_seed(0)
        return params_class(self.name)(name=self.name, **self.settings).build(torch.float32)


CASES = [
    *(Case("digits_mlp", {"hidden": hidden, "layers": 2}, 16) for hidden in (32, 128, 512, 1024, 2048)),
    Case("digits_mlp", {"hidden": 512, "layers": 6}, 16),
    Case("digits_mlp", {"hidden": 512, "layers": 6}, 128),
    *(Case("char_gpt", {"width": width, "layers": 2, "context": 64}, 4) for width in (64, 256)),
    Case("char_gpt", {"width": 256, "layers": 2, "context": 64}, 1),
]


def steps(problem: Problem, optimizer: str, way: str, window: list[torch.Tensor], held: bool = False) -> Iterator[Step]:
    """Train a copy of the problem's model for ever; `held`: with all micro-batches of a window made beforehand."""
    model = copy.deepcopy(problem.model)
    if way == "fused":
        fuse_linears(model)
    stepping = build(OPTIMIZERS[optimizer], 0.001, model.parameters())
    boundary = step_in_backward(model, stepping) if way == "in backward" else Boundary([stepping])
    made = (MicroBatches(problem, window, CPU, 0, 1) for _ in iter(int, 1))
    windows: Iterator[Sequence[Any]] = map(list, made) if held else made
    return train(model, boundary, windows, partial(accumulate_gradients, loss=problem.loss))


def peak(*settings: Any) -> int:
    """Bytes of two steps, the second with the optimizer's state in place."""
    gc.collect()

    def two_steps() -> None:
        for number, _ in enumerate(steps(*settings), start=1):
            if number == 2:
                break

    found = measure_peak(two_steps, CPU).allocated_bytes
    assert found is not None, "the CPU can tell"
    return found


def times(plain: Iterator[Step], other: Iterator[Step]) -> float:
    """Return the median ratio of the two loops' steps, taken in turn."""
    ratios: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(ratios) < MIN_PAIRS + WARM_UP or time.perf_counter() < end:
        clock = [time.perf_counter()]
        for loop in (plain, other):
            next(loop)
            clock.append(time.perf_counter())
        ratios.append((clock[2] - clock[1]) / (clock[1] - clock[0]))
    return statistics.median(ratios[WARM_UP:])


def cell(problem: Problem, case: Case, optimizer: str, way: str, accum_steps: int) -> str:
    """Peak and time of one way, as multiples of the plain loop's; bold where it wins, beyond what the control shows."""
    window = list(torch.arange(accum_steps * case.micro).split(case.micro))
    ratio = peak(problem, optimizer, way, window) / peak(problem, optimizer, "plain", window)
    slower = times(steps(problem, optimizer, "plain", window), steps(problem, optimizer, way, window))
    pairs = ((ratio, 0.99), (slower, 0.9))
    return ", ".join(f"**{number:.2f}**" if number <= bound else f"{number:.2f}" for number, bound in pairs)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown of rows, the first of which is the header."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]))


def main() -> None:
    """Measure everything and print the tables."""
    torch.set_num_threads(1)
    rows = [["model", "optimizer", *(f"{way}, accum_steps={accum_steps}" for way, accum_steps in WAYS)]]
    for case in CASES:
        problem = case.problem()
        for optimizer in OPTIMIZERS:
            rows.append([case.title, optimizer, *(cell(problem, case, optimizer, *way) for way in WAYS)])
    print(table(rows), end="\n\n")
    lengths = (1, 2, 8, 32)
    data = [["micro-batches made", *(f"accum_steps={accum_steps}" for accum_steps in lengths)]]
    problem = CASES[1].problem()
    for words, held in (("one at a time, as the plain loop does", False), ("all before the window", True)):
        windows = (list(torch.arange(16 * accum_steps).split(16)) for accum_steps in lengths)
        data.append([words, *(f"{peak(problem, 'SGD', 'plain', window, held):,}" for window in windows)])
    print(table(data), end="\n\n")
    print(f"torch {torch.__version__}; Python {platform.python_version()}; {processor()}, 1 thread.")


if __name__ == "__main__":
    main()
