"""What is trained: one file a problem, found by its name.

`problem.name=digits_mlp` is the module `digits_mlp` beside this file; a name with a dot, such as `mine.my_problem`, is
imported as it stands. Either module holds a class `Params`, a `ProblemParams` with a `build` of its own.
"""

import importlib
import importlib.util
import pkgutil

from accum_sweep.errors import ConfigError, Fault, nearest
from accum_sweep.problems.base import Problem, ProblemParams

NO_PROBLEMS = ("base", "corpus", "digits", "held_out", "hugging_face", "transformer")  # what problems are made of

__all__ = ["Problem", "ProblemParams", "params_class"]


def params_class(name: str) -> type[ProblemParams]:
    """Return the `Params` class of the problem called `name`; raise ConfigError if there is none."""
    shipped = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in NO_PROBLEMS)
    module_name = name if "." in name else f"{__name__}.{name}"
    if "." not in name and name not in shipped:
        remedy = nearest(name, shipped, f"choose from {', '.join(shipped)}, or give a module's full name")
        raise ConfigError([Fault("problem.name", name, "must be a known problem", remedy)])
    try:
        params = importlib.import_module(module_name).Params
    except Exception as error:  # a user's module may raise what it likes
        remedy = "give the full name of a module on the Python path that holds a class Params"
        raise ConfigError(
            [Fault("problem.name", name, f"could not be loaded ({type(error).__name__}: {error})", remedy)]
        ) from error
    if not (isinstance(params, type) and issubclass(params, ProblemParams)):
        remedy = "derive Params from accum_sweep.problems.ProblemParams"
        raise ConfigError([Fault("problem.name", name, "holds a Params that is no ProblemParams", remedy)])
    missing = [name for name in ("train_samples", "build") if getattr(params, name) is getattr(ProblemParams, name)]
    if missing:
        rule = f"{module_name}.Params lacks {' and '.join(missing)}"
        raise ConfigError([Fault("problem.name", name, rule, "see ProblemParams for what they return")])
    return params
