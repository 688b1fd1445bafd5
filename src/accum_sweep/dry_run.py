"""What a sweep would do: its combinations with their sizes, keys, state, predicted memory and time. Nothing is made."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from accum_sweep.config import Config
from accum_sweep.jobs import Job
from accum_sweep.record import Record, records
from accum_sweep.units import show_bytes

SIZES = ("accum_steps", "micro_batch_size", "effective_batch_size")
HEADINGS = ("combination", *SIZES, "run key", "state", "memory", "time")
# Neither memory nor time depends on these.
NO_MATTER = {"lr", "seed", "tracking", "sweep", "memory_budget", "memory_limit"}


def text(jobs: Sequence[Job], to_go: Sequence[Job], folder: Path) -> str:
    """Return the table of `jobs`, of which `to_go` have no result yet, and what all of it would take.

    Memory is predicted; time is that of earlier runs below `folder` which differ in lr and seed only.
    """
    took = _seconds(folder)
    peaks: dict[str, str] = {}
    left = {job.key for job in to_go}
    rows: list[tuple[str, ...]] = [HEADINGS]
    known, total = 0, 0.0
    for job in jobs:
        form = _form(job.config.model_dump(mode="json"))
        seconds = took.get(form)
        if form not in peaks:
            peaks[form] = _peak(job.config)
        if job.key in left and seconds is not None:
            known, total = known + 1, total + seconds
        sizes = [getattr(job.config, key) for key in SIZES]
        rows.append(
            (
                job.name,
                *("" if size is None else str(size) for size in sizes),
                job.key,
                "to run" if job.key in left else "has its result",
                peaks[form],
                "" if seconds is None else f"{seconds:.3g} s",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    estimate = f"about {total:.3g} s by earlier runs" if known == len(left) else _partly(total, known, len(left))
    answer = f"{len(jobs)} combinations, {len(jobs) - len(left)} have their result, {len(left)} to run: {estimate}"
    return "\n".join([*lines, "", f"{answer}; dry run, nothing was made"])


def _partly(total: float, known: int, count: int) -> str:
    return f"time unknown but for {known} of {count} (about {total:.3g} s by earlier runs)" if known else "time unknown"


def _form(config: dict[str, object]) -> str:
    return json.dumps({key: value for key, value in config.items() if key not in NO_MATTER}, sort_keys=True)


def _seconds(folder: Path) -> dict[str, float]:
    """Return the seconds of the last finished run of each form."""
    ended: list[Record] = sorted(records(folder), key=lambda record: record.ended_at)
    return {_form(record.config): _duration(record) for record in ended if record.status == "finished"}


def _duration(record: Record) -> float:
    return (datetime.fromisoformat(record.ended_at) - datetime.fromisoformat(record.started_at)).total_seconds()


def _peak(config: Config) -> str:
    """Return the predicted peak in words; nothing where it cannot be predicted."""
    if config.automatic:
        return "as it fits"
    from accum_sweep.device import resolve
    from accum_sweep.errors import UserError
    from accum_sweep.predict import outline, try_to_predict

    try:
        device = resolve(config.device, config.precision)
        found = try_to_predict(config, outline(config), device)
    except UserError:  # the device is not there
        return ""
    return "" if found is None else show_bytes(found.needed_bytes)
