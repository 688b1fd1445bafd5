"""One run: a checked configuration is trained and measured, and leaves a record in its folder.

Whatever happens while training becomes a status with a reason; only what makes a record impossible is raised.
"""

import logging
import math
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from accum_sweep import environment
from accum_sweep.auto import DoesNotFit, decide
from accum_sweep.config import Config, run_key
from accum_sweep.device import hardware_name, resolve
from accum_sweep.errors import UserError, traceback_of, without_secrets
from accum_sweep.limit import held_bytes, limited
from accum_sweep.memory import out_of_memory, release
from accum_sweep.oom import Shortage, describe
from accum_sweep.precision import matrix_products
from accum_sweep.process_group import disband, joined
from accum_sweep.record import Identity, Record, Status, plain, refuse_second, write, write_companions
from accum_sweep.sketch import sketch
from accum_sweep.training import Judge, Pruned, State, Training, train_and_measure

log = logging.getLogger(__name__)

SMALL_MODEL = 1000  # weights; up to here they stand in the record in full


def execute(config: Config, folder: Path, identity: Identity, judge: Judge | None = None) -> Record:
    """Train as `config` says, write `record.json` and its companions into `folder`, and return the record.

    The global random state is as before when this returns. An interrupt becomes the status `interrupted`; the caller
    decides whether to stop. A `judge` may end it early, as `pruned`. Raises UserError where the folder holds a run
    already.
    """
    refuse_second(folder)
    started = datetime.now(UTC)
    device: torch.device | None = None
    training = Training()
    shortage: Shortage | None = None
    held_before = 0
    status: Status = "finished"
    reason: str | None = None
    failure: str | None = None
    chosen: dict[str, Any] = {}
    try:
        device = resolve(config.device, config.precision)
        forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        limit = limited(config.memory_limit)
        with forked, matrix_products(config.precision, device), limit as held_before:
            if config.automatic:
                training.stage = "choosing accum_steps"
                decision = decide(config, device)
                config, chosen = decision.config, decision.found
                training.stage = "building the problem"
            with joined(device, config.processes):
                train_and_measure(config, device, training, repeats=bool(chosen), judge=judge)
    except DoesNotFit as error:
        status, reason, chosen = "oom", str(error), error.found
    except Pruned as error:
        status, reason = "pruned", str(error)
    except UserError as error:
        status, reason = "failed", str(error)
    except KeyboardInterrupt:
        status, reason = "interrupted", "stopped by the user"
    except (Exception, SystemExit) as error:  # a problem's code may raise what it likes, and call exit()
        if out_of_memory(error, limited=config.memory_limit is not None):
            taken = held_bytes() - held_before if config.memory_limit is not None else None
            shortage = describe(error, device, _where(config, training), taken, config.memory_limit)
            status, reason = "oom", shortage.reason
            log.debug("%s: oom", identity.name, exc_info=True)
        else:
            status, reason = "failed", without_secrets(f"{type(error).__name__}: {error}")
            failure = traceback_of(error)
            log.error("%s: failed\n%s", identity.name, failure)
    ended = datetime.now(UTC)
    if status != "finished":
        release(device)  # here, not in the except block: until that is left, the traceback holds the tensors
    disband()
    series = training.history.series()
    if status == "finished" and (reason := _divergence(series, training, config.step_in_backward)):
        status = "failed" if set(training.history.outcomes) == {"empty"} else "diverged"
    metrics = _metrics(series, training)
    if shortage is not None:
        metrics |= {
            "failed_allocation_bytes": shortage.failed_allocation_bytes,
            "in_use_bytes": shortage.in_use_bytes,
        }
    record = Record(
        run_id=identity.run_id,
        run_key=run_key(config, config.device if device is None else str(device)),
        name=identity.name,
        status=status,
        reason=plain(reason),
        started_at=started.isoformat(),
        ended_at=ended.isoformat(),
        overrides=identity.overrides,
        config=config.model_dump(mode="json"),
        environment=environment.describe()
        | {"device": device and str(device), "device_name": device and hardware_name(device)},
        metrics=plain(metrics),
        series=plain(series),
        result=plain(_result(training, metrics) or {"status": status, "reason": reason}),
        weights=plain(_weights_in_full(training)),
        equivalence=plain(_equivalence(training)),
        traceback=plain(failure),
        peak_phase=training.statement.phase if training.statement is not None else None,
        notes=[chosen[key] for key in ("why",) if key in chosen]
        + training.notes
        + training.repeated
        + _unusual(training),
        auto=plain(chosen),
        sweep_id=identity.sweep_id,
        job_num=identity.job_num,
    )
    folder.mkdir(parents=True, exist_ok=True)
    if config.save_weights and training.initial is not None and training.final is not None:
        save_file(training.initial, folder / "initial.safetensors")
        save_file(training.final, folder / "final.safetensors")
    write(record, folder)
    write_companions(record, folder)
    return record


def _where(config: Config, training: Training) -> str:
    """Say what a run was doing, and with which sizes."""
    step = f" {len(training.samples)}" if training.stage == "step" else ""
    sizes = {"micro_batch_size": config.micro_batch_size, "accum_steps": config.accum_steps}
    given = " ".join(f"{key}={value}" for key, value in sizes.items() if value is not None)
    again = f", {training.repeated[-1]}" if training.repeated else ""
    return f"{training.stage}{step}{given and f' with {given}'}{again}"


def _metrics(series: dict[str, list[float]], training: Training) -> dict[str, float | int | None]:
    """Derive a run's numbers from what there is of its training."""
    metrics: dict[str, float | int | None] = {}
    metrics |= _memory(training)
    losses, norms = series["train/loss"], series["train/grad_norm"]
    if losses:
        outcomes = training.history.outcomes
        taken = [number for number, outcome in enumerate(outcomes) if outcome == "stepped"] or range(len(outcomes))
        first, last = taken[0], taken[-1]
        metrics |= {
            "steps_done": outcomes.count("stepped"),
            "windows_overflowed": outcomes.count("overflow"),
            "windows_skipped": outcomes.count("skipped"),
            "windows_empty": outcomes.count("empty"),
            "micro_steps_done": len(series["train/micro_loss"]),
            "samples_seen": sum(training.samples[: len(losses)]),
            "first_loss": losses[first],
            "last_loss": losses[last],
            "first_grad_norm": norms[first],
            "last_grad_norm": norms[last],
            "last_clipped_norm": series.get("train/clipped_norm", norms)[last],
            "last_lr": series["train/lr"][last],
        }
    if training.seconds:
        metrics |= _speed(training.seconds, training.samples)
    if training.parameters is not None:
        metrics["parameters"] = training.parameters
    for when, state in (("initial", training.initial), ("final", training.final)):
        if state is not None:
            metrics[f"{when}_weight_norm"] = _norm(state)
    if training.verdict is not None:
        verdict, judged, _ = training.verdict
        metrics |= {
            "gradient_error": verdict.relative_error,
            "gradient_cosine": verdict.cosine,
            "gradient_tolerance": verdict.tolerance,
            "steps_judged": judged,
        }
    return metrics | training.held_out


def _memory(training: Training) -> dict[str, float | int | None]:
    """Return the peak, measured and predicted, and who holds it."""
    peak, statement, predicted = training.peak, training.statement, training.prediction
    found: dict[str, float | int | None] = {}
    if peak is not None:
        found["peak_allocated_bytes"] = peak.allocated_bytes
        more = {
            "peak_reserved_bytes": peak.reserved_bytes,
            "peak_requested_bytes": peak.requested_bytes,
            "allocation_retries": peak.allocation_retries,
            "baseline_bytes": peak.baseline_bytes,
            "free_bytes": peak.free_bytes,
        }
        found |= {key: value for key, value in more.items() if value is not None}
    if peak is not None and peak.allocated_bytes is not None and statement is not None:
        found |= {f"peak_{kind}_bytes": size for kind, size in statement.parts.items()}
        # What was not followed, kernels took for themselves.
        named = sum(size for kind, size in statement.parts.items() if kind != "temporaries")
        found["peak_temporaries_bytes"] = max(0, peak.allocated_bytes - named)
    if predicted is not None:
        found["predicted_allocated_bytes"] = predicted.peak_allocated_bytes
        if predicted.peak_reserved_bytes is not None:
            found["predicted_reserved_bytes"] = predicted.peak_reserved_bytes
        if peak is not None and peak.allocated_bytes:
            found["prediction_error"] = predicted.peak_allocated_bytes / peak.allocated_bytes - 1
    return found


def _speed(seconds: Sequence[float], samples: Sequence[int]) -> dict[str, float | int | None]:
    """Return the median of a step's time with its spread, and rates, from the seconds and samples of each step."""
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else None
    return {
        "train_seconds": sum(seconds),
        "step_seconds": median,
        "step_seconds_iqr": quartiles[2] - quartiles[0] if quartiles else None,
        "steps_per_second": 1 / median,
        "samples_per_second": statistics.median(n / s for n, s in zip(samples, seconds, strict=True)),
    }


def _divergence(series: dict[str, list[float]], training: Training, in_backward: bool) -> str | None:
    """Say where a loss, a gradient or the weights are not finite; None where all are, or were skipped on request.

    `in_backward`: whether weights move before all gradients of a step are there.
    """
    steps = len(training.samples)
    if "diverged" in training.history.outcomes:
        number = training.history.outcomes.index("diverged")
        what = "gradient" if math.isfinite(series["train/loss"][number]) else "loss"
        weights = "weights have moved in it (step_in_backward)" if in_backward else "the weights are those before it"
        return f"the {what} is not finite in step {number + 1}; {weights}"
    if training.final is not None and not math.isfinite(_norm(training.final)):
        return f"the weights are not finite after step {steps}"
    if steps and "stepped" not in training.history.outcomes:
        return "no step was taken: every window was skipped, overflowed or held no item"
    return None


def _norm(state: State) -> float:
    """L2 norm over all floating-point entries, in float64."""
    squares = [float(tensor.double().square().sum()) for tensor in state.values() if tensor.is_floating_point()]
    return math.sqrt(sum(squares))


def _result(training: Training, metrics: dict[str, float | int | None]) -> dict[str, Any] | None:
    """Return what a run prints: the weight where it is short, else norms and losses; None where it has no end."""
    initial, final = training.initial, training.final
    if initial is None or final is None:
        return None
    changed = any(not torch.equal(initial[name], final[name]) for name in initial)
    if _is_small(initial) and "weight" in initial:
        before, after = initial["weight"].flatten().tolist(), final["weight"].flatten().tolist()
        return {"initial_weight": before, "final_weight": after, "weight_changed": changed}
    shown = ("initial_weight_norm", "final_weight_norm", "first_loss", "last_loss", *training.held_out)
    return {key: metrics[key] for key in shown} | {"weight_changed": changed}


def _is_small(state: State) -> bool:
    whole = sum(tensor.numel() for tensor in state.values())
    return whole <= SMALL_MODEL and not any(tensor.is_complex() for tensor in state.values())  # JSON knows no complex


def _unusual(training: Training) -> list[str]:
    """Say how many windows took no step, of which kind."""
    outcomes = training.history.outcomes
    kinds = {"skipped": "were not finite and skipped", "overflow": "overflowed float16", "empty": "held no item"}
    counts = {words: outcomes.count(kind) for kind, words in kinds.items()}  # type: ignore[arg-type]
    return [f"{count} of {len(outcomes)} windows {words}" for words, count in counts.items() if count]


def _equivalence(training: Training) -> dict[str, Any]:
    """Return the verdict, and what tells a run's data and its weights from another's."""
    found: dict[str, Any] = {}
    if training.verdict is not None:
        verdict, _, errors = training.verdict
        found |= {"verdict": verdict.outcome, "reason": verdict.reason, "relative_errors": errors}
    if training.final is not None:
        weights = sketch(training.final[name] for name in training.weights)
        found |= {"data": training.data.hexdigest()[:16], "final_sketch": weights}
    return found


def _weights_in_full(training: Training) -> dict[str, dict[str, Any]]:
    states = {"initial": training.initial, "final": training.final}
    return {
        when: {name: tensor.tolist() for name, tensor in state.items()}
        for when, state in states.items()
        if state is not None and _is_small(state)
    }
