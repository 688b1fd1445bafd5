"""What MLflow is missing of the records on disk, sent once; what a killed process has left running there, ended."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from accum_sweep import closing, exports
from accum_sweep.config import Tracking
from accum_sweep.errors import UserError, without_secrets
from accum_sweep.lock import held
from accum_sweep.record import (
    LOCK_FILE,
    RECORD_FILE,
    SWEEP_FILE,
    Record,
    Status,
    SweepRecord,
    read,
    read_sweep,
    sweeps,
    write,
)
from accum_sweep.tracking import Tracker, open_tracker

SYNC_LOCK = ".sync.lock"
Known = Mapping[str, tuple[str, bool]]  # see Tracker.known


@dataclass
class Found:
    """Of one store: the records that are to be there, with their folders, and the sweeps they are of."""

    runs: list[tuple[Path, Record]]
    sweeps: list[tuple[Path, SweepRecord]]


def sync(folder: Path) -> str:
    """Send what is missing of the records below `folder`, each to the store it was meant for; return what was done.

    Sweeps that another process is at work on are left alone. Raises UserError where a store is away, or another
    process is at it.
    """
    done: Counter[str] = Counter()
    if not folder.is_dir():
        raise UserError(f"sync: there is no folder {folder}; give --runs FOLDER")
    with ExitStack() as locks:
        if not locks.enter_context(held(folder / SYNC_LOCK)):
            raise UserError(f"sync: another process syncs {folder}; wait for it")
        for tracking, found in _by_store(folder, locks, done).items():
            if tracking.backend == "none":
                done["untracked"] += len(found.runs)
                continue
            tracker = open_tracker(tracking)
            if tracker is None:
                raise UserError("sync: the store is away, see above; what was sent before it, is there")
            try:
                _send(found, tracker, tracker.known(), done)
            except UserError:
                raise
            except Exception as error:  # MLflow and the drivers below it raise what they like
                why = without_secrets(str(error).partition("\n")[0])
                raise UserError(
                    f"sync: the store does not take all ({why}); what was sent is there, try again"
                ) from error
    return _in_words(done)


def repair(folder: Path) -> int:
    """Close, on disk and in MLflow, the sweeps in `folder` that a killed process has left open; return how many.

    Nothing is raised where a store is away: the next one tries again.
    """
    done: Counter[str] = Counter()
    for path in folder.glob(f"*/{SWEEP_FILE}"):
        sweep = read_sweep(path.parent)
        if sweep is not None and sweep.ended_at is None and sweep.tracking:
            with held(path.parent / LOCK_FILE) as ours:
                tracker = open_tracker(Tracking.model_validate(sweep.tracking)) if ours else None
                if tracker is not None:
                    with tracker.tolerant(f"sweep {sweep.sweep_id}"):
                        found = Found(list(records_below(path.parent)), [(path.parent, sweep)])
                        _send(found, tracker, tracker.known(sweep.sweep_id), done)
    return done["closed"]


def _by_store(folder: Path, locks: ExitStack, done: Counter[str]) -> dict[Tracking, Found]:
    """Return what is on disk by the store it is for; sweeps at work are left out, the others stay locked."""
    stores: dict[Tracking, Found] = defaultdict(lambda: Found([], []))
    busy = set()
    for path, sweep in sweeps(folder):
        if not locks.enter_context(held(path / LOCK_FILE)):
            busy.add(sweep.sweep_id)
        elif sweep.tracking:  # else it was made before sweeps kept it
            stores[Tracking.model_validate(sweep.tracking)].sweeps.append((path, sweep))
    done["at work"] = len(busy)
    for path, record in records_below(folder):
        if record.sweep_id not in busy:
            stores[Tracking.model_validate(record.config["tracking"])].runs.append((path, record))
    return dict(stores)


def records_below(folder: Path) -> Iterator[tuple[Path, Record]]:
    """Yield every record with its folder, those of runs that were made again too."""
    for path in sorted(folder.rglob(RECORD_FILE)):
        if (record := read(path.parent)) is not None:
            yield path.parent, record


def _send(found: Found, tracker: Tracker, known: Known, done: Counter[str]) -> None:
    """Send runs and sweeps to their store, and close the sweeps that nobody has closed there."""
    parents: dict[str, str] = {}
    for path, sweep in found.sweeps:
        there, _ = known.get(sweep.sweep_id, (None, False))
        if there is None:
            there = tracker.start_sweep(replace(sweep, parent_run_id=None))
        if there != sweep.parent_run_id:
            write(replace(sweep, parent_run_id=there), path)
        parents[sweep.sweep_id] = there
    done += send(found.runs, tracker, parents, known)
    for path, sweep in found.sweeps:
        if not known.get(sweep.sweep_id, (None, False))[1]:
            cut: Status | None = None if sweep.ended_at is not None else "interrupted"
            closed, unfinished, tables = closing.close(replace(sweep, parent_run_id=parents[sweep.sweep_id]), path)
            closing.tell(closed, path, tracker, unfinished, exports.markdown(tables), cut)
            done["closed"] += 1


def send(
    runs: Iterable[tuple[Path, Record]],
    tracker: Tracker,
    parents: Mapping[str, str],
    known: Known | None = None,
) -> Counter[str]:
    """Send those runs that a store has not, and what it lacks of those that were cut off; return how many of each."""
    known, done = tracker.known() if known is None else known, Counter[str]()
    for path, record in runs:
        there, ended = known.get(record.run_id, (None, False))
        if ended:
            done["there"] += 1
            continue
        tracker.log_run(record, path, parents.get(record.sweep_id or ""), there)
        done["sent" if there is None else "completed"] += 1
    return done


def _in_words(done: Counter[str]) -> str:
    words = [f"{done['sent']} runs sent", f"{done['completed']} completed", f"{done['closed']} sweeps closed"]
    words.append(f"{done['there']} were there")
    if done["untracked"]:
        words.append(f"{done['untracked']} are not to be tracked (tracking=none)")
    if done["at work"]:
        words.append(f"{done['at work']} sweeps are at work and left alone")
    return ", ".join(words)
