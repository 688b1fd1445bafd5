"""hydra/launcher=slurm on a real Slurm of one node: the same runs, and nothing is lost whatever becomes of a job."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from mlflow import MlflowClient

from accum_sweep.record import Record, records
from conftest import Cli
from odd_runs import ODD, odd, started, until
from one_node import missing, one_node

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]
SLURM = ("-m", "hydra/launcher=slurm", "hydra.launcher.timeout_min=5")
pytest.importorskip("submitit", reason="submitit (extra [slurm]) is not installed")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with one_node(tmp_path_factory.mktemp("slurm")) as there:
        yield there


@pytest.fixture
def folder(tmp_path: Path, node: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own, with spaces and quotes in its path, from which problems are imported."""
    folder = tmp_path / "a folder's"
    folder.mkdir()
    (folder / "odd.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.setenv("SLURM_CONF", node["SLURM_CONF"])
    return folder


def found(folder: Path) -> list[Record]:
    return list(records(folder / "runs"))


def squeue() -> list[str]:
    """What Slurm has to do: job, state and what it waits for."""
    return subprocess.run(["squeue", "-h", "-r", "-o", "%i %T %r"], capture_output=True, text=True).stdout.splitlines()


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command line, and go on once its first job waits."""
    with ExitStack() as stack:
        yield lambda *words: stack.enter_context(started(folder, *words))
    subprocess.run(["scancel", "--user=root"], check=True)
    until(lambda: not squeue(), "jobs are left")


def test_the_runs_are_those_of_one_after_the_other(cli: Cli, folder: Path) -> None:
    words = ("problem=linear", "accum_steps=1,2", "save_weights=true", "steps=3")
    done = cli(*SLURM, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 finished" in done.stdout
    assert re.search(r"^2/2  accum_steps=[12]: finished", done.stderr, re.MULTILINE), done.stderr  # in either order
    (sweep,) = (path.parent for path in folder.glob("runs/*/sweep.json"))
    serial = folder / "serial"
    serial.mkdir()
    assert cli("-m", *words, cwd=serial).returncode == 0
    (other,) = (path.parent for path in serial.glob("runs/*/sweep.json"))
    for number in "01":
        for file in ("initial.safetensors", "final.safetensors"):
            assert (sweep / number / file).read_bytes() == (other / number / file).read_bytes()
    here, there = ([(run.run_key, run.series) for run in found(where)] for where in (folder, serial))
    assert here == there
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    told = client.search_runs([client.get_experiment_by_name("accum-sweep").experiment_id])
    assert sorted(run.info.status for run in told) == ["FINISHED"] * 3, "two runs and their parent"


def test_what_dies_costs_its_run_and_a_sweep_goes_on(cli: Cli, folder: Path) -> None:
    done = cli(*SLURM, *odd("segfault fine unlucky_once"), "sweep.retries=1", cwd=folder)
    assert done.returncode == 1
    assert "3 runs, 2 finished" in done.stdout
    (failed,) = (run for run in found(folder) if run.status == "failed")
    assert "segfault" in failed.name
    assert "ended without a result (Slurm: FAILED)" in (failed.reason or "")
    assert len(list(folder.glob("runs/*/*/record.json"))) == 5, "two were tried again"
    done = cli(*SLURM, *odd("segfault fine unlucky_once"), "sweep.retries=1", "sweep.resume=latest", cwd=folder)
    assert "2 of 3 runs have their result, 1 to go" in done.stderr


def preempt() -> None:
    """Let a more urgent job take the node."""
    subprocess.run(["srun", "--partition=urgent", "--ntasks=2", "true"], check=True, timeout=60)


def hurry() -> None:
    """Let what is queued again start now, and not after Slurm's two minutes."""
    for line in squeue():
        subprocess.run(["scontrol", "update", f"JobId={line.split()[0]}", "StartTime=now"], check=True)


def notify() -> None:
    """As clusters do that are so kind to say so before."""
    subprocess.run(["scancel", "--signal=USR2", "--user=root"], check=True)


@pytest.mark.parametrize("take_away", [preempt, notify])
def test_a_job_that_is_preempted_is_queued_again_and_finishes(
    folder: Path, start: Callable[..., subprocess.Popen[str]], take_away: Callable[[], None]
) -> None:
    process = start(*SLURM, *odd("wait_to_go"), "tracking=none")
    take_away()
    until(lambda: any("BeginTime" in line for line in squeue()), "the job is not queued again")
    time.sleep(2)  # what lets the job start is revoked, to the second
    hurry()
    until(lambda: len(list(folder.glob("waiting.*"))) == 2, "the job does not start anew")
    assert not found(folder), "it has not been"
    (folder / "go").touch()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (record,) = found(folder)
    assert record.status == "finished"
    assert record.run_id.endswith("/0")


def test_a_run_whose_time_is_over_fails_and_says_so(folder: Path, start: Callable[..., subprocess.Popen[str]]) -> None:
    words = ("-m", "hydra/launcher=slurm", "hydra.launcher.timeout_min=1")
    process = start(*words, *odd("wait"), "tracking=none")
    notify()
    process.communicate(timeout=120)
    assert process.returncode == 1
    (record,) = found(folder)
    assert record.status == "failed"
    assert "hydra.launcher.timeout_min=1: is over before the run is" in (record.reason or "")
    assert record.traceback is None, "sweep.retries would not help"


def test_ctrl_c_interrupts_what_runs_and_takes_the_rest_from_the_queue(
    cli: Cli, folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start(*SLURM, "hydra.launcher.array_parallelism=1", *odd("wait fine"))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "to go on: python -m accum_sweep -m" in err
    (record,) = found(folder)
    assert record.status == "interrupted"
    until(lambda: not squeue(), "jobs are left")


def test_after_kill_9_the_next_command_takes_over(
    cli: Cli, folder: Path, start: Callable[..., subprocess.Popen[str]]
) -> None:
    words = (*SLURM, *odd("wait_to_go fine"))
    process = start(*words)
    until(lambda: any(run.status == "finished" for run in found(folder)), "no run finishes")
    process.kill()
    process.wait()
    assert any("RUNNING" in line for line in squeue()), "Slurm's jobs do not end with it"
    (folder / "go").touch()
    done = cli(*words, "sweep.resume=latest", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 finished" in done.stdout
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    told = client.search_runs([client.get_experiment_by_name("accum-sweep").experiment_id])
    assert {run.info.status for run in told} == {"FINISHED"}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["hydra.launcher.timeout_min=0"], ["hydra.launcher.timeout_min=0", "whole number"]),
        (["+hydra.launcher.nonsense=1"], ["nonsense", "submitit"]),
        (["hydra.launcher.partition=nowhere"], ["Slurm does not take the jobs", "partition"]),
    ],
)
def test_what_slurm_cannot_do_is_told(cli: Cli, folder: Path, words: Sequence[str], parts: Sequence[str]) -> None:
    done = cli(*SLURM[:2], "seed=0,1", *words, cwd=folder)
    assert done.returncode == 2, done.stderr
    for part in parts:
        assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_torchrun_inside_a_job_trains_every_run_on_all_its_processes_and_goes_on(folder: Path) -> None:
    script = Path(__file__).parents[1] / "examples/torchrun.sbatch"
    words = ("problem=digits_mlp", "effective_batch_size=64", "epochs=1", "accum_steps=1,2", "tracking=none")
    command = ["sbatch", "--wait", "--cpus-per-task=2", "--output=job.out", str(script), *words]
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    said = (folder / "job.out").read_text()
    assert done.returncode == 0, said
    assert "2 runs, 2 finished" in said
    assert [run.config["processes"] for run in found(folder)] == [2, 2]
    number = done.stdout.split()[-1]
    (folder / f"runs/slurm-{number}/1/record.json").unlink()
    subprocess.run(["scontrol", "requeue", number], check=True)
    until(lambda: any("BeginTime" in line for line in squeue()), "the job is not queued again")
    time.sleep(2)
    hurry()
    until(lambda: not squeue(), "the job does not end")
    said = (folder / "job.out").read_text()
    assert "1 of 2 runs have their result, 1 to go" in said
    assert [run.status for run in found(folder)] == ["finished", "finished"]
