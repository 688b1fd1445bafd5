"""Which setting to take: the rule, the Pareto front, and what must never be advised."""

import itertools
import math
import random
from typing import Any

import pandas as pd
import pytest

from accum_sweep import exports, table
from accum_sweep.advice import ENOUGH_STEPS, Advice, advise
from accum_sweep.pareto import on_front
from accum_sweep.summary import Comparison

MIB = 2**20
# accum_steps: (peak memory in MiB, samples a second). 2 is a little slower than 1, 4 is the fastest, 8 slow and small.
MEASURED = {1: (100.0, 980.0), 2: (60.0, 960.0), 4: (40.0, 1000.0), 8: (30.0, 900.0)}


def comparison(kind: str = "effective_batch_size", rows: Any = MEASURED, **more: Any) -> Comparison:
    """A table as `summary` makes it; `more` are columns, one value for all or a list, or the constant memory_budget."""
    constant = {key: more.pop(key) for key in ("memory_budget",) if key in more}
    frame = pd.DataFrame(
        {
            "accum_steps": list(rows),
            "micro_batch_size": [64 // steps for steps in rows],
            "runs": 3,
            "finished": 3,
            "steps": 100,
            "verdict": "equivalent",
            "peak_allocated_bytes": [peak * MIB for peak, _ in rows.values()],
            "samples_per_second": [speed for _, speed in rows.values()],
        }
    )
    for metric in ("peak_allocated_bytes", "samples_per_second"):
        frame[f"{metric}_vs_baseline"] = frame[metric] / frame[metric].iloc[0]
    for key, value in more.items():
        frame[key] = value
    settings = ["accum_steps", "micro_batch_size"]
    return Comparison(kind, settings, ["peak_allocated_bytes", "samples_per_second"], constant, frame)


def one(found: list[Advice]) -> Advice:
    (advice,) = found
    return advice


def chosen(found: Advice) -> int | None:
    return None if found.choice is None else int(found.choice["accum_steps"])


def test_of_those_nearly_as_fast_the_smallest_is_taken() -> None:
    found = one(advise(comparison()))
    assert chosen(found) == 4, "8 is 10 % slower, 1 and 2 are larger"
    assert found.why == "accum_steps=4, micro-batch 16: same training, 60 % less memory, 2 % faster"
    assert found.front == [4, 8]


def test_slower_than_nearly_is_not_taken_however_small() -> None:
    at_the_edge = {1: (100.0, 1000.0), 2: (50.0, 950.0), 4: (10.0, 949.0)}
    found = one(advise(comparison(rows=at_the_edge)))
    assert chosen(found) == 2
    assert found.why.endswith("50 % less memory, 5 % slower")


@pytest.mark.parametrize(("budget", "accum_steps"), [(40, 4), (39.9, 8), (29, None)])
def test_it_fits_the_budget(budget: float, accum_steps: int | None) -> None:
    found = one(advise(comparison(memory_budget=budget * MIB)))
    assert chosen(found) == accum_steps
    if accum_steps is None:
        assert "fits memory_budget" in found.why


@pytest.mark.parametrize("verdict", ["different", "not comparable", ""])
def test_another_training_is_never_taken(verdict: str) -> None:
    verdicts = ["equivalent", "equivalent", verdict, "equivalent"]
    found = one(advise(comparison(verdict=verdicts)))
    assert chosen(found) == 2
    assert 4 not in found.front
    none = one(advise(comparison(verdict=verdict)))
    assert chosen(none) is None
    assert "no setting's gradient was found to be the full batch's" in none.why


def test_a_setting_of_which_a_seed_failed_is_not_taken() -> None:
    assert chosen(one(advise(comparison(finished=[3, 3, 2, 3])))) == 2
    assert chosen(one(advise(comparison(finished=0)))) is None


def test_a_speed_of_few_steps_says_so() -> None:
    assert one(advise(comparison(steps=ENOUGH_STEPS))).why.endswith("faster")
    few = one(advise(comparison(steps=[100, 100, 100, ENOUGH_STEPS - 1])))
    assert few.why.endswith(f"(by {ENOUGH_STEPS - 1} steps: train longer to choose by speed)")


def test_where_nothing_is_to_be_saved_it_says_so() -> None:
    found = one(advise(comparison(rows={1: (10.0, 1000.0), 2: (10.0, 1000.0), 4: (5.0, 100.0)})))
    assert chosen(found) == 1
    assert "less memory would cost more than 5 % of the speed" in found.why


def test_without_a_run_of_one_micro_batch_it_compares_with_none() -> None:
    rows = {steps: MEASURED[steps] for steps in (2, 4)}
    nothing = {"peak_allocated_bytes_vs_baseline": math.nan, "samples_per_second_vs_baseline": math.nan}
    assert "no run with accum_steps=1" in one(advise(comparison(rows=rows, **nothing))).why


@pytest.mark.parametrize("kind", ["micro_batch_size", ""])
def test_settings_that_are_not_one_training_are_not_chosen_among(kind: str) -> None:
    assert advise(comparison(kind)) == []


def test_each_group_has_its_own_advice() -> None:
    both = comparison()
    other = {1: (100.0, 1000.0), 2: (60.0, 100.0), 4: (40.0, 100.0), 8: (30.0, 100.0)}
    frame = pd.concat([both.rows.assign(lr=0.1), comparison(rows=other).rows.assign(lr=0.01)])
    found = advise(Comparison(both.kind, [*both.settings, "lr"], both.metrics, {}, frame))
    assert {advice.others["lr"]: chosen(advice) for advice in found} == {0.1: 4, 0.01: 1}


def test_the_front_is_what_nobody_beats() -> None:
    """Held against its definition, spelled out, on many small sets with ties."""
    draw = random.Random(0)
    for _ in range(200):
        points = [(draw.randint(0, 4), draw.randint(0, 4)) for _ in range(draw.randint(1, 8))]
        beaten = [
            any(a <= x and b <= y and (a < x or b < y) for (a, b) in points)  # as good in both, better in one
            for (x, y) in points
        ]
        assert on_front(points) == [not b for b in beaten]


def test_what_was_not_measured_is_on_no_front() -> None:
    assert on_front([(1.0, math.nan), (2.0, 2.0), (math.nan, math.nan)]) == [False, True, False]
    assert on_front([]) == []


@pytest.mark.parametrize("show", [table.text, exports.markdown])
def test_the_table_ends_with_the_advice(show: Any) -> None:
    rows = comparison(reason="", verdict_reason="", notes="").rows
    said = show([Comparison("effective_batch_size", ["accum_steps"], ["peak_allocated_bytes"], {}, rows)])
    assert "take" not in said, "speed was not compared"
    said = " ".join(show([comparison(reason="", verdict_reason="", notes="")]).split())
    assert "take: accum_steps=4, micro-batch 16: same training, 60 % less memory, 2 % faster" in said
    assert "Pareto front of memory and speed: accum_steps=4, 8" in said
    assert "within 5 % of the fastest" in said


def test_all_orders_of_rows_give_one_answer() -> None:
    answers = set()
    for order in itertools.permutations(MEASURED):
        table = comparison()
        rows = table.rows.set_index("accum_steps").loc[list(order)].reset_index()
        answers.add(chosen(one(advise(Comparison(table.kind, table.settings, table.metrics, {}, rows)))))
    assert answers == {4}
