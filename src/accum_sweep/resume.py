"""A sweep continued: which of its combinations are finished, which are to be run, and whether it is the same sweep.

What ran before stays where it is. Runs that are made again get new numbers, and folders of their own.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accum_sweep.config import NO_MATTER, flatten
from accum_sweep.errors import ConfigError, Fault
from accum_sweep.jobs import Job
from accum_sweep.record import Record, SweepRecord, records, sweeps

SHOWN = 5  # differences that are told one by one
# The others' outcome may be another when they are run again: the machine's fault, or what it had to give.
RESULTS = ("finished", "diverged")


def find(which: str, folder: Path) -> tuple[Path, SweepRecord]:
    """Return the sweep called `which`, its id or latest, beside where the next one would be; raise ConfigError."""
    known = sweeps(folder) or sweeps(folder.parent)
    for path, sweep in reversed(known):
        if which in ("latest", sweep.sweep_id):
            if not sweep.keys and not sweep.search:
                rule = "was made by an accum-sweep that kept no keys, and cannot be continued"
                raise ConfigError([Fault("sweep.resume", which, rule, "start it anew")])
            return path, sweep
    remedy = "see summary --list" if known else "leave it out to start one"
    raise ConfigError([Fault("sweep.resume", which, f"is no sweep in {folder.parent}", remedy)])


def left(sweep: SweepRecord, folder: Path, jobs: Sequence[Job], extend: bool) -> list[Job]:
    """Return the jobs that have no result yet; raise ConfigError where `jobs` are not those of the sweep.

    With `extend` there may be more of them.
    """
    before, now = set(sweep.keys), {job.key for job in jobs}
    added = [job for job in jobs if job.key not in before]
    if before - now or (added and not extend):
        raise ConfigError([_another(sweep, folder, jobs, added)])
    done = {sweep.keys[number] for number, record in _own(sweep, folder).items() if record.status in RESULTS}
    return [job for job in jobs if job.key not in done]


def with_more(sweep: SweepRecord, jobs: Sequence[Job]) -> SweepRecord:
    """Return the sweep with `jobs` to be run, numbered after those it has."""
    return replace(
        sweep,
        jobs=sweep.jobs + [job.overrides for job in jobs],
        names=sweep.names + [job.name for job in jobs],
        keys=sweep.keys + [job.key for job in jobs],
        ended_at=None,
    )


def _own(sweep: SweepRecord, folder: Path) -> dict[int, Record]:
    """Return the sweep's records by job number; of a job that was run again, the last."""
    return {r.job_num: r for r in records(folder) if r.sweep_id == sweep.sweep_id and r.job_num is not None}


def _another(sweep: SweepRecord, folder: Path, jobs: Sequence[Job], added: Sequence[Job]) -> Fault:
    """Say in what the sweep and the jobs differ."""
    now = {job.key for job in jobs}
    lost = {
        name: number for number, (name, key) in enumerate(zip(sweep.names, sweep.keys, strict=True)) if key not in now
    }
    ran = _own(sweep, folder)
    words: list[str] = []
    new: list[str] = []
    for job in added:
        number = lost.pop(job.name, None)
        if number is None:
            new.append(job.name)
        elif number in ran:
            words += [
                word for word in _changes(ran[number].config, job.config.model_dump(mode="json")) if word not in words
            ]
        else:
            words.append(f"other settings for {job.name}")
    words += [f"no more {name}" for name in lost] + [f"also {name}" for name in new]
    told = ", ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")
    only_more = not lost and len(words) == len(new)
    remedy = "use sweep.extend=true to add them" if only_more else "give its own settings, or leave sweep.resume out"
    return Fault("sweep.resume", sweep.sweep_id, f"was started with other settings; now: {told}", remedy)


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    old, new = flatten(before), flatten(now)
    differing = [key for key in old | new if old.get(key) != new.get(key) and key.partition(".")[0] not in NO_MATTER]
    return [f"{key}={new.get(key)} instead of {old.get(key)}" for key in differing]
