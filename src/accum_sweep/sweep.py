"""One multirun: every combination checked before the first starts, each a job of Hydra's launcher, a table at the end.

The only file that knows Hydra's launchers. What a sweep is stands in `sweep.json` in its folder, written before
the first job; jobs find themselves in it by their number.
"""

import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict, read_write

from accum_sweep import closing, dry_run, report, resume, sync
from accum_sweep.config import SweepOptions
from accum_sweep.errors import ConfigError, Fault, RunsFailed, UserError, interrupted
from accum_sweep.jobs import Job, combine
from accum_sweep.lock import held
from accum_sweep.progress import Progress
from accum_sweep.prune import needs_as_much
from accum_sweep.record import LOCK_FILE, Record, Status, SweepRecord, read, read_sweep, write
from accum_sweep.tracking import Tracker, open_tracker, tolerated

log = logging.getLogger(__name__)


def sweep(
    params: Sequence[str], arguments: Sequence[str], config: DictConfig, context: HydraContext, task: TaskFunction
) -> None:
    """Run the combinations of `params` (the config's) and `arguments` (the command line's, which win), print the table.

    Raises UserError before anything is written where a combination is wrong, RunsFailed at the end where runs failed.
    """
    jobs = combine([*params, *arguments], config, context)
    folder, plan = Path(config.hydra.sweep.dir), None
    options = jobs[0].config.sweep
    if options.resume is not None:
        folder, plan = resume.find(options.resume, folder)
        _move(config, folder)
    serial = str(config.hydra.launcher._target_).endswith(".BasicLauncher")
    _check_sweep(jobs, folder, serial, fresh=plan is None)
    if options.dry_run:
        to_go = jobs if plan is None else resume.left(plan, folder, jobs, options.extend)
        print(dry_run.text(jobs, to_go, folder.parent))
        return
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    tracker = open_tracker(jobs[0].config.tracking)
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder / LOCK_FILE) as ours:
        if not ours:
            raise UserError(f"sweep.resume: another process is at work on {folder}; wait for it, or end it")
        if plan is None:
            plan = _plan(folder, arguments, params, jobs)
        else:
            jobs, plan = _resumed(plan, folder, jobs, options.extend)
        _run(jobs, launcher, serial, plan, folder, tracker)


def _plan(folder: Path, arguments: Sequence[str], params: Sequence[str], jobs: Sequence[Job]) -> SweepRecord:
    """Return what a new sweep is, of which no job has a number yet."""
    pairs = ["sweep.pairs"] if jobs[0].config.sweep.pairs else []
    swept = (
        " ".join([*pairs, *(text for text in [*params, *arguments] if text not in jobs[0].overrides)]) or jobs[0].name
    )
    created = datetime.now(UTC).isoformat()
    tracking = jobs[0].config.tracking.model_dump()
    return SweepRecord(folder.name, created, list(arguments), [], [], swept, tracking=tracking)


def _resumed(plan: SweepRecord, folder: Path, jobs: list[Job], extend: bool) -> tuple[list[Job], SweepRecord]:
    """Return the jobs that are left of a sweep, and the sweep as it was read again under the lock."""
    plan = read_sweep(folder) or plan
    left = resume.left(plan, folder, jobs, extend)
    done = len(jobs) - len(left)
    log.info("sweep %s: %s of %s runs have their result, %s to go", plan.sweep_id, done, len(jobs), len(left))
    return left, plan


def _run(
    jobs: Sequence[Job], launcher: Launcher, serial: bool, plan: SweepRecord, folder: Path, tracker: Tracker | None
) -> None:
    """Run the jobs under the numbers that follow those of the sweep, and close it, whatever ends it."""
    first = len(plan.jobs)
    plan = resume.with_more(plan, jobs)
    write(plan, folder)
    if tracker is not None:
        with tolerated(f"sweep {plan.sweep_id}"):
            parent = tracker.start_sweep(plan)
            plan = replace(plan, parent_run_id=parent)
            write(plan, folder)
            if first:  # what ended it before may have ended it in the middle of a word to MLflow
                sync.send(sync.records_below(folder), tracker, {plan.sweep_id: parent})
    # Whatever ends it, what there is, is closed and shown.
    try:
        _launch(jobs, launcher, serial, plan, folder, first)
    except (KeyboardInterrupt, Exception) as error:
        if interrupted(error):
            _finish(plan, folder, tracker, "interrupted")
            words = shlex.join(["python", "-m", "accum_sweep", "-m", *plan.overrides, f"sweep.resume={plan.sweep_id}"])
            log.warning("to go on: %s", words)
            raise KeyboardInterrupt from error
        log.exception("the launcher failed")  # by an error of its own: it lost its workers, say
        _finish(plan, folder, tracker, "failed")
        raise RunsFailed("the launcher failed before all runs were done") from None
    unfinished = _finish(plan, folder, tracker, None)
    if unfinished:
        raise RunsFailed(f"{unfinished} of {plan.size} runs did not finish")


def _move(config: DictConfig, folder: Path) -> None:
    """Let Hydra's launchers put the jobs into this folder; they compose each job's configuration anew."""
    with read_write(config), open_dict(config):
        config.hydra.sweep.dir = str(folder)
        kept = [text for text in config.hydra.overrides.hydra if not text.startswith("hydra.sweep.dir=")]
        config.hydra.overrides.hydra = [*kept, f"hydra.sweep.dir={_quoted(folder)}"]


def _quoted(folder: Path) -> str:
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _check_sweep(jobs: Sequence[Job], folder: Path, serial: bool, fresh: bool) -> None:
    """Raise ConfigError for what is wrong with the sweep as a whole."""
    faults = []
    if fresh and read_sweep(folder) is not None:
        remedy = "use sweep.resume=latest to continue it, or another folder"
        faults.append(Fault("hydra.sweep.dir", folder, "holds a sweep already", remedy))
    for key in ("tracking", "sweep"):
        if len({getattr(job.config, key).model_dump_json() for job in jobs}) > 1:
            faults.append(Fault(key, "several values", "must be the same for the whole sweep", "start two sweeps"))
    options, rule = jobs[0].config.sweep, "needs a launcher that runs one job after the other"
    if not serial and options.on_failure == "stop":
        remedy = "use sweep.on_failure=continue, or hydra/launcher=basic"
        faults.append(Fault("sweep.on_failure", "stop", rule, remedy))
    if not serial and options.max_failures is not None:
        faults.append(Fault("sweep.max_failures", options.max_failures, rule, "leave it out, or hydra/launcher=basic"))
    if faults:
        raise ConfigError(faults)


def _launch(jobs: Sequence[Job], launcher: Launcher, serial: bool, plan: SweepRecord, folder: Path, first: int) -> None:
    """Hand the jobs to the launcher: one by one where it runs them so, to see and say how far it is; else at once.

    Their numbers begin with `first`. One by one, those that cannot fit where an earlier one did not are marked in the
    plan, where the job finds it.
    """
    progress = Progress(len(jobs), serial)
    too_large: list[Job] = []
    skipped = 0
    try:
        for batch in _batches(len(jobs), serial):
            if serial:
                progress.starting(jobs[batch.start].name)
                if blocker := _blocker(jobs[batch.start], too_large):
                    plan.skipped[first + batch.start] = f"larger than an out-of-memory setting: {blocker.name}"
                    skipped += 1
                    write(plan, folder)
            words = [jobs[place].overrides for place in batch]
            returned = launcher.launch(words, initial_job_idx=first + batch.start)
            found = [_record(job_return) for job_return in returned]
            del returned  # it would keep a failed job's tensors alive
            for place, record in zip(batch, found, strict=True):
                progress.ended(jobs[place].name, record)
                if record is not None and record.status == "oom":
                    too_large.append(jobs[place])
                if serial and _enough(jobs[place].config.sweep, progress.failed):
                    return
    finally:
        progress.close()
    if skipped:
        log.warning("%s runs were skipped; sweep.prune=false runs them all the same", skipped)


def _enough(options: SweepOptions, failed: int) -> bool:
    """Tell, and say, whether so many failures end the sweep."""
    if failed and options.on_failure == "stop":
        log.warning("stopped after the first failure, as sweep.on_failure=stop says")
        return True
    if options.max_failures is not None and failed >= options.max_failures:
        log.warning("stopped after %s failures, as sweep.max_failures says", failed)
        return True
    return False


def _blocker(job: Job, too_large: Sequence[Job]) -> Job | None:
    """Return a job that has run out of memory and needed no more than this one must; None where there is none."""
    if not job.config.sweep.prune:
        return None
    return next((other for other in too_large if needs_as_much(job.config, other.config)), None)


def _batches(count: int, serial: bool) -> Iterator[range]:
    size = 1 if serial else count
    yield from (range(start, min(start + size, count)) for start in range(0, count, size))


def _record(returned: JobReturn) -> Record | None:
    """Return the record a job has left; None, after a word why, where it could not leave one."""
    if returned.status == JobStatus.FAILED:
        log.warning("a run could not leave a record: %s", returned._return_value)
        return None
    return None if returned.hydra_cfg is None else read(Path(returned.hydra_cfg.hydra.runtime.output_dir))


def _finish(plan: SweepRecord, folder: Path, tracker: Tracker | None, cut_short: Status | None) -> int:
    """Close the sweep: its record, its table in the folder and on standard output, its MLflow run.

    Returns how many runs did not finish. `cut_short` is what became of a sweep that could not go through its jobs.
    """
    plan, unfinished, tables = closing.close(plan, folder)
    look = None
    if tracker is not None and plan.parent_run_id is not None:
        with tolerated(f"sweep {plan.sweep_id}"):
            closing.tell(plan, folder, tracker, unfinished, report.markdown(tables), cut_short)
            look = tracker.how_to_look(plan.parent_run_id)
    print(report.text(tables))
    log.info("%s", "\n".join(filter(None, [f"records: {os.path.relpath(folder)}", look])))
    return unfinished
