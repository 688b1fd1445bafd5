"""`hydra/launcher=slurm`: the jobs of a multirun as jobs of Slurm, submitted by submitit.

Slurm runs each where and when there is room, on nodes that share the sweep's folder. One that it takes back for others
is queued again and starts anew; one that dies costs its run. A Ctrl-C interrupts those that run and takes the others
from the queue, and so does the next command for the same sweep with those of one that was killed.
"""

import getpass
import hashlib
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from accum_sweep import child
from accum_sweep.errors import ConfigError, Fault, UserError
from accum_sweep.hydra_job import HydraJobs, folder_of, lost

if TYPE_CHECKING:
    from submitit import AutoExecutor, Job

log = logging.getLogger(__name__)

SUBFOLDER = "slurm"  # of the sweep's folder: what submitit sends to the jobs, and what they print
ARRAY_SIZE = 1000  # Slurm takes no more at once, unless told so
NOTICE_SECONDS = 60  # before a job's time is over or its node is taken away, at most
EARLY_SECONDS = 60  # that notice may come so much earlier
PATIENCE_SECONDS = 30.0  # for jobs that were interrupted
ENGINES = ("timeout_min", "cpus_per_task", "gpus_per_node", "mem_gb")  # keys that submitit has not for Slurm alone
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"),
    *("NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}


@dataclass(frozen=True)
class Slurm:
    """Where jobs are submitted to, and what is."""

    executor: "AutoExecutor"
    task: "_Task"
    name: str  # of all jobs of the sweep, and of no others


def prepare(keys: Mapping[str, Any], config: DictConfig, context: HydraContext, task: TaskFunction) -> Slurm:
    """Check the keys under `hydra.launcher`; raise ConfigError for what there is not or what is not understood."""
    missing = [
        Fault("hydra/launcher", "slurm", f"needs {what}", remedy)
        for what, there, remedy in (
            ("Slurm's sbatch", shutil.which("sbatch"), "start it where Slurm is, or leave it out"),
            ("submitit", find_spec("submitit"), 'pip install "accum-sweep[slurm]"'),
        )
        if not there
    ]
    given: dict[str, Any] = {
        key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for key, value in keys.items()
        if value is not None
    }
    wrong = [
        Fault(f"hydra.launcher.{key}", given.get(key), "must be a whole number, 1 or more", f"for example {key}=8")
        for key in ("timeout_min", "cpus_per_task", "array_parallelism")
        if type(given.get(key)) is not int or given[key] < 1
    ]
    if missing or wrong:
        raise ConfigError([*missing, *wrong])
    import submitit

    minutes, threads = given["timeout_min"], given["cpus_per_task"]
    notice = min(NOTICE_SECONDS, minutes * 15)
    folder = Path(config.hydra.sweep.dir)
    # Unique, and the same when the sweep goes on: its jobs are found by it.
    name = f"{folder.name}-{hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:8]}"
    executor = submitit.AutoExecutor(folder=folder / SUBFOLDER / "%j", cluster="slurm")
    more = {"requeue": True, "signal": f"USR2@{notice}"} | given.pop("additional_parameters", {})
    try:
        shared = {key: given.pop(key) for key in ENGINES if key in given}
        own = {f"slurm_{key}": value for key, value in (given | {"additional_parameters": more}).items()}
        executor.update_parameters(name=name, **shared, **own)
    except (NameError, TypeError, ValueError) as error:  # what submitit does not know, or not in this form
        what = str(error).partition("\n")[0].partition(". ")[0]
        fault = Fault("hydra.launcher", ", ".join(keys), f"is refused by submitit: {what}", "see its documentation")
        raise ConfigError([fault]) from None
    return Slurm(executor, _Task(HydraJobs.of(config, context, task), threads, minutes, notice), name)


def launch(job_overrides: Sequence[Sequence[str]], first: int, slurm: Slurm) -> list[JobReturn]:
    """Run the jobs, numbered from `first`, and return what became of each, in their order."""
    _say("scancel", f"--name={slurm.name}")  # what a command that was killed has left
    submitted: list[Job[JobReturn]] = []
    try:
        for start in range(0, len(job_overrides), ARRAY_SIZE):
            part = [list(overrides) for overrides in job_overrides[start : start + ARRAY_SIZE]]
            submitted += _submit(slurm, range(first + start, first + start + len(part)), part)
        log.info("%s jobs are Slurm's now: squeue --name=%s", len(submitted), slurm.name)
        return _await(submitted, slurm.name)
    except BaseException as error:
        try:
            if isinstance(error, KeyboardInterrupt):
                _interrupt(slurm.name)
        finally:
            _say("scancel", f"--name={slurm.name}")
        raise


def _submit(slurm: Slurm, numbers: Sequence[int], part: list[list[str]]) -> "list[Job[JobReturn]]":
    from submitit.core.utils import FailedJobError

    try:
        jobs: list[Job[JobReturn]] = slurm.executor.map_array(slurm.task, numbers, part)
        return jobs
    except (FailedJobError, subprocess.CalledProcessError, OSError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"hydra/launcher=slurm: Slurm does not take the jobs ({said}); see hydra.launcher") from error


def _await(submitted: "Sequence[Job[JobReturn]]", name: str) -> list[JobReturn]:
    returned: dict[str, JobReturn] = {}
    suspected: set[str] = set()
    begun = time.monotonic()
    while waiting := [job for job in submitted if job.job_id not in returned]:
        states = _states(name)  # before the results: what has ended then has its result, if it ever will
        for job in waiting:
            if job.paths.result_pickle.exists():
                returned[job.job_id] = _result(job)
        if states is not None:
            ended = {job.job_id for job in waiting if states.get(job.job_id, "CANCELLED") in ENDED}
            for job in waiting:  # twice: a shared folder may show the result later, and Slurm may queue it again
                if job.job_id in ended & suspected and job.job_id not in returned:
                    returned[job.job_id] = _gone(job, states.get(job.job_id))
            suspected = ended
        if len(returned) < len(submitted):
            time.sleep(min(10.0, 1 + (time.monotonic() - begun) / 60))
    return [returned[job.job_id] for job in submitted]


def _result(job: "Job[JobReturn]") -> JobReturn:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        returned: JobReturn = job.results()[0]
        return returned
    except (FailedJobError, UncompletedJobError) as error:
        last = str(error).split("-" * 10)[1:2] or [str(error)]
        return lost(f"failed: {last[0].strip().splitlines()[-1]}; see {os.path.relpath(job.paths.stderr)}")


def _gone(job: "Job[JobReturn]", state: str | None) -> JobReturn:
    return lost(
        f"ended without a result (Slurm: {state or 'no longer known'}); see {os.path.relpath(job.paths.stderr)}"
    )


def _interrupt(name: str) -> None:
    """Let what runs end in order; a second Ctrl-C ends the waiting."""
    _say("scancel", f"--name={name}", "--state=PENDING")
    _say("scancel", f"--name={name}", "--signal=INT")
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        states = _states(name)
        if states is not None and ENDED.issuperset(states.values()):
            break
        time.sleep(0.5)


def _states(name: str) -> dict[str, str] | None:
    """Return the state of each job of that name that Slurm still knows, by its id; None where it does not answer."""
    said = _say("squeue", f"--name={name}", "--noheader", "--array", "--states=all", "--format=%i %T")
    return None if said is None else dict(line.split(maxsplit=1) for line in said.splitlines())


def _say(*command: str) -> str | None:
    """Return what a command of Slurm's prints about our own jobs; None, after a word, where it fails."""
    try:
        done = subprocess.run([*command, f"--user={getpass.getuser()}"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.debug("%s: %s", command[0], error)
        return None
    if done.returncode:
        log.debug("%s: %s", command[0], done.stderr.strip())
        return None
    return done.stdout


# In the jobs


@dataclass(frozen=True)
class _Task:
    jobs: HydraJobs
    threads: int
    minutes: int
    notice_seconds: int

    def __call__(self, number: int, overrides: list[str]) -> JobReturn:
        begun = time.monotonic()
        child.stop_when_told()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from Slurm it means what the notice says, or SIGKILL follows
        enough = self.minutes * 60 - self.notice_seconds - EARLY_SECONDS
        signal.signal(signal.SIGUSR2, lambda *_: self._noticed(time.monotonic() - begun >= enough))
        os.environ["OMP_NUM_THREADS"] = str(self.threads)  # of the processes that runs with a memory_limit have
        import torch

        torch.set_num_threads(self.threads)
        self.jobs.begin()
        composed = self.jobs.compose(number, overrides)
        if (folder_of(composed) / "record.json").exists():
            return lost("was ended by Slurm when its record was written")
        return self.jobs.run(composed)

    def _noticed(self, over: bool) -> NoReturn:
        """Its time is over, which a run cannot help; or its node is taken away, and it can have another."""
        if over:
            key, rule = "hydra.launcher.timeout_min", "is over before the run is"
            raise ConfigError([Fault(key, self.minutes, rule, "raise it, or let the run be shorter")])
        import submitit

        identity = submitit.JobEnvironment().job_id
        try:
            subprocess.run(["scontrol", "requeue", identity], check=True, capture_output=True, timeout=30)
        except (OSError, subprocess.SubprocessError) as error:
            raise UserError(f"Slurm takes the node away and does not queue the job again ({error})") from error
        os._exit(1)  # without a record: it has not been
