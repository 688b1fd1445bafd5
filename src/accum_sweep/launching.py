"""The jobs of a sweep handed to a launcher of Hydra's, and what follows from each one's end for those to come."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from accum_sweep.errors import ProcessDied, UserError
from accum_sweep.jobs import Job
from accum_sweep.progress import Progress
from accum_sweep.prune import needs_as_much
from accum_sweep.record import Identity, Record, SweepRecord, read, write
from accum_sweep.untrained import leave
from accum_sweep.watch import watching

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Way:
    """How a launcher works."""

    serial: bool  # one job after the other, in this process
    seen: bool  # whether it can be seen how far it is: jobs one by one, or records where they are looked for


@dataclass(frozen=True)
class Outcome:
    """What became of the jobs."""

    again: list[Job]  # those that failed, and not by their settings
    lost: bool  # whether processes died, before or while they told MLflow
    stopped: bool  # whether the sweep is to end here


def launch(
    jobs: Sequence[Job], launcher: Launcher, way: Way, plan: SweepRecord, folder: Path, retried: bool
) -> Outcome:
    """Run the jobs, which are the last of the plan; `retried` says that what fails will be tried again."""
    first = len(plan.jobs) - len(jobs)
    course = _Course(jobs, plan, folder, first, way, retried)
    lost = False
    try:
        for batch in [range(place, place + 1) for place in range(len(jobs))] if way.serial else [range(len(jobs))]:
            if way.serial:
                course.progress.starting(jobs[batch.start].name)
            folders = {place: folder / str(first + place) for place in batch}
            with watching(folders, course.ended) if way.seen and not way.serial else nullcontext():
                returned = launcher.launch(
                    [jobs[place].overrides for place in batch], initial_job_idx=first + batch.start
                )
            for place, result in zip(batch, returned, strict=True):
                lost = lost or isinstance(result._return_value, ProcessDied)
                if place not in course.over:
                    record = _record(result) or read(folders[place])
                    course.ended(place, record or _leave(jobs[place], plan, first + place, folders[place], result))
            del returned, result  # they would keep a failed job's tensors alive
            if course.stopped and way.serial:
                break
    finally:
        course.progress.close()
    if course.skipped:
        log.warning("%s runs were skipped; sweep.prune=false runs them all the same", course.skipped)
    again = [jobs[place] for place, may_pass in course.over.items() if may_pass]
    return Outcome(again, lost, course.stopped)


class _Course:
    """What has become of the jobs so far. Tells those to come, by the plan, which they read, that they need not run."""

    def __init__(
        self, jobs: Sequence[Job], plan: SweepRecord, folder: Path, first: int, way: Way, retried: bool
    ) -> None:
        self._jobs, self._plan, self._folder, self._first = jobs, plan, folder, first
        self._options, self._retried = jobs[0].config.sweep, retried
        self.progress = Progress(len(jobs), way.seen)
        self.over: dict[int, bool] = {}  # by place: whether it may do better another time
        self.skipped = 0
        self.stopped = False

    def ended(self, place: int, record: Record | None) -> None:
        """Take down what became of a job."""
        self.over[place] = record is None or _may_pass(record)
        self.progress.ended(self._jobs[place].name, record)
        if record is not None and record.status == "oom" and self._options.prune:
            too_large = self._jobs[place]
            reason = f"larger than an out-of-memory setting: {too_large.name}"
            self.skipped += self._skip(reason, lambda job: needs_as_much(job.config, too_large.config))
        if not self.stopped and (said := self._enough()):
            self.stopped = True
            log.warning("stopped after %s", said)
            self._skip(f"the sweep was stopped after {said}", lambda _: True)

    def _enough(self) -> str | None:
        """Say so where there were so many failures that the sweep is to end."""
        if self.progress.failed and self._options.on_failure == "stop" and not self._retried:
            return "the first failure, as sweep.on_failure=stop says"
        if self._options.max_failures is not None and self.progress.failed >= self._options.max_failures:
            return f"{self.progress.failed} failures, as sweep.max_failures says"
        return None

    def _skip(self, reason: str, which: Callable[[Job], bool]) -> int:
        numbers = [
            self._first + place
            for place, job in enumerate(self._jobs)
            if place not in self.over and self._first + place not in self._plan.skipped and which(job)
        ]
        self._plan.skipped.update(dict.fromkeys(numbers, reason))
        if numbers:
            try:
                write(self._plan, self._folder)
            except OSError as error:
                log.warning("%s runs cannot be told that they need not run (%s)", len(numbers), error.strerror)
        return len(numbers)


def _may_pass(record: Record) -> bool:
    """Tell whether a failed run may do better another time: not by its settings alone it failed."""
    return record.status == "failed" and record.traceback is not None


def _record(returned: JobReturn) -> Record | None:
    """Return the record a job has left where it says that its output is; None where it could not leave one."""
    if returned.status == JobStatus.FAILED or returned.hydra_cfg is None:
        return None
    return read(Path(returned.hydra_cfg.hydra.runtime.output_dir))


def _leave(job: Job, plan: SweepRecord, number: int, folder: Path, returned: JobReturn) -> Record | None:
    """Leave, for a job that could not, a record that says why; None, after a word, where that cannot be written."""
    error = returned._return_value
    why = str(error) if isinstance(error, ProcessDied | UserError) else f"{type(error).__name__}: {error}"
    identity = Identity(f"{plan.sweep_id}/{number}", job.name, job.overrides, plan.sweep_id, number)
    try:
        return leave(
            job.config, folder, identity, "failed", why, last_words=None if isinstance(error, UserError) else why
        )
    except (OSError, UserError) as error:
        log.warning("a run could not leave a record: %s (%s)", why, error)
        return None
