"""What each way to split an effective batch would need, and which to take: predicted, without training.

Models may be larger than this machine, and the device may be elsewhere.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from accum_sweep import lines
from accum_sweep.config import Config
from accum_sweep.device import HEADROOM, free_bytes, resolve
from accum_sweep.errors import ConfigError, Fault, UserError
from accum_sweep.predict import Prediction, outline, read, trace
from accum_sweep.units import show_bytes

PHASES = {
    "start": "before training",
    "data": "making a micro-batch",
    "forward": "forward",
    "backward": "backward",
    "step": "optimizer step",
}
FIXED = ("parameters", "gradients", "optimizer")  # what no split makes smaller


@dataclass(frozen=True)
class Row:
    """One way to split the effective batch, and what it would need."""

    accum_steps: int
    micro_batch_size: int  # of the largest
    prediction: Prediction

    @property
    def needed_bytes(self) -> int:
        """What the device must hold."""
        return self.prediction.needed_bytes


@dataclass(frozen=True)
class Plan:
    """Every way, fewest micro-batches first. The budget is None where none is given and no device is there to ask."""

    config: Config
    device_type: str
    budget_bytes: int | None
    rows: list[Row]

    @property
    def usable_bytes(self) -> int | None:
        """The budget, less head-room for what a prediction cannot see."""
        return None if self.budget_bytes is None else int(self.budget_bytes * (1 - HEADROOM))

    def fits(self, row: Row) -> bool | None:
        """Tell whether a row fits the budget, head-room left; None without a budget."""
        return None if self.usable_bytes is None else row.needed_bytes <= self.usable_bytes

    @property
    def recommended(self) -> Row | None:
        """The fewest micro-batches that fit; None where none does, or no budget is known."""
        return next((row for row in self.rows if self.fits(row)), None)

    @property
    def answer(self) -> str:
        """The recommendation in a sentence."""
        least = min(self.rows, key=lambda row: row.needed_bytes)
        if self.budget_bytes is None:
            return f"no budget is known: give memory_budget, of {show_bytes(self.enough_bytes, up=True)} or more"
        budget = f"{show_bytes(self.budget_bytes)} with {HEADROOM:.0%} left free"
        row = self.recommended
        if row is None:
            parts = least.prediction.parts
            enough = show_bytes(self.enough_bytes, up=True)
            fixed = ", ".join(f"{show_bytes(parts[kind])} {kind}" for kind in FIXED)  # type: ignore[index]
            return (
                f"nothing fits {budget}: accum_steps={least.accum_steps}, the least, needs "
                f"{show_bytes(least.needed_bytes)} ({fixed}); that takes a budget of {enough}"
            )
        return (
            f"accum_steps={row.accum_steps} is the fewest listed that fits {budget}: micro-batches of "
            f"{row.micro_batch_size}, {show_bytes(row.needed_bytes)} at the peak, in the {PHASES[row.prediction.phase]}"
        )

    @property
    def enough_bytes(self) -> int:
        """The least budget under which something fits."""
        return math.ceil(min(row.needed_bytes for row in self.rows) / (1 - HEADROOM))


def make(config: Config) -> Plan:
    """Predict every split of the configuration's effective batch.

    Raises ConfigError where it has none, or a setting is there that cannot be predicted.
    """
    faults = []
    effective = config.effective_batch_size or 0
    if not effective:
        rule = "plan splits an effective batch, and this configuration has none"
        faults.append(Fault("effective_batch_size", None, rule, "give effective_batch_size"))
    if config.compile:
        faults.append(Fault("compile", "true", "what torch.compile makes of a model is not predicted", "leave it out"))
    if faults:
        raise ConfigError(faults)
    device_type = _device_type(config)
    budget = config.memory_budget or _free(config, device_type)
    try:
        rows = _rows(config, effective, device_type)
    except UserError:
        raise
    except Exception as error:  # of a problem's own code, which may not be made for tensors without content
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        rule = f"cannot be followed without content ({said})"
        remedy = "run it instead: each run measures its peak"
        raise ConfigError([Fault("problem", config.problem.name, rule, remedy)]) from error
    return Plan(config, device_type, budget, rows)


def _rows(config: Config, effective: int, device_type: str) -> list[Row]:
    problem = outline(config)
    splits = {accum_steps: config.chosen(accum_steps) for accum_steps in _splits(config)}
    # Without a second micro-batch, or of unequal sizes, they are no part of a line.
    even = {_size(split): split for k, split in splits.items() if k > 1 and effective % k == 0}
    known = lines.traces(even, lambda size: trace(even[size], problem, device_type))
    rows = []
    for accum_steps, split in splits.items():
        found = known.get(_size(split)) if split is even.get(_size(split)) else None
        found = found or trace(split, problem, device_type)
        rows.append(Row(accum_steps, _size(split), read(found, device_type)))
    return rows


def _splits(config: Config) -> Iterator[int]:
    """Yield 1, 2, 4, ... and the number at which micro-batches are of one sample; only what divides, if it must."""
    assert config.effective_batch_size is not None, "a fault otherwise"
    most = 1 if config.step_in_backward else config.effective_batch_size
    for accum_steps in [*(2**power for power in range(most.bit_length()) if 2**power < most), most]:
        divides = most % accum_steps == 0 or config.normalization == "items"
        if divides and _size(config.chosen(accum_steps)) <= config.problem.train_samples:
            yield accum_steps


def _size(config: Config) -> int:
    assert config.micro_batch_size is not None, "chosen() says it"
    return config.micro_batch_size


def _device_type(config: Config) -> str:
    """Return the type of the device planned for; it need not be there."""
    if config.device != "auto":
        return torch.device(config.device).type
    return resolve("auto", config.precision).type


def _free(config: Config, device_type: str) -> int | None:
    """Return what is free on the device, where it is there."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return None
    try:
        free = free_bytes(resolve(config.device, config.precision)) if device_type != "mps" else None
    except UserError:  # this machine has another one
        return None
    return min(free, config.memory_limit) if free is not None and config.memory_limit is not None else free
