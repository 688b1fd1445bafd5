"""Out of memory is a result: what the record says of it, and that nothing of it stays behind."""

import gc
import itertools
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import accum_sweep
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.execute import execute
from accum_sweep.memory import out_of_memory
from accum_sweep.oom import describe
from accum_sweep.problems import Problem, digits_mlp
from accum_sweep.record import Identity, Record

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
TOO_MUCH = 10**15  # bytes; no machine has them
DIGITS = ("problem=digits_mlp", "micro_batch_size=16", "accum_steps=2", "steps=5", "device=cpu", "tracking=none")


def run_here(folder: Path, *overrides: str) -> Record:
    return execute(check(compose([*DIGITS, *overrides])), folder, Identity("r", "r", []))


# What it says

OF_THE_CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1048576 bytes. Error code 12 (Cannot allocate memory)"
)
OF_CUDA = (
    "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.62 GiB is "
    "free.\nProcess 4711 has 77.48 GiB memory in use. Of the allocated memory 76.50 GiB is allocated by PyTorch, and "
    "512.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting\n"
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
)
GIB = 1024**3


def test_the_words_of_cuda_become_one_line_and_numbers() -> None:
    found = describe(torch.OutOfMemoryError(OF_CUDA), CUDA, "step 3", None, None)
    assert found.reason == (
        "step 3: no memory for 20 GiB more; in use: 76.5 GiB allocated, 77 GiB reserved, 1.62 GiB of 79.11 GiB free "
        "(cuda:0)"
    )
    assert (found.failed_allocation_bytes, found.in_use_bytes) == (20 * GIB, int(76.5 * GIB))


def test_words_of_cuda_that_say_less_say_what_they_do() -> None:
    found = describe(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 bytes"), CUDA, "x", None, None)
    assert found.failed_allocation_bytes == 20
    assert found.reason.startswith("x: no memory for 20 B more; in use: ")


def test_the_words_of_the_cpu_become_one_line_and_numbers() -> None:
    limited = describe(RuntimeError(OF_THE_CPU), CPU, "step 1", 3 * GIB, 4 * GIB)
    assert limited.reason == "step 1: no memory for 1 MiB more; in use: 3 GiB of memory_limit=4 GiB"
    assert (limited.failed_allocation_bytes, limited.in_use_bytes) == (1024**2, 3 * GIB)
    free = describe(RuntimeError(OF_THE_CPU), CPU, "step 1", None, None)
    assert "by this process" in free.reason
    assert free.reason.endswith("free")
    assert free.in_use_bytes is not None
    assert free.in_use_bytes > 50 * 1024**2, "Python and torch are there"


def test_an_error_without_a_size_is_told_as_it_is() -> None:
    assert "no memory (MemoryError); in use" in describe(MemoryError(), CPU, "x", 1, 2).reason
    assert "(MemoryError: std::bad_alloc)" in describe(MemoryError("std::bad_alloc"), CPU, "x", 1, 2).reason
    assert describe(MemoryError(), CPU, "x", 1, 2).failed_allocation_bytes is None


def raised_from(cause: BaseException) -> ImportError:
    error = ImportError("the install seems to be broken")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "limited", "expected"),
    [
        (RuntimeError(OF_THE_CPU), False, True),
        (torch.OutOfMemoryError(OF_CUDA), False, True),
        (OSError(12, "Cannot allocate memory"), False, True),
        (RuntimeError("std::bad_alloc"), False, True),
        (RuntimeError("could not create a primitive"), True, True),
        (RuntimeError("could not create a primitive"), False, False),
        (raised_from(ImportError("x.so: failed to map segment from shared object")), False, True),
        (raised_from(ImportError("x.so: no such file")), False, False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), True, False),
    ],
)
def test_which_errors_are_a_lack_of_memory(error: BaseException, limited: bool, expected: bool) -> None:
    assert out_of_memory(error, limited) is expected


def fail_in(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Let one micro-batch of the training itself, counted from 1, ask for more than there is."""
    build = digits_mlp.Params.build

    def building(self: digits_mlp.Params, dtype: torch.dtype) -> Problem:
        problem, calls = build(self, dtype), itertools.count(1)

        def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
            if model is problem.model and next(calls) == call:  # the short pass trains a copy
                torch.empty(TOO_MUCH, dtype=torch.uint8)
            return problem.loss(model, batch)  # type: ignore[return-value]

        return Problem(problem.model, problem.train, loss, evaluate=problem.evaluate)

    monkeypatch.setattr(digits_mlp.Params, "build", building)


def test_the_step_in_which_memory_ran_out_is_told_and_those_before_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_in(monkeypatch, call=6)
    record = run_here(tmp_path)
    assert record.status == "oom"
    where = "step 3 with micro_batch_size=16 accum_steps=2: no memory for 909.5 TiB more; in use: "
    assert (record.reason or "").startswith(where)
    assert record.metrics["failed_allocation_bytes"] == TOO_MUCH
    assert record.metrics["in_use_bytes"]
    assert record.metrics["steps_done"] == 2


def test_the_other_places_have_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        torch.empty(TOO_MUCH, dtype=torch.uint8)

    for number, (owner, name, where) in enumerate(
        (
            ("accum_sweep.short_pass", "boundary", "measuring memory with"),
            ("accum_sweep.training", "_state", "setting up with"),
            ("accum_sweep.problems.digits", "load", "building the problem with"),
        )
    ):
        with monkeypatch.context() as patched:
            patched.setattr(f"{owner}.{name}", failing)
            record = run_here(tmp_path / str(number))
        assert record.status == "oom"
        assert (record.reason or "").startswith(where)


def test_a_run_that_fits_says_nothing_of_it(tmp_path: Path) -> None:
    record = run_here(tmp_path)
    assert record.status == "finished"
    assert not {"failed_allocation_bytes", "in_use_bytes"} & record.metrics.keys()


# What is left of it


def live_bytes() -> int:
    """Bytes of all storages that a tensor anywhere in this process still holds."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter):
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
            if thing.grad is not None:
                storages[thing.grad.untyped_storage().data_ptr()] = thing.grad.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.fixture
def no_log(caplog: pytest.LogCaptureFixture) -> None:
    """pytest keeps what is logged, tracebacks with their tensors too."""
    caplog.set_level(logging.CRITICAL + 1, "accum_sweep")


def test_memory_is_back_to_the_baseline_after_each_run_whatever_became_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_log: None
) -> None:
    run_here(tmp_path / "first")  # loads the data, which is kept
    baseline = live_bytes()
    for number in range(3):
        with monkeypatch.context() as patched:
            fail_in(patched, call=4)
            assert run_here(tmp_path / f"oom {number}", "optimizer=adamw").status == "oom"
        assert live_bytes() == baseline
        assert run_here(tmp_path / f"fine {number}", "optimizer=adamw").status == "finished"
        assert live_bytes() == baseline


def test_the_control_a_reference_that_is_kept_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_log: None
) -> None:
    run_here(tmp_path / "first")
    baseline, kept = live_bytes(), []
    real = torch.empty

    def keeping(*size: int, **options: object) -> Tensor:
        kept.append(torch.ones(1000, dtype=torch.uint8))
        return real(*size, **options)  # type: ignore[call-overload, no-any-return]

    with monkeypatch.context() as patched:
        fail_in(patched, call=4)
        patched.setattr(torch, "empty", keeping)
        run_here(tmp_path / "leaking")
    assert live_bytes() == baseline + 1000 * len(kept) > baseline
    kept.clear()
    assert live_bytes() == baseline


def test_the_next_runs_peak_is_that_of_a_fresh_process(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = accum_sweep.run([*DIGITS, "memory_limit=1GiB"])  # in a process of its own
    with monkeypatch.context() as patched:
        fail_in(patched, call=4)
        assert accum_sweep.run([*DIGITS]).status == "oom"
    after = accum_sweep.run([*DIGITS])
    assert after.metrics["peak_allocated_bytes"] == fresh.metrics["peak_allocated_bytes"]
    assert after.result == fresh.result


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_on_cuda_memory_is_back_to_the_baseline(workdir: Path, monkeypatch: pytest.MonkeyPatch, no_log: None) -> None:
    words = ["problem=digits_mlp", "steps=5", "device=cuda", "tracking=none"]
    before = accum_sweep.run(words).metrics["peak_allocated_bytes"]
    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with monkeypatch.context() as patched:
        patched.setattr("accum_sweep.training._check_data", lambda *_: torch.empty(TOO_MUCH, device="cuda"))
        record = accum_sweep.run(words)
    assert record.status == "oom"
    assert record.metrics["failed_allocation_bytes"]
    assert torch.cuda.memory_allocated() <= allocated
    assert torch.cuda.memory_reserved() <= reserved
    assert accum_sweep.run(words).metrics["peak_allocated_bytes"] == before
