"""From records to a tidy table, and from that to a comparison. pandas only.

`to_frame` has one row a run and stable columns; `compare` folds seeds and sets every setting against accum_steps=1 of
the same seeds. Fixed micro-batch and fixed effective batch are different questions and never share a table.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from accum_sweep.config import Config, flatten
from accum_sweep.record import Record

SIZES = ["accum_steps", "micro_batch_size", "effective_batch_size"]
KINDS = {
    "micro_batch_size": "fixed micro-batch: the effective batch grows with accum_steps",
    "effective_batch_size": "fixed effective batch: the micro-batch shrinks as accum_steps grows",
}
IDENTITY = ["sweep_id", "job_num", "run_id", "run_key", "name", "status", "reason", "started_at", "ended_at"]
# Config keys that do not make a setting: who asked for it, where it is kept, what it is derived from.
NO_SETTING = ("seed", "fixed", "save_weights", "tracking.", "sweep.", "problem.default_")

# What is compared: the column, and how it is set against the baseline.
COMPARED = {
    "first_loss": None,
    "last_loss": "difference",
    "last_grad_norm": None,
    "test/accuracy": "difference",
    "peak_allocated_bytes": "ratio",
    "samples_per_second": "ratio",
}


@dataclass(frozen=True)
class Comparison:
    """One table: the runs of one kind, one row a setting.

    `rows` has a column for each of `settings`, then `runs`, `finished` and `reason`, and for each metric m in `metrics`
    the columns m (mean over seeds), `m_std` (NaN for one seed), and where it is compared `m_vs_baseline` (mean of the
    differences or ratios, seed by seed; NaN where no seed has a baseline).
    """

    kind: str
    settings: list[str]
    metrics: list[str]
    constant: dict[str, Any]
    rows: pd.DataFrame


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Return one row a run, with identity, config, metrics, weights where short, and environment.

    Config keys keep their dotted names, so do `environment.` ones; lists stand as JSON. No records: an empty frame.
    """
    rows = [_row(record) for record in records]
    frame = pd.DataFrame(rows, columns=IDENTITY if not rows else None)
    empty = [name for name in frame.columns if name not in IDENTITY and frame[name].isna().all()]
    return frame.drop(columns=empty)


def compare(frame: pd.DataFrame) -> list[Comparison]:
    """Return one comparison for each kind of sweep in `frame`; none for no runs."""
    if frame.empty:
        return []
    return [_compare(runs, str(kind)) for kind, runs in frame.groupby("fixed", dropna=False)]


def varying(runs: pd.DataFrame) -> list[str]:
    """Return the config columns that differ between these runs, other than the seed; the sizes come first.

    Where two problems or optimizers are compared, keys that follow from the name alone are left out.
    """
    keys = [key for key in runs.columns if _is_setting(key) and _distinct(runs[key]) > 1]
    sizes = [size for size in SIZES if size in keys]
    return [*sizes, *(key for key in keys if key not in SIZES and not _told_by_name(runs, key))]


def _compare(runs: pd.DataFrame, kind: str) -> Comparison:
    settings = varying(runs)
    constant = {key: runs[key].iloc[0] for key in runs.columns if _is_setting(key) and _distinct(runs[key]) == 1}
    metrics = [metric for metric in COMPARED if metric in runs.columns]
    finished = runs[runs["status"] == "finished"]
    relative = _against_baseline(finished, settings, kind, metrics)
    rows = []
    by = settings or ["fixed"]
    for values, group in runs.groupby(by, dropna=False, sort=False):
        done = relative.loc[relative.index.intersection(group.index)]
        row: dict[str, Any] = dict(zip(by, values, strict=True))
        row |= {"runs": len(group), "finished": len(done), "reason": _reasons(group)}
        for metric in metrics:
            row[metric], row[f"{metric}_std"] = done[metric].mean(), done[metric].std()
            if f"{metric}_vs_baseline" in done:
                row[f"{metric}_vs_baseline"] = done[f"{metric}_vs_baseline"].mean()
        if "final_weight" in group:
            row["final_weight"] = _mean_weight(done["final_weight"])
        rows.append(row)
    table = pd.DataFrame(rows).sort_values(by, ignore_index=True)
    return Comparison(kind, settings, metrics, constant, table)


def _against_baseline(
    finished: pd.DataFrame, settings: Sequence[str], kind: str, metrics: Sequence[str]
) -> pd.DataFrame:
    """Add to each run how it stands to the accum_steps=1 run of the same seed and the same other settings."""
    if "accum_steps" not in settings:
        return finished
    derived = SIZES[1] if kind == SIZES[2] else SIZES[2]
    key = [setting for setting in settings if setting not in ("accum_steps", derived)] + ["seed"]
    first = finished[finished["accum_steps"] == 1].drop_duplicates(key)
    joined = finished.merge(first, how="left", on=key, suffixes=("", "_of_baseline")).set_axis(finished.index)
    for metric in metrics:
        if COMPARED[metric] == "difference":
            joined[f"{metric}_vs_baseline"] = joined[metric] - joined[f"{metric}_of_baseline"]
        elif COMPARED[metric] == "ratio":
            joined[f"{metric}_vs_baseline"] = joined[metric] / joined[f"{metric}_of_baseline"]
    return joined


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {key: getattr(record, key) for key in IDENTITY}
    row |= {
        key: json.dumps(value) if isinstance(value, list) else value for key, value in flatten(record.config).items()
    }
    row |= record.metrics
    row |= {key: json.dumps(value) for key, value in record.result.items() if isinstance(value, list)}
    if "weight_changed" in record.result:
        row["weight_changed"] = record.result["weight_changed"]
    return row | {f"environment.{key}": value for key, value in record.environment.items()}


def _is_setting(column: str) -> bool:
    return column.partition(".")[0] in Config.model_fields and not column.startswith(NO_SETTING)


def _told_by_name(runs: pd.DataFrame, key: str) -> bool:
    """Tell whether `problem.name` or `optimizer.name` differs and says what `key` below it is."""
    name = f"{key.partition('.')[0]}.name"
    if "." not in key or key == name or _distinct(runs[name]) == 1:
        return False
    return bool(runs.groupby(name)[key].nunique(dropna=False).max() == 1)


def _distinct(column: pd.Series) -> int:
    return column.nunique(dropna=False)


def _reasons(group: pd.DataFrame) -> str:
    """Say what became of the runs that did not finish."""
    failed = group[group["status"] != "finished"]
    return "; ".join(dict.fromkeys(f"{row.status}: {row.reason}" for row in failed.itertuples()))


def _mean_weight(weights: pd.Series) -> list[float] | None:
    """Mean over runs of weights that stand as JSON lists; None without runs."""
    lists = [json.loads(text) for text in weights.dropna()]
    return [sum(numbers) / len(lists) for numbers in zip(*lists, strict=True)] if lists else None
