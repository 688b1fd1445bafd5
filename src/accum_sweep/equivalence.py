"""Is an accumulated gradient the full batch's? Numbers first, then a verdict, and why.

torch only. Compared are gradients, because losses agree to a few parts in a thousand where gradients are off by half,
and before clipping and the optimizer, because constant clipping and Adam hide a wrong divisor.

**Tolerance** of the relative L2 error, for arithmetic that rounds by u, gradients that are summed with a rounding of
v, and k micro-batches:

    16 v sqrt(k)  +  4 u where u > v

Each of the k additions rounds the sum by at most v; roundings are as good as independent, so they grow like sqrt(k)
(Higham, Accuracy and Stability of Numerical Algorithms, 2.8 and 4.2), and forward and backward of either side add a
few more of their own: 16 leaves room for those. Matrix products in a lower precision round each entry by u on either
side; they are not summed in it, so this does not grow. With gradients in bfloat16, v is still float32's: that they are
summed too coarsely is what the verdict has to find. Largest measured: 5e-16 in fp64, 3e-7 in fp32, 2.4e-3 in bf16.

**Rounding noise.** Where gradients of opposite sign cancel, near the end of a training say, rounding alone makes them
differ by more. The full batch is then run once more with every weight moved by its last digit, up or down; what differs
by no more than 4 times what that does is rounding. And a full batch in bfloat16 may itself sum too coarsely: what is
nearer to its gradient in float32 than it is, is not accused.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accum_sweep.accumulate import Loss, Normalization, accumulate_gradients, mean_loss
from accum_sweep.full_batch import Reference, full_batch
from accum_sweep.gradients import Gradient, compare, dense, distance, dot, l2_norm, trainable

Outcome = Literal["equivalent", "different", "not comparable"]
COARSE = (torch.bfloat16, torch.float16)
LOSS_TOLERANCE = 1e-4  # relative; positive and negative losses may cancel, and a wrong loss is farther off
COUPLED = "something in the model or the loss couples the samples of a micro-batch"
FEW = 8  # counts that are listed in a reason


@dataclass(frozen=True)
class Verdict:
    """What was found. The numbers are None where there is nothing to compare with."""

    outcome: Outcome
    reason: str
    relative_error: float | None = None  # L2 distance of the gradients, over the norm of the full batch's
    cosine: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Case:
    """What is judged: one window's gradient, and all it takes to compute it again.

    `micro_batches` and `batch` hold the same samples, those of all ranks. `model` is a copy of the model at the
    weights the gradient was taken at. `unit` is the arithmetic's rounding, `scale` a factor for gradients that might
    underflow.
    """

    model: nn.Module
    loss: Loss
    micro_batches: Sequence[Any]
    batch: Any
    gradient: Gradient
    items: int  # that the window counted
    mean_loss: float  # that the window reported
    normalization: Normalization
    unit: float
    scale: float = 1.0
    reproducible: bool = True  # whether the model draws the same random numbers again


def tolerance(unit: float, summed_with: float, micro_batches: int) -> float:
    """Return the largest relative error that rounding explains; the module says why."""
    return 16 * summed_with * math.sqrt(micro_batches) + (4 * unit if unit > summed_with else 0.0)


def judge(case: Case, reference: Reference) -> Verdict:
    """Say whether the case's gradient is the reference's."""
    pieces = len(case.micro_batches)
    summed_with = torch.finfo(torch.float64 if case.gradient[0].dtype == torch.float64 else torch.float32).eps / 2
    allowed = tolerance(case.unit, summed_with, pieces)
    error, cosine = compare(case.gradient, reference.gradient)
    numbers = {"relative_error": error, "cosine": cosine, "tolerance": allowed}
    if reason := _incomparable(case, reference):
        return Verdict("not comparable", reason, **numbers)
    if case.items != reference.items:
        reason = (
            f"different data, or a wrong count: {case.items} items in the window, {reference.items} in its full batch"
        )
        return Verdict("different", reason, **numbers)
    if _close(case.gradient, case.mean_loss, reference, allowed):
        return Verdict("equivalent", "", **numbers)
    again = _accumulated_again(case, _wide(case.gradient[0].dtype))
    # Rounding is an excuse only where careful accumulation of the same micro-batches misses the full batch as well.
    if not _close(again.gradient, again.mean_loss, reference, allowed):
        if reference.moved and pieces > 1:
            reason = f"the model changes in every forward pass ({_listed(reference.moved)})"
            return Verdict("not comparable", reason, **numbers)
        if _is_noise(case, reference, allowed):
            return Verdict("equivalent", "the gradient is so small that its last digits are rounding", **numbers)
        if _is_nearer(case, reference, allowed):
            return Verdict("equivalent", "nearer to the gradient in float32 than the full batch's is", **numbers)
    return Verdict("different", _why(case, reference, again, allowed, pieces), **numbers)


def _incomparable(case: Case, reference: Reference) -> str | None:
    """Say what makes a sample's gradient depend on the micro-batch it is in, or on chance."""
    model, one = case.model, len(case.micro_batches) == 1
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm) and module.training]
    if norms and not one:
        return f"BatchNorm in training mode ({_listed(norms)}) takes its statistics from the micro-batch"
    if reference.draws and not (one and case.reproducible):
        layers = [
            name
            for name, module in model.named_modules()
            if "drop" in type(module).__name__.lower() and getattr(module, "p", True) and module.training
        ]
        where = f" ({_listed(layers)})" if layers else ""
        return f"the model draws random numbers in training, as dropout does{where}: each micro-batch draws its own"
    return None


def _close(gradient: Gradient, mean_loss: float, reference: Reference, allowed: float) -> bool:
    loss_error = abs(mean_loss - reference.loss)
    right = compare(gradient, reference.gradient)[0] <= allowed
    return right and loss_error <= max(allowed, LOSS_TOLERANCE) * abs(reference.loss)


def _is_noise(case: Case, reference: Reference, allowed: float) -> bool:
    """Tell whether gradient and loss differ by what moving the weights by their last digit does."""
    noise, loss_noise = _noise(case, reference)
    loss_error = abs(case.mean_loss - reference.loss)
    loss_allowed = max(4 * loss_noise, max(allowed, LOSS_TOLERANCE) * abs(reference.loss))
    return distance(case.gradient, reference.gradient) <= 4 * noise and loss_error <= loss_allowed


def _is_nearer(case: Case, reference: Reference, allowed: float) -> bool:
    """Tell whether a gradient in a low precision is nearer to that in float32 than the full batch's is.

    Some kernels sum over the samples of a batch in its own precision, so the larger the batch, the worse.
    """
    if case.gradient[0].dtype not in COARSE:
        return False
    exact = full_batch(copy.deepcopy(case.model).float(), _as_float(case.batch), case.loss)
    nearest = max(distance(reference.gradient, exact.gradient), allowed * l2_norm(exact.gradient))
    return distance(case.gradient, exact.gradient) <= nearest and abs(case.mean_loss - exact.loss) <= allowed * abs(
        exact.loss
    )


def _as_float(batch: Any) -> Any:
    """Return the batch with its coarse numbers in float32."""
    if isinstance(batch, Tensor):
        return batch.float() if batch.dtype in COARSE else batch
    if isinstance(batch, Mapping):
        return {name: _as_float(value) for name, value in batch.items()}
    return tuple(map(_as_float, batch)) if isinstance(batch, list | tuple) else batch


def _why(case: Case, reference: Reference, again: "_Again", allowed: float, pieces: int) -> str:
    """Name the cause, after trying it."""
    if compare(case.gradient, reference.gradient)[0] <= allowed:
        return f"the loss it reports is {case.mean_loss:.4g}, the full batch's is {reference.loss:.4g}"
    additive = abs(again.mean_loss - reference.loss) <= max(allowed, 1e-5) * abs(reference.loss)
    if not additive:
        losses = f"{again.mean_loss:.4g} an item over its micro-batches, {reference.loss:.4g} over the full batch"
        if abs(again.mean_loss) > math.sqrt(pieces) * abs(reference.loss):  # nearer to k times than to once
            return f"the loss is no sum over items ({losses}): is reduction='sum' missing?"
        return f"{COUPLED} ({losses})"
    if compare(again.gradient, reference.gradient)[0] > 4 * allowed:
        return COUPLED
    factor = dot(case.gradient, reference.gradient) / (dot(reference.gradient, reference.gradient) or math.nan)
    scaled = [factor * gradient for gradient in reference.gradient]
    counts = _listed([str(count) for count in again.counts])
    if case.normalization == "mean" and len(set(again.counts)) > 1:
        return f"mean gives micro-batches of {counts} items the same weight; use normalization=items"
    dtype = case.gradient[0].dtype
    if dtype in COARSE and compare(case.gradient, _accumulated_again(case, dtype).gradient)[0] <= allowed:
        name = str(dtype).removeprefix("torch.")
        return f"low-precision accumulator: {pieces} gradients summed in {name}; use accumulator=fp32"
    if compare(case.gradient, scaled)[0] <= 4 * allowed:
        cause = f" (sum: {pieces} micro-batches, never divided)" if case.normalization == "sum" else ""
        return f"the gradient is {factor:.4g} times the full batch's{cause}"
    if case.normalization == "sum":
        return f"sum adds {pieces} micro-batches of {counts} items, each divided by its own"
    return "the gradients were not accumulated rightly: summed one by one, they do give the full batch's"


@dataclass(frozen=True)
class _Again:
    gradient: Gradient
    mean_loss: float
    counts: tuple[int, ...]  # items by micro-batch


def _accumulated_again(case: Case, accumulator: torch.dtype) -> _Again:
    """Accumulate the same micro-batches on the copy, to tell a wrong loop from a model that is not additive."""

    def scaled(model: nn.Module, batch: Any) -> tuple[Tensor, int | Tensor]:
        loss_sum, items = case.loss(model, batch)
        return loss_sum * case.scale, items

    case.model.zero_grad()
    window = accumulate_gradients(case.model, case.micro_batches, scaled, accumulator=accumulator)
    gradient = [dense(parameter.grad, parameter).div_(case.scale) for parameter in trainable(case.model)]
    case.model.zero_grad()
    return _Again(gradient, mean_loss(window) / case.scale, window.items)


def _noise(case: Case, reference: Reference) -> tuple[float, float]:
    """Return how far the full batch's gradient, and its loss, move with the last digit of the weights.

    It is also scaled by another number, for models that round to a type of their own inside.
    """
    generator = torch.Generator().manual_seed(0)
    before = [parameter.detach().clone() for parameter in trainable(case.model)]
    with torch.no_grad():
        for parameter in trainable(case.model):
            signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1).to(parameter.device)
            unit = max(case.unit, torch.finfo(parameter.dtype).eps / 2)
            parameter.mul_(1 + 2 * unit * signs.to(parameter.dtype))
    moved = full_batch(case.model, case.batch, case.loss, case.scale / 3)
    with torch.no_grad():
        for parameter, value in zip(trainable(case.model), before, strict=True):
            parameter.copy_(value)
    return distance(moved.gradient, reference.gradient), abs(moved.loss - reference.loss)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:FEW]) + (f" and {len(words) - FEW} more" if len(words) > FEW else "")
