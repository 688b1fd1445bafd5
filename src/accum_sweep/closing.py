"""The end of a sweep: its record closed, its table written, its parent run in MLflow ended."""

import logging
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from accum_sweep import exports, summary, tidy
from accum_sweep.record import Status, SweepRecord, records, write
from accum_sweep.tracking import Tracker

log = logging.getLogger(__name__)

TABLE_FILE = "summary.csv"


def close(plan: SweepRecord, folder: Path) -> tuple[SweepRecord, int, list[summary.Comparison]]:
    """Close the record of a sweep and write its table; return it, how many runs did not finish, and the tables.

    Where the disk is full, the tables are returned even so; the sweep stays open on disk, for the next one to close.
    """
    plan = replace(plan, ended_at=datetime.now(UTC).isoformat())
    own = [record for record in records(folder) if record.sweep_id == plan.sweep_id]
    unfinished = plan.size - sum(record.status in ("finished", "pruned") for record in own)
    frame = tidy.to_frame(own)
    try:
        exports.write_csv(frame, folder / TABLE_FILE)
        write(plan, folder)
    except OSError as error:
        log.error("%s: the sweep's end and table cannot be written (%s)", folder, error.strerror)
    return plan, unfinished, summary.compare(frame, plan.search.get("objectives"))


def tell(plan: SweepRecord, folder: Path, tracker: Tracker, unfinished: int, note: str, cut: Status | None) -> None:
    """End the sweep's parent run, described by `note`; `cut` is what became of one that did not go through its jobs."""
    status: Status = cut or ("failed" if unfinished else "finished")
    counts = {"runs": plan.size, "runs_finished": plan.size - unfinished}
    tracker.end_sweep(plan, status, note, counts, folder / TABLE_FILE)
