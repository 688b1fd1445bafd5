"""hydra/launcher=ray on a real Ray: the same runs, whether its nodes see the sweep's folder or not."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.server import free_port
from mlflow import MlflowClient

from accum_sweep.record import Record, records
from conftest import Cli
from odd_runs import ODD, odd, started, until

pytestmark = [pytest.mark.slow]
pytest.importorskip("ray", reason="Ray (extra [ray]) is not installed")
RAY = ("-m", "hydra/launcher=ray", "+hydra.launcher.init.num_cpus=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's own, with spaces and quotes in its path, from which problems are imported."""
    folder = tmp_path / "a folder's"
    folder.mkdir()
    (folder / "odd.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", ".")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or a token is made in the user's home
    return folder


def found(folder: Path) -> list[Record]:
    return list(records(folder / "runs"))


def told(folder: Path) -> Counter[str]:
    """How often MLflow has each run that is finished, and the parent, by name."""
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    return Counter(run.info.run_name for run in client.search_runs([experiment.experiment_id], "status = 'FINISHED'"))


@pytest.fixture(params=["shared", "apart"])
def cluster(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    """The address of a Ray that sees the test's folder, or finds nothing there."""
    if request.param == "apart" and (os.geteuid() or subprocess.run(["unshare", "-m", "true"]).returncode):
        pytest.skip("only root can hide a folder from a process")
    port = str(free_port())
    hidden = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(folder)]
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}", "--num-cpus=2"]
    quiet = ["--include-dashboard=false", "--disable-usage-stats"]
    command = [*(hidden if request.param == "apart" else []), *ray, *quiet]
    process = subprocess.Popen(command, cwd="/", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_the_runs_are_those_of_one_after_the_other(cli: Cli, folder: Path, cluster: str) -> None:
    words = ("problem=linear", "accum_steps=1,2", "save_weights=true", "steps=3")
    done = cli(*RAY[:2], f"hydra.launcher.address='{cluster}'", *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 finished" in done.stdout
    assert "2/2  " in done.stderr
    (sweep,) = (path.parent for path in folder.glob("runs/*/sweep.json"))
    serial = folder / "serial"
    serial.mkdir()
    assert cli("-m", *words, cwd=serial).returncode == 0
    (other,) = (path.parent for path in serial.glob("runs/*/sweep.json"))
    for number in "01":
        for file in ("initial.safetensors", "final.safetensors"):
            assert (sweep / number / file).read_bytes() == (other / number / file).read_bytes()
    assert [run.run_key for run in found(folder)] == [run.run_key for run in found(serial)]
    assert [run.series for run in found(folder)] == [run.series for run in found(serial)]
    assert told(folder) == {"accum_steps=1": 1, "accum_steps=2": 1, "accum_steps=1,2 save_weights=true": 1}
    assert "0 runs sent, 0 completed, 0 sweeps closed, 2 were there" in cli("sync", cwd=folder).stdout


def test_what_dies_costs_its_run(cli: Cli, folder: Path) -> None:
    done = cli(*RAY, *odd("segfault fine unlucky_once"), "sweep.retries=1", cwd=folder)
    assert done.returncode == 1
    assert "3 runs, 2 finished" in done.stdout
    (failed,) = (run for run in found(folder) if run.status == "failed")
    assert "segfault" in failed.name
    assert "died in Ray" in (failed.reason or "")
    assert len(list(folder.glob("runs/*/*/record.json"))) == 5, "two were tried again"


def test_ctrl_c_interrupts_what_runs_and_a_sweep_goes_on(cli: Cli, folder: Path) -> None:
    words = (*RAY, *odd("wait_to_go fine"))
    with started(folder, *words) as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "to go on: python -m accum_sweep -m" in err
    assert "interrupted" in {run.status for run in found(folder)}
    (folder / "go").touch()
    done = cli(*words, "sweep.resume=latest", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 finished" in done.stdout


def test_after_kill_9_nothing_runs_on_and_the_sweep_goes_on(cli: Cli, folder: Path) -> None:
    words = (*RAY, *odd("wait_to_go fine"))
    with started(folder, *words) as process:
        (waiting,) = folder.glob("waiting.*")
        process.kill()
        process.communicate()
    until(lambda: not Path("/proc", waiting.suffix[1:]).exists(), "a run runs on")
    (folder / "go").touch()
    done = cli(*words, "sweep.resume=latest", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 finished" in done.stdout


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("hydra.launcher.num_cpus=0", "hydra.launcher.num_cpus=0: must be a whole number, 1 or more"),
        ("hydra.launcher.address='127.0.0.1:9'", "hydra.launcher.address=127.0.0.1:9: is not there"),
        ("+hydra.launcher.remote.nonsense=1", "nonsense"),
    ],
)
def test_what_ray_cannot_do_is_told(cli: Cli, folder: Path, words: str, part: str) -> None:
    done = cli(*RAY[:2], "seed=0,1", words, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
