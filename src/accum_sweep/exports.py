"""A comparison, and its runs, as files for elsewhere: Markdown, CSV."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from accum_sweep.record import write_atomically
from accum_sweep.summary import Comparison
from accum_sweep.table import cells
from accum_sweep.tidy import SKETCH
from accum_sweep.words import caption, recommendations, verdicts


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


def _markdown(comparison: Comparison) -> str:
    header, *lines = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in cells(comparison))
    table = [header, ["---:"] * len(header), *lines]
    # The table first: MLflow folds a description after its first lines.
    below = [f"{line}  " for part in (recommendations, caption, verdicts) for line in part(comparison)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in table), "", *below])
