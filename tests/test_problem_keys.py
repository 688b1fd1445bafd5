"""Bad values of the problems' own keys: one clear error each; and problem=custom, which runs a user's code."""

from pathlib import Path
from typing import Any

import pytest
import torch

import accum_sweep
from accum_sweep.errors import UserError
from accum_sweep.problems import params_class
from conftest import Cli

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("digits_cnn problem.norm=layer", ["problem.norm=layer", "'batch', 'group' or 'none'"]),
        ("digits_cnn problem.channels=6", ["problem.channels=6", "multiple of problem.groups=4"]),
        ("digits_cnn problem.groups=0", ["problem.groups=0", "greater than or equal to 1"]),
        ("digits_cnn problem.test_samples=1797", ["problem.test_samples=1797", "less than 1797"]),
        ("linear problem.held_out={x:[[1]],y:[1]}", ["problem.held_out=", "needs 2", "problem.held_out=null"]),
        ("linear problem.held_out={x:[[1,2]],y:[]}", ["problem.held_out.y=[]", "at least 1"]),
        ("linear problem.held_out={x:[[1,2],[3,4]],y:[1]}", ["problem.held_out=", "2 rows in x but 1 values in y"]),
        ("custom", ["problem.factory=null", "package.module:function", "problem.samples=null", "1 or more"]),
        ("char_gpt problem.width=63 problem.heads=4", ["problem.width=63", "multiple of problem.heads=4", "is 64"]),
        ("char_gpt problem.dropout=1", ["problem.dropout=1", "less than 1"]),
        ("char_gpt problem.context=1", ["problem.context=1", "2"]),
        ("char_gpt problem.train_sequences=9000", ["problem.train_sequences=9000", "sentences there are", "lower"]),
        ("char_gpt problem.layers=0", ["problem.layers=0", "greater than or equal to 1"]),
        ("custom problem.factory=mine.make problem.samples=9", ["problem.factory=mine.make", "my_problem:make"]),
        ("custom problem.factory=no_such:make problem.samples=9", ["no module no_such", "python -m accum_sweep"]),
        ("custom problem.factory=json:dumps problem.samples=0", ["problem.samples=0", "1 or more"]),
        ("custom problem.factory=json:dumps problem.samples=9 problem.arguments=3", ["problem.arguments=3"]),
    ],
)
def test_bad_keys_are_told(workdir: Path, words: str, told: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        accum_sweep.run([f"problem={words.split()[0]}", *words.split()[1:], "tracking=none"])
    assert not [part for part in told if part not in str(caught.value)], caught.value
    assert not list(workdir.iterdir())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"factory": "custom_problem:mak"}, ["problem.factory=", "has no function mak", "make"]),
        ({"factory": "custom_problem:SAMPLES"}, ["has no function SAMPLES"]),
        ({"factory": "json.no_such:make"}, ["json.no_such could not be imported", "ModuleNotFoundError"]),
        ({"arguments": {"hiden": 8}}, ["problem.arguments={'hiden': 8}", "hiden", "it takes (dtype", "hidden: int"]),
        ({"factory": "custom_problem:curves", "arguments": {"samples": 3, "noise": 0}}, ["returned a dict"]),
    ],
)
def test_a_factory_that_gives_no_problem_is_told(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], told: list[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    params = params_class("custom")(**({"name": "custom", "factory": "custom_problem:make", "samples": 512} | settings))
    with pytest.raises(UserError) as caught:
        params.build(torch.float32)
    assert not [part for part in told if part not in str(caught.value)], caught.value


def test_the_example_of_a_custom_problem_runs(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "custom_problem.py").write_text((EXAMPLES / "custom_problem.py").read_text())
    words = ["problem=custom", "problem.factory=custom_problem:make", "problem.arguments={hidden: 8}"]
    sizes = ["effective_batch_size=64", "accum_steps=1,4", "precision=fp64", "tracking=none"]
    done = cli("-m", *words, "problem.samples=512", *sizes)
    assert done.returncode == 0, done.stderr
    assert "2 runs, 2 finished; fixed effective batch" in done.stdout
    wrong = cli(*words, "problem.samples=500", "steps=1", "tracking=none")
    assert wrong.returncode == 1
    assert "says that it has 500 training samples" in wrong.stderr
