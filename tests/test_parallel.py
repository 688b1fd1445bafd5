"""hydra/launcher=processes: the runs of a sweep side by side are those of one after the other, and lose nothing."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from accum_sweep.record import Record, read, records, sweeps
from accum_sweep.workers import Died, work
from conftest import Cli
from odd_runs import ODD, odd

pytestmark = pytest.mark.slow
PARALLEL = ("-m", "hydra/launcher=processes", "hydra.launcher.workers=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "odd.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", ".")
    return tmp_path


def found(folder: Path) -> list[Record]:
    return list(records(folder / "runs"))


def processes(folder: Path) -> dict[int, list[str]]:
    return {int(path.suffix[1:]): path.read_text().splitlines() for path in folder.glob("pid.*")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def same(record: Record) -> dict[str, Any]:
    """What a run's own process must not change."""
    times = ("samples_per_second", "step_seconds", "steps_per_second", "train_seconds")
    metrics = {key: value for key, value in record.metrics.items() if not key.startswith(times)}
    kept = ("run_key", "name", "status", "overrides", "series", "result", "equivalence", "weights", "notes", "job_num")
    return {key: getattr(record, key) for key in kept} | metrics


def mlflow_runs(folder: Path) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def test_side_by_side_is_to_the_bit_one_after_the_other(cli: Cli, tmp_path: Path) -> None:
    words = ("problem=digits_mlp", "accum_steps=1,4", "seed=0,1,2", "effective_batch_size=64", "epochs=1")
    (tmp_path / "serial").mkdir()
    (tmp_path / "parallel").mkdir()
    serial = cli("-m", *words, cwd=tmp_path / "serial")
    parallel = cli(*PARALLEL, *words, cwd=tmp_path / "parallel")
    assert parallel.returncode == serial.returncode == 0, parallel.stderr
    assert [same(record) for record in found(tmp_path / "parallel")] == [
        same(record) for record in found(tmp_path / "serial")
    ]
    told = [line for line in parallel.stderr.splitlines() if ": finished, last loss" in line]
    assert len(told) == 6
    assert "left" in told[0], "each is told as it ends"
    runs = mlflow_runs(tmp_path / "parallel")
    assert len(runs) == 7
    assert {run.info.status for run in runs} == {"FINISHED"}
    parent = next(run.info.run_id for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert sum(run.data.tags.get("mlflow.parentRunId") == parent for run in runs) == 6


def test_a_process_that_dies_costs_its_run_and_is_replaced(cli: Cli, folder: Path) -> None:
    words = odd("fine segfault killed exit raise well good nice")
    done = cli(*PARALLEL, *words)
    assert done.returncode == 1
    reasons = {record.overrides[-1].partition("does:")[2][:-1]: record.reason for record in found(folder)}
    dead = "the run's process"
    assert reasons == {
        "fine": None,
        "segfault": f"{dead} was killed by SIGSEGV",
        "killed": f"{dead} was killed by SIGKILL; where nobody sent it, the machine had no more memory",
        "exit": f"{dead} ended with exit code 3",
        "raise": "ValueError: a secret: postgresql://***@db/x",
        "well": None,
        "good": None,
        "nice": None,
    }
    assert "8 runs, 4 finished" in done.stdout
    assert sum("exit code 3" in line for line in done.stderr.splitlines()) == 1, done.stderr
    runs = mlflow_runs(folder)
    assert sorted(run.info.status for run in runs) == [*["FAILED"] * 5, *["FINISHED"] * 4]
    assert len({run.data.tags.get("accum_sweep.run_id") for run in runs}) == 9
    raised = next(record for record in found(folder) if "raise" in record.overrides[-1])
    assert raised.traceback is not None
    assert raised.traceback.startswith("Traceback")
    assert 'odd.py", line' in raised.traceback
    ((sweep, _),) = sweeps(folder / "runs")
    assert (sweep / str(raised.job_num) / "traceback.txt").read_text() == raised.traceback
    assert not [
        path for path in folder.rglob("*") if path.is_file() and b"hush" in path.read_bytes() and path.suffix != ".py"
    ]
    assert not any(map(alive, processes(folder)))


def test_processes_are_kept_unless_fresh_ones_are_wanted(cli: Cli, folder: Path) -> None:
    assert cli(*PARALLEL, *odd("a b c d e"), "hydra.launcher.threads=1", "tracking=none").returncode == 0
    kept = processes(folder)
    assert len(kept) == 2
    assert sorted(line for lines in kept.values() for line in lines) == [f"{does} 1" for does in "abcde"]
    words = ("hydra.launcher.fresh=true", "hydra.launcher.threads=3", "tracking=none")
    assert cli(*PARALLEL, *odd("f g h"), *words).returncode == 0
    fresh = {pid: lines for pid, lines in processes(folder).items() if pid not in kept}
    assert sorted(fresh.values()) == [["f 3"], ["g 3"], ["h 3"]]


def test_a_run_alone_has_as_many_threads_as_among_others(cli: Cli, folder: Path) -> None:
    """Else what is run again, when a sweep goes on, would be rounded otherwise."""
    cores = len(os.sched_getaffinity(0))
    words = ("-m", "hydra/launcher=processes", f"hydra.launcher.workers={cores}", *odd("alone"), "tracking=none")
    assert cli(*words).returncode == 0
    assert list(processes(folder).values()) == [["alone 1"]]


@pytest.mark.parametrize("launcher", ["processes", "basic"])
def test_what_fails_by_bad_luck_is_tried_again(cli: Cli, folder: Path, launcher: str) -> None:
    unlucky = "unlucky_once" if launcher == "processes" else "fine"
    words = ("-m", f"hydra/launcher={launcher}", *odd(f"raise {unlucky} well"), "seed=0,1", "sweep.retries=2")
    done = cli(*words, "tracking=none")
    assert done.returncode == 1
    assert [record.status for record in found(folder)] == [*["failed"] * 2, *["finished"] * 4]
    ((sweep, plan),) = sweeps(folder / "runs")
    tries = [record for path in sweep.rglob("record.json") if (record := read(path.parent)) is not None]
    again = [record.name for record in tries if (record.job_num or 0) >= 6]
    assert sum("raise" in name for name in again) == 4, "two retries each"
    assert len(again) == 4 + (launcher == "processes")
    assert plan.size == 6
    assert len(tries) == len(plan.jobs)


def test_settings_that_are_refused_are_not_tried_again(cli: Cli, folder: Path) -> None:
    text = ODD.replace('if does == "raise":', 'if does == "raise":\n        return 5').replace(
        "\n        raise Val", "\n    if 0:\n        raise Val"
    )
    (folder / "odd.py").write_text(text)
    assert cli("-m", *odd("raise well"), "sweep.retries=2", "tracking=none").returncode == 1
    assert [record.status for record in found(folder)] == ["failed", "finished"]
    assert len(list((folder / "runs").rglob("record.json"))) == 2


def test_the_policies_hold_side_by_side_too(cli: Cli, folder: Path) -> None:
    done = cli(*PARALLEL, *odd("raise"), "seed=range(0,30)", "sweep.max_failures=3", "tracking=none")
    assert done.returncode == 1
    statuses = [record.status for record in found(folder)]
    assert 3 <= statuses.count("failed") < 30
    assert statuses.count("failed") + statuses.count("skipped") == 30
    assert "stopped after 3 failures" in done.stderr
    skipped = next(record for record in found(folder) if record.status == "skipped")
    assert skipped.reason == "the sweep was stopped after 3 failures, as sweep.max_failures says"


def test_what_is_larger_than_what_did_not_fit_is_skipped(cli: Cli, folder: Path) -> None:
    words = odd("memory")[:-1]
    sizes = ("micro_batch_size=2,4,8", "accum_steps=1", "lr=0.1,0.2,0.3,0.4", "steps=2")
    done = cli(*PARALLEL, *words, "problem.arguments={does:memory}", *sizes, "tracking=none")
    assert done.returncode == 1
    statuses = [record.status for record in found(folder)]
    assert statuses[0] == "oom"
    assert statuses.count("skipped") >= 4
    assert set(statuses) == {"oom", "skipped"}


@pytest.fixture
def waiting(folder: Path) -> Iterator["subprocess.Popen[str]"]:
    """A sweep of which two runs are done and two others never end."""
    command = [sys.executable, "-m", "accum_sweep", *PARALLEL, *odd("fine well wait"), "seed=0,1"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(list(folder.glob("waiting.*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate()


def resumed(cli: Cli, folder: Path) -> None:
    """Continue the sweep, where waiting is no more; every run is there once."""
    (folder / "odd.py").write_text(ODD.replace('== "wait"', '== "never"'))
    done = cli(*PARALLEL, *odd("fine well wait"), "seed=0,1", "sweep.resume=latest")
    assert done.returncode == 0, done.stderr
    assert "4 of 6 runs have their result, 2 to go" in done.stderr
    assert [record.status for record in found(folder)] == ["finished"] * 6
    runs = mlflow_runs(folder)
    assert "RUNNING" not in {run.info.status for run in runs}
    finished = [
        run.data.tags["accum_sweep.run_key"]
        for run in runs
        if run.data.tags.get("accum_sweep.status") == "finished" and "accum_sweep.run_id" in run.data.tags
    ]
    assert len(finished) == len(set(finished)) == 6


def test_ctrl_c_interrupts_what_runs_and_keeps_what_is_done(
    cli: Cli, folder: Path, waiting: "subprocess.Popen[str]"
) -> None:
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=60)
    assert waiting.returncode == 130, err
    assert [record.status for record in found(folder)] == [*["finished"] * 4, *["interrupted"] * 2]
    assert "to go on: python -m accum_sweep -m" in err
    assert "Traceback" not in err
    assert "6 runs, 4 finished" in out
    assert not any(map(alive, processes(folder)))
    resumed(cli, folder)


def test_after_kill_9_no_process_is_left_and_the_sweep_goes_on(
    cli: Cli, folder: Path, waiting: "subprocess.Popen[str]"
) -> None:
    waiting.kill()
    waiting.wait()
    deadline = time.monotonic() + 30
    while any(map(alive, processes(folder))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, processes(folder))), "they end with the sweep's own process"
    resumed(cli, folder)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hydra.launcher.workers=0"], "hydra.launcher.workers=0: must be a whole number"),
        (["hydra.launcher.threads=two"], "hydra.launcher.threads=two: must be a whole number"),
        (["hydra.launcher.fresh=maybe"], "hydra.launcher.fresh=maybe: must be true or false"),
        (["hydra.launcher.wrokers=2"], "wrokers"),
        (["hydra.sweep.subdir=x${hydra.job.num}", "sweep.max_failures=2"], "sweep.max_failures=2: needs hydra.sweep"),
    ],
)
def test_bad_options_are_told(cli: Cli, tmp_path: Path, words: Sequence[str], told: str) -> None:
    done = cli("-m", "hydra/launcher=processes", "lr=0.1,0.2", *words)
    assert done.returncode == 2
    assert told in done.stderr
    assert not list(tmp_path.iterdir())


# The processes by themselves


def _begin(number: int) -> Any:
    return functools.partial(_do, number)


def _do(number: int, task: int) -> tuple[int, int, int]:
    if task < 0:
        os.kill(os.getpid(), -task)
    return number, task, os.getpid()


def test_results_come_in_the_order_of_the_tasks() -> None:
    results = work(range(20), _begin, 3)
    assert [task for _, task, _ in results] == list(range(20))
    assert len({(number, pid) for number, _, pid in results}) <= 3


def test_one_that_dies_costs_one_task() -> None:
    results = work([1, -signal.SIGKILL, 2, -signal.SIGSEGV, 3, 4], _begin, 2)
    assert [result if isinstance(result, Died) else result[1] for result in results] == [
        1,
        Died(-9),
        2,
        Died(-11),
        3,
        4,
    ]


def test_each_process_sees_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import cloudpickle
    import torch
    from hydra.core.singleton import Singleton
    from omegaconf import OmegaConf

    from accum_sweep import processes
    from accum_sweep.hydra_job import HydraJobs

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = processes._gpus()
    config = OmegaConf.create({"hydra": {"hydra_logging": None, "verbose": False}})
    packed = cloudpickle.dumps(HydraJobs(config, None, None, Singleton.get_state()))
    seen = []
    for number in range(3):
        processes._begin(number, packed, torch.get_num_threads(), gpus)
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
    assert seen == ["4", "7", "4"]
