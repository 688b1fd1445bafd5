"""hydra/sweeper=search: Optuna asks, the records answer; what is best is best, also after a kill."""

import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from accum_sweep.record import Record, records, sweeps
from conftest import Cli

optuna = pytest.importorskip("optuna", reason="optuna (extra [optuna]) is not installed")
pytestmark = pytest.mark.slow
SEARCH = ("-m", "hydra/sweeper=search", "problem=digits_mlp", "effective_batch_size=64", "tracking=none")
SPACE = ("lr=tag(log, interval(0.001, 3.0))", "accum_steps=1,2,4")


def found(folder: Path) -> list[Record]:
    return list(records(folder / "runs"))


def study(folder: Path) -> "optuna.Study":
    ((sweep, _),) = sweeps(folder / "runs")
    return optuna.load_study(study_name="search", storage=f"sqlite:///{sweep}/search.db")


def test_what_optuna_asks_is_run_and_the_best_is_told(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SEARCH, *SPACE, "epochs=1", "hydra.sweeper.trials=8", "hydra.sweeper.pruning=false")
    assert done.returncode == 0, done.stderr
    losses = {record.name: record.metrics["last_loss"] for record in found(tmp_path)}
    assert len(losses) == 8
    best = min(losses, key=lambda name: losses[name] or 0)
    assert done.stdout.splitlines()[-1] == f"best of 8 trials, 0 pruned, 0 failed: {best}: last_loss {losses[best]:.4g}"
    assert {trial.value for trial in study(tmp_path).trials} == set(losses.values())
    alone = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, constant_liar=True))
    space = {
        "lr": optuna.distributions.FloatDistribution(0.001, 3.0, log=True),
        "accum_steps": optuna.distributions.CategoricalDistribution([1, 2, 4]),
    }
    assert study(tmp_path).trials[0].params == alone.ask(space).params, "Optuna's own answer to the same question"


def test_hopeless_runs_are_ended_early(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SEARCH, *SPACE, "epochs=2", "hydra.sweeper.trials=16", "tracking=mlflow")
    assert done.returncode == 0, done.stderr
    runs = found(tmp_path)
    pruned = [record for record in runs if record.status == "pruned"]
    assert pruned
    assert {record.status for record in runs} == {"pruned", "finished"}
    assert f"{len(pruned)} pruned, 0 failed" in done.stdout
    total = 2 * 23  # windows: 1437 samples, 64 each, twice
    for record in pruned:
        done_part = len(record.series["train/loss"]) / total
        assert 0.2 <= done_part < 1
        assert f"after {int(done_part * 20) / 20:.0%} of the training" in (record.reason or "")
        # Checked by hand: its best mean loss so far against the median of the others' at that look.
        before = [r for r in runs if (r.job_num or 0) < (record.job_num or 0)]
        assert min(looks(record, total)) > median_at(before, int(done_part * 20), total)
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    statuses = Counter(run.info.status for run in client.search_runs([experiment.experiment_id]))
    assert statuses == {"KILLED": len(pruned), "FINISHED": 16 - len(pruned) + 1}


def looks(record: Record, total: int) -> list[float]:
    """The mean losses between one look and the next."""
    means, since, last = [], list[float](), 0
    for number, loss in enumerate(record.series["train/loss"], start=1):
        since.append(loss)
        if number < total and number * 20 // total > last:
            last = number * 20 // total
            means.append(statistics.fmean(since))
            since = []
    return means


def median_at(before: Sequence[Record], look: int, total: int) -> float:
    return statistics.median(looks(record, total)[look - 1] for record in before if record.status == "finished")


def test_the_same_again_is_not_run_again(cli: Cli, tmp_path: Path) -> None:
    done = cli(*SEARCH, "accum_steps=1,2", "epochs=1", "hydra.sweeper.trials=6", "hydra.sweeper.pruning=false")
    assert done.returncode == 0, done.stderr
    assert len(found(tmp_path)) == 2
    assert len(study(tmp_path).trials) == 6
    assert "best of 6 trials" in done.stdout


@pytest.mark.parametrize("launcher", [(), ("hydra/launcher=processes", "hydra.launcher.workers=2")])
def test_of_several_objectives_the_pareto_set_is_told(cli: Cli, tmp_path: Path, launcher: Sequence[str]) -> None:
    objectives = ("hydra.sweeper.maximize=[test/accuracy]", "hydra.sweeper.minimize=[peak_allocated_bytes]")
    at_once = ("hydra.sweeper.trials=9", "hydra.sweeper.at_once=3")
    done = cli(*SEARCH, *SPACE, "epochs=1", *objectives, *at_once, *launcher)
    assert done.returncode == 0, done.stderr
    points = {
        record.name: (float(record.metrics["test/accuracy"] or 0), float(record.metrics["peak_allocated_bytes"] or 0))
        for record in found(tmp_path)
    }

    def beaten(own: tuple[float, float]) -> bool:
        return any(a >= own[0] and b <= own[1] and (a, b) != own for a, b in points.values())

    _, _, told = done.stdout.partition(
        "none is better in all objectives (Pareto set of 9 trials, 0 pruned, 0 failed):\n"
    )
    assert {line.strip().partition(":")[0] for line in told.splitlines()} == {
        name for name, own in points.items() if not beaten(own)
    }
    assert 0 < len(told.splitlines()) < len(points)
    table = done.stdout.partition("none is better")[0].splitlines()
    for shown in (table, cli("summary").stdout.splitlines()):
        (head,) = (line for line in shown if "Pareto set" in line)
        place = head.index("Pareto set")
        rows = [line for line in shown if re.match(r" +\d", line)]
        marked = [line for line in rows if "yes" in line[place:]]
        assert (len(marked), len(rows)) == (len(told.splitlines()), len(points))


def test_a_killed_search_goes_on(cli: Cli, tmp_path: Path) -> None:
    words = (*SEARCH, *SPACE, "epochs=2", "hydra.sweeper.trials=10")
    process = subprocess.Popen([sys.executable, "-m", "accum_sweep", "-q", *words], cwd=tmp_path)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "runs").rglob("record.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    there = {record.run_id for record in found(tmp_path)}
    other = cli(*words, "seed=1,2", "sweep.resume=latest")
    assert other.returncode == 2
    assert "was started with other keys" in other.stderr
    done = cli(*words, "sweep.resume=latest")
    assert done.returncode == 0, done.stderr
    assert there < {record.run_id for record in found(tmp_path)}
    states = Counter(trial.state.name for trial in study(tmp_path).trials)
    assert "RUNNING" not in states
    assert sum(states.values()) == 10
    assert states["COMPLETE"] == sum(record.status == "finished" for record in found(tmp_path))
    assert cli(*words, "sweep.resume=latest").stdout == done.stdout


def test_settings_that_do_not_go_together_are_failed_trials(cli: Cli, tmp_path: Path) -> None:
    space = ("accum_steps=1,128", "lr=interval(0.01,0.1)")  # 128 micro-batches of 64 samples
    done = cli(*SEARCH, *space, "epochs=1", "hydra.sweeper.trials=6")
    assert done.returncode == 0, done.stderr
    assert "accum_steps=128" in done.stderr
    states = Counter(trial.state.name for trial in study(tmp_path).trials)
    assert states["FAIL"] >= 1
    assert states["FAIL"] + len(found(tmp_path)) == 6


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["lr=0.1"], "there is nothing to search"),
        (["lr=interval(0.1,1)", "hydra.sweeper.trials=0"], "hydra.sweeper.trials=0: must be a whole number, 1 or more"),
        (["lr=interval(0.1,1)", "hydra.sweeper.pruning=some"], "hydra.sweeper.pruning=some: must be true or false"),
        (
            ["lr=interval(0.1,1)", "hydra.sweeper.minimize=last_loss"],
            "hydra.sweeper.minimize=last_loss: must be a list",
        ),
        (["lr=interval(0.1,1)", "hydra.sweeper.minimize=[]"], "hydra.sweeper.minimize=[]: must name a metric"),
        (["lr=interval(1,0.1)"], "lr=lr=interval(1,0.1): is no range"),
        (["lr=tag(log, interval(0,1))"], "is no range"),
        (["lr=interval(0.1,1)", "sweep.dry_run=true"], "sweep.dry_run=True: is for a grid"),
        (["lr=interval(0.1,1)", "effective_batch_size=x"], "effective_batch_size=x"),
        (["lr=interval(0.1,1)", "sweep.resume=latest"], "sweep.resume=latest: is no sweep"),
    ],
)
def test_bad_words_are_told_and_nothing_is_written(cli: Cli, tmp_path: Path, words: Sequence[str], told: str) -> None:
    done = cli(*SEARCH[:-2], "tracking=none", *words)
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_an_objective_that_runs_do_not_have_is_told_with_those_they_have(cli: Cli, tmp_path: Path) -> None:
    words = ("lr=interval(0.1,1)", "epochs=1", "hydra.sweeper.minimize=[val/loss]")
    done = cli(*SEARCH, *words)
    assert done.returncode == 2
    assert "val/loss is no metric of these runs; choose from final_weight_norm, first_grad_norm" in done.stderr
    assert len(found(tmp_path)) == 1
