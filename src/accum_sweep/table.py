"""A comparison as a table of text, for a terminal."""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from accum_sweep.sizes import SIZES
from accum_sweep.summary import Comparison
from accum_sweep.tidy import missing
from accum_sweep.units import show_bytes
from accum_sweep.words import caption, plain, recommendations, short, verdicts

WIDTH = 118  # characters of a line of words


def text(comparisons: Sequence[Comparison]) -> str:
    """Return the tables for a terminal."""
    return "\n\n".join(_aligned(comparison) for comparison in comparisons) or "no runs"


def cells(comparison: Comparison) -> list[list[str]]:
    """Return the table as text: the header row, then one row a setting. Columns without content are left out."""
    rows = comparison.rows
    columns: list[tuple[str, list[str]]] = []
    for setting in comparison.settings:
        header = setting.removesuffix(".name").removeprefix("problem.").removeprefix("optimizer.")
        known = [*comparison.settings, *comparison.constant]
        absent = ["-"] * len(rows)
        if setting in SIZES and "accum_schedule" in known:
            absent = ["by schedule"] * len(rows)
        elif setting in SIZES:
            # A number of micro-batches is missing only where accum_steps=auto came to no choice.
            numbers = (
                rows["accum_steps"] if "accum_steps" in rows else [1 if "accum_steps" in known else None] * len(rows)
            )
            absent = ["auto" if missing(number) else "as written" for number in numbers]
        pairs = zip(rows[setting], absent, strict=True)
        shown = [word if missing(value) else short(plain(value, setting)) for value, word in pairs]
        columns.append((header, shown))
    columns.append(("runs", [_count(*pair) for pair in zip(rows["runs"], rows["finished"], strict=True)]))
    for metric in comparison.metrics:
        if metric == "predicted_allocated_bytes":
            columns.append(("predicted", [_predicted(row) for _, row in rows.iterrows()]))
        if metric not in COLUMNS:
            continue
        columns.append((COLUMNS[metric][0], [_measured(row, metric) for _, row in rows.iterrows()]))
    columns.append(("gradient", [_judged(row) for _, row in rows.iterrows()]))
    if "pareto" in rows:
        columns.append(("Pareto set", ["yes" if best else "" for best in rows["pareto"]]))
    columns.append(("not finished", list(rows["reason"])))
    filled = [(header, values) for header, values in columns if any(values)]
    return [list(line) for line in zip(*([header, *values] for header, values in filled), strict=True)]


def _aligned(comparison: Comparison) -> str:
    lines = cells(comparison)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    numbers = [not any(line[column].startswith("[") for line in lines) for column in range(len(widths))]
    if lines[0][-1] == "not finished":
        numbers[-1] = False
    table = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numbers, strict=True)
        ).rstrip()
        for line in lines
    ]
    table.insert(1, "  ".join("-" * width for width in widths))
    parts = [caption(comparison), table, verdicts(comparison), recommendations(comparison)]
    wrapped = [
        lines if lines is table else [part for line in lines for part in textwrap.wrap(line, WIDTH)] for lines in parts
    ]
    return "\n\n".join("\n".join(lines) for lines in wrapped if lines)


def _judged(row: pd.Series) -> str:
    """Return the verdict on a setting's gradient, and how far it is from the full batch's."""
    error = row.get("gradient_error")
    return row["verdict"] if missing(error) or not row["verdict"] else f"{row['verdict']} ({error:.1g})"


def _predicted(row: pd.Series) -> str:
    """Return the peak memory predicted, and how far it is from the one measured."""
    predicted, error = row["predicted_allocated_bytes"], row.get("prediction_error", math.nan)
    if missing(predicted):
        return ""
    return show_bytes(predicted) if math.isnan(error) else f"{show_bytes(predicted)} ({_percent_off(error)})"


def _measured(row: pd.Series, metric: str) -> str:
    """Return mean, spread and comparison of one metric; empty where nothing was measured."""
    _, show, show_relative = COLUMNS[metric]
    mean, spread, relative = row[metric], row.get(f"{metric}_std", math.nan), row[f"{metric}_vs_baseline"]
    if missing(mean):
        return ""
    cell = show(mean) if missing(spread) or spread == 0 else f"{show(mean)} ± {show(spread)}"
    if missing(relative) or row.get("accum_steps") == 1:
        return cell
    return f"{cell} ({show_relative(relative)})" if cell else show_relative(relative)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.2g}"


def _times(value: float) -> str:
    return f"×{value:.2f}" if value >= 0.1 else f"×{value:.2g}"


def _points(value: float) -> str:
    return "0" if value == 0 else f"{100 * value:+.2f}"


def _percent_off(error: float) -> str:
    return "0 %" if abs(error) < 5e-5 else f"{100 * error:+.2g} %"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _weight(values: list[float]) -> str:
    return f"[{', '.join(f'{value:.4f}' for value in values)}]"


def _away(distance: float) -> str:
    return f"{distance:.2g} away"


# By metric: how it is headed, how it is shown, how its difference from the baseline, or its ratio to it, is shown.
COLUMNS: dict[str, tuple[str, Callable[[Any], str], Callable[[float], str]]] = {
    "first_loss": ("first loss", _number, _signed),
    "last_loss": ("last loss", _number, _signed),
    "last_grad_norm": ("grad norm", _number, _times),
    "test/accuracy": ("test accuracy", _percent, _points),
    "test/loss": ("test loss", _number, _signed),
    "peak_allocated_bytes": ("peak memory", show_bytes, _times),
    "samples_per_second": ("samples/s", _rate, _times),
    "final_weight": ("final weight", _weight, _away),
    "final_sketch": ("final weights", lambda _: "", _away),
}


def _count(runs: int, finished: int) -> str:
    return str(runs) if runs == finished else f"{finished} of {runs}"
