"""A plan put on paper: a table, CSV, JSON, a plot."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

from accum_sweep.device import HEADROOM
from accum_sweep.errors import UserError
from accum_sweep.ledger import Kind
from accum_sweep.plan import PHASES, Plan, Row
from accum_sweep.record import write_atomically
from accum_sweep.units import UNITS, show_bytes

UNSEEN = {
    "cuda": "kernels' workspaces, fragments left by other tensors, and CUDA's own context",
    "cpu": "kernels that run on more than 128 MiB, and the C library's fragments",
    "mps": "kernels' workspaces and what the allocator reserves",
}

# By Okabe and Ito: told apart by those who see few colours, and in print.
COLOURS: dict[Kind, str] = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#56B4E9",
    "data": "#F0E442",
    "temporaries": "#999999",
}


def text(plan: Plan) -> str:
    """Return the table for a terminal, what it is of above it, and the answer below it."""
    config = plan.config
    header = ["accum_steps", "micro_batch_size", "peak memory", "reserved", "fits", "peak in the"]
    header += list(plan.rows[0].prediction.parts)
    lines = [header, *(_cells(plan, row) for row in plan.rows)]
    filled = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in filled]
    table = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*filled, strict=True)
    ]
    table.insert(1, "  ".join("-" * width for width in widths))
    optimizer = f"optimizer={config.optimizer['name']}"
    what = f"problem={config.problem.name} effective_batch_size={config.effective_batch_size} {optimizer}"
    caption = f"predicted for {plan.device_type}, not run: {what} precision={config.precision}"
    unseen = f"not seen, and what the {HEADROOM:.0%} are for: {UNSEEN[plan.device_type]}"
    if config.memory_limit is not None:
        unseen += "; under memory_limit also copies of the weights, the equivalence check and the profiler"
    return "\n".join([caption, "", *table, "", plan.answer, unseen])


def _cells(plan: Plan, row: Row) -> list[str]:
    prediction = row.prediction
    reserved = prediction.peak_reserved_bytes
    fits = {True: "yes", False: "no", None: ""}[plan.fits(row)]
    return [
        str(row.accum_steps),
        str(row.micro_batch_size),
        show_bytes(prediction.peak_allocated_bytes),
        "" if reserved is None else show_bytes(reserved),
        fits,
        PHASES[prediction.phase],
        *map(show_bytes, prediction.parts.values()),
    ]


def rows(plan: Plan) -> list[dict[str, Any]]:
    """Return one dictionary a row, sizes in bytes."""
    return [
        {
            "accum_steps": row.accum_steps,
            "micro_batch_size": row.micro_batch_size,
            "predicted_allocated_bytes": row.prediction.peak_allocated_bytes,
            "predicted_reserved_bytes": row.prediction.peak_reserved_bytes,
            "fits": plan.fits(row),
            "peak_phase": row.prediction.phase,
            **{f"peak_{kind}_bytes": size for kind, size in row.prediction.parts.items()},
        }
        for row in plan.rows
    ]


def as_csv(plan: Plan) -> str:
    """Return the rows as CSV."""
    buffer = io.StringIO()
    found = rows(plan)
    writer = csv.DictWriter(buffer, found[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return buffer.getvalue()


def as_json(plan: Plan) -> str:
    """Return the plan as JSON, with the configuration that its rows have in common."""
    own = {"automatic", "processes", "accum_steps", "micro_batch_size"}
    content = {
        "device": plan.device_type,
        "budget_bytes": plan.budget_bytes,
        "usable_bytes": plan.usable_bytes,
        "recommended_accum_steps": plan.recommended and plan.recommended.accum_steps,
        "answer": plan.answer,
        "rows": rows(plan),
        "config": plan.config.model_dump(mode="json", exclude=own),
    }
    return json.dumps(content, indent=2) + "\n"


def draw(plan: Plan, path: Path | None) -> None:
    """Draw who holds the peak, one bar a split, and the budget, to a file by its suffix; None: PNG, standard output."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    needed = [row.needed_bytes for row in plan.rows]
    usable = plan.usable_bytes
    # What is far beyond the budget is cut, or what fits could not be seen.
    top = 1.1 * max(needed) if usable is None else min(1.1 * max(needed), max(2.5 * usable, 1.1 * min(needed)))
    unit = show_bytes(top).split()[1]
    scale = UNITS[unit]
    labels = [f"{row.accum_steps} × {row.micro_batch_size}" for row in plan.rows]
    below = [0.0] * len(labels)
    for kind, colour in COLOURS.items():
        heights = [row.prediction.parts[kind] / scale for row in plan.rows]
        axes.bar(labels, heights, bottom=below, label=kind, color=colour)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    if plan.rows[0].prediction.peak_reserved_bytes is not None:
        reserved = [size / scale for size in needed]
        axes.bar(labels, reserved, label="reserved by the allocator", fill=False, edgecolor="black", linestyle=":")
    for place, size in enumerate(needed):
        words, height = (show_bytes(size), size) if size <= top else (f"{show_bytes(size)} ↑", 0.94 * top)
        axes.annotate(
            words,
            (place, height / scale),
            (0, 2),  # points above
            textcoords="offset points",
            ha="center",
            fontsize=7,
            bbox={"color": "white", "pad": 0.5} if size > top else None,
        )
    if usable is not None and plan.budget_bytes is not None:
        line = f"{show_bytes(plan.budget_bytes)}, {HEADROOM:.0%} left free"
        axes.axhline(usable / scale, color="black", linewidth=1, label=line)
    axes.set_ylim(0, top / scale)
    axes.set_xlabel("accum_steps × micro_batch_size")
    axes.set_ylabel(f"predicted peak, {unit}")
    axes.legend(fontsize=8)
    if path is None:
        figure.savefig(sys.stdout.buffer, format="png", dpi=150)
        return
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:  # the latter for a suffix it does not know
        raise UserError(f"--plot {path}: cannot be written ({error}); choose another file") from error


def suffixes() -> set[str]:
    """Return what a plot's file may end with."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return {f".{name}" for name in FigureCanvasAgg.get_supported_filetypes()}


def put(option: str, where: str, content: str) -> None:
    """Write to a file, whole or not at all, or to standard output where it is called -."""
    if where == "-":
        sys.stdout.write(content)
        return
    try:
        write_atomically(Path(where).resolve(), content)
    except OSError as error:
        raise UserError(f"{option} {where}: cannot be written ({error.strerror}); choose another file") from error
