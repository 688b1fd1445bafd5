"""Where Hydra looks for plugins. It imports this at every start, so the work is elsewhere and imported late."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn


class AccumSweeper(Sweeper):
    """Checks every combination before the first job, keeps the sweep's record, and compares its runs at the end."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = dict(params or {})

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives."""
        self._given = config, hydra_context, task_function

    def sweep(self, arguments: list[str]) -> None:
        """Run the sweep that the command line and `hydra.sweeper.params` describe."""
        from accum_sweep.sweep import sweep

        settings = [f"{key}={value}" for key, value in self.params.items()]
        sweep(settings, arguments, *self._given)


class SearchSweeper(Sweeper):
    """Tries what Optuna says, and keeps records as AccumSweeper does."""

    def __init__(self, params: Mapping[str, Any], minimize: Any, maximize: Any, **keys: Any) -> None:
        self.params = dict(params)
        named = {"minimize": minimize, "maximize": maximize}
        self._keys = keys | {key: value if isinstance(value, str) else list(value) for key, value in named.items()}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives."""
        self._given = config, hydra_context, task_function

    def sweep(self, arguments: list[str]) -> None:
        """Run the search that the command line and `hydra.sweeper.params` describe."""
        from accum_sweep.search import Options, search

        settings = [f"{key}={value}" for key, value in self.params.items()]
        search(settings, arguments, Options(**self._keys), *self._given)


class ProcessesLauncher(Launcher):
    """Runs the jobs of a multirun in processes side by side on this machine."""

    def __init__(self, workers: Any = None, threads: Any = None, fresh: Any = False) -> None:
        self._keys = workers, threads, fresh

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives; raise ConfigError where a setting is wrong."""
        from accum_sweep.processes import Options

        self._given = Options(*self._keys), config, hydra_context, task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> "Sequence[JobReturn]":
        """Run the jobs and return what became of each, in their order."""
        from accum_sweep.processes import launch

        return launch(job_overrides, initial_job_idx, *self._given)


class SlurmLauncher(Launcher):
    """Runs the jobs of a multirun as jobs of Slurm."""

    def __init__(self, **keys: Any) -> None:
        self._keys = keys

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives; raise ConfigError where there is no Slurm, or a setting is wrong."""
        from accum_sweep.slurm import prepare

        self._prepared = prepare(self._keys, config, hydra_context, task_function)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> "Sequence[JobReturn]":
        """Run the jobs and return what became of each, in their order."""
        from accum_sweep.slurm import launch

        return launch(job_overrides, initial_job_idx, self._prepared)


class RayLauncher(Launcher):
    """Runs the jobs of a multirun as tasks of Ray."""

    def __init__(self, **keys: Any) -> None:
        self._keys = keys

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives; raise ConfigError where there is no Ray, or a setting is wrong."""
        from accum_sweep.ray_cluster import prepare

        self._prepared = prepare(self._keys, config, hydra_context, task_function)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> "Sequence[JobReturn]":
        """Run the jobs and return what became of each, in their order."""
        from accum_sweep.ray_cluster import launch

        return launch(job_overrides, initial_job_idx, self._prepared)
