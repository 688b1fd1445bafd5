"""A sweep that is continued by the same command: after failures, after kill -9, and with more values."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accum_sweep.lock import held
from accum_sweep.record import Record, read, records, sweeps
from conftest import Cli

BROKEN = """
from pathlib import Path
import torch
from accum_sweep.problems import Problem

def make(dtype, fails):
    if fails and not Path("mended").exists():
        raise RuntimeError("not mended yet")
    def loss(model, batch):
        return model(batch[0]).square().sum(), len(batch[0])
    return Problem(torch.nn.Linear(2, 1).to(dtype), (torch.ones(8, 2, dtype=dtype),), loss)
"""
SWEPT = ("-m", "seed=range(0,12)", "problem=digits_mlp", "epochs=2", "tracking=none")
RESUME = "sweep.resume=latest"


def finished(folder: Path) -> list[Record]:
    """Every record on disk that is finished, also of jobs that were run again."""
    found = [read(path.parent) for path in (folder / "runs").rglob("record.json")]
    return [record for record in found if record is not None and record.status == "finished"]


def test_what_failed_is_run_again_and_what_is_finished_is_not(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    words = ("-m", "problem=custom", "problem.factory=broken:make", "problem.samples=8", "micro_batch_size=2")
    words = (*words, "problem.arguments={fails:false},{fails:true}", "seed=0,1")
    first = cli(*words, PYTHONPATH=".")
    assert first.returncode == 1
    ((folder, before),) = sweeps(tmp_path / "runs")
    old = {record.run_id: record for record in records(tmp_path / "runs")}
    assert [record.status for record in old.values()] == ["finished", "finished", "failed", "failed"]
    (tmp_path / "mended").touch()
    again = cli(*words, RESUME, PYTHONPATH=".")
    assert again.returncode == 0, again.stderr
    assert "2 of 4 runs have their result, 2 to go" in again.stderr
    ((_, after),) = sweeps(tmp_path / "runs")
    assert (after.sweep_id, after.parent_run_id, after.size) == (before.sweep_id, before.parent_run_id, 4)
    found = list(records(tmp_path / "runs"))
    assert [record.status for record in found] == ["finished"] * 4
    assert [record.job_num for record in found] == [0, 1, 4, 5], "numbers go on"
    assert [record.name for record in found] == before.names, "the table is in its order"
    assert found[:2] == list(old.values())[:2], "nothing is written over"
    assert read(folder / "2") == old[f"{before.sweep_id}/2"]
    assert "4 runs, 4 finished" in again.stdout
    nothing_to_do = cli(*words, RESUME, PYTHONPATH=".")
    assert (nothing_to_do.returncode, nothing_to_do.stdout) == (0, again.stdout)


def test_the_parent_run_is_the_same_in_mlflow_and_closed(cli: Cli, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    assert cli("-m", "lr=0.1,1e30", "steps=9").returncode == 1
    assert cli("-m", "lr=0.1,1e30,0.2", "steps=9", RESUME, "sweep.extend=true").returncode == 1
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent.info.run_id]
    assert sorted(run.data.tags["accum_sweep.run_id"].rpartition("/")[2] for run in children) == ["0", "1", "2"]
    assert parent.data.metrics["runs"] == 3
    assert all(run.info.status != "RUNNING" for run in runs)
    assert "diverged" in (tmp_path / "runs" / parent.data.tags["accum_sweep.sweep_id"] / "summary.csv").read_text()


@pytest.mark.parametrize("moment", [1, 4])
def test_after_kill_9_every_run_is_finished_once(cli: Cli, tmp_path: Path, moment: int) -> None:
    """`moment`: the records there are when the kill comes."""
    process = subprocess.Popen([sys.executable, "-m", "accum_sweep", "-q", *SWEPT], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while len(finished(tmp_path)) < moment and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    there = {record.run_id for record in finished(tmp_path)}
    assert moment <= len(there) < 12
    done = cli(*SWEPT, RESUME)
    assert done.returncode == 0, done.stderr
    found = finished(tmp_path)
    assert len({record.run_key for record in found}) == len(found) == 12, "each once"
    assert there < {record.run_id for record in found}
    alone = cli(*SWEPT)
    assert [r.series for r in records(sweeps(tmp_path / "runs")[0][0])] == [
        r.series for r in records(sweeps(tmp_path / "runs")[1][0])
    ], "as if nothing had happened"
    assert "12 runs, 12 finished" in alone.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-m", "lr=0.1,0.3", RESUME], ["no more lr=0.2", "also lr=0.3", "give its own settings"]),
        (["-m", "lr=0.1,0.3", RESUME, "sweep.extend=true"], ["no more lr=0.2", "also lr=0.3"]),
        (["-m", "lr=0.1,0.2,0.3", RESUME], ["also lr=0.3", "sweep.extend=true"]),
        (["-m", "lr=0.1,0.2", "steps=3", RESUME, "sweep.extend=true"], ["steps=3 instead of 1"]),
        (["-m", "lr=0.1,0.2", "sweep.resume=19700101"], ["sweep.resume=19700101: is no sweep in", "summary --list"]),
        (["lr=0.1", RESUME], ["sweep.resume=latest: is for a multirun", "add -m"]),
    ],
)
def test_another_sweep_is_refused_with_what_differs(
    cli: Cli, tmp_path: Path, words: list[str], told: list[str]
) -> None:
    assert cli("-m", "lr=0.1,0.2", "tracking=none").returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = cli(*words, "tracking=none")
    assert done.returncode == 2
    assert all(word in done.stderr for word in told), done.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_where_there_is_no_sweep_there_is_none_to_continue(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "lr=0.1,0.2", RESUME)
    assert done.returncode == 2
    assert "sweep.resume=latest: is no sweep in runs; leave it out to start one" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_sweep_that_is_running_is_not_continued(cli: Cli, tmp_path: Path) -> None:
    assert cli("-m", "lr=0.1,0.2", "tracking=none").returncode == 0
    ((folder, _),) = sweeps(tmp_path / "runs")
    with held(folder / ".lock") as ours:
        assert ours
        done = cli("-m", "lr=0.1,0.2", RESUME, "tracking=none")
    assert done.returncode == 2
    assert "another process is at work on" in done.stderr
    assert cli("-m", "lr=0.1,0.2", RESUME, "tracking=none").returncode == 0, "the lock ends with its process"


def test_combinations_that_are_there_twice_are_run_once(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "lr=0.1,0.2,0.10", "tracking=none")
    assert done.returncode == 0, done.stderr
    assert "3 combinations, of which 2 are different; each is run once" in done.stderr
    assert [record.config["lr"] for record in records(tmp_path / "runs")] == [0.1, 0.2]


def test_what_cannot_change_a_result_is_still_another_combination(cli: Cli, tmp_path: Path) -> None:
    words = ("-m", "equivalence=off,first_step", "tracking=none")
    assert cli(*words).returncode == 0
    assert [record.config["equivalence"] for record in records(tmp_path / "runs")] == ["off", "first_step"]
    again = cli(*words, RESUME)
    assert "2 of 2 runs have their result, 0 to go" in again.stderr


def test_a_sweep_stops_after_so_many_failures(cli: Cli, tmp_path: Path) -> None:
    words = ("-m", "seed=range(0,6)", "lr=0.1,1e30", "steps=9", "tracking=none")
    done = cli(*words, "sweep.max_failures=2")
    assert done.returncode == 1
    assert [record.status for record in records(tmp_path / "runs")] == ["finished", "diverged"] * 2
    assert "stopped after 2 failures, as sweep.max_failures says" in done.stderr
    assert cli(*words, RESUME).returncode == 1, "they still diverge"
    assert len(list(records(tmp_path / "runs"))) == 12
