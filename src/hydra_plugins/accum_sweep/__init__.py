"""Where Hydra looks for plugins. It imports this at every start, so the work is elsewhere and imported late."""

from collections.abc import Mapping
from typing import Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


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
