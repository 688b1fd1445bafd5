"""A problem of your own without a file in the package: `problem.factory=package.module:function` makes it.

The function is called as `function(dtype=..., **arguments)` and returns a `Problem`; see examples/custom_problem.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from accum_sweep.errors import ConfigError, Fault
from accum_sweep.problems.base import Problem, ProblemParams

if TYPE_CHECKING:
    import torch

FORM = "must be package.module:function"


class Params(ProblemParams):
    """Keys of `problem=custom`."""

    factory: str = Field(
        description=f"{FORM}, a function that returns an accum_sweep.problems.Problem",
        examples=["my_problem:make"],
        pattern=r"^\w+(\.\w+)*:\w+$",
    )
    arguments: dict[str, Any] | None = Field(default=None, description="what the function is called with, beside dtype")
    samples: int = Field(
        description="must be the number of training samples the function makes, 1 or more", examples=[256], ge=1
    )

    @property
    def train_samples(self) -> int:
        """As many as the config says; the run compares it with the data."""
        return self.samples

    @field_validator("factory")
    @classmethod
    def _can_be_found(cls, factory: str) -> str:
        """Look for the package without importing anything: a config is checked without running a user's code."""
        package = factory.partition(":")[0].partition(".")[0]
        if importlib.util.find_spec(package) is None:
            remedy = "run `python -m accum_sweep` in the folder that holds it, or install it"
            raise ConfigError([Fault("problem.factory", factory, f"there is no module {package} to import", remedy)])
        return factory

    def build(self, dtype: torch.dtype) -> Problem:
        """Import the function and call it. Raises ConfigError unless that gives a `Problem`.

        What the function itself raises is passed on.
        """
        function, arguments = self._function(), self.arguments or {}
        try:
            signature = inspect.signature(function)
        except ValueError as error:  # of what is written in C
            raise self._fault(f"cannot be asked for its arguments ({error})", "give a Python function") from error
        try:
            signature.bind(dtype=dtype, **arguments)
        except TypeError as error:
            rule = f"{self.factory} cannot be called with dtype and these ({error})"
            raise ConfigError([Fault("problem.arguments", self.arguments, rule, f"it takes {signature}")]) from error
        problem = function(dtype=dtype, **arguments)
        if not isinstance(problem, Problem):
            rule = f"returned a {type(problem).__name__}, not a Problem"
            raise self._fault(rule, "return accum_sweep.problems.Problem(model, train, loss)")
        return problem

    def _function(self) -> Callable[..., Any]:
        module_name, _, name = self.factory.partition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # a user's module may raise what it likes
            rule = f"{module_name} could not be imported ({type(error).__name__}: {error})"
            raise self._fault(rule, "mend the module") from error
        function: Callable[..., Any] | None = getattr(module, name, None)
        if not callable(function):
            public = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value)) or "none"
            raise self._fault(f"{module_name} has no function {name}", f"its functions are: {public}")
        return function

    def _fault(self, rule: str, remedy: str) -> ConfigError:
        return ConfigError([Fault("problem.factory", self.factory, rule, remedy)])
