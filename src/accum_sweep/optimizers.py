"""From `optimizer` in the config to a torch optimizer: the name of a class in `torch.optim`, and its arguments.

A new optimizer is a new file in `conf/optimizer/`, nothing more.
"""

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from accum_sweep.errors import UserError, nearest


def build(settings: Mapping[str, Any], lr: float, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return `torch.optim.<name>(parameters, lr=lr, **other settings)`.

    Raises UserError where the class is unknown or refuses its arguments.
    """
    arguments = {key: value for key, value in settings.items() if key != "name"}
    name = settings["name"]
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer):
        known = [key for key, value in vars(torch.optim).items() if isinstance(value, type)]
        raise UserError(f"torch.optim has no optimizer {name!r}: {nearest(name, known, 'see its documentation')}")
    for key, parameter in inspect.signature(cls).parameters.items():
        # torch takes any value for true here, "no" as well.
        if "bool" in str(parameter.annotation) and not isinstance(arguments.get(key), bool | None):
            raise UserError(f"torch.optim.{name} takes true or false for {key}, not {arguments[key]}")
    try:
        return cls(parameters, lr=lr, **arguments)  # type: ignore[call-arg]  # every torch optimizer takes lr
    except (TypeError, ValueError) as error:
        raise UserError(f"torch.optim.{name} refuses these settings: {error}") from error


def probe(settings: Mapping[str, Any], lr: float) -> None:
    """Raise UserError where torch would refuse these settings, or a step with them, by trying on one weight."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = build(settings, lr, [weight])
    try:
        optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"torch.optim.{settings['name']} cannot take a step with these settings: {error}") from error


def lr_factor(shape: str, warmup_steps: int, steps: int, step: int) -> float:
    """Return by what the learning rate is multiplied in a step, counted from 0, of `steps`.

    It rises evenly to 1 during the warm-up; then it stays ("constant"), or falls along half a cosine to 0 at the end
    ("cosine": SGDR, Loshchilov and Hutter 2017, without restarts).
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if shape == "constant":
        return 1.0
    return (1 + math.cos(math.pi * (step - warmup_steps) / max(1, steps - warmup_steps))) / 2
