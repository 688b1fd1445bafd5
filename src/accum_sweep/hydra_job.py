"""One of a multirun's jobs, in another process than the sweep's: composed and run as Hydra's basic launcher does."""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from accum_sweep.errors import ProcessDied


@dataclass(frozen=True)
class HydraJobs:
    """What all jobs of a multirun have in common; it is pickled, by cloudpickle."""

    config: DictConfig
    context: HydraContext
    task: TaskFunction
    state: dict[Any, Any]  # of Hydra's singletons

    @classmethod
    def of(cls, config: DictConfig, context: HydraContext, task: TaskFunction) -> "HydraJobs":
        """Return it with the state as it is here."""
        setup_globals()
        return cls(config, context, task, Singleton.get_state())

    def begin(self) -> None:
        """Prepare a process for its jobs."""
        Singleton.set_state(self.state)
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)

    def compose(self, number: int, overrides: Sequence[str]) -> DictConfig:
        """Return the configuration of a job."""
        composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(composed):
            composed.hydra.job.id = str(number)
            composed.hydra.job.num = number
        return composed

    def run(self, composed: DictConfig) -> JobReturn:
        """Run a job; what it returns can be pickled, whatever the task returned or raised."""
        returned = run_job(
            hydra_context=self.context,
            task_function=self.task,
            config=composed,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
        return _sendable(returned)


def folder_of(composed: DictConfig) -> Path:
    """Return where a job's results will be."""
    return Path(composed.hydra.sweep.dir, str(composed.hydra.sweep.subdir))


def lost(how: str) -> JobReturn:
    """Return what stands for a job whose process ended without a word."""
    return JobReturn(status=JobStatus.FAILED, _return_value=ProcessDied(f"the run's process {how}"))


def _sendable(returned: JobReturn) -> JobReturn:
    try:
        pickle.dumps(returned)
    except Exception:  # what the task returned or raised; pickle raises what it likes
        value: Any = returned._return_value
        returned._return_value = RuntimeError(f"{type(value).__name__}: {value}")
    return returned
