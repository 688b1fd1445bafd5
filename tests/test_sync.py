"""What MLflow is missing is sent once, and what a killed process has left running there is ended."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from accum_sweep.lock import held
from accum_sweep.record import records, sweeps
from conftest import Cli

AWAY = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}


def in_mlflow(folder: Path, database: str = "mlflow.db") -> tuple[list[Run], list[Run]]:
    """The parent runs, and the others, of the one experiment there is."""
    client = MlflowClient(f"sqlite:///{folder}/{database}")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    return [r for r in runs if "accum_sweep.run_id" not in r.data.tags], [
        r for r in runs if "accum_sweep.run_id" in r.data.tags
    ]


def test_what_a_server_missed_is_sent_once(cli: Cli, tmp_path: Path) -> None:
    assert cli("seed=7", **AWAY).returncode == 0
    assert cli("-m", "lr=0.1,1e30", "steps=5", **AWAY).returncode == 1
    there = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    first = cli("sync", **there)
    assert first.returncode == 0, first.stderr
    assert first.stdout == "3 runs sent, 0 completed, 1 sweeps closed, 0 were there\n"
    again = cli("sync", **there)
    assert again.stdout == "0 runs sent, 0 completed, 0 sweeps closed, 3 were there\n"
    ((parent,), runs) = in_mlflow(tmp_path)
    on_disk = {record.run_id: record for record in records(tmp_path / "runs")}
    assert Counter(run.data.tags["accum_sweep.run_id"] for run in runs) == Counter(list(on_disk))
    assert {run.info.status for run in runs} == {"FINISHED", "FAILED"}
    for run in runs:
        record = on_disk[run.data.tags["accum_sweep.run_id"]]
        assert run.data.metrics["peak_allocated_bytes"] == record.metrics["peak_allocated_bytes"]
        assert run.data.tags.get("mlflow.parentRunId") == (parent.info.run_id if record.sweep_id else None)
    assert parent.info.status == "FAILED"
    assert parent.data.metrics == {"runs": 2, "runs_finished": 1}


SWEPT = ("-m", "seed=range(0,50)", "problem=digits_mlp", "epochs=1")


@pytest.fixture
def killed(cli: Cli, tmp_path: Path) -> str:
    """What `sync` says of a sweep at work, which is killed then."""
    process = subprocess.Popen([sys.executable, "-m", "accum_sweep", "-q", *SWEPT], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while len(list((tmp_path / "runs").rglob("record.json"))) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        return cli("sync").stdout
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()


def test_the_next_sweep_ends_what_a_killed_one_left_running(cli: Cli, tmp_path: Path, killed: str) -> None:
    assert {parent.info.status for parent in in_mlflow(tmp_path)[0]} == {"RUNNING"}
    after = cli("-m", "seed=100,101")
    assert after.returncode == 0, after.stderr
    assert "1 sweeps that were killed are closed now" in after.stderr
    parents, runs = in_mlflow(tmp_path)
    assert sorted(parent.info.status for parent in parents) == ["FINISHED", "KILLED"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert Counter(run.data.tags["accum_sweep.run_id"] for run in runs) == Counter(
        record.run_id for record in records(tmp_path / "runs")
    )
    assert "closed now" not in cli("-m", "seed=102,103").stderr
    assert cli(*SWEPT, f"sweep.resume={sweeps(tmp_path / 'runs')[0][1].sweep_id}").returncode == 0
    assert len(in_mlflow(tmp_path)[1]) == 54


def test_what_a_killed_sweep_left_running_is_ended(cli: Cli, tmp_path: Path, killed: str) -> None:
    assert "1 sweeps are at work and left alone" in killed
    ((parent,), _) = in_mlflow(tmp_path)
    assert parent.info.status == "RUNNING"
    done = cli("sync")
    assert done.returncode == 0, done.stderr
    ((parent,), runs) = in_mlflow(tmp_path)
    assert parent.info.status == "KILLED"
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert Counter(run.data.tags["accum_sweep.run_id"] for run in runs) == Counter(
        record.run_id for record in records(tmp_path / "runs")
    )
    goes_on = cli(*SWEPT, "sweep.resume=latest")
    assert goes_on.returncode == 0, goes_on.stderr
    ((parent,), runs) = in_mlflow(tmp_path)
    assert (parent.info.status, len(runs)) == ("FINISHED", 50)


def test_a_run_that_was_cut_off_is_completed_also_by_going_on(cli: Cli, tmp_path: Path) -> None:
    words = ("-m", "seed=0,1,2", "steps=5")
    assert cli(*words).returncode == 0
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    _, runs = in_mlflow(tmp_path)
    whole = {run.info.run_id: run.data.metrics for run in runs}
    for run, how in zip(runs, (cli("sync").stdout, None, None), strict=True):
        client.update_run(run.info.run_id, "RUNNING")  # as a kill in the middle leaves it
        if how is not None:
            assert "0 completed" in how
            assert "1 completed" in cli("sync").stdout
    assert cli(*words, "sweep.resume=latest").returncode == 0
    _, runs = in_mlflow(tmp_path)
    assert {run.info.run_id: run.data.metrics for run in runs} == whole
    assert {run.info.status for run in runs} == {"FINISHED"}


@pytest.mark.parametrize(
    ("words", "environment", "told"),
    [
        (["sync"], AWAY, "the store is away"),
        (["sync", "--runs", "nowhere"], {}, "sync: there is no folder nowhere"),
    ],
)
def test_what_cannot_be_sent_is_told(
    cli: Cli, tmp_path: Path, words: list[str], environment: dict[str, str], told: str
) -> None:
    assert cli("-q", **AWAY).returncode == 0
    done = cli(*words, **environment)
    assert done.returncode == 2
    assert told in done.stderr


def test_two_at_once_do_not_send_the_same(cli: Cli, tmp_path: Path) -> None:
    assert cli("tracking=none").returncode == 0
    with held(tmp_path / "runs/.sync.lock") as ours:
        assert ours
        done = cli("sync")
    assert (done.returncode, "another process syncs runs" in done.stderr) == (2, True)
    assert cli("sync").stdout.endswith("0 were there, 1 are not to be tracked (tracking=none)\n")
    assert len(sweeps(tmp_path / "runs")) == 0
