"""One multirun: every combination checked before the first starts, each a job of Hydra's launcher, a table at the end.

What a sweep is stands in `sweep.json` in its folder, written before
the first job; jobs find themselves in it by their number.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.plugins import Plugins
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from accum_sweep import dry_run, launch, resume, sync
from accum_sweep.conduct import Multirun, conduct
from accum_sweep.config import Config
from accum_sweep.errors import ConfigError, Fault, UserError
from accum_sweep.jobs import Job, combine
from accum_sweep.launching import Way
from accum_sweep.lock import held
from accum_sweep.record import LOCK_FILE, SweepRecord, read_sweep
from accum_sweep.tracking import open_tracker

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
    if options.resume is not None and launch.rank() == 0:
        folder, plan = resume.find(options.resume, folder)
        move(config, folder)
    way = way_of(config)
    check_sweep([job.config for job in jobs], folder, way, fresh=plan is None)
    if options.dry_run:
        to_go = jobs if plan is None else resume.left(plan, folder, jobs, options.extend)
        print(dry_run.text(jobs, to_go, folder.parent))
        return
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
    tracker = open_tracker(jobs[0].config.tracking)
    with alone(folder):
        if plan is None:
            plan = _plan(folder, arguments, params, jobs)
        else:
            jobs, plan = _resumed(plan, folder, jobs, options.extend)
        if options.resume is not None and launch.world_size() > 1:
            jobs = _agreed(jobs)
            if launch.rank() and not jobs:
                return
        multirun = Multirun(plan, folder, launcher, way, tracker)
        multirun.add(jobs)
        conduct(multirun, lambda: multirun.launch(jobs))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make a sweep's folder and be its only process; raise UserError where another one is at work there."""
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder / LOCK_FILE) as ours:
        if not ours:
            raise UserError(f"sweep.resume: another process is at work on {folder}; wait for it, or end it")
        if repaired := sync.repair(folder.parent):
            log.info("%s sweeps that were killed are closed now; sweep.resume goes on with one", repaired)
        yield


def _plan(folder: Path, arguments: Sequence[str], params: Sequence[str], jobs: Sequence[Job]) -> SweepRecord:
    """Return what a new sweep is, of which no job has a number yet."""
    pairs = ["sweep.pairs"] if jobs[0].config.sweep.pairs else []
    swept = (
        " ".join([*pairs, *(text for text in [*params, *arguments] if text not in jobs[0].overrides)]) or jobs[0].name
    )
    return SweepRecord.begun(folder.name, arguments, swept, jobs[0].config.tracking.model_dump())


def _resumed(plan: SweepRecord, folder: Path, jobs: list[Job], extend: bool) -> tuple[list[Job], SweepRecord]:
    """Return the jobs that are left of a sweep, and the sweep as it was read again under the lock."""
    plan = read_sweep(folder) or plan
    left = resume.left(plan, folder, jobs, extend)
    done = len(jobs) - len(left)
    log.info("sweep %s: %s of %s runs have their result, %s to go", plan.sweep_id, done, len(jobs), len(left))
    return left, plan


def _agreed(jobs: list[Job]) -> list[Job]:
    """Return, of several processes' jobs, those that are left by what the first one has found on disk."""
    from accum_sweep.process_group import first_says

    keys = set(first_says("jobs", [job.key for job in jobs]))
    return [job for job in jobs if job.key in keys]


def way_of(config: DictConfig) -> Way:
    """Return how the configured launcher works."""
    serial = str(config.hydra.launcher._target_).endswith(".BasicLauncher")
    sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
    return Way(serial, seen=serial or sweep["subdir"] == "${hydra.job.num}")


def move(config: DictConfig, folder: Path) -> None:
    """Let Hydra's launchers put the jobs into this folder; they compose each job's configuration anew."""
    with read_write(config), open_dict(config):
        config.hydra.sweep.dir = str(folder)
        kept = [text for text in config.hydra.overrides.hydra if not text.startswith("hydra.sweep.dir=")]
        config.hydra.overrides.hydra = [*kept, f"hydra.sweep.dir={_quoted(folder)}"]


def _quoted(folder: Path) -> str:
    text = str(folder).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def check_sweep(configs: Sequence[Config], folder: Path, way: Way, fresh: bool) -> None:
    """Raise ConfigError for what is wrong with the sweep as a whole."""
    faults = []
    if fresh and read_sweep(folder) is not None:
        remedy = "use sweep.resume=latest to continue it, or another folder"
        faults.append(Fault("hydra.sweep.dir", folder, "holds a sweep already", remedy))
    for key in ("tracking", "sweep"):
        if len({getattr(config, key).model_dump_json() for config in configs}) > 1:
            faults.append(Fault(key, "several values", "must be the same for the whole sweep", "start two sweeps"))
    options = configs[0].sweep
    if not way.seen:
        rule = "needs hydra.sweep.subdir as it is, where each run is looked for"
        for key, value in (("on_failure", options.on_failure), ("max_failures", options.max_failures)):
            if value not in ("continue", None):
                faults.append(Fault(f"sweep.{key}", value, rule, "leave one of them out, or hydra/launcher=basic"))
    if faults:
        raise ConfigError(faults)
