"""One multirun: every combination checked before the first starts, each a job of Hydra's launcher, a table at the end.

What a sweep is stands in `sweep.json` in its folder, written before
the first job; jobs find themselves in it by their number.
"""

import logging
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from accum_sweep import closing, dry_run, launching, report, resume, sync
from accum_sweep.errors import ConfigError, Fault, RunsFailed, UserError, interrupted, traceback_of
from accum_sweep.jobs import Job, combine
from accum_sweep.launching import Way
from accum_sweep.lock import held
from accum_sweep.record import LOCK_FILE, Status, SweepRecord, read_sweep, write
from accum_sweep.tracking import Tracker, open_tracker

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
    way = _way(config)
    _check_sweep(jobs, folder, way, fresh=plan is None)
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
        if repaired := sync.repair(folder.parent):
            log.info("%s sweeps that were killed are closed now; sweep.resume goes on with one", repaired)
        if plan is None:
            plan = _plan(folder, arguments, params, jobs)
        else:
            jobs, plan = _resumed(plan, folder, jobs, options.extend)
        _run(jobs, launcher, way, plan, folder, tracker)


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
    jobs: Sequence[Job], launcher: Launcher, way: Way, plan: SweepRecord, folder: Path, tracker: Tracker | None
) -> None:
    """Run the jobs under the numbers that follow those of the sweep, and close it, whatever ends it."""
    first = len(plan.jobs)
    plan = resume.with_more(plan, jobs)
    write(plan, folder)
    if tracker is not None:
        with tracker.tolerant(f"sweep {plan.sweep_id}"):
            parent = tracker.start_sweep(plan)
            plan = replace(plan, parent_run_id=parent)
            write(plan, folder)
            if first:  # what ended it before may have ended it in the middle of a word to MLflow
                _send(plan, folder, tracker)
    # Whatever ends it, what there is, is closed and shown.
    try:
        for left in reversed(range(jobs[0].config.sweep.retries + 1) if jobs else ()):
            outcome = launching.launch(jobs, launcher, way, plan, folder, retried=left > 0)
            if outcome.lost and tracker is not None:
                with tracker.tolerant(f"sweep {plan.sweep_id}"):
                    _send(plan, folder, tracker)
            jobs = outcome.again
            if not left or not jobs or outcome.stopped:
                break
            log.info("%s runs failed and are tried again, as sweep.retries says", len(jobs))
            plan = resume.with_more(plan, jobs)
            write(plan, folder)
    except (KeyboardInterrupt, Exception) as error:
        if interrupted(error):
            _finish(plan, folder, tracker, "interrupted")
            words = shlex.join(["python", "-m", "accum_sweep", "-m", *plan.overrides, f"sweep.resume={plan.sweep_id}"])
            log.warning("to go on: %s", words)
            raise KeyboardInterrupt from error
        # By an error of its own: it lost its workers, say.
        log.error("the launcher failed\n%s", traceback_of(error))
        _finish(plan, folder, tracker, "failed")
        raise RunsFailed("the launcher failed before all runs were done") from None
    unfinished = _finish(plan, folder, tracker, None)
    if unfinished:
        raise RunsFailed(f"{unfinished} of {plan.size} runs did not finish")


def _send(plan: SweepRecord, folder: Path, tracker: Tracker) -> None:
    """Send to MLflow what it lacks of the sweep's runs."""
    parents = {plan.sweep_id: plan.parent_run_id or ""}
    sync.send(sync.records_below(folder), tracker, parents, tracker.known(plan.sweep_id))


def _way(config: DictConfig) -> Way:
    """Return how the configured launcher works."""
    serial = str(config.hydra.launcher._target_).endswith(".BasicLauncher")
    sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    return Way(serial, seen=serial or sweep["subdir"] == "${hydra.job.num}")


def _move(config: DictConfig, folder: Path) -> None:
    """Let Hydra's launchers put the jobs into this folder; they compose each job's configuration anew."""
    with read_write(config), open_dict(config):
        config.hydra.sweep.dir = str(folder)
        kept = [text for text in config.hydra.overrides.hydra if not text.startswith("hydra.sweep.dir=")]
        config.hydra.overrides.hydra = [*kept, f"hydra.sweep.dir={_quoted(folder)}"]


def _quoted(folder: Path) -> str:
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def _check_sweep(jobs: Sequence[Job], folder: Path, way: Way, fresh: bool) -> None:
    """Raise ConfigError for what is wrong with the sweep as a whole."""
    faults = []
    if fresh and read_sweep(folder) is not None:
        remedy = "use sweep.resume=latest to continue it, or another folder"
        faults.append(Fault("hydra.sweep.dir", folder, "holds a sweep already", remedy))
    for key in ("tracking", "sweep"):
        if len({getattr(job.config, key).model_dump_json() for job in jobs}) > 1:
            faults.append(Fault(key, "several values", "must be the same for the whole sweep", "start two sweeps"))
    options = jobs[0].config.sweep
    if not way.seen:
        rule = "needs hydra.sweep.subdir as it is, where each run is looked for"
        for key, value in (("on_failure", options.on_failure), ("max_failures", options.max_failures)):
            if value not in ("continue", None):
                faults.append(Fault(f"sweep.{key}", value, rule, "leave one of them out, or hydra/launcher=basic"))
    if faults:
        raise ConfigError(faults)


def _finish(plan: SweepRecord, folder: Path, tracker: Tracker | None, cut_short: Status | None) -> int:
    """Close the sweep: its record, its table in the folder and on standard output, its MLflow run.

    Returns how many runs did not finish. `cut_short` is what became of a sweep that could not go through its jobs.
    """
    plan, unfinished, tables = closing.close(plan, folder)
    look = None
    if tracker is not None and plan.parent_run_id is not None:
        with tracker.tolerant(f"sweep {plan.sweep_id}"):
            closing.tell(plan, folder, tracker, unfinished, report.markdown(tables), cut_short)
            look = tracker.how_to_look(plan.parent_run_id)
    print(report.text(tables))
    log.info("%s", "\n".join(filter(None, [f"records: {os.path.relpath(folder)}", look])))
    return unfinished
