"""One multirun: every combination checked before the first starts, each a job of Hydra's launcher, a table at the end.

The only file that knows Hydra's sweep machinery. What a sweep is stands in `sweep.json` in its folder, written before
the first job; jobs find themselves in it by their number.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from accum_sweep import report, summary
from accum_sweep.check import check
from accum_sweep.compose import COMPOSITION_ERRORS, as_dict, explain
from accum_sweep.config import Config
from accum_sweep.errors import ConfigError, Fault, RunsFailed, UserError
from accum_sweep.progress import Progress
from accum_sweep.prune import needs_as_much
from accum_sweep.record import Record, Status, SweepRecord, read, read_sweep, write
from accum_sweep.record import records as read_all
from accum_sweep.tracking import Tracker, open_tracker, tolerated

log = logging.getLogger(__name__)

TABLE_FILE = "summary.csv"


@dataclass(frozen=True)
class Job:
    """One combination: what Hydra is told, and what differs from the others."""

    overrides: list[str]
    name: str
    config: Config


def sweep(
    params: Sequence[str], arguments: Sequence[str], config: DictConfig, context: HydraContext, task: TaskFunction
) -> None:
    """Run the combinations of `params` (the config's) and `arguments` (the command line's, which win), print the table.

    Raises UserError before anything is written where a combination is wrong, RunsFailed at the end where runs failed.
    """
    jobs = _jobs([*params, *arguments], config, context)
    folder = Path(config.hydra.sweep.dir)
    serial = str(config.hydra.launcher._target_).endswith(".BasicLauncher")
    _check_sweep(jobs, folder, serial)
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    tracker = open_tracker(jobs[0].config.tracking)
    created = datetime.now(UTC).isoformat()
    names = [job.name for job in jobs]
    swept = " ".join(text for text in [*params, *arguments] if text not in jobs[0].overrides) or names[0]
    plan = SweepRecord(folder.name, created, list(arguments), [job.overrides for job in jobs], names, swept)
    folder.mkdir(parents=True, exist_ok=True)
    write(plan, folder)
    if tracker is not None:
        with tolerated(f"sweep {plan.sweep_id}"):
            plan = replace(plan, parent_run_id=tracker.start_sweep(plan))
            write(plan, folder)
    # Whatever ends it, what there is, is closed and shown.
    try:
        _launch(jobs, launcher, serial, plan, folder)
    except KeyboardInterrupt:
        _finish(plan, folder, tracker, "interrupted")
        raise
    except Exception:  # a launcher's own: it lost its workers, say
        log.exception("the launcher failed")
        _finish(plan, folder, tracker, "failed")
        raise RunsFailed("the launcher failed before all runs were done") from None
    unfinished = _finish(plan, folder, tracker, None)
    if unfinished:
        raise RunsFailed(f"{unfinished} of {len(jobs)} runs did not finish")


def _jobs(texts: Sequence[str], config: DictConfig, context: HydraContext) -> list[Job]:
    """Return every combination, composed and checked; raise one ConfigError for all faults."""
    overrides = OverridesParser.create(config_loader=context.config_loader).parse_overrides(list(texts))
    combinations = _combinations(overrides)
    if not combinations:
        raise UserError(f"{' '.join(texts)}: the sweep is empty; give every key at least one value")
    varies = {text for combination in combinations for text in combination if any(text not in c for c in combinations)}
    jobs: list[Job] = []
    faults: list[Fault] = []
    for combination in combinations:
        name = " ".join(text for text in combination if text in varies) or " ".join(combination)
        try:
            checked = check(as_dict(context.config_loader.load_sweep_config(config, combination)))
        except COMPOSITION_ERRORS as error:
            own = [source.path for source in config.hydra.runtime.config_sources if source.provider == "command-line"]
            raise explain(error, combination, *own) from error
        except ConfigError as error:
            faults += error.faults
        else:
            jobs.append(Job(combination, name or checked.problem.name, checked))
    if faults:
        raise ConfigError(faults)
    return jobs


def _combinations(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each job, in Hydra's own order: the last key turns fastest."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            rule = "has no single values to sweep over"
            raise ConfigError([Fault(override.key_or_group, override.input_line, rule, "list them: a,b,c")])
    return BasicSweeper.split_arguments(overrides, None)[0]


def _check_sweep(jobs: Sequence[Job], folder: Path, serial: bool) -> None:
    """Raise ConfigError for what is wrong with the sweep as a whole."""
    faults = []
    if read_sweep(folder) is not None:
        faults.append(
            Fault("hydra.sweep.dir", folder, "holds a sweep already", "choose another folder, or leave it out")
        )
    for key in ("tracking", "sweep"):
        if len({getattr(job.config, key) for job in jobs}) > 1:
            faults.append(Fault(key, "several values", "must be the same for the whole sweep", "start two sweeps"))
    if not serial and jobs[0].config.sweep.on_failure == "stop":
        remedy = "use sweep.on_failure=continue, or hydra/launcher=basic"
        faults.append(Fault("sweep.on_failure", "stop", "needs a launcher that runs one job after the other", remedy))
    if faults:
        raise ConfigError(faults)


def _launch(jobs: Sequence[Job], launcher: Launcher, serial: bool, plan: SweepRecord, folder: Path) -> None:
    """Hand the jobs to the launcher: one by one where it runs them so, to see and say how far it is; else at once.

    One by one, those that cannot fit where an earlier one did not are marked in the plan, where the job finds it.
    """
    progress = Progress(len(jobs), serial)
    too_large: list[Job] = []
    try:
        for batch in _batches(len(jobs), serial):
            if serial:
                progress.starting(jobs[batch.start].name)
                if blocker := _blocker(jobs[batch.start], too_large):
                    plan.skipped[batch.start] = f"larger than an out-of-memory setting: {blocker.name}"
                    write(plan, folder)
            returned = launcher.launch([jobs[number].overrides for number in batch], initial_job_idx=batch.start)
            found = [_record(job_return) for job_return in returned]
            del returned  # it would keep a failed job's tensors alive
            for number, record in zip(batch, found, strict=True):
                progress.ended(jobs[number].name, record)
                if record is not None and record.status == "oom":
                    too_large.append(jobs[number])
                if (record is None or record.status != "finished") and jobs[0].config.sweep.on_failure == "stop":
                    log.warning("stopped after the first failure, as sweep.on_failure=stop says")
                    return
    finally:
        progress.close()
    if plan.skipped:
        log.warning("%s runs were skipped; sweep.prune=false runs them all the same", len(plan.skipped))


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
    plan = replace(plan, ended_at=datetime.now(UTC).isoformat())
    write(plan, folder)
    records = [record for record in read_all(folder) if record.sweep_id == plan.sweep_id]
    unfinished = len(plan.jobs) - sum(record.status == "finished" for record in records)
    frame = summary.to_frame(records)
    tables = summary.compare(frame)
    report.write_csv(frame, folder / TABLE_FILE)
    look = None
    if tracker is not None and plan.parent_run_id is not None:
        status: Status = cut_short or ("failed" if unfinished else "finished")
        with tolerated(f"sweep {plan.sweep_id}"):
            note = report.markdown(tables)
            counts = {"runs": len(plan.jobs), "runs_finished": len(plan.jobs) - unfinished}
            tracker.end_sweep(plan, status, note, counts, folder / TABLE_FILE)
            look = tracker.how_to_look(plan.parent_run_id)
    print(report.text(tables))
    log.info("%s", "\n".join(filter(None, [f"records: {os.path.relpath(folder)}", look])))
    return unfinished
