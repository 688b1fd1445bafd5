"""Which gradient-accumulation setting to train with, what it costs, and whether it is the same training.

    import accum_sweep
    record = accum_sweep.run(overrides=["accum_steps=4"])
    record.result  # {"initial_weight": [...], "final_weight": [...], "weight_changed": True}

The loop itself, for a training script of your own, is `accum_sweep.accumulate`; it needs nothing but torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accum_sweep.app import run
    from accum_sweep.errors import ConfigError, UserError
    from accum_sweep.record import Record

__all__ = ["ConfigError", "Record", "UserError", "run"]

_HOME = {"run": "app", "Record": "record", "ConfigError": "errors", "UserError": "errors"}


def __getattr__(name: str) -> Any:
    """Import late: the command line answers before torch could be loaded."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
