"""One run: a checked configuration becomes a problem, is trained and measured, and leaves a record in its folder.

Whatever happens while training becomes a status with a reason; only what makes a record impossible is raised.
"""

import copy
import gc
import json
import logging
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from accum_sweep import environment, optimizers, windows
from accum_sweep.accumulate import Step, train
from accum_sweep.config import Config, run_key
from accum_sweep.device import Clock, hardware_name, resolve
from accum_sweep.errors import UserError
from accum_sweep.memory import Peak, measure_peak
from accum_sweep.problems import Problem
from accum_sweep.record import Identity, Record, Status, write, write_atomically

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SMALL_MODEL = 1000  # weights; up to here they stand in the record in full


@dataclass(frozen=True)
class Outcome:
    """What a run gives, whatever became of it."""

    status: Status
    reason: str | None = None
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)  # state dicts, on the CPU
    final: dict[str, Tensor] = field(default_factory=dict)


def execute(config: Config, folder: Path, identity: Identity) -> Record:
    """Train as `config` says, write `record.json` and its companions into `folder`, and return the record.

    The global random state is as before when this returns. An interrupt becomes the status `interrupted`; the caller
    decides whether to stop.
    """
    started = datetime.now(UTC)
    device: torch.device | None = None
    try:
        device = resolve(config.device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            outcome = _train(config, device)
    except UserError as error:
        outcome = Outcome("failed", str(error))
    except KeyboardInterrupt:
        outcome = Outcome("interrupted", "stopped by the user")
    except Exception as error:
        outcome = Outcome("oom" if _out_of_memory(error) else "failed", f"{type(error).__name__}: {error}")
        log.exception("%s: %s", identity.name, outcome.status)
    if outcome.status != "finished":
        # Here, not in the except block: until that is left, the traceback holds the run's tensors.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    record = Record(
        run_id=identity.run_id,
        run_key=run_key(config, config.device if device is None else str(device)),
        name=identity.name,
        status=outcome.status,
        reason=outcome.reason,
        started_at=started.isoformat(),
        ended_at=datetime.now(UTC).isoformat(),
        overrides=identity.overrides,
        config=config.model_dump(mode="json"),
        environment=environment.describe()
        | {"device": device and str(device), "device_name": device and hardware_name(device)},
        metrics=outcome.metrics,
        series=outcome.series,
        result=_result(outcome),
        weights=_weights_in_full(outcome),
        sweep_id=identity.sweep_id,
        job_num=identity.job_num,
    )
    _write_companions(record, outcome if config.save_weights else None, folder)
    write(record, folder)  # last: where it is, the rest is too
    return record


def _train(config: Config, device: torch.device) -> Outcome:
    """Measure the peak in a short pass, then train for real, timed and without instruments."""
    torch.manual_seed(config.seed)
    problem = config.problem.build(DTYPES[config.precision])
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        peak = _peak(config, problem, device)
    model = problem.model.to(device)
    initial = _state(model)
    optimizer = optimizers.build(config.optimizer, config.lr, model.parameters())
    clock, history = Clock(device), History()
    batches = (MicroBatches(problem.train, window, device) for window in _windows(config, problem))
    clock.mark()
    for step in train(model, optimizer, batches, problem.loss, config.normalization):
        history.add(step)
        clock.mark()
    seconds = clock.seconds()
    series = history.series()
    metrics = _metrics(series, seconds, history.items) | _peak_metrics(peak)
    if problem.evaluate is not None:
        metrics |= problem.evaluate(model, device)
    final = _state(model)
    metrics |= {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "initial_weight_norm": _norm(initial),
        "final_weight_norm": _norm(final),
    }
    reason = _divergence(series)
    return Outcome("diverged" if reason else "finished", reason, metrics, series, initial, final)


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
        return tuple(column[index].to(self.device, non_blocking=True) for column in self.columns)


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


class History:
    """Losses and gradient norms of all steps, kept on the device until asked for."""

    def __init__(self) -> None:
        self.items: list[tuple[int, ...]] = []  # by step, by micro-batch
        self._loss_sums = Scalars()
        self._grad_norms = Scalars()

    def add(self, step: Step) -> None:
        """Remember a step."""
        self.items.append(step.window.items)
        self._loss_sums.extend(step.window.loss_sums)
        self._grad_norms.extend([step.grad_norm])

    def series(self) -> dict[str, list[float]]:
        """Return `train/loss` and `train/grad_norm` by step, and `train/micro_loss` by micro-batch.

        Losses are means over items: over those of the whole window, and over those of the micro-batch.
        """
        sums = iter(self._loss_sums.tolist())
        micro, window = [], []
        for items in self.items:
            window_sums = list(islice(sums, len(items)))
            micro += [loss_sum / count for loss_sum, count in zip(window_sums, items, strict=True)]
            window.append(math.fsum(window_sums) / sum(items) if all(map(math.isfinite, window_sums)) else math.nan)
        return {"train/loss": window, "train/grad_norm": self._grad_norms.tolist(), "train/micro_loss": micro}


class Scalars:
    """A growing list of scalar tensors, packed now and then so that a long run does not hold a tensor a number."""

    def __init__(self) -> None:
        self._loose: list[Tensor] = []
        self._packed: list[Tensor] = []

    def extend(self, scalars: Sequence[Tensor]) -> None:
        """Add scalars of one device."""
        self._loose.extend(scalars)
        if len(self._loose) >= 4096:
            self._pack()

    def tolist(self) -> list[float]:
        """Wait for the device and return the numbers."""
        self._pack()
        return [number for packed in self._packed for number in packed.tolist()]

    def _pack(self) -> None:
        if self._loose:
            self._packed.append(torch.stack(self._loose))
            self._loose = []


def _metrics(
    series: dict[str, list[float]], seconds: list[float], items: list[tuple[int, ...]]
) -> dict[str, float | int | None]:
    """Derive a run's numbers from its series and its step times."""
    losses, norms = series["train/loss"], series["train/grad_norm"]
    samples = [sum(window) for window in items]
    spread = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else None
    return {
        "steps_done": len(losses),
        "micro_steps_done": len(series["train/micro_loss"]),
        "samples_seen": sum(samples),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "first_grad_norm": norms[0],
        "last_grad_norm": norms[-1],
        "train_seconds": sum(seconds),
        "step_seconds": statistics.median(seconds),
        "step_seconds_iqr": spread[2] - spread[0] if spread else None,
        "steps_per_second": 1 / statistics.median(seconds),
        "samples_per_second": statistics.median(n / s for n, s in zip(samples, seconds, strict=True)),
    }


def _peak_metrics(peak: Peak) -> dict[str, float | int | None]:
    reserved = {} if peak.reserved_bytes is None else {"peak_reserved_bytes": peak.reserved_bytes}
    return {"peak_allocated_bytes": peak.allocated_bytes, **reserved}


def _divergence(series: dict[str, list[float]]) -> str | None:
    """Say since when a loss or gradient is not finite; None if all are."""
    for number, (loss, norm) in enumerate(zip(series["train/loss"], series["train/grad_norm"], strict=True), start=1):
        if not math.isfinite(loss) or not math.isfinite(norm):
            what = "gradient" if math.isfinite(loss) else "loss"
            return f"the {what} is not finite in step {number} of {len(series['train/loss'])}"
    return None


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all weights and buffers on the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def _norm(state: dict[str, Tensor]) -> float:
    """L2 norm over all floating-point entries, in float64."""
    return math.sqrt(math.fsum(float(t.double().square().sum()) for t in state.values() if t.is_floating_point()))


def _result(outcome: Outcome) -> dict[str, Any]:
    """Return what a run prints: the weight where it is short, else its norm and the last figures."""
    initial, final = outcome.initial, outcome.final
    if not initial:
        return {"status": outcome.status, "reason": outcome.reason}
    changed = any(not torch.equal(initial[name], final[name]) for name in initial)
    if _is_small(initial) and "weight" in initial:
        before, after = initial["weight"].flatten().tolist(), final["weight"].flatten().tolist()
        return {"initial_weight": before, "final_weight": after, "weight_changed": changed}
    shown = ("initial_weight_norm", "final_weight_norm", "first_loss", "last_loss", "test/loss", "test/accuracy")
    return {key: outcome.metrics[key] for key in shown if key in outcome.metrics} | {"weight_changed": changed}


def _is_small(state: dict[str, Tensor]) -> bool:
    return sum(tensor.numel() for tensor in state.values()) <= SMALL_MODEL


def _weights_in_full(outcome: Outcome) -> dict[str, dict[str, Any]]:
    if not outcome.initial or not _is_small(outcome.initial):
        return {}
    states = {"initial": outcome.initial, "final": outcome.final}
    return {when: {name: tensor.tolist() for name, tensor in state.items()} for when, state in states.items()}


def _write_companions(record: Record, saved: Outcome | None, folder: Path) -> None:
    """Write, for people and for MLflow's pages, what the record also holds; and the weights, if asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "config.yaml", yaml.safe_dump(record.config, sort_keys=False))
    write_atomically(folder / "result.json", json.dumps(record.result) + "\n")
    if record.weights:
        write_atomically(folder / "weights.json", json.dumps(record.weights) + "\n")
    if saved is not None and saved.initial:
        save_file(saved.initial, folder / "initial.safetensors")
        save_file(saved.final, folder / "final.safetensors")


def _out_of_memory(error: Exception) -> bool:
    """Tell whether memory ran out; the CPU allocator says so only in words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
