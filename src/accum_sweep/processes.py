"""`hydra/launcher=processes`: the jobs of a multirun in processes side by side on one machine.

Each is one of Hydra's jobs as its basic launcher would run it. Each process has its share of the threads, and a GPU
where there are any.
"""

import functools
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from accum_sweep.errors import ConfigError, Fault
from accum_sweep.hydra_job import HydraJobs, lost
from accum_sweep.workers import Died, work

# Loaded once, before the processes part: they start with it. Neither starts threads or touches a GPU.
PRELOADED = ("torch", "accum_sweep.execute", "mlflow", "mlflow.store.tracking.sqlalchemy_store")


@dataclass(frozen=True)
class Options:
    """Keys under `hydra.launcher`."""

    workers: Any  # None: one a GPU, or where there is none, one a core
    threads: Any  # of torch in each; None: the cores shared out
    fresh: Any  # whether each job has a process of its own

    def __post_init__(self) -> None:
        """Raise ConfigError for what is no number of processes or threads."""
        faults = [
            Fault(f"hydra.launcher.{key}", value, "must be a whole number, 1 or more, or null", f"for example {key}=2")
            for key, value in (("workers", self.workers), ("threads", self.threads))
            if value is not None and (type(value) is not int or value < 1)
        ]
        if not isinstance(self.fresh, bool):
            rule = "must be true or false"
            faults.append(Fault("hydra.launcher.fresh", self.fresh, rule, "for example fresh=true"))
        if faults:
            raise ConfigError(faults)


def launch(
    job_overrides: Sequence[Sequence[str]],
    first: int,
    options: Options,
    config: DictConfig,
    context: HydraContext,
    task: TaskFunction,
) -> list[JobReturn]:
    """Run the jobs, numbered from `first`, and return what became of each, in their order."""
    gpus = _gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = options.workers or len(gpus) or cores
    # However few the jobs are: one that is made later, alone, is to be rounded as it would have been among the others.
    threads = options.threads or max(1, cores // workers)
    packed = cloudpickle.dumps(HydraJobs.of(config, context, task))
    jobs = [(number, list(overrides)) for number, overrides in enumerate(job_overrides, start=first)]
    begin = functools.partial(_begin, packed=packed, threads=threads, gpus=gpus)
    returned = work(jobs, begin, min(workers, len(jobs)), options.fresh, PRELOADED)
    return [_lost(found) if isinstance(found, Died) else found for found in returned]


def _gpus() -> list[str]:
    """Return the names that CUDA_VISIBLE_DEVICES has for the GPUs that this process sees."""
    import torch  # late: Hydra imports launchers at every start

    count = torch.cuda.device_count()
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[:count] if names else [str(number) for number in range(count)]


def _lost(died: Died) -> JobReturn:
    how = f"ended with exit code {died.code}"
    if died.code < 0:
        how = f"was killed by {signal.Signals(-died.code).name}"
    if died.code == -signal.SIGKILL:
        how += "; where nobody sent it, the machine had no more memory"
    return lost(how)


# In the processes


def _begin(
    number: int, packed: bytes, threads: int, gpus: Sequence[str]
) -> Callable[[tuple[int, list[str]]], JobReturn]:
    """Prepare a process for its jobs."""
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the processes that jobs with a memory_limit have
    import torch

    torch.set_num_threads(threads)
    jobs: HydraJobs = pickle.loads(packed)
    jobs.begin()
    return functools.partial(_job, jobs)


def _job(jobs: HydraJobs, job: tuple[int, list[str]]) -> JobReturn:
    return jobs.run(jobs.compose(*job))
