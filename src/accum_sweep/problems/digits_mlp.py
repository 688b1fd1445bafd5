"""Real data, small: handwritten digits (see digits.py) and a multi-layer perceptron."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from pydantic import Field

from accum_sweep.problems.base import Problem
from accum_sweep.problems.digits import CLASSES, PIXELS, DigitsParams, cross_entropy, evaluation, split

if TYPE_CHECKING:
    import torch
    from torch import nn


class Params(DigitsParams):
    """Keys of `problem=digits_mlp`."""

    hidden: int = Field(default=128, ge=1, description="units of each hidden layer")
    layers: int = Field(default=1, ge=1, description="number of hidden layers")

    def build(self, dtype: torch.dtype) -> Problem:
        """Build the perceptron (ReLU) and split the images."""
        from torch import nn

        widths = [PIXELS] + [self.hidden] * self.layers
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES)).to(dtype)
        train, test = split(self.test_samples, dtype)
        return Problem(model, train, cross_entropy, evaluate=evaluation(test))
