"""From records to a tidy table: one row a run. pandas only.

Columns keep the names they have elsewhere: config keys are dotted (`optimizer.name`), metrics carry their unit
(`peak_allocated_bytes`, `step_seconds`), what the machine was begins with `environment.`.
"""

import json
import math
from collections.abc import Iterable
from typing import Any

import pandas as pd

from accum_sweep.config import flatten
from accum_sweep.record import Record

IDENTITY = ["sweep_id", "job_num", "run_id", "run_key", "name", "status", "reason", "started_at", "ended_at"]
WEIGHTS = "final_weight"  # a list of numbers, where they are few
SKETCH = "final_sketch"  # numbers that stand for the weights, where they are many: see sketch.py
LISTS = (WEIGHTS, SKETCH)


def to_frame(records: Iterable[Record]) -> pd.DataFrame:
    """Return one row a run, with identity, config, metrics, weights where short, and environment.

    Config keys keep their dotted names, so do `environment.` ones; lists stand as JSON. `device` is the one the run
    had, where it got one. No records: an empty frame.
    """
    rows = [_row(record) for record in records]
    return pd.DataFrame(rows, columns=IDENTITY if not rows else None)


def _row(record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {key: getattr(record, key) for key in IDENTITY}
    config = flatten(record.config).items()
    row |= {key: json.dumps(value) if isinstance(value, list) else value for key, value in config}
    row["device"] = record.environment.get("device") or row.get("device")
    row |= record.metrics
    row |= {key: json.dumps(value) for key, value in record.result.items() if isinstance(value, list)}
    row |= {
        "verdict": record.equivalence.get("verdict"),
        "verdict_reason": record.equivalence.get("reason"),
        "data": record.equivalence.get("data"),
        "notes": "; ".join(record.notes) or None,
        "peak_phase": record.peak_phase,
    }
    if SKETCH in record.equivalence and WEIGHTS not in record.result:
        row[SKETCH] = json.dumps(record.equivalence[SKETCH])
    if "weight_changed" in record.result:
        row["weight_changed"] = record.result["weight_changed"]
    return row | {f"environment.{key}": value for key, value in record.environment.items()}


def missing(value: Any) -> bool:
    """Tell whether a cell has no value."""
    return value is None or (isinstance(value, float) and math.isnan(value))
