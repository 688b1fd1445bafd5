"""memory_limit: a run in a process of its own that may take so much memory, and what becomes of both."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import accum_sweep
from accum_sweep import limit
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.device import free_bytes
from accum_sweep.errors import ConfigError, UserError
from accum_sweep.own_process import fate
from accum_sweep.record import Record, Status, records
from conftest import Cli

pytestmark = pytest.mark.skipif(not limit.supported(), reason="memory is limited on Linux only")

MIB = 1024**2
GPT = ("problem=char_gpt", "problem.test_sequences=16", "device=cpu", "tracking=none")
TWO_THREADS = {"OMP_NUM_THREADS": "2"}  # each takes buffers of its own
LONG = ("problem=digits_mlp", "steps=1e6", "memory_limit=200MiB", "device=cpu", "tracking=none")


def runs_of(folder: Path) -> list[Record]:
    return list(records(folder / "runs"))


# The limit itself


def test_within_the_limit_memory_is_given_and_beyond_it_is_not() -> None:
    with limit.limited(64 * MIB):
        torch.empty(32 * MIB, dtype=torch.uint8)
        left = limit.left_bytes()
        assert left is not None
        assert 0 < left <= 64 * MIB
        assert free_bytes(torch.device("cpu")) <= left + MIB  # type: ignore[operator]
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(128 * MIB, dtype=torch.uint8)
    assert limit.left_bytes() is None
    torch.empty(128 * MIB, dtype=torch.uint8)


def test_no_limit_limits_nothing() -> None:
    with limit.limited(None):
        assert limit.left_bytes() is None


def test_a_system_that_does_not_keep_the_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "_kept", lambda _: False)
    with pytest.raises(UserError, match="does not keep it"), limit.limited(64 * MIB):
        pass
    assert limit.left_bytes() is None


# The run in its process


def test_the_numbers_are_those_without_a_limit(workdir: Path) -> None:
    words = ["problem=digits_mlp", "epochs=1", "accum_steps=2", "optimizer=adamw", "device=cpu", "tracking=none"]
    check(compose(words))  # torch's optimizers set the environment once
    torch.manual_seed(7)
    random, environment = torch.get_rng_state(), dict(os.environ)
    limited = accum_sweep.run([*words, "memory_limit=1GiB"])
    assert torch.equal(torch.get_rng_state(), random), "nothing has happened here"
    assert dict(os.environ) == environment
    free = accum_sweep.run(words)
    assert limited.status == free.status == "finished"
    for part in ("series", "result", "weights", "equivalence", "run_key", "environment", "notes"):
        assert getattr(limited, part) == getattr(free, part)
    timed = {key for key in free.metrics if "second" in key}
    assert {key: value for key, value in limited.metrics.items() if key not in timed} == {
        key: value for key, value in free.metrics.items() if key not in timed
    }


def test_what_the_run_logs_is_heard(cli: Cli, tmp_path: Path) -> None:
    words = ("problem=digits_mlp", "batchnorm=eval", "steps=1", "memory_limit=200MiB", "device=cpu", "tracking=none")
    done = cli(*words)
    assert done.returncode == 0, done.stderr
    note = "batchnorm=eval changes nothing"
    assert note in done.stderr
    (log,) = tmp_path.glob("runs/*/accum_sweep.log")
    assert note in log.read_text()
    assert runs_of(tmp_path)[0].notes


@pytest.mark.parametrize("size", ["1B", "8MiB", "100MiB"])
def test_a_limit_below_what_is_needed_is_out_of_memory(cli: Cli, tmp_path: Path, size: str) -> None:
    """Below what Python needs, what the weights need, and what the activations need."""
    done = cli(*GPT, "steps=1", "problem.width=256", "micro_batch_size=128", f"memory_limit={size}")
    assert done.returncode == 1
    (record,) = runs_of(tmp_path)
    assert record.status == "oom"
    assert f"of memory_limit={size.replace('B', ' B').replace('Mi ', ' Mi')}" in (record.reason or "")
    assert "Traceback" not in done.stderr
    assert (record.reason or "") in done.stderr


@pytest.mark.parametrize("kept", [False, True])
def test_what_was_given_back_does_not_use_up_the_limit(cli: Cli, tmp_path: Path, kept: bool) -> None:
    """A run that first probes, under a limit not far above its peak; the control is how a C library keeps blocks."""
    words = ("problem=char_gpt", "effective_batch_size=64", "accum_steps=auto", "steps=2")
    keeping = {name: str(2**25) for name in limit.EXACT_MALLOC}
    done = cli(*words, "memory_limit=90MiB", "device=cpu", "tracking=none", **(keeping if kept else {}))
    (record,) = runs_of(tmp_path)
    if kept:  # most often nothing fits; libraries that do not look whether they were given memory crash
        assert record.status in ("oom", "failed"), done.stderr
    else:
        assert record.status == "finished", done.stderr
        assert record.config["accum_steps"] == 2


CRASHING = """
import os, signal, sys
import torch
from accum_sweep.problems.linear import Params as Linear

class Params(Linear):
    crash: str = ""

    def build(self, dtype):
        if self.crash == "cpp":
            os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n")
            os.abort()
        if self.crash.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.crash))
        if self.crash == "exit":
            os._exit(3)
        if self.crash == "error":
            raise ValueError("no such thing")
        return super().build(dtype)
"""


def test_however_the_process_ends_there_is_a_record(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/__init__.py").write_text("")
    (tmp_path / "own/crashing.py").write_text(CRASHING)
    (tmp_path / "conf/problem").mkdir(parents=True)
    text = "name: own.crashing\nbatches: [{x: [[1.0]], y: [2.0]}, {x: [[2.0]], y: [4.0]}]\ncrash: ''\n"
    (tmp_path / "conf/problem/crashing.yaml").write_text(text)
    ways = "cpp,SIGKILL,SIGSEGV,SIGABRT,exit,error,''"
    words = ["--config-dir", "conf", "-m", "problem=crashing", f"problem.crash={ways}", "memory_limit=200MiB"]
    done = cli(*words, "tracking=none")
    assert done.returncode == 1, done.stderr
    found = [(record.status, record.reason or "") for record in runs_of(tmp_path)]
    assert [status for status, _ in found] == ["oom", "failed", "failed", "failed", "failed", "failed", "finished"]
    for (_, reason), words_of in zip(
        found, ("bad_alloc", "SIGKILL", "SIGSEGV", "SIGABRT", "exit code 3", "no such thing", ""), strict=True
    ):
        assert words_of in reason
    assert "6 of 7 runs did not finish" in done.stderr
    log = (tmp_path / "runs" / runs_of(tmp_path)[5].run_id / "accum_sweep.log").read_text()
    assert "Traceback" in log, "the job's own log has the whole story"


@pytest.mark.parametrize(
    ("code", "said", "status"),
    [
        (-signal.SIGKILL, "", "failed"),
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'\n", "oom"),
        (-signal.SIGABRT, "Assertion failed\n", "failed"),
        (-signal.SIGSEGV, "", "failed"),
        (-40, "", "failed"),
        (1, "libgomp: Thread creation failed: Resource temporarily unavailable\n", "oom"),
        (1, "MemoryError\n", "oom"),
        (1, "ModuleNotFoundError: No module named 'x'\n", "failed"),
        (0, "", "failed"),
    ],
)
def test_what_a_process_without_a_record_died_of(code: int, said: str, status: Status) -> None:
    found, reason = fate(code, said, 2**31, starved=False)
    assert found == status
    assert ("memory_limit=2 GiB" in reason) == (status == "oom")
    assert said.strip() in reason
    assert "\n" not in reason


def test_a_kill_is_for_memory_only_where_the_system_counts_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert fate(-signal.SIGKILL, "", 2**31, starved=True)[0] == "oom"
    assert fate(-signal.SIGSEGV, "", 2**31, starved=True)[0] == "failed"
    monkeypatch.setattr(limit, "EVENTS", tmp_path / "vmstat")
    assert limit.killed_for_memory() == 0, "a system that does not say"
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 12\noom_kill_other 3\n")
    assert limit.killed_for_memory() == 12


# Who is stopped, and with whom


def children(parent: int) -> list[int]:
    """Numbers of the processes that a process has started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(ppid) == parent and state != "Z":
            found.append(int(path.parent.name))
    return found


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(what: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A run that would last for hours, and the process that trains it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "accum_sweep", *LONG],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: [child for child in children(process.pid) if threads(child) > 1])
        (child,) = children(process.pid)
        time.sleep(3)
        assert alive(child), "the control: it would go on"
        yield process, child
    finally:
        process.kill()
        process.communicate()


def threads(process: int) -> int:
    """How many threads it has: with torch's profiler, which the run starts, more than one."""
    try:
        return len(list(Path(f"/proc/{process}/task").iterdir()))
    except OSError:
        return 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_who_is_stopped_stops_the_run_and_keeps_what_there_is(
    training: tuple[subprocess.Popen[str], int], tmp_path: Path, how: signal.Signals
) -> None:
    process, child = training
    process.send_signal(how)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    (record,) = runs_of(tmp_path)
    assert (record.status, record.reason) == ("interrupted", "stopped by the user")
    assert not alive(child)


def test_a_parent_that_is_killed_leaves_no_orphan(training: tuple[subprocess.Popen[str], int]) -> None:
    process, child = training
    process.kill()
    process.wait()
    wait_for(lambda: not alive(child), seconds=10)


# Where there is no limit


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["device=cuda"], {}, "limits the CPU's memory, not that of device=cuda"),
        (["device=mps"], {}, "limits the CPU's memory, not that of device=mps"),
        (
            ["device=cpu"],
            {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            "torchrun's 2 stay for all",
        ),
    ],
)
def test_a_limit_that_could_not_be_kept_is_refused(
    cli: Cli, tmp_path: Path, words: list[str], environment: dict[str, str], said: str
) -> None:
    done = cli("memory_limit=2GiB", "tracking=none", *words, **environment)
    assert done.returncode == 2
    assert "memory_limit=2 GiB: " in done.stderr
    assert said in done.stderr
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_a_system_without_limits_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["memory_limit=2GiB", "device=cpu", "tracking=none"]
    check(compose(words))
    monkeypatch.setattr(limit, "supported", lambda: False)
    with pytest.raises(ConfigError, match="needs Linux"):
        check(compose(words))


def test_a_device_that_is_chosen_and_is_no_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["memory_limit=2GiB", "device=auto", "tracking=none"]
    monkeypatch.setattr("accum_sweep.device.resolve", lambda *_: torch.device("cpu"))
    check(compose(words))
    monkeypatch.setattr("accum_sweep.device.resolve", lambda *_: torch.device("cuda:0"))
    with pytest.raises(ConfigError, match="not that of device=auto, here cuda:0"):
        check(compose(words))


# A sweep


def test_a_sweep_goes_on_and_leaves_out_what_cannot_fit(cli: Cli, tmp_path: Path) -> None:
    words = (*GPT, "-m", "steps=1", "memory_limit=200MiB", "micro_batch_size=16,256,512", "accum_steps=1,2")
    done = cli(*words, **TWO_THREADS)
    assert done.returncode == 1, done.stderr
    runs = runs_of(tmp_path)
    assert [run.status for run in runs] == ["finished", "finished", "oom", "skipped", "skipped", "skipped"]
    blocker = "micro_batch_size=256 accum_steps=1"
    assert runs[2].name == blocker
    for run in runs[3:]:
        assert run.reason == f"larger than an out-of-memory setting: {blocker}"
        assert not run.metrics
        assert run.environment["device"] == "cpu"
    assert f"skipped: larger than an out-of-memory setting: {blocker}" in done.stdout
    assert "oom: measuring memory with micro_batch_size=256 accum_steps=1: no memory for" in done.stdout
    assert "memory_limit=200MiB" in done.stdout
    assert "6 runs, 2 finished" in done.stdout
    assert "3 runs were skipped; sweep.prune=false runs them all the same" in done.stderr
    assert "1 failed, 3 skipped" in done.stderr
    assert "4 of 6 runs did not finish" in done.stderr
    assert cli("summary").stdout == done.stdout
    rows = cli("summary", "--csv", "-").stdout
    assert rows.count(",skipped,larger than an out-of-memory setting") == 3
    assert "failed_allocation_bytes" in rows.splitlines()[0]
    assert json.loads((tmp_path / "runs" / runs[3].run_id / "result.json").read_text())["status"] == "skipped"


def test_a_sweep_told_so_tries_everything(cli: Cli, tmp_path: Path) -> None:
    words = (*GPT, "-m", "steps=1", "memory_limit=200MiB", "micro_batch_size=256,512", "sweep.prune=false")
    done = cli(*words, **TWO_THREADS)
    assert done.returncode == 1, done.stderr
    assert [run.status for run in runs_of(tmp_path)] == ["oom", "oom"]
    assert "skipped" not in done.stdout + done.stderr


def test_what_may_fit_is_tried(cli: Cli, tmp_path: Path) -> None:
    """From large to small, as accum_steps=1,2,4 go at one effective batch."""
    words = (*GPT, "-m", "steps=1", "memory_limit=200MiB", "effective_batch_size=512", "accum_steps=1,2,16")
    done = cli(*words, **TWO_THREADS)
    assert done.returncode == 1, done.stderr
    assert [run.status for run in runs_of(tmp_path)] == ["oom", "oom", "finished"]
