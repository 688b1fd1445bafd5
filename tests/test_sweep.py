"""Sweeps by the real command line: what is run, recorded, shown, and what becomes of failures."""

import csv
import io
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import accum_sweep
from accum_sweep.record import Record, records, sweeps
from conftest import Cli

EXPERIMENTS = sorted(path.stem for path in (Path(__file__).parents[1] / "conf/experiment").glob("*.yaml"))


def runs_of(folder: Path) -> list[Record]:
    return list(records(folder / "runs"))


def test_a_sweep_runs_every_combination_and_prints_one_table(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "accum_steps=1,2", "lr=0.1,0.01", "seed=0,1", "device=cpu", "tracking=none")
    assert done.returncode == 0, done.stderr
    runs = runs_of(tmp_path)
    names = [record.name for record in runs]
    assert names == [f"accum_steps={a} lr={lr} seed={s}" for a in (1, 2) for lr in ("0.1", "0.01") for s in (0, 1)]
    assert len({record.run_key for record in runs}) == len({record.run_id for record in runs}) == 8
    assert "8 runs, 8 finished; fixed micro-batch" in done.stdout
    table = done.stdout.split("gradient\n")[1].split("\n\n")[0].splitlines()[1:]
    assert len(table) == 4, "seeds are folded"
    ((_, sweep),) = sweeps(tmp_path / "runs")
    assert sweep.ended_at is not None
    assert done.stderr.count("finished, last loss") == 8


def test_the_summary_prints_the_table_again_and_all_runs_as_csv(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "accum_steps=1,2", "seed=0,1", "tracking=none")
    sweep_id = sweeps(tmp_path / "runs")[0][1].sweep_id
    again = cli("summary", "latest", "--csv", "summary.csv")
    assert again.stdout == done.stdout
    assert cli("summary", sweep_id).stdout == done.stdout
    listed = cli("summary", "--list").stdout
    assert listed.split() == [sweep_id, "4/4", "finished", "accum_steps=1,2", "seed=0,1", "tracking=none"]
    printed = cli("summary", "all", "--csv", "-").stdout
    assert printed == (tmp_path / "summary.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert len(rows) == 4
    for row, record in zip(rows, runs_of(tmp_path), strict=True):
        assert float(row["last_loss"]) == record.metrics["last_loss"]
        assert int(row["peak_allocated_bytes"]) == record.metrics["peak_allocated_bytes"]
        assert json.loads(row["final_weight"]) == record.result["final_weight"]
        assert int(row["seed"]) == record.config["seed"]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_shipped_experiment_runs_and_answers(cli: Cli, tmp_path: Path, name: str) -> None:
    length = "epochs=1" if name in ("equivalence", "lr") else "steps=2"
    done = cli("-m", f"experiment={name}", length, "seed=0", "tracking=none")
    assert done.returncode == 0, done.stderr
    runs = runs_of(tmp_path)
    assert len(runs) > 3
    assert {record.status for record in runs} == {"finished"}
    ANSWERS.get(name, lambda _: None)(runs)


def _only_items_are_the_full_batch(runs: list[Record]) -> None:
    found = {(r.config["normalization"], r.config["accum_steps"]): r.equivalence["verdict"] for r in runs}
    assert found == {
        **{(normalization, 1): "equivalent" for normalization in ("items", "mean", "sum")},
        ("items", 4): "equivalent",
        ("mean", 4): "different",
        ("sum", 4): "different",
    }


def _the_same_training(runs: list[Record]) -> None:
    losses = [record.series["train/loss"] for record in runs]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-12)


def _less_memory(runs: list[Record]) -> None:
    """Each split has a lower peak than the one before."""
    peaks = [record.metrics["peak_allocated_bytes"] for record in runs]
    assert peaks == sorted(set(peaks), reverse=True)


def _the_same_memory(runs: list[Record]) -> None:
    """From the second micro-batch on, which finds gradients in place, every window has the same peak."""
    first, *others = [record.metrics["peak_allocated_bytes"] for record in runs]
    assert len(set(others)) == 1
    assert first < others[0]


ANSWERS = {
    "equivalence": _the_same_training,
    "memory": _less_memory,
    "memory_micro": _the_same_memory,
    "ragged": _only_items_are_the_full_batch,
}


LINEAR, LLAMA = "linear effective_batch_size=8", "causal_lm problem.context=32"


@pytest.mark.parametrize("problem", [LINEAR, "digits_mlp", "digits_cnn", LLAMA])
def test_what_the_memory_experiments_show_is_so_on_every_problem(workdir: Path, problem: str) -> None:
    if problem == LLAMA:
        pytest.importorskip("transformers", reason="problem=causal_lm needs the extra [hf]")

    def run(experiment: str, accum_steps: int) -> Record:
        chosen = problem if experiment == "memory" else problem.replace("effective_batch_size=8", "")
        words = f"experiment={experiment} problem={chosen} accum_steps={accum_steps} steps=1 equivalence=off"
        return accum_sweep.run([*words.split(), "device=cpu", "tracking=none"])

    _less_memory([run("memory", accum_steps) for accum_steps in (1, 2, 8)])
    _the_same_memory([run("memory_micro", accum_steps) for accum_steps in (1, 2, 5)])
    with pytest.raises(AssertionError):  # the control
        _less_memory([run("memory_micro", accum_steps) for accum_steps in (1, 2)])


def test_the_equivalence_experiment_would_show_a_difference(cli: Cli, tmp_path: Path) -> None:
    words = ["-m", "experiment=equivalence", "epochs=1", "seed=0", "accum_steps=1,4", "tracking=none"]
    assert cli(*words, "normalization=sum").returncode == 0
    with pytest.raises(AssertionError):
        _the_same_training(runs_of(tmp_path))


def test_a_device_that_is_not_there_fails_its_runs_and_no_others(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "device=cuda:99,cpu", "seed=0,1", "tracking=none")
    assert done.returncode == 1
    status = {(record.config["device"], record.status) for record in runs_of(tmp_path)}
    assert status == {("cuda:99", "failed"), ("cpu", "finished")}
    failed = [record for record in runs_of(tmp_path) if record.status == "failed"]
    assert all("device=cuda:99 is not there" in (record.reason or "") for record in failed)
    assert "0 of 2" in done.stdout
    assert "device=cuda:99 is not there" in done.stdout
    assert "2 of 4 runs did not finish" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_diverging_run_says_so_and_since_when(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "lr=0.1,1e30", "steps=20", "tracking=none")
    assert done.returncode == 1
    fine, diverged = runs_of(tmp_path)
    assert fine.status == "finished"
    assert diverged.status == "diverged"
    assert diverged.reason == "the loss is not finite in step 2; the weights are those before it"
    assert diverged.series["train/loss"][1] is None
    json.loads((tmp_path / "runs" / diverged.run_id / "record.json").read_text(), parse_constant=pytest.fail)


BROKEN = """
from accum_sweep.problems.linear import Params as Linear

class Params(Linear):
    crash: str = ""

    def build(self, dtype):
        if self.crash == "error":
            raise RuntimeError("the disk of the data is on fire")
        if self.crash == "character":
            raise RuntimeError("half a \\udcff character")
        if self.crash == "memory":
            raise MemoryError
        return super().build(dtype)
"""


@pytest.fixture
def own_problem(tmp_path: Path) -> dict[str, str]:
    """A user's own problem in a module and a config folder of theirs; returns the environment that finds it."""
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "lib/own").mkdir(parents=True)
    (tmp_path / "lib/own/__init__.py").write_text("")
    (tmp_path / "lib/own/broken.py").write_text(BROKEN)
    (tmp_path / "own_conf/problem").mkdir(parents=True)
    (tmp_path / "own_conf/problem/broken.yaml").write_text(
        "name: own.broken\nbatches: [{x: [[1.0]], y: [2.0]}, {x: [[2.0]], y: [4.0]}]\ncrash: ''\n"
    )
    return {"PYTHONPATH": str(tmp_path / "lib")}


def test_exceptions_become_a_status_and_the_sweep_goes_on(
    cli: Cli, tmp_path: Path, own_problem: dict[str, str]
) -> None:
    crashes = "problem.crash=error,character,memory,''"
    done = cli("--config-dir", "own_conf", "-m", "problem=broken", crashes, "tracking=none", **own_problem)
    assert done.returncode == 1, done.stderr
    runs = runs_of(tmp_path)
    assert [record.status for record in runs] == ["failed", "failed", "oom", "finished"]
    assert runs[0].reason == "RuntimeError: the disk of the data is on fire"
    assert "half a" in (runs[1].reason or "")
    assert "Logging error" not in done.stderr
    log = (tmp_path / "runs" / runs[0].run_id / "accum_sweep.log").read_text()
    assert "Traceback" in log, "the job's own log has the whole story"
    assert "on fire" in done.stdout


def test_jobs_that_share_a_folder_do_not_write_over_each_other(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "seed=0,1", "hydra.sweep.subdir=same", "tracking=none")
    assert done.returncode == 1
    assert "holds a run already" in done.stderr
    first, second = runs_of(tmp_path)
    assert (first.config["seed"], first.status) == (0, "finished")
    assert (second.config["seed"], second.status) == (1, "failed")
    assert "same holds a run already; choose another" in (second.reason or "")


def test_a_sweep_counts_its_own_runs_only(cli: Cli, tmp_path: Path) -> None:
    assert cli("tracking=none", "seed=7").returncode == 0
    done = cli("-m", "seed=0,1", "hydra.sweep.dir=runs", "tracking=none")
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 finished" in done.stdout


def test_a_sweep_can_stop_at_its_first_failure(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "device=cpu,cuda:99", "seed=0,1", "sweep.on_failure=stop", "tracking=none")
    assert done.returncode == 1
    assert [record.status for record in runs_of(tmp_path)] == ["finished", "finished", "failed"]
    assert "stopped after the first failure" in done.stderr


def test_a_single_run_that_fails_has_its_record_and_exit_code_1(cli: Cli, tmp_path: Path) -> None:
    done = cli("device=cuda:99", "tracking=none")
    assert done.returncode == 1
    assert "device=cuda:99 is not there" in done.stderr
    (record,) = runs_of(tmp_path)
    assert record.status == "failed"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_keeps_what_is_finished_and_closes(cli: Cli, tmp_path: Path, how: signal.Signals) -> None:
    words = ["-m", "seed=range(0,20)", "problem=digits_mlp", "epochs=40", "tracking=none"]
    process = subprocess.Popen(
        [sys.executable, "-m", "accum_sweep", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 240
        while len(list(tmp_path.glob("runs/*/*/record.json"))) < 2:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(how)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    runs = runs_of(tmp_path)
    assert {record.status for record in runs} <= {"finished", "interrupted"}
    assert sum(record.status == "finished" for record in runs) >= 2
    assert f"{len(runs)} runs" in output
    ((_, sweep),) = sweeps(tmp_path / "runs")
    assert sweep.ended_at is not None
    command = errors.rpartition("to go on: python -m accum_sweep ")[2].splitlines()[0]
    would = cli(*shlex.split(command), "sweep.dry_run=true")
    done = sum(record.status == "finished" for record in runs)
    assert f"20 combinations, {done} have their result, {20 - done} to run" in would.stdout, would.stderr


def test_quiet_leaves_the_results_only(cli: Cli) -> None:
    done = cli("-q", "-m", "accum_steps=1,2", "tracking=none")
    assert done.stderr == ""
    assert "2 runs, 2 finished" in done.stdout
    single = cli("-q", "tracking=none")
    assert single.stderr == ""
    assert len(single.stdout.splitlines()) == 1


def test_hydras_own_verbosity_works(cli: Cli) -> None:
    words = ["tracking=none", "-m", "seed=0,1", "hydra.verbose=true"]
    assert "Launching 1 jobs locally" in cli(*words).stderr
    assert "Launching" not in cli(*words[:-1]).stderr


def test_on_a_terminal_one_line_renews_itself(tmp_path: Path) -> None:
    try:
        controller, terminal = pty.openpty()
    except OSError as error:
        pytest.skip(f"this machine gives no terminal: {error}")
    process = subprocess.Popen(
        [sys.executable, "-m", "accum_sweep", "-m", "device=cpu,cuda:99", "seed=0,1", "tracking=none"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    while select.select([controller], [], [], 120)[0]:
        try:
            piece = os.read(controller, 4096)
        except OSError:  # the other end is closed
            break
        shown += piece
    os.close(controller)
    assert process.wait(timeout=60) == 1
    text = shown.decode()
    assert "\r\x1b[K0/4  device=cpu seed=0" in text
    assert "4/4, 2 failed" in text
    assert "finished, last loss" not in text


def test_hydra_parameters_in_a_config_are_swept_and_the_command_line_wins(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mine/experiment").mkdir(parents=True)
    text = "# @package _global_\nhydra:\n  sweeper:\n    params:\n      accum_steps: 1,2\n      seed: 0,1\n"
    (tmp_path / "mine/experiment/own.yaml").write_text(text)
    done = cli("--config-dir", "mine", "-m", "experiment=own", "seed=5", "tracking=none")
    assert done.returncode == 0, done.stderr
    assert [record.name for record in runs_of(tmp_path)] == ["accum_steps=1", "accum_steps=2"]
    assert {record.config["seed"] for record in runs_of(tmp_path)} == {5}


def test_the_run_folders_can_be_the_users_own(cli: Cli, tmp_path: Path) -> None:
    words = ["hydra.sweep.dir=out put/s", "hydra.sweep.subdir=job_${hydra.job.num}"]
    assert cli("-m", "seed=0,1", "tracking=none", *words).returncode == 0
    assert len(list((tmp_path / "out put/s").glob("job_*/record.json"))) == 2
    assert "2 runs, 2 finished" in cli("summary", "s", "--runs", "out put").stdout
