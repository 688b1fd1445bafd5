"""A multirun conducted: its record and parent run opened, its jobs launched as they come, closed whatever ends it."""

import logging
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.plugins.launcher import Launcher

from accum_sweep import closing, exports, launching, resume, sync, table
from accum_sweep.errors import RunsFailed, UserError, interrupted, traceback_of
from accum_sweep.jobs import Job
from accum_sweep.launching import Way
from accum_sweep.record import Status, SweepRecord, write
from accum_sweep.tracking import Tracker

log = logging.getLogger(__name__)


@dataclass
class Multirun:
    """What a multirun is, so far, and what its jobs are run with."""

    plan: SweepRecord
    folder: Path
    launcher: Launcher
    way: Way
    tracker: Tracker | None

    def add(self, jobs: Sequence[Job]) -> None:
        """Give the jobs the numbers that follow those of the plan."""
        self.plan = resume.with_more(self.plan, jobs)
        write(self.plan, self.folder)

    def launch(self, jobs: Sequence[Job]) -> bool:
        """Run the jobs that were just added, those that fail again as `sweep.retries` says; tell whether to go on."""
        if not jobs:
            return True
        for left in reversed(range(jobs[0].config.sweep.retries + 1)):
            outcome = launching.launch(jobs, self.launcher, self.way, self.plan, self.folder, retried=left > 0)
            if outcome.lost:
                self._send()
            if outcome.stopped:
                return False
            jobs = outcome.again
            if not left or not jobs:
                break
            log.info("%s runs failed and are tried again, as sweep.retries says", len(jobs))
            self.add(jobs)
        return True

    def open(self) -> None:
        """Open the parent run in MLflow, and send what was cut off where there were jobs before."""
        if self.tracker is not None:
            with self.tracker.tolerant(f"sweep {self.plan.sweep_id}"):
                again = self.plan.parent_run_id is not None
                self.plan = replace(self.plan, parent_run_id=self.tracker.start_sweep(self.plan))
                write(self.plan, self.folder)
                if again:  # what ended it before may have ended it in the middle of a word to MLflow
                    self._send()

    def close(self, cut_short: Status | None) -> int:
        """Close its record, its table in the folder and on standard output, its MLflow run.

        Returns how many runs did not finish. `cut_short` is what became of one that could not go through its jobs.
        """
        self.plan, unfinished, tables = closing.close(self.plan, self.folder)
        look = None
        if self.tracker is not None and self.plan.parent_run_id is not None:
            with self.tracker.tolerant(f"sweep {self.plan.sweep_id}"):
                closing.tell(self.plan, self.folder, self.tracker, unfinished, exports.markdown(tables), cut_short)
                look = self.tracker.how_to_look(self.plan.parent_run_id)
        print(table.text(tables))
        log.info("%s", "\n".join(filter(None, [f"records: {os.path.relpath(self.folder)}", look])))
        return unfinished

    def _send(self) -> None:
        """Send to MLflow what it lacks of the runs."""
        if self.tracker is not None:
            with self.tracker.tolerant(f"sweep {self.plan.sweep_id}"):
                parents = {self.plan.sweep_id: self.plan.parent_run_id or ""}
                known = self.tracker.known(self.plan.sweep_id)
                sync.send(sync.records_below(self.folder), self.tracker, parents, known)


def conduct(multirun: Multirun, work: Callable[[], object]) -> None:
    """Do the work, which launches jobs, between opening and closing; raise RunsFailed where runs did not finish."""
    multirun.open()
    try:
        work()
    except (KeyboardInterrupt, Exception) as error:
        if interrupted(error):
            multirun.close("interrupted")
            resumed = [*multirun.plan.overrides, f"sweep.resume={multirun.plan.sweep_id}"]
            log.warning("to go on: %s", shlex.join(["python", "-m", "accum_sweep", "-m", *resumed]))
            raise KeyboardInterrupt from error
        if isinstance(error, UserError):
            multirun.close("failed")
            raise
        # By an error of its own: it lost its workers, say.
        log.error("the launcher failed\n%s", traceback_of(error))
        multirun.close("failed")
        raise RunsFailed("the launcher failed before all runs were done") from None
    if unfinished := multirun.close(None):
        raise RunsFailed(f"{unfinished} of {multirun.plan.size} runs did not finish")
