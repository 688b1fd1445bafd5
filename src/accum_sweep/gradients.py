"""Arithmetic on gradients, exact enough to judge them by: whole, dense, in float64. torch only."""

import math

import torch
from torch import Tensor, nn

from accum_sweep import ranks

Gradient = list[Tensor]  # by parameter that requires one


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that take a gradient, shared ones once."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """Return a copy of a gradient, whole and dense; zeros where there is none."""
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    whole = ranks.whole(gradient.detach())
    whole = whole.to_dense() if whole.is_sparse else whole.clone()
    return torch.view_as_real(whole) if whole.is_complex() else whole


def compare(found: Gradient, expected: Gradient) -> tuple[float, float]:
    """Return relative L2 error and cosine over all parameters together, in float64. Two zeros are equal."""
    norm, other = l2_norm(expected), l2_norm(found)
    if norm == 0 or other == 0:
        return (0.0, 1.0) if norm == other else (math.inf, 0.0)
    return distance(found, expected) / norm, dot(found, expected) / (norm * other)


def l2_norm(gradient: Gradient) -> float:
    """Return the L2 norm over all parameters together, in float64."""
    return math.sqrt(dot(gradient, gradient))


def distance(found: Gradient, expected: Gradient) -> float:
    """Return the L2 norm of the difference."""
    pairs = zip(found, expected, strict=True)
    return math.sqrt(math.fsum(float((_exact(a, b) - _exact(b, b)).square().sum()) for a, b in pairs))


def dot(a: Gradient, b: Gradient) -> float:
    """Return the inner product."""
    return math.fsum(float((_exact(x, y) * _exact(y, y)).sum()) for x, y in zip(a, b, strict=True))


def _exact(tensor: Tensor, beside: Tensor) -> Tensor:
    """Return the tensor in float64, on the other's device; Apple's GPUs know no float64."""
    return tensor.to("cpu" if beside.device.type == "mps" else beside.device).double()
