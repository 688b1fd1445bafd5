"""A sweep killed at random moments, continued each time, against one that nothing happens to.

    python -m benchmarks.torture --runs 40 --kills 50 [--launcher processes] [--server] [--seed 0] [--write]

Killed, with SIGKILL and by turns, are the sweep's own process, one of its workers (`--launcher processes`) and the
MLflow server (`--server`). In the end every run must be there finished once, on disk and in MLflow, none may be left
RUNNING, and the table must be that of the other sweep.
"""

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pandas

from accum_sweep.environment import versions
from accum_sweep.record import read, sweeps
from benchmarks.server import Server

REPORT = Path(__file__).with_suffix(".md")
LONGEST_WAIT_SECONDS = 9.0  # for the next kill; to start takes about half of it
TIMES = ("started_at", "ended_at", "seconds", "per_second", "iqr", "folder", "run_id", "job_num", "sweep_id", "sweep.")


@dataclass
class Outcome:
    """What there is when all is over."""

    kills: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    faults: list[str] = field(default_factory=list)  # what is not as it must be


def torture(
    folder: Path,
    runs: int,
    kills: int,
    launcher: str,
    server: bool,
    seed: int,
    longest_wait: float = LONGEST_WAIT_SECONDS,
) -> Outcome:
    """Do it in `folder`, which must be empty."""
    drawn, outcome = random.Random(seed), Outcome()
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(Server(folder)) if server else None
        address = f"sqlite:///{folder}/mlflow.db" if store is None else store.address
        words = ["-q", "-m", f"seed=range(0,{runs})", "problem=digits_mlp", "epochs=8", "effective_batch_size=32"]
        words += ["accum_steps=4", f"hydra/launcher={launcher}", f"tracking.uri={address}"]
        words += ["hydra.launcher.workers=2"] if launcher == "processes" else []
        victims = ["main", *(["worker"] if launcher == "processes" else []), *(["server"] if server else [])]
        process = _start(folder, words, outcome)
        for number in range(kills):
            victim = victims[number % len(victims)]
            time.sleep(drawn.uniform(0, longest_wait))
            if process.poll() is not None:  # it is through
                process = _start(folder, words, outcome)
            if victim == "main":
                process.kill()
                process.wait()
                outcome.kills["main"] += 1
                process = _start(folder, words, outcome)
            elif victim == "worker":
                while not (workers := _workers(process.pid)) and process.poll() is None:
                    time.sleep(0.01)
                for pid in workers[:1]:
                    os.kill(pid, signal.SIGKILL)
                    outcome.kills["worker"] += 1
            elif store is not None:
                store.end()
                outcome.kills["server"] += 1
                time.sleep(drawn.uniform(0, 2))
                store.start()
        process.wait()
        for _ in range(2):  # what a killed worker was at
            _start(folder, words, outcome).wait()
        _run(folder, ["sync"])
        outcome.faults += _faults(folder, runs, address)
        undisturbed = folder / "undisturbed"
        undisturbed.mkdir()
        _run(undisturbed, [word if "tracking.uri" not in word else "tracking=none" for word in words])
        outcome.faults += _differences(_table(folder), _table(undisturbed))
    return outcome


def _start(folder: Path, words: list[str], outcome: Outcome) -> "subprocess.Popen[bytes]":
    """Begin the sweep, or continue it where there is one."""
    resume = ["sweep.resume=latest"] if sweeps(folder / "runs") else []
    outcome.starts += 1
    command = [sys.executable, "-m", "accum_sweep", *words, *resume]
    with (folder / "said").open("a") as said:
        return subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=said)


def _run(folder: Path, words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "accum_sweep", *words], cwd=folder, capture_output=True, check=True)


def _workers(pid: int) -> list[int]:
    """Return the processes that a sweep's server of processes has started, busy or not."""
    return [worker for child in _children(pid) for worker in _children(child)]


def _children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def _faults(folder: Path, runs: int, address: str) -> list[str]:
    """Return what is not there once, finished and ended."""
    from mlflow import MlflowClient

    faults = []
    found = [record for path in (folder / "runs").rglob("record.json") if (record := read(path.parent)) is not None]
    finished = Counter(record.run_key for record in found if record.status == "finished")
    faults += [f"{key} is finished {times} times on disk" for key, times in finished.items() if times > 1]
    faults += [f"{runs - len(finished)} runs are missing on disk"] if len(finished) != runs else []
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    there = client.search_runs([experiment.experiment_id], max_results=5000)
    tags = [run.data.tags for run in there]
    sent = Counter(
        tag["accum_sweep.run_key"]
        for tag in tags
        if tag.get("accum_sweep.run_id") and tag["accum_sweep.status"] == "finished"
    )
    faults += [f"{key} is finished {times} times in MLflow" for key, times in sent.items() if times > 1]
    faults += [f"{runs - len(sent)} runs are missing in MLflow"] if len(sent) != runs else []
    twice = [own for own, times in Counter(tag.get("accum_sweep.run_id") for tag in tags).items() if own and times > 1]
    faults += [f"{own} is in MLflow twice" for own in twice]
    faults += [f"{run.info.run_name} is still RUNNING" for run in there if run.info.status == "RUNNING"]
    parents = [tag for tag in tags if not tag.get("accum_sweep.run_id")]
    faults += [f"{len(parents)} parent runs"] if len(parents) != 1 else []
    faults += [f"{len(sweeps(folder / 'runs'))} sweeps on disk"] if len(sweeps(folder / "runs")) != 1 else []
    return faults


def _table(folder: Path) -> pandas.DataFrame:
    ((path, _),) = sweeps(folder / "runs")
    frame = pandas.read_csv(path / "summary.csv")
    kept = [name for name in frame.columns if not any(word in name for word in TIMES) and "tracking" not in name]
    return frame[kept].sort_values("seed").reset_index(drop=True)


def _differences(table: pandas.DataFrame, other: pandas.DataFrame) -> list[str]:
    if list(table.columns) != list(other.columns) or len(table) != len(other):
        return [f"the table is another: {table.shape} and {other.shape}"]
    differing = [name for name in table.columns if not table[name].equals(other[name])]
    return [f"column {name} differs: {list(table[name])} and {list(other[name])}" for name in differing]


def report(outcome: Outcome, runs: int, launcher: str, server: bool, seed: int, seconds: float) -> str:
    """Return the outcome in words."""
    killed = ", ".join(f"{times} of the {victim}" for victim, times in outcome.kills.items())
    verdict = (
        "; ".join(outcome.faults) or "every run finished once, on disk and in MLflow; none RUNNING; the same table"
    )
    store = "an MLflow server" if server else "SQLite"
    return f"| {runs} | {launcher} | {store} | {seed} | {killed} | {outcome.starts} | {seconds:.0f} | {verdict} |"


HEAD = """# Killed and continued

{machine}

`python -m benchmarks.torture --runs 40 --kills 50 --write` with the options of each row: {what}

| runs | launcher | store | seed | kills | starts | seconds | in the end |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Torture a sweep and say what is left of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--launcher", choices=("basic", "processes"), default="processes")
    parser.add_argument("--server", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"add a row to {REPORT.name}")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accum-sweep-torture-") as folder:
        outcome = torture(Path(folder), given.runs, given.kills, given.launcher, given.server, given.seed)
    row = report(outcome, given.runs, given.launcher, given.server, given.seed, time.monotonic() - began)
    print(row)
    if given.write:
        if not REPORT.exists():
            found = versions()
            machine = (
                f"{os.cpu_count()} cores; Python {found['python']}, torch {found['torch']}, MLflow {found['mlflow']}"
            )
            REPORT.write_text(
                HEAD.format(machine=machine, what="killed with SIGKILL at random moments, by turns, and continued.")
            )
        with REPORT.open("a") as file:
            file.write(row + "\n")
    sys.exit(1 if outcome.faults else 0)


if __name__ == "__main__":
    main()
