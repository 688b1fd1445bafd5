"""What a grid cannot say: values that go together, conditions, a part of all combinations."""

from pathlib import Path

import pytest

from accum_sweep.record import records, sweeps
from conftest import Cli

SWEEPS = sorted(path.stem for path in (Path(__file__).parents[1] / "conf/sweep").glob("*.yaml"))
DRY = "sweep.dry_run=true"
PAIRS = "sweep.pairs=[{lr:0.1,accum_steps:1,optimizer:adamw},{lr:0.2,accum_steps:4,optimizer:sgd}]"


def combinations(cli: Cli, *words: str) -> list[str]:
    done = cli("-m", *words, DRY)
    assert done.returncode == 0, done.stderr
    return [line.split("  ")[0].strip() for line in done.stdout.split("\n\n")[0].splitlines()[2:]]


def test_values_that_go_together_are_crossed_with_the_rest(cli: Cli, tmp_path: Path) -> None:
    done = cli("-m", PAIRS, "seed=0,1", "tracking=none")
    assert done.returncode == 0, done.stderr
    found = [(r.config["lr"], r.config["accum_steps"], r.config["optimizer"]["name"], r.config["seed"])
             for r in records(tmp_path / "runs")]  # fmt: skip
    assert found == [(0.1, 1, "AdamW", 0), (0.1, 1, "AdamW", 1), (0.2, 4, "SGD", 0), (0.2, 4, "SGD", 1)]
    ((_, sweep),) = sweeps(tmp_path / "runs")
    assert sweep.name == "sweep.pairs seed=0,1"
    assert (
        "4 of 4 runs have their result" in cli("-m", PAIRS, "seed=0,1", "tracking=none", "sweep.resume=latest").stderr
    )


def test_every_kind_of_value_can_go_together(cli: Cli) -> None:
    pairs = "[{problem.hidden:32,clip_norm:null,save_weights:true,tracking.experiment:'it''s'}]".replace("''", "\\'")
    found = combinations(cli, "problem=digits_mlp", f"sweep.pairs={pairs}", "accum_schedule={0:1,5:2}", "seed=0,1")
    assert found == ["seed=0", "seed=1"]
    weird = "[{accum_schedule:{0:1,5:2},lr:1e-3},{accum_schedule:null,lr:0.5}]"
    assert len(combinations(cli, "problem=digits_mlp", f"sweep.pairs={weird}")) == 2


def test_only_what_holds_is_run(cli: Cli) -> None:
    words = ("problem=digits_mlp", "effective_batch_size=64", "accum_steps=1,2,8", "lr=0.1,0.5")
    condition = "sweep.where='micro_batch_size <= 32 and lr * accum_steps < 2'"
    assert combinations(cli, *words, condition) == [
        "accum_steps=2 lr=0.1", "accum_steps=2 lr=0.5", "accum_steps=8 lr=0.1"
    ]  # fmt: skip
    assert combinations(
        cli, *words, "sweep.where=\"problem == 'digits_mlp' and optimizer != 'SGD'\"", "optimizer=adamw"
    )


@pytest.mark.parametrize("condition", [[], ["sweep.where='seed >= 0'"]])
def test_a_part_of_all_is_drawn_by_its_seed(cli: Cli, condition: list[str]) -> None:
    words = ("seed=range(0,30)", "sweep.subset=5", *condition)
    first = combinations(cli, *words)
    assert len(set(first)) == 5
    assert first == sorted(first, key=lambda name: int(name.removeprefix("seed=")))
    assert combinations(cli, *words) == first != combinations(cli, *words, "sweep.subset_seed=1")
    assert len(combinations(cli, "seed=0,1", "sweep.subset=5")) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["sweep.where='sed < 1'"], ["sweep.where=sed < 1", "names sed", "did you mean seed?"]),
        (["sweep.where='seed < 0'"], ["sweep.where=seed < 0: holds for no combination"]),
        (["sweep.where=\"__import__('os').system('touch ran')\""], ["sweep.where=", "means nothing here"]),
        (["sweep.where=3"], ["sweep.where=3: must be a condition"]),
        (["sweep.pairs=[{seed:1}]"], ["sweep.pairs=seed: is given beside it too"]),
        (["sweep.pairs=[{lr:1},{lr:0.1,accum_steps:3}]"], ["sweep.pairs={'lr': 1}: has no accum_steps"]),
        (["sweep.pairs=[{lrr:1}]"], ["lrr=1: is no known key; did you mean lr?"]),
        (["sweep.pairs=[{lr:x}]"], ["lr=x: must be a finite number"]),
        (["sweep.pairs=[]"], ["sweep.pairs=[]: must be a list of settings that go together"]),
        (["sweep.pairs=3"], ["sweep.pairs=3: must be a list of settings that go together"]),
        (["sweep.subset=0"], ["sweep.subset=0: must be a whole number, 1 or more"]),
    ],
)
def test_bad_input_is_told_and_leaves_nothing(cli: Cli, tmp_path: Path, words: list[str], told: list[str]) -> None:
    done = cli("-m", "seed=0,1", "tracking=none", *words)
    assert done.returncode == 2, done.stdout
    assert all(word in done.stderr for word in told), done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_in_a_file_needs_no_m(cli: Cli, tmp_path: Path, name: str) -> None:
    words = (f"sweep={name}", "tracking=none", "seed=0")
    shown = cli(*words, DRY)
    assert shown.returncode == 0, shown.stderr
    assert not list(tmp_path.iterdir())
    done = cli(*words, "steps=1")
    assert done.returncode == 0, done.stderr
    assert len(list(records(tmp_path / "runs"))) == len(shown.stdout.split("\n\n")[0].splitlines()) - 2 > 3
