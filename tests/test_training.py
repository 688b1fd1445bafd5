"""What a run measures and keeps: of its own steps, of its data as said, and when it ends before its time."""

import functools
import gc
import itertools
import json
import logging
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import accum_sweep
from accum_sweep import training
from accum_sweep.batches import MicroBatches
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.errors import UserError
from accum_sweep.execute import execute
from accum_sweep.history import History
from accum_sweep.problems import Problem, digits, digits_mlp, linear
from accum_sweep.record import Identity, Record
from accum_sweep.referee import Referee

CPU = torch.device("cpu")
DIGITS = ["problem=digits_mlp", "tracking=none", "device=cpu"]


def run_here(folder: Path, *overrides: str) -> Record:
    return execute(check(compose([*overrides, "tracking=none", "device=cpu"])), folder, Identity("r", "r", []))


def micro_batches(samples: int) -> MicroBatches:
    """Three micro-batches of four, of data that may be too short for them."""
    problem = Problem(nn.Linear(3, 1), (torch.rand(samples, 3),), linear.squared_error)
    return MicroBatches(problem, list(torch.arange(12).split(4)), CPU, rank=0, world=1)


def test_one_micro_batch_is_held_at_a_time() -> None:
    batches = micro_batches(12)
    seen: list[weakref.ref[Tensor]] = []
    alive = []
    for batch in batches:
        seen.append(weakref.ref(batch[0]))
        del batch
        gc.collect()
        alive.append(sum(ref() is not None for ref in seen))
    assert alive == [0, 0, 0]
    assert len(batches) == 3


def test_an_index_beyond_the_data_is_an_error_and_not_the_end() -> None:
    batches = micro_batches(10)
    with pytest.raises(IndexError):
        list(batches)


def test_data_that_is_not_as_long_as_said_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        digits, "load", lambda: (torch.rand(1400, 64).numpy(), torch.zeros(1400, dtype=torch.int64).numpy())
    )
    record = run_here(tmp_path, "problem=digits_mlp", "epochs=1")
    assert record.status == "failed"
    assert "says that it has 1437 training samples, but column 0 of its data has 1400" in (record.reason or "")


def test_a_run_counts_its_steps_and_samples(workdir: Path) -> None:
    metrics = accum_sweep.run([*DIGITS, "epochs=2", "accum_steps=4", "micro_batch_size=16"]).metrics
    assert metrics["steps_done"] == 2 * 23
    assert metrics["micro_steps_done"] == 2 * 90  # 1437 = 89 x 16 + 13
    assert metrics["samples_seen"] == 2 * 1437
    dropped = accum_sweep.run([*DIGITS, "epochs=2", "accum_steps=4", "micro_batch_size=16", "last_window=drop"]).metrics
    assert (dropped["steps_done"], dropped["samples_seen"]) == (2 * 22, 2 * 22 * 64)


def test_speed_is_the_median_over_steps(workdir: Path) -> None:
    metrics = accum_sweep.run([*DIGITS, "steps=51"]).metrics
    step, whole = metrics["step_seconds"], metrics["train_seconds"]
    assert step is not None
    assert whole is not None
    assert 0 < step < whole
    assert metrics["steps_per_second"] == pytest.approx(1 / step)
    assert metrics["samples_per_second"] == pytest.approx(16 / step)


def test_the_clock_does_not_count_what_happens_between_steps(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("accum_sweep.device.time.perf_counter", lambda: float(next(ticks)))
    for cls, name in ((History, "add"), (Referee, "watch"), (Referee, "ended"), (Referee, "_clipping_fault")):
        monkeypatch.setattr(cls, name, slowly(getattr(cls, name), ticks))
    assert accum_sweep.run(["tracking=none", "steps=3", "equivalence=off"]).metrics["train_seconds"] == 3
    # A step that is judged is timed in three pieces: before the gradient is judged, after, and when the weights move.
    assert accum_sweep.run(["tracking=none", "steps=3", "equivalence=every_step"]).metrics["train_seconds"] == 9


def slowly(original: Callable[..., object], ticks: Iterator[int]) -> Callable[..., object]:
    def slow(*arguments: object) -> object:
        for _ in range(100):
            next(ticks)
        return original(*arguments)

    return slow


class Interrupted(linear.Params):
    """The textbook problem, interrupted by the user in its seventh micro-batch."""

    def build(self, dtype: torch.dtype) -> Problem:
        problem = super().build(dtype)
        calls = itertools.count(1)

        def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
            if model is problem.model and next(calls) == 7:  # not in the short pass, which trains a copy
                raise KeyboardInterrupt
            return linear.squared_error(model, batch)

        return Problem(problem.model, problem.train, loss, shuffle=False)


def test_an_interrupted_run_keeps_the_steps_it_took(tmp_path: Path) -> None:
    settings = check(compose(["accum_steps=2", "steps=50", "tracking=none"]))
    whole = execute(settings, tmp_path / "whole", Identity("w", "w", []))
    cut = settings.model_copy(update={"problem": Interrupted(**settings.problem.model_dump())})
    record = execute(cut, tmp_path / "cut", Identity("c", "c", []))
    assert (record.status, record.reason) == ("interrupted", "stopped by the user")
    assert record.metrics["steps_done"] == 3
    assert record.series["train/loss"] == whole.series["train/loss"][:3]
    assert record.result == {"status": "interrupted", "reason": "stopped by the user"}
    assert json.loads((tmp_path / "cut/record.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("error", [SystemExit(5), MemoryError(), RuntimeError("no luck")])
def test_whatever_a_problem_raises_becomes_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def failing(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        raise error

    monkeypatch.setattr(digits_mlp, "cross_entropy", failing)
    record = run_here(tmp_path, "problem=digits_mlp")
    assert record.status == ("oom" if isinstance(error, MemoryError) else "failed")
    assert type(error).__name__ in (record.reason or "")


def test_a_real_lack_of_memory_is_oom_and_the_next_run_is_fine(tmp_path: Path) -> None:
    record = run_here(tmp_path / "a", "problem=digits_mlp", "problem.hidden=1000000000000")
    assert record.status == "oom"
    assert "building the problem with micro_batch_size=16 accum_steps=1: no memory for 232.8 TiB more" in (
        record.reason or ""
    )
    after = run_here(tmp_path / "b", "problem=digits_mlp", "epochs=1")
    fresh = run_here(tmp_path / "c", "problem=digits_mlp", "epochs=1")
    assert after.status == "finished"
    assert after.metrics["peak_allocated_bytes"] == fresh.metrics["peak_allocated_bytes"]


def test_a_failed_run_does_not_hold_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1, "accum_sweep")  # else pytest keeps the logged traceback, and so the tensors
    held: list[weakref.ref[nn.Module]] = []

    def failing(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        held.append(weakref.ref(model))
        raise RuntimeError("no")

    monkeypatch.setattr(digits_mlp, "cross_entropy", failing)
    assert run_here(tmp_path, "problem=digits_mlp").status == "failed"
    assert held
    assert all(ref() is None for ref in held)


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path: Path) -> None:
    run_here(tmp_path)
    before = (tmp_path / "record.json").read_bytes()
    with pytest.raises(UserError, match="holds a run already"):
        run_here(tmp_path, "lr=0.5")
    assert (tmp_path / "record.json").read_bytes() == before


def test_held_out_metrics_may_be_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = digits_mlp.Params.build

    def with_tensor(self: digits_mlp.Params, dtype: torch.dtype) -> Problem:
        problem = build(self, dtype)
        return Problem(problem.model, problem.train, problem.loss, evaluate=lambda *_: {"test/x": torch.tensor(0.5)})  # type: ignore[dict-item]

    monkeypatch.setattr(digits_mlp.Params, "build", with_tensor)
    assert run_here(tmp_path, "problem=digits_mlp", "epochs=1").metrics["test/x"] == 0.5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_cuda_gives_one_peak_run_after_run_and_the_weights_of_the_cpu(workdir: Path) -> None:
    words = ["problem=digits_mlp", "tracking=none", "steps=5", "save_weights=true"]
    first, second = (accum_sweep.run([*words, f"device={name}"]) for name in ("cuda", "cuda:0"))
    assert first.run_key == second.run_key
    assert first.metrics["peak_allocated_bytes"] == second.metrics["peak_allocated_bytes"]
    assert first.metrics["peak_reserved_bytes"]
    on_cpu = accum_sweep.run([*words, "device=cpu"])
    assert first.series["train/loss"] == pytest.approx(on_cpu.series["train/loss"], rel=1e-4)


def test_the_training_so_far_is_empty_before_it_begins() -> None:
    so_far = training.Training()
    assert so_far.history.series() == {"train/loss": [], "train/grad_norm": [], "train/lr": [], "train/micro_loss": []}


def test_the_same_samples_in_other_windows_are_other_data(tmp_path: Path) -> None:
    words = ("problem.batches=[{x:[[1],[2],[3],[4]],y:[1,2,3,4]}]", "micro_batch_size=1", "epochs=1")
    four, two, again = (
        run_here(tmp_path / str(number), *words, f"accum_steps={steps}").equivalence["data"]
        for number, steps in enumerate((4, 2, 4))
    )
    assert four != two
    assert four == again


def test_the_peak_of_float16_is_that_of_a_step_that_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("problem=digits_mlp", "optimizer=adamw", "precision=fp16", "steps=3")
    usual = run_here(tmp_path / "usual", *words).metrics["peak_allocated_bytes"]
    scaler = functools.partial(torch.amp.GradScaler, init_scale=2.0**40)
    monkeypatch.setattr("accum_sweep.preparation.torch.amp.GradScaler", scaler)
    record = run_here(tmp_path / "overflowing", *words)
    assert record.metrics["windows_overflowed"] == 3
    assert usual is not None
    assert record.metrics["peak_allocated_bytes"] == pytest.approx(usual, rel=1e-3)


def test_a_window_that_is_never_full_is_noted(tmp_path: Path) -> None:
    words = ("problem=digits_mlp", "problem.test_samples=1700", "micro_batch_size=64", "accum_steps=4", "epochs=2")
    (note,) = run_here(tmp_path / "flush", *words).notes
    assert "of 256 samples a step sees 97" in note
    assert not run_here(tmp_path / "carry", *words, "last_window=carry").notes
