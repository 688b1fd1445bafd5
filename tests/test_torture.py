"""A sweep that is killed at random moments and continued; and the faults by which these tests would fail, planted."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.torture import torture

from accum_sweep.record import sweeps
from conftest import Cli

pytestmark = pytest.mark.slow
SWEPT = ("-q", "-m", "seed=range(0,6)", "problem=digits_mlp", "epochs=1", "tracking=none")
PLANTED = {
    # A record is written in two halves, at its own place; long is the wait for the other one in run 2.
    "not atomic": """
import accum_sweep.record, time
def write(path, text):
    half = len(text) // 2
    with path.open("w") as file:
        file.write(text[:half])
        file.flush()
        if path.parent.name == "2":
            time.sleep(60)
        file.write(text[half:])
accum_sweep.record.write_atomically = write
""",
    # As long, and as it is: to a temporary file first.
    "atomic": """
import os, time
fsync = os.fsync
def slow(file):
    if "/2/" in os.readlink(f"/proc/self/fd/{file}"):
        time.sleep(60)
    fsync(file)
os.fsync = slow
""",
    "no lock": """
import accum_sweep.lock, contextlib
@contextlib.contextmanager
def held(path):
    yield True
accum_sweep.lock.held = held
""",
    "no key check": """
import accum_sweep.resume
accum_sweep.resume.left = lambda sweep, folder, jobs, extend: list(jobs)
""",
}


def planted(folder: Path, name: str) -> dict[str, str]:
    """The environment in which a program of ours has this fault."""
    place = folder / name.replace(" ", "_")
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(PLANTED[name])
    return {"PYTHONPATH": str(place)}


def begin(folder: Path, *words: str, **environment: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "accum_sweep", *SWEPT, *words]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, cwd=folder, env={**os.environ, **environment}, **quiet)  # type: ignore[call-overload,no-any-return]


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def finished(folder: Path) -> Counter[str]:
    """How often each seed is finished on disk."""
    texts = [path.read_text() for path in (folder / "runs").rglob("record.json")]
    return Counter(text.partition('"name": "')[2].partition('"')[0] for text in texts if '"status": "finished"' in text)


def test_killed_at_random_moments_nothing_is_lost_and_nothing_is_twice(tmp_path: Path) -> None:
    outcome = torture(tmp_path, runs=6, kills=4, launcher="processes", server=False, seed=3, longest_wait=6.0)
    assert not outcome.faults, (outcome, (tmp_path / "said").read_text()[-3000:])
    assert sum(outcome.kills.values()) == 4
    assert set(outcome.kills) == {"main", "worker"}


@pytest.mark.parametrize("fault", ["atomic", "not atomic"])
def test_a_kill_while_a_record_is_written_leaves_no_half_of_it(cli: Cli, tmp_path: Path, fault: str) -> None:
    process = begin(tmp_path, **planted(tmp_path, fault))
    runs = tmp_path / "runs"
    wait_for(lambda: list(runs.rglob("2/record.json" if fault == "not atomic" else "2/.record.json.*")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = cli(*SWEPT, "sweep.resume=latest")
    if fault == "not atomic":
        assert done.returncode == 2, "the control: the kill came in the middle"
        assert "2/record.json cannot be read" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert finished(tmp_path) == {f"seed={seed}": 1 for seed in range(6)}


@pytest.mark.parametrize("fault", [None, "no lock"])
def test_two_that_go_on_at_once_do_not_run_the_same_twice(tmp_path: Path, fault: str | None) -> None:
    process = begin(tmp_path)
    wait_for(lambda: list((tmp_path / "runs").rglob("1/record.json")))
    process.kill()
    process.wait()
    environment = {} if fault is None else planted(tmp_path, fault)
    first = begin(tmp_path, "sweep.resume=latest", **environment)
    try:
        wait_for(lambda: list((tmp_path / "runs").rglob("6")))  # the first of the runs that it makes anew
        first.send_signal(signal.SIGSTOP)  # however fast the machine is: it is at work while the other one comes
        second = begin(tmp_path, "sweep.resume=latest", **environment).wait(timeout=120)
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait(timeout=120) == 0
    if fault is None:
        assert second == 2
        assert finished(tmp_path) == {f"seed={seed}": 1 for seed in range(6)}
    else:
        assert second == 0
        twice = [name for name, times in finished(tmp_path).items() if times > 1]
        assert twice, "the control: the lock is needed"


@pytest.mark.parametrize("fault", [None, "no key check"])
def test_what_is_finished_is_known_by_its_key(tmp_path: Path, fault: str | None) -> None:
    process = begin(tmp_path)
    wait_for(lambda: list((tmp_path / "runs").rglob("1/record.json")))
    process.kill()
    process.wait()
    environment = {} if fault is None else planted(tmp_path, fault)
    assert begin(tmp_path, "sweep.resume=latest", **environment).wait(timeout=120) == 0
    twice = [name for name, times in finished(tmp_path).items() if times > 1]
    assert bool(twice) == (fault is not None), finished(tmp_path)
    assert len(sweeps(tmp_path / "runs")) == 1
