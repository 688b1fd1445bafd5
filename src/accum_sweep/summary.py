"""From a tidy table, one row a run, to a comparison: one row a setting. pandas only.

`compare` folds seeds and sets every setting against accum_steps=1 of the same seeds.
Fixed micro-batch and fixed effective batch are different questions and never share a table.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from accum_sweep.config import Config
from accum_sweep.pareto import on_front
from accum_sweep.sizes import SIZES
from accum_sweep.tidy import LISTS, SKETCH, WEIGHTS, missing

# Config keys that do not make a setting: who asked for it, where it is kept, what it is derived from.
NO_SETTING = ("seed", "save_weights", "equivalence", "tracking.", "sweep.", "problem.default_", "automatic", "auto.")
VERDICTS = ("equivalent", "not comparable", "different")  # the gravest last

# What is compared, and how it is set against the baseline.
COMPARED = {
    "first_loss": "difference",
    "last_loss": "difference",
    "last_grad_norm": "ratio",
    "test/accuracy": "difference",
    "test/loss": "difference",
    "peak_allocated_bytes": "ratio",
    "predicted_allocated_bytes": "ratio",
    "prediction_error": "difference",
    "samples_per_second": "ratio",
    WEIGHTS: "distance",
    SKETCH: "distance",
    "gradient_error": "largest",
}


@dataclass(frozen=True)
class Comparison:
    """One table: the runs of one kind of sweep, one row a setting.

    `kind` is the size that stays as it is while accum_steps grows, or "" where accum_steps does not vary. `rows` has a
    column for each of `settings`, then `runs`, `finished`, `steps` (the fewest that one of these took), `reason`, the
    gravest `verdict` of them on equivalence, `verdict_reason`, their `notes`, and for each metric m in `metrics` the
    columns m (mean over seeds; of `gradient_error` the largest), `m_std` (NaN for one seed) and `m_vs_baseline` (mean
    of the differences or L2 distances, geometric mean of the ratios, seed by seed; NaN where no seed has a baseline).
    `final_weight` and `final_sketch` are lists and have no spread. For `pareto` see `compare`.
    """

    kind: str
    settings: list[str]
    metrics: list[str]
    constant: dict[str, Any]
    rows: pd.DataFrame


def compare(frame: pd.DataFrame, objectives: Mapping[str, str] | None = None) -> list[Comparison]:
    """Return one comparison for each kind of sweep in `frame`; none for no runs.

    `objectives` are what a search was for: metrics, each to "minimize" or "maximize". Of several, the rows that none is
    better than in all of them have True in the column `pareto`.
    """
    if frame.empty:
        return []
    kinds = pd.Series("", index=frame.index)
    for _, sweep in frame.groupby("sweep_id", dropna=False):
        kinds[sweep.index] = _kind(sweep)
    wanted = objectives if objectives is not None and len(objectives) > 1 else {}
    return [_compare(runs, str(kind), wanted) for kind, runs in frame.groupby(kinds)]


def varying(runs: pd.DataFrame) -> list[str]:
    """Return the config columns that differ between these runs, other than the seed; the sizes come first.

    Where two problems or optimizers are compared, keys that follow from the name alone are left out.
    """
    keys = [key for key in runs.columns if _is_setting(key) and _distinct(runs[key]) > 1]
    sizes = [size for size in SIZES if size in keys]
    return [*sizes, *(key for key in keys if key not in SIZES and not _told_by_name(runs, key))]


def _kind(sweep: pd.DataFrame) -> str:
    """Return the size that is fixed in a sweep over accum_steps: of the two, the one with fewer values."""
    accum, micro, effective = SIZES
    if _distinct(sweep[accum]) == 1:
        return ""
    return (
        micro if sweep[effective].isna().all() or _distinct(sweep[micro]) < _distinct(sweep[effective]) else effective
    )


def _compare(runs: pd.DataFrame, kind: str, objectives: Mapping[str, str]) -> Comparison:
    settings = varying(runs)
    constant = {key: runs[key].iloc[0] for key in runs.columns if _is_setting(key) and _distinct(runs[key]) == 1}
    metrics = [metric for metric in COMPARED if metric in runs.columns and runs[metric].notna().any()]
    if "test/accuracy" in metrics and "test/loss" in metrics:  # one held-out number is enough to compare
        metrics.remove("test/loss")
    by = settings or ["status"]
    seeds = _by_seed(runs, by, metrics)
    if kind:
        _set_against_baseline(seeds, settings, kind, metrics)
    rows, points = [], []
    for values, group in runs.groupby(by, dropna=False):
        done = seeds.loc[_equal(seeds, by, values)]
        finished = int((group["status"] == "finished").sum())
        row: dict[str, Any] = dict(zip(by, values, strict=True))
        steps = group.loc[group["status"] == "finished", "steps_done"].min() if "steps_done" in group else math.nan
        row |= {"runs": len(group), "finished": finished, "steps": steps, "reason": _reasons(group)}
        row |= dict(zip(("verdict", "verdict_reason"), _verdict(group), strict=True))
        row["notes"] = "; ".join(dict.fromkeys(group["notes"].dropna()))
        for metric in metrics:
            row[metric] = done[metric].max() if COMPARED[metric] == "largest" else _mean(done[metric])
            if metric not in LISTS:
                row[f"{metric}_std"] = done[metric].std()
            row[f"{metric}_vs_baseline"] = (
                _typical(done[f"{metric}_vs_baseline"], COMPARED[metric]) if kind else math.nan
            )
        rows.append(row)
        points.append(_point(group, objectives))
    table = pd.DataFrame(rows)
    if objectives:
        table["pareto"] = on_front(points)
    return Comparison(kind, settings, metrics, {k: v for k, v in constant.items() if not missing(v)}, table)


def _point(group: pd.DataFrame, objectives: Mapping[str, str]) -> tuple[float, ...]:
    """Return where a setting's finished runs are, on the mean, with all coordinates to be small."""
    done = group[group["status"] == "finished"]
    means = [float(done[metric].mean()) if metric in done else math.nan for metric in objectives]
    return tuple(-mean if way == "maximize" else mean for mean, way in zip(means, objectives.values(), strict=True))


def _by_seed(runs: pd.DataFrame, by: Sequence[str], metrics: Sequence[str]) -> pd.DataFrame:
    """Return one row a setting and seed, over its finished runs: a run repeated is no second seed."""
    finished = runs[runs["status"] == "finished"].copy()
    lists = [metric for metric in metrics if metric in LISTS]
    for metric in lists:
        finished[metric] = finished[metric].map(lambda text: json.loads(text) if isinstance(text, str) else None)
    keys = [*by, "seed"]
    if finished.empty:
        return finished[[*keys, *metrics, "data"]]
    groups = finished.groupby(keys, dropna=False)
    numbers = groups[[metric for metric in metrics if metric not in LISTS]].mean().reset_index()
    for metric in lists:
        numbers[metric] = groups[metric].agg(_mean).to_numpy()
    numbers["data"] = groups["data"].first().to_numpy()
    return numbers


def _set_against_baseline(seeds: pd.DataFrame, settings: Sequence[str], kind: str, metrics: Sequence[str]) -> None:
    """Add to each row how it stands to accum_steps=1 with the same seed and the same other settings."""
    accum, derived = SIZES[0], SIZES[2] if kind == SIZES[1] else SIZES[1]
    key = [setting for setting in settings if setting not in (accum, derived)] + ["seed"]
    first = seeds.loc[seeds[accum] == 1, [*key, *metrics, "data"]].drop_duplicates(key)
    baseline = seeds[key].merge(first, how="left", on=key).set_axis(seeds.index)
    for metric in metrics:
        pairs = zip(seeds[metric], baseline[metric], strict=True)
        against = AGAINST[COMPARED[metric]]
        seeds[f"{metric}_vs_baseline"] = [against(value, base) for value, base in pairs]
    if SKETCH in metrics:  # weights that have seen other samples are elsewhere for a reason of their own
        seeds.loc[seeds["data"] != baseline["data"], f"{SKETCH}_vs_baseline"] = math.nan


def _difference(value: float, base: float) -> float:
    return value - base


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan


def _distance(value: list[float] | None, base: list[float] | None) -> float:
    both = isinstance(value, list) and isinstance(base, list) and len(value) == len(base)
    return math.dist(value, base) if both else math.nan  # type: ignore[arg-type]


def _no_comparison(*_: float) -> float:
    return math.nan


def _typical(against: pd.Series, how: str) -> float:
    """Return the mean over seeds; of ratios the geometric one, for which twice and half even out."""
    known = [value for value in against.dropna() if how != "ratio" or value > 0]
    if not known:
        return math.nan
    return statistics.geometric_mean(known) if how == "ratio" else statistics.fmean(known)


AGAINST: dict[str, Callable[[Any, Any], float]] = {
    "difference": _difference,
    "ratio": _ratio,
    "distance": _distance,
    "largest": _no_comparison,
}


def _is_setting(column: str) -> bool:
    return column.partition(".")[0] in Config.model_fields and not column.startswith(NO_SETTING)


def _told_by_name(runs: pd.DataFrame, key: str) -> bool:
    """Tell whether only some of the problems or optimizers compared have `key`, and their name says what it is."""
    name = f"{key.partition('.')[0]}.name"
    if "." not in key or key == name or _distinct(runs[name]) == 1 or runs[key].notna().all():
        return False
    return bool(runs.groupby(name)[key].nunique(dropna=False).max() == 1)


def _distinct(column: pd.Series) -> int:
    return column.nunique(dropna=False)


def _equal(frame: pd.DataFrame, keys: Sequence[str], values: Sequence[Any]) -> "pd.Series[bool]":
    """Tell of each row whether it has these values; two missing ones are equal."""
    same = pd.Series(True, index=frame.index)
    for key, value in zip(keys, values, strict=True):
        same &= frame[key].isna() if missing(value) else frame[key] == value
    return same


def _reasons(group: pd.DataFrame) -> str:
    """Say what became of the runs that did not finish."""
    failed = group[group["status"] != "finished"]
    pairs = zip(failed["status"], failed["reason"], strict=True)
    return "; ".join(dict.fromkeys(f"{status}: {reason}" for status, reason in pairs))


def _verdict(group: pd.DataFrame) -> tuple[str, str]:
    """Return the gravest verdict of the runs, and the reasons given for it."""
    group = group[group["status"] == "finished"]
    found = [verdict for verdict in VERDICTS if (group["verdict"] == verdict).any()]
    if not found:
        return "", ""
    reasons = group.loc[group["verdict"] == found[-1], "verdict_reason"].dropna()
    return found[-1], "; ".join(dict.fromkeys(filter(None, reasons)))


def _mean(column: pd.Series) -> Any:
    """Return the mean of numbers, or number by number of lists of one length; None for no lists."""
    if column.name not in LISTS:
        return column.mean()
    lists = [values for values in column if isinstance(values, list) and None not in values]
    if not lists or len({len(values) for values in lists}) > 1:
        return None
    return [math.fsum(numbers) / len(lists) for numbers in zip(*lists, strict=True)]
