"""Real data, small: scikit-learn's 1797 handwritten digits (8 x 8 pixels) and a multi-layer perceptron.

Source of the data: the test part of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998),
as shipped by scikit-learn.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

from pydantic import Field

from accum_sweep.problems.base import Problem, ProblemParams

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

SAMPLES = 1797
PIXELS = 64
CLASSES = 10


class Params(ProblemParams):
    """Keys of `problem=digits_mlp`."""

    hidden: int = Field(default=128, ge=1, description="units of each hidden layer")
    layers: int = Field(default=1, ge=1, description="number of hidden layers")
    test_samples: int = Field(
        default=360, ge=1, lt=SAMPLES, description="images held out for test/accuracy and test/loss"
    )

    @property
    def train_samples(self) -> int:
        """Images that are not held out."""
        return SAMPLES - self.test_samples

    def build(self, dtype: torch.dtype) -> Problem:
        """Build the perceptron (ReLU) and split the images; the split is the same for every seed."""
        import torch
        from torch import nn

        widths = [PIXELS] + [self.hidden] * self.layers
        layers: list[nn.Module] = []
        for inputs, outputs in itertools.pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES)).to(dtype)
        images, labels = _digits()
        images = images.to(dtype)
        test = images[self.train_samples :], labels[self.train_samples :]

        def evaluate(model: nn.Module, device: torch.device) -> dict[str, float]:
            with torch.no_grad():
                x, y = (column.to(device) for column in test)
                loss_sum, samples = cross_entropy(model, (x, y))
                right = (model(x).argmax(dim=1) == y).sum().item()
            return {"test/loss": loss_sum.item() / samples, "test/accuracy": right / samples}

        train = images[: self.train_samples], labels[: self.train_samples]
        return Problem(model, train, cross_entropy, evaluate=evaluate)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """Sum of the cross-entropies and number of samples; x is (samples, 64), y is (samples,) class numbers."""
    from torch.nn import functional as F

    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), y.shape[0]


@functools.lru_cache(maxsize=1)
def _digits() -> tuple[Tensor, Tensor]:
    """All images (1797, 64), pixels from 0 to 1, and labels (1797,), in one fixed shuffled order.

    Shuffled, because the file is sorted by writer and a tail would hold out whole writers.
    """
    import torch
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(digits.data).to(torch.float64) / 16
    return images[order], torch.from_numpy(digits.target).to(torch.int64)[order]
