"""Which setting to take: from a comparison to a sentence, by a rule that it states. pandas only.

Only settings of one training can be chosen among: those that share the effective batch and all else, and whose gradient
was found to be the full batch's. Of these, the rule takes the one with the least peak memory among those that are
nearly as fast as the fastest, and fit `memory_budget` where one is given.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from accum_sweep.pareto import on_front
from accum_sweep.sizes import SIZES
from accum_sweep.summary import Comparison
from accum_sweep.tidy import missing

ACCUM, MICRO, EFFECTIVE = SIZES
PEAK, SPEED = "peak_allocated_bytes", "samples_per_second"
NEARLY = 0.95  # of the fastest's samples a second
ENOUGH_STEPS = 20  # for a speed to choose by


@dataclass(frozen=True)
class Advice:
    """On the settings that differ in `accum_steps` alone; `others` are what they share of what varies.

    `choice` is a row of the comparison, None where there is none to take, `why` says so. `front` are the accum_steps
    of the Pareto front: no setting beside them takes less memory and is as fast, or is faster and takes as little.
    """

    others: dict[str, Any]
    choice: pd.Series | None
    front: list[int]
    why: str


def advise(comparison: Comparison) -> list[Advice]:
    """Return advice on each group of settings that are one training; none where nothing can be chosen.

    That is so where `accum_steps` does not vary, where it changes the effective batch and so the training, and where
    memory or speed was not measured.
    """
    rows = comparison.rows
    if comparison.kind != EFFECTIVE or not {PEAK, SPEED} <= set(comparison.metrics):
        return []
    others = [key for key in comparison.settings if key not in (ACCUM, MICRO)]
    groups = [((), rows)] if not others else list(rows.groupby(others, dropna=False))
    found = []
    for values, group in groups:
        shared = dict(zip(others, values, strict=True))
        if group[ACCUM].nunique() > 1:
            found.append(_advise(shared, group, (comparison.constant | shared).get("memory_budget")))
    return found


def _advise(others: dict[str, Any], group: pd.DataFrame, budget: float | None) -> Advice:
    whole = group[(group["finished"] > 0) & (group["finished"] == group["runs"]) & group[ACCUM].notna()]
    same = whole[whole["verdict"] == "equivalent"]
    best = on_front([(row[PEAK], -row[SPEED]) for _, row in same.iterrows()])
    front = sorted(int(number) for number in same.loc[best, ACCUM])
    if same.empty:
        return Advice(others, None, front, "no setting's gradient was found to be the full batch's in finished runs")
    fit = same if missing(budget) else same[same[PEAK] <= budget]
    if fit.empty:
        return Advice(others, None, front, "no setting whose gradient is the full batch's fits memory_budget")
    fast = fit[fit[SPEED] >= NEARLY * fit[SPEED].max()]
    choice = fast.sort_values([PEAK, ACCUM]).iloc[0]
    return Advice(others, choice, front, _sentence(choice, whole))


def _sentence(choice: pd.Series, whole: pd.DataFrame) -> str:
    """Say what a person would: what to take, and what that costs against accum_steps=1."""
    words = f"accum_steps={int(choice[ACCUM])}"
    if not missing(choice.get(MICRO)):
        words += f", micro-batch {int(choice[MICRO])}"
    if choice[ACCUM] == 1:
        cost = f"{100 * (1 - NEARLY):.0f} % of the speed"
        return f"{words}: less memory would cost more than {cost}, or there is none to save"
    memory, speed = choice[f"{PEAK}_vs_baseline"], choice[f"{SPEED}_vs_baseline"]
    if missing(memory) or missing(speed):
        return f"{words}: same training (no run with accum_steps=1 to compare with)"
    said = f"{words}: same training, {_changed(memory, 'less', 'more')} memory, {_changed(speed, 'slower', 'faster')}"
    steps = int(whole["steps"].min())
    return said if steps >= ENOUGH_STEPS else f"{said} (by {steps} steps: train longer to choose by speed)"


def _changed(ratio: float, below: str, above: str) -> str:
    percent = round(100 * (ratio - 1))
    return f"{abs(percent)} % {below if percent < 0 else above}" if percent else f"no {above}"
