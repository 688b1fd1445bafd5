"""Conditions on settings: what holds, and what is refused without being run."""

import re

import pytest

from accum_sweep.errors import UserError
from accum_sweep.where import holds

SETTINGS = {
    "lr": 0.1,
    "accum_steps": 4,
    "micro_batch_size": None,
    "problem": "char_gpt",
    "problem.width": 64,
    "on": True,
}


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("lr < 0.2", True),
        ("lr * accum_steps == 0.4", True),
        ("problem == 'char_gpt' and not accum_steps > 4", True),
        ("problem.width // 2 in (16, 32)", True),
        ("1 < accum_steps <= 4", True),
        ("accum_steps % 3 == 0 or lr >= 1", False),
        ("problem not in ['linear']", True),
        ("on", True),
        ("on == true", True),
        ("micro_batch_size == null", True),
        ("micro_batch_size < 8", False),
        ("micro_batch_size >= 8", False),
        ("micro_batch_size * 2 > 8", False),
        ("lr / 0 > 1", False),
        ("-lr < 0", True),
    ],
)
def test_what_holds(condition: str, expected: bool) -> None:
    assert holds(condition, SETTINGS) is expected


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("lr <", "is no condition"),
        ("", "is no condition"),
        ("lr", "neither true nor false"),
        ("lr + 1", "neither true nor false"),
        ("learning_rate < 1", "names learning_rate, which is no setting"),
        ("acum_steps < 1", "did you mean accum_steps?"),
        ("problem == char_gpt", "names char_gpt, which is no setting"),
        ("lr < 'a'", "have no order"),
        ("problem * 10 == 1", "no numbers"),
        ("lr is 0.1", "compares by identity"),
        ("__import__('os').system('touch ran')", "means nothing here"),
        ("(lambda: 1)() == 1", "means nothing here"),
        ("[lr for lr in (1, 2)] == 1", "means nothing here"),
        ("9 ** 9 ** 9 > 1", "means nothing here"),
        ("problem.__class__ == 1", "which is no setting"),
        ("lr and on", "neither true nor false"),
        ("(" * 500 + "on" + ")" * 500, "is no condition"),
    ],
)
def test_what_is_no_condition_is_told_and_never_run(condition: str, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        holds(condition, SETTINGS)
