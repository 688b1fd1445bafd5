"""From `optimizer` in the config to a torch optimizer: the name of a class in `torch.optim`, and its arguments.

A new optimizer is a new file in `conf/optimizer/`, nothing more.
"""

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
    try:
        return cls(parameters, lr=lr, **arguments)  # type: ignore[call-arg]  # every torch optimizer takes lr
    except (TypeError, ValueError) as error:
        raise UserError(f"torch.optim.{name} refuses these settings: {error}") from error


def probe(settings: Mapping[str, Any], lr: float) -> None:
    """Raise UserError where torch would refuse these settings, or a step with them, by trying on one weight."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer = build(settings, lr, [weight])
    try:
        optimizer.step()
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"torch.optim.{settings['name']} cannot step on plain gradients: {error}") from error
