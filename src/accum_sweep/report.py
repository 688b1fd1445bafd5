"""A comparison put on paper: as a table for the terminal, as Markdown, and its runs as CSV."""

import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from accum_sweep.advice import NEARLY, advise
from accum_sweep.record import write_atomically
from accum_sweep.sizes import SIZES
from accum_sweep.summary import SKETCH, Comparison
from accum_sweep.units import show_bytes

KINDS = {
    "micro_batch_size": "fixed micro-batch: the effective batch grows with accum_steps",
    "effective_batch_size": "fixed effective batch: the micro-batch shrinks as accum_steps grows",
}
# Settings that go without saying where they are as most people leave them.
UNREMARKABLE: dict[str, Any] = {
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "on_nonfinite": "stop",
    "batchnorm": "train",
    "checkpointing": False,
    "compile": False,
    "fused_linear": False,
    "step_in_backward": False,
    "parallel": "ddp",
    "sync_every_micro_batch": False,
    "processes": 1,
}
BYTES = ("memory_budget", "memory_limit")  # settings that are sizes of memory
MANY = 4  # settings that are named beside a reason
_SLOWER = f"{100 * (1 - NEARLY):.0f} %"
RULE = f"(the least memory of those that are the same training, fit, and are within {_SLOWER} of the fastest)"
LONGEST_CONSTANT = 40  # characters of a setting; longer ones the caption leaves out and the table cuts


def text(comparisons: Sequence[Comparison]) -> str:
    """Return the tables for a terminal."""
    return "\n\n".join(_aligned(comparison) for comparison in comparisons) or "no runs"


def markdown(comparisons: Sequence[Comparison]) -> str:
    """Return the tables as Markdown."""
    return "\n\n".join(_markdown(comparison) for comparison in comparisons) or "no runs"


def write_csv(frame: pd.DataFrame, path: Path | None) -> None:
    """Write every run, one row each, all columns, numbers as numbers; `path` None is standard output.

    A file is complete or not there; what is no file, such as a pipe, is written to. Raises OSError.
    """
    typed = frame.drop(
        columns=SKETCH, errors="ignore"
    ).convert_dtypes()  # a column of whole numbers stays one where a failed run has none
    if path is None:
        typed.to_csv(sys.stdout, index=False)
    elif path.exists() and not path.is_file():
        typed.to_csv(path, index=False)
    else:
        write_atomically(path.resolve(), typed.to_csv(index=False))


def cells(comparison: Comparison) -> list[list[str]]:
    """Return the table as text: the header row, then one row a setting. Columns without content are left out."""
    rows = comparison.rows
    columns: list[tuple[str, list[str]]] = []
    for setting in comparison.settings:
        header = setting.removesuffix(".name").removeprefix("problem.").removeprefix("optimizer.")
        known = [*comparison.settings, *comparison.constant]
        missing = ["-"] * len(rows)
        if setting in SIZES and "accum_schedule" in known:
            missing = ["by schedule"] * len(rows)
        elif setting in SIZES:
            # A number of micro-batches is missing only where accum_steps=auto came to no choice.
            numbers = (
                rows["accum_steps"] if "accum_steps" in rows else [1 if "accum_steps" in known else None] * len(rows)
            )
            missing = ["auto" if _missing(number) else "as written" for number in numbers]
        pairs = zip(rows[setting], missing, strict=True)
        shown = [word if _missing(value) else _short(_plain(value, setting)) for value, word in pairs]
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
    below = [*_verdict_notes(comparison, wrap=True), *_advice(comparison, wrap=True)]
    return "\n".join([*_caption(comparison, wrap=True), "", *table, *below])


def _markdown(comparison: Comparison) -> str:
    header, *lines = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in cells(comparison))
    table = [header, ["---:"] * len(header), *lines]
    # The table first: MLflow folds a description after its first lines.
    below = [line for part in (_advice, _caption, _verdict_notes) for line in part(comparison, wrap=False)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in table), "", *below])


def _caption(comparison: Comparison, wrap: bool) -> list[str]:
    """Say what the table holds: which kind of sweep, what is the same everywhere, how to read it."""
    rows = comparison.rows
    runs, finished = int(rows["runs"].sum()), int(rows["finished"].sum())
    kind = f"; {KINDS[comparison.kind]}" if comparison.kind else ""
    lines = [f"{runs} run{'s' * (runs != 1)}, {finished} finished{kind}"]
    constant = comparison.constant.items()
    same = [f"{key}={_plain(value, key)}" for key, value in constant if UNREMARKABLE.get(key, ...) != value]
    lines.append(f"the same for all: {' '.join(item for item in same if len(item) <= LONGEST_CONSTANT)}")
    notes = []
    if any(rows[f"{metric}_vs_baseline"].notna().any() for metric in comparison.metrics):
        notes.append("(in parentheses: against accum_steps=1, seed by seed)")
    if (rows["finished"] > 1).any():
        notes.append("(±: standard deviation over the runs of a row)")
    lines += [" ".join(notes)] if notes else []
    return [part for line in lines for part in (textwrap.wrap(line, 118) if wrap else [line + "  "])]


def _verdict_notes(comparison: Comparison, wrap: bool) -> list[str]:
    """Say, for each reason there is, why which settings' gradients are as they are, and what else was noted."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for _, row in comparison.rows.iterrows():
        label = " ".join(
            f"{key}={_short(_plain(row[key], key))}" for key in comparison.settings if not _missing(row[key])
        )
        for kind, words in ((row["verdict"], row["verdict_reason"]), ("note", row["notes"])):
            if words:
                by_reason.setdefault((kind, words), []).append(label)
    lines = [f"{verdict}: {reason}{_of(labels)}" for (verdict, reason), labels in by_reason.items()]
    return ["", *(part for line in lines for part in (textwrap.wrap(line, 118) if wrap else [line + "  "]))] * bool(
        lines
    )


def _advice(comparison: Comparison, wrap: bool) -> list[str]:
    """Say which setting to take, by which rule, and which are worth a look."""
    found = advise(comparison)
    if not found:
        return []
    lines = []
    for advice in found:
        shared = " ".join(f"{key}={_short(_plain(value, key))}" for key, value in advice.others.items())
        front = ", ".join(map(str, advice.front))
        lines.append(
            f"{'nothing to take' if advice.choice is None else 'take'}{shared and f' for {shared}'}: {advice.why}"
            + (f"; Pareto front of memory and speed: accum_steps={front}" if len(advice.front) > 1 else "")
        )
    lines.append(RULE)
    return ["", *(part for line in lines for part in (textwrap.wrap(line, 118) if wrap else [line + "  "]))]


def _of(labels: Sequence[str]) -> str:
    named = [label for label in labels if label]
    more = f" and {len(named) - MANY} more" if len(named) > MANY else ""
    return f" ({', '.join(named[:MANY])}{more})" if named else ""


def _judged(row: pd.Series) -> str:
    """Return the verdict on a setting's gradient, and how far it is from the full batch's."""
    error = row.get("gradient_error")
    return row["verdict"] if _missing(error) or not row["verdict"] else f"{row['verdict']} ({error:.1g})"


def _predicted(row: pd.Series) -> str:
    """Return the peak memory predicted, and how far it is from the one measured."""
    predicted, error = row["predicted_allocated_bytes"], row.get("prediction_error", math.nan)
    if _missing(predicted):
        return ""
    return show_bytes(predicted) if math.isnan(error) else f"{show_bytes(predicted)} ({_percent_off(error)})"


def _measured(row: pd.Series, metric: str) -> str:
    """Return mean, spread and comparison of one metric; empty where nothing was measured."""
    _, show, show_relative = COLUMNS[metric]
    mean, spread, relative = row[metric], row.get(f"{metric}_std", math.nan), row[f"{metric}_vs_baseline"]
    if _missing(mean):
        return ""
    cell = show(mean) if _missing(spread) or spread == 0 else f"{show(mean)} ± {show(spread)}"
    if _missing(relative) or row.get("accum_steps") == 1:
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


def _plain(value: Any, key: str) -> str:
    """Return a setting as one would type it; whole numbers that pandas keeps as floats are whole again."""
    if key in BYTES:
        return show_bytes(value).replace(" ", "")
    return str(int(value)) if isinstance(value, float) and value.is_integer() and 1 <= abs(value) < 1e15 else str(value)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_CONSTANT else f"{text[: LONGEST_CONSTANT - 1]}…"


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
