"""The data of the `digits_*` problems: scikit-learn's 1797 handwritten digits, 8 x 8 pixels; their loss and metrics.

Source of the data: the test part of UCI's "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, 1998),
as shipped by scikit-learn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from pydantic import Field

from accum_sweep.problems.base import ProblemParams
from accum_sweep.problems.held_out import mean

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn

SAMPLES = 1797
PIXELS = 64  # 8 x 8, row by row
CLASSES = 10


class DigitsParams(ProblemParams):
    """Keys that the problems on digits share."""

    libraries = ("sklearn.datasets",)

    test_samples: int = Field(
        default=360, ge=1, lt=SAMPLES, description="images held out for test/accuracy and test/loss"
    )

    @property
    def train_samples(self) -> int:
        """Images that are not held out."""
        return SAMPLES - self.test_samples


def split(test_samples: int, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) to train on, and those held out; the split is the same for every seed."""
    import torch

    images, labels = map(torch.from_numpy, load())
    images, train = images.to(dtype), SAMPLES - test_samples
    return (images[:train], labels[:train]), (images[train:], labels[train:])


def evaluation(test: tuple[Tensor, Tensor]) -> Callable[[nn.Module, torch.device], dict[str, float]]:
    """Return the function that measures a model on the images held out."""

    def evaluate(model: nn.Module, device: torch.device) -> dict[str, float]:
        return {
            "test/loss": mean(model, cross_entropy, test, device),
            "test/accuracy": mean(model, right, test, device),
        }

    return evaluate


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """Sum of the cross-entropies and number of samples; x is (samples, 64), y is (samples,) class numbers."""
    from torch.nn import functional as F

    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), y.shape[0]


def right(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    """Return how many samples are classified right, and how many there are; shapes as in `cross_entropy`."""
    x, y = batch
    return (model(x).argmax(dim=1) == y).sum(), y.shape[0]


@functools.lru_cache(maxsize=1)
def load() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """All images (1797, 64), pixels from 0 to 1, and labels (1797,), in one fixed shuffled order.

    Shuffled, because the file is sorted by writer and a tail would hold out whole writers. No tensors: what is kept
    must be what it is, also where a problem is built without content.
    """
    import torch
    from sklearn.datasets import load_digits
    from torch.utils._python_dispatch import _disable_current_modes

    digits = load_digits()
    with _disable_current_modes():
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(0)).numpy()
    return digits.data[order] / 16, digits.target[order].astype("int64")
