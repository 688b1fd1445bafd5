"""Bad input by the real command line: one clear error, exit code 2, nothing written."""

import time
from pathlib import Path

import pytest

from conftest import Cli

DIGITS = "problem=digits_mlp"


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["accum_steps=0"], ["accum_steps=0", "1 or more"]),
        (["accum_steps=-1"], ["accum_steps=-1", "1 or more"]),
        (["accum_steps=2.5"], ["accum_steps=2.5", "whole number"]),
        (["accum_steps=abc"], ["accum_steps=abc", "whole number"]),
        ([DIGITS, "accum_steps=4", "micro_batch_size=8", "effective_batch_size=64"], ["32, not 64"]),
        (
            [DIGITS, "accum_steps=3", "effective_batch_size=64", "normalization=mean"],
            ["effective_batch_size=64", "items"],
        ),
        (["accum_schedule={5:2}"], ["accum_schedule", "from 0 on"]),
        (["accum_schedule={0:2}", "accum_steps=2"], ["accum_steps=2", "accum_schedule"]),
        (["clip_norm=1", "clip_value=1"], ["clip_norm=1", "exclude each other"]),
        (["precision=bf16", "accumulator=fp32"], ["accumulator=fp32", "bf16-params"]),
        (["parallel=fsdp"], ["parallel=fsdp", "torchrun"]),
        (["fused_linear=true", "precision=bf16"], ["fused_linear=true", "precision=fp32 or bf16-params"]),
        (["step_in_backward=true", "clip_norm=1"], ["step_in_backward=true", "use accum_steps=1", "clip_norm=1.0"]),
        (["device=cpu", "precision=tf32"], ["precision=tf32", "CUDA"]),
        (["warmup_steps=9", "steps=3"], ["warmup_steps=9", "3 steps"]),
        ([DIGITS, "micro_batch_size=5000"], ["micro_batch_size=5000", "1437"]),
        (["lr=-1"], ["lr=-1", "0 or more"]),
        (["lr=nan"], ["lr=nan", "finite"]),
        (["steps=0"], ["steps=0", "1 or more"]),
        (["acum_steps=4"], ["acum_steps=4", "did you mean accum_steps?"]),
        (["problem.bathces=[]"], ["problem.bathces", "did you mean problem.batches?"]),
        (["--cgf", "job"], ["--cgf", "did you mean --cfg?"]),
        (["problem=digits_mpl"], ["problem=digits_mpl", "did you mean digits_mlp?"]),
        (["device=gpu0"], ["device=gpu0", "cuda:N"]),
        (["seed=18446744073709551616"], ["seed=18446744073709551616", "2**64 - 1"]),
        (["--config-dir", "no/such/folder"], ["no/such/folder", "not found"]),
        (["lr=[1"], ["lr=[1", "key=value"]),
        (["accum_steps=1,2"], ["accum_steps=1,2", "add -m"]),
        (["lrate=1"], ["lrate=1", "did you mean lr?"]),
        (["sumary"], ["sumary", "did you mean summary?"]),
        (["lr=-1", "accum_steps=0", "spede=3"], ["lr=-1", "accum_steps=0", "spede=3"]),
        (["-m", "accum_steps=0,1,2", "lr=0.1,-1"], ["accum_steps=0", "lr=-1"]),
        (["-m", "acum_steps=1,2"], ["acum_steps", "did you mean accum_steps?"]),
        (["-m", "problem=linear,nothing"], ["problem=nothing", "digits_mlp"]),
        (["-m", "lr=0.1,0.2", "acum_steps=1"], ["acum_steps=1", "did you mean accum_steps?"]),
        (["-m", "lr=0.1,0.2", "experiment=memroy"], ["experiment=memroy", "did you mean memory?"]),
        (["-m", "lr=range(1"], ["lr=range(1"]),
        (["lr=${nothing}"], ["nothing"]),
        (["steps=???"], ["steps"]),
        (["hydra.job.chdir=true"], ["hydra.job.chdir=true"]),
        (["-m", "seed=0,1", "hydra/sweeper=basic"], ["hydra/sweeper", "keeps no record"]),
        (["--info", "searchpath", "-m"], ["--info and --multirun exclude each other"]),
        (["--speed", "--quality"], ["--speed", "--quality"]),
        (["optimizer.name=LBFGS", "~optimizer.weight_decay"], ["LBFGS", "step"]),
        (["tracking.uri=http://host:abc"], ["tracking.uri", "database or a tracking server"]),
        (["-m", "lr=interval(0,1)"], ["lr=", "list them"]),
        (["-m", "lr=range(3,1)"], ["lr=range(3,1)", "empty"]),
        (["problem=null"], ["group", "NoneType"]),
        (["~seed"], ["seed=(missing)"]),
        (["~accum_steps"], ["~accum_steps", "cannot be taken out"]),
        (["+lr=1"], ["+lr", "drop the +"]),
        (["lr=1e39"], ["SGD", "overflow"]),
        (["accum_steps=99999999999999999999999"], ["accum_steps=99999999999999999999999"]),
        (["+optimizer.maximize=abc"], ["true or false for maximize"]),
        (["problem.initial_weight=[nan,1]"], ["problem.initial_weight.0=nan", "finite"]),
        (["hydra.run.dir=/proc/nothing", "tracking=none"], ["/proc/nothing"]),
        (["tracking.uri=sqlite:///:memory:"], ["tracking.uri", "must name a file"]),
        (["-m", "tracking=none,mlflow"], ["tracking", "same for the whole sweep"]),
        (["tracking.uri=sqlite:///no/such/folder/mlflow.db"], ["tracking.uri", "no folder no/such/folder"]),
        (["tracking.uri=file:///tmp/mlruns"], ["tracking.uri", "database or a tracking server"]),
        (["-m", "lr=0.1,0.2", "tracking.uri=sqlite:////dev/full"], ["tracking.uri", "/dev/full"]),
        (["summary"], ["no sweeps in runs yet", "-m accum_steps"]),
        (["summary", "all"], ["no runs in runs yet"]),
        (["summary", "20200101-000000"], ["20200101-000000", "no such sweep"]),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(cli: Cli, tmp_path: Path, words: list[str], told: list[str]) -> None:
    started = time.monotonic()
    done = cli(*words)
    assert time.monotonic() - started < 30, "in seconds"
    assert done.returncode == 2, done.stderr
    for part in told:
        assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert written(tmp_path) == []


def test_the_control_good_input_does_leave_something(cli: Cli, tmp_path: Path) -> None:
    assert cli("tracking=none").returncode == 0
    assert any(name.endswith("record.json") for name in written(tmp_path))


def test_a_config_file_with_a_wrong_type_is_told_by_its_key(cli: Cli, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "wrong.yaml").write_text("# @package _global_\nsteps: many\nsweep: 3\n")
    before = written(tmp_path)
    done = cli("--config-dir", "mine", "experiment=wrong")
    assert done.returncode == 2
    assert "steps=many" in done.stderr
    assert "sweep=3" in done.stderr
    assert written(tmp_path) == before


def test_an_unknown_key_beside_a_config_dir_is_not_blamed_on_it(cli: Cli, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "own.yaml").write_text("# @package _global_\nlr: 0.5\n")
    done = cli("--config-dir=mine", "experiment=own", "stpes=3")
    assert done.returncode == 2
    assert done.stderr.strip() == "stpes=3: is no known key; did you mean steps?"


def test_a_config_dir_that_cannot_be_read_as_yaml_is_told(cli: Cli, tmp_path: Path) -> None:
    mine = tmp_path / "mine" / "experiment"
    mine.mkdir(parents=True)
    (mine / "broken.yaml").write_text("lr: [1\n")
    done = cli("--config-dir", "mine", "experiment=broken")
    assert done.returncode == 2, done.stderr
    assert "broken.yaml" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_is_no_database_is_told_at_once(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("this is a letter to a friend, and longer than a header" * 20)
    done = cli()
    assert done.returncode == 2
    assert "mlflow.db" in done.stderr
    assert "not a database" in done.stderr
    assert written(tmp_path) == ["mlflow.db"]


def test_a_summary_that_cannot_be_written_is_told_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    assert cli("-m", "accum_steps=1,2", "tracking=none").returncode == 0
    before = written(tmp_path)
    done = cli("summary", "latest", "--csv", "no/such/folder/summary.csv")
    assert done.returncode == 2
    assert "no/such/folder/summary.csv" in done.stderr
    assert written(tmp_path) == before
    folder = cli("summary", "latest", "--csv", "runs")
    assert folder.returncode == 2
    assert written(tmp_path) == before


def test_a_folder_that_holds_a_sweep_is_not_written_over(cli: Cli, tmp_path: Path) -> None:
    words = ["-m", "accum_steps=1,2", "tracking=none", "hydra.sweep.dir=runs/mine"]
    assert cli(*words).returncode == 0
    record = (tmp_path / "runs/mine/0/record.json").read_bytes()
    done = cli(*words)
    assert done.returncode == 2
    assert "hydra.sweep.dir=runs/mine" in done.stderr
    assert (tmp_path / "runs/mine/0/record.json").read_bytes() == record


def test_without_slurm_it_says_so(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", "hydra/launcher=slurm", "seed=0,1", PATH=str(tmp_path))
    assert done.returncode == 2
    assert "hydra/launcher=slurm: needs Slurm's sbatch" in done.stderr
    assert not list(tmp_path.iterdir())
