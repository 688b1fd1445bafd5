"""The record of a run: plain data, on disk before anything else hears of it.

    runs/<sweep id>/sweep.json            what the sweep is: a `SweepRecord`
    runs/<sweep id>/<job number>/record.json
    runs/<run id>/record.json             a single run

Everything that reads results, here or elsewhere, reads these files. Numbers that are not finite stand as null: JSON has
no word for them, and `status` says what happened.
"""

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from accum_sweep.errors import UserError

log = logging.getLogger(__name__)

RECORD_FILE = "record.json"
SWEEP_FILE = "sweep.json"
LOCK_FILE = ".lock"  # beside it, held by the process that is at work on the sweep
RUNS_FOLDER = "runs"
VERSION = 1

Status = Literal["finished", "diverged", "oom", "failed", "interrupted", "skipped", "pruned"]


@dataclass(frozen=True)
class Identity:
    """Who a run is: its place in a sweep, or alone."""

    run_id: str
    name: str
    overrides: list[str]
    sweep_id: str | None = None
    job_num: int | None = None


@dataclass(frozen=True)
class Record:
    """One configuration executed once."""

    run_id: str  # unique: the sweep's id and the job's number, or the run folder's name
    run_key: str  # equal for equal settings
    name: str  # what differs in its sweep
    status: Status
    reason: str | None  # why it is not finished
    started_at: str  # ISO 8601, UTC
    ended_at: str
    overrides: list[str]  # the command line's words for it
    config: dict[str, Any]  # the checked configuration, nested
    environment: dict[str, Any]  # versions, device name, git commit
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    series: dict[str, list[Any]] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)  # weights before and after: what a single run prints
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)  # small models: {"initial": {name: values}, ...}
    # "verdict", "reason" and "relative_errors" of the steps judged; "data", equal for equal samples in every step;
    # "final_sketch", see sketch.py
    equivalence: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what a user might not expect
    traceback: str | None = None  # of what made it fail, or its process's last words; None: its settings were refused
    peak_phase: str | None = None  # of memory: in making the data, forward, backward or the optimizer's step
    auto: dict[str, Any] = field(default_factory=dict)  # what accum_steps=auto was decided on: see auto.Decision
    sweep_id: str | None = None
    job_num: int | None = None
    version: int = VERSION


@dataclass(frozen=True)
class SweepRecord:
    """What a sweep is and which runs belong to it."""

    sweep_id: str
    created_at: str
    overrides: list[str]  # what the user typed
    jobs: list[list[str]]  # the overrides of each job, by its number
    names: list[str]  # what differs between them
    name: str  # what is swept
    parent_run_id: str | None = None  # the MLflow run that the sweep's runs hang under
    ended_at: str | None = None
    skipped: dict[int, str] = field(default_factory=dict)  # why, by number: jobs that are not to be run
    keys: list[str] = field(default_factory=list)  # by number; a job that is run again has a number of its own
    search: dict[str, Any] = field(default_factory=dict)  # of one: keys, objectives, trials by job number
    tracking: dict[str, Any] = field(default_factory=dict)  # where its runs are kept beside their folders
    version: int = VERSION

    @classmethod
    def begun(
        cls, sweep_id: str, overrides: Sequence[str], name: str, tracking: dict[str, Any], **more: Any
    ) -> "SweepRecord":
        """Return what a new one is, of which no job has a number yet."""
        created = datetime.now(UTC).isoformat()
        return cls(sweep_id, created, list(overrides), [], [], name, tracking=tracking, **more)

    @property
    def size(self) -> int:
        """How many runs it is to have."""
        return len(set(self.keys)) or len(self.jobs)


def write(entry: Record | SweepRecord, folder: Path) -> Path:
    """Write the record into `folder`, whole or not at all: temporary file, fsync, rename, fsync of the folder."""
    path = folder / (SWEEP_FILE if isinstance(entry, SweepRecord) else RECORD_FILE)
    write_atomically(path, json.dumps(plain(asdict(entry)), allow_nan=False))
    return path


def write_companions(record: Record, folder: Path) -> None:
    """Write, for people and for MLflow's pages, what the record also holds."""
    try:
        write_atomically(folder / "config.yaml", yaml.safe_dump(record.config, sort_keys=False))
        write_atomically(folder / "result.json", json.dumps(record.result) + "\n")
        if record.traceback is not None:
            write_atomically(folder / "traceback.txt", record.traceback)
        if record.weights:
            write_atomically(folder / "weights.json", json.dumps(record.weights) + "\n")
    except OSError as error:
        log.warning("%s: only record.json could be written (%s)", folder, error.strerror)


def refuse_second(folder: Path) -> None:
    """Raise UserError where `folder` holds a run already."""
    if (folder / RECORD_FILE).exists():
        raise UserError(f"{folder} holds a run already; choose another hydra.run.dir or hydra.sweep.subdir")


def write_atomically(path: Path, text: str) -> None:
    """Put `text` at `path` so that a reader, or a power cut, finds the old content or the new, nothing between.

    Its folder must be there.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system lets a folder be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(folder: Path) -> Record | None:
    """Return the record in `folder`, None where there is none; raise UserError where it is damaged."""
    content = _read_json(folder / RECORD_FILE)
    return None if content is None else _from_json(Record, content, folder / RECORD_FILE)


def read_sweep(folder: Path) -> SweepRecord | None:
    """Return the sweep kept in `folder`, None where there is none; raise UserError where it is damaged."""
    content = _read_json(folder / SWEEP_FILE)
    return None if content is None else _from_json(SweepRecord, content, folder / SWEEP_FILE)


def sweeps(runs_folder: Path) -> list[tuple[Path, SweepRecord]]:
    """Return every sweep below `runs_folder`, oldest first."""
    found = [(path.parent, read_sweep(path.parent)) for path in runs_folder.rglob(SWEEP_FILE)]
    return sorted(((folder, sweep) for folder, sweep in found if sweep), key=lambda pair: pair[1].created_at)


def records(folder: Path) -> Iterator[Record]:
    """Yield the records in `folder` and below, by sweep and job number; of a job that was run again, the last."""
    found = [record for path in folder.rglob(RECORD_FILE) if (record := read(path.parent)) is not None]
    found.sort(key=lambda record: (record.sweep_id or record.run_id, record.job_num or 0))
    keys = {sweep.sweep_id: sweep.keys for _, sweep in sweeps(folder)}
    last: dict[object, Record] = {}
    for record in found:
        number, own = record.job_num, keys.get(record.sweep_id or "", [])
        last[(record.sweep_id, own[number]) if number is not None and number < len(own) else record.run_id] = record
    yield from last.values()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); move it away to go on without it") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no record; move it away to go on without it")
    return content


T = TypeVar("T", Record, SweepRecord)


_checks: Callable[[Any], TypeAdapter[Any]] = cache(TypeAdapter)  # to make one takes longer than to read many records


def _from_json(cls: type[T], content: dict[str, Any], path: Path) -> T:
    number = content.get("version", 0)
    if isinstance(number, int) and number > VERSION:
        raise UserError(f"{path} was written by a newer accum-sweep; update this one to read it")
    try:
        found: T = _checks(cls).validate_python(content)
        return found
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{path} is damaged ({where}: {first['msg']}); move it away to go on without it") from error


def plain(value: Any) -> Any:
    """Return `value` with what JSON cannot say, at any depth, replaced: NaN and infinities by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # half a character, from a file name say, is none
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return value
