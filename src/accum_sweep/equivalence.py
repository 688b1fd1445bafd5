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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from accum_sweep import ranks
from accum_sweep.accumulate import Loss, Normalization, accumulate_gradients, mean_loss

Outcome = Literal["equivalent", "different", "not comparable"]
COARSE = (torch.bfloat16, torch.float16)
LOSS_TOLERANCE = 1e-4  # relative; positive and negative losses may cancel, and a wrong loss is farther off
COUPLED = "something in the model or the loss couples the samples of a micro-batch"
FEW = 8  # counts that are listed in a reason

Gradient = list[Tensor]  # by parameter that requires one


@dataclass(frozen=True)
class Reference:
    """The gradient of the mean loss of one full batch, in one forward and backward."""

    gradient: Gradient
    loss: float  # mean over items
    items: int
    draws: bool  # whether the model drew random numbers on the way
    moved: tuple[str, ...] = ()  # buffers that it changed on the way, other than BatchNorm's


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


def full_batch(model: nn.Module, batch: Any, loss: Loss, scale: float = 1.0) -> Reference:
    """Compute the reference. `.grad` is left as it is; buffers and random state may move."""
    parameters = trainable(model)
    before, buffers = random_state(), {name: buffer.clone() for name, buffer in _own_buffers(model)}
    loss_sum, items = loss(model, batch)
    draws = any(not torch.equal(a, b) for a, b in zip(before, random_state(), strict=True))
    moved = tuple(name for name, buffer in _own_buffers(model) if not torch.equal(buffer, buffers[name]))
    weight = torch.full_like(loss_sum, scale / int(items))
    found = torch.autograd.grad(loss_sum, parameters, weight, allow_unused=True)
    gradient = [dense(g, p).div_(scale) for g, p in zip(found, parameters, strict=True)]
    return Reference(gradient, float(loss_sum.detach()) / int(items), int(items), draws, moved)


def _own_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        if not isinstance(module, _BatchNorm):
            yield from module.named_buffers(prefix, recurse=False)


def finite_full_batch(model: nn.Module, batch: Any, loss: Loss, scale: float) -> tuple[Reference, float]:
    """Compute the reference with `scale`, or the next lower one, by halves, at which it does not overflow."""
    while True:
        state = random_state()
        reference = full_batch(model, batch, loss, scale)
        if scale <= 1 or all(bool(gradient.isfinite().all()) for gradient in reference.gradient):
            return reference, scale
        set_random_state(state)
        scale /= 2


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
    distance, norm, other = (
        _distance(found, expected),
        math.sqrt(_dot(expected, expected)),
        math.sqrt(_dot(found, found)),
    )
    if norm == 0 or other == 0:
        return (0.0, 1.0) if norm == other else (math.inf, 0.0)
    return distance / norm, _dot(found, expected) / (norm * other)


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
    return _distance(case.gradient, reference.gradient) <= 4 * noise and loss_error <= loss_allowed


def _is_nearer(case: Case, reference: Reference, allowed: float) -> bool:
    """Tell whether a gradient in a low precision is nearer to that in float32 than the full batch's is.

    Some kernels sum over the samples of a batch in its own precision, so the larger the batch, the worse.
    """
    if case.gradient[0].dtype not in COARSE:
        return False
    exact = full_batch(copy.deepcopy(case.model).float(), _as_float(case.batch), case.loss)
    nearest = max(_distance(reference.gradient, exact.gradient), allowed * l2_norm(exact.gradient))
    return _distance(case.gradient, exact.gradient) <= nearest and abs(case.mean_loss - exact.loss) <= allowed * abs(
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
    factor = _dot(case.gradient, reference.gradient) / (_dot(reference.gradient, reference.gradient) or math.nan)
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
    return _distance(moved.gradient, reference.gradient), abs(moved.loss - reference.loss)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def l2_norm(gradient: Gradient) -> float:
    """Return the L2 norm over all parameters together, in float64."""
    return math.sqrt(_dot(gradient, gradient))


def _distance(found: Gradient, expected: Gradient) -> float:
    pairs = zip(found, expected, strict=True)
    return math.sqrt(math.fsum(float((_exact(a, b) - _exact(b, b)).square().sum()) for a, b in pairs))


def _dot(a: Gradient, b: Gradient) -> float:
    return math.fsum(float((_exact(x, y) * _exact(y, y)).sum()) for x, y in zip(a, b, strict=True))


def _exact(tensor: Tensor, beside: Tensor) -> Tensor:
    """Return the tensor in float64, on the other's device; Apple's GPUs know no float64."""
    return tensor.to("cpu" if beside.device.type == "mps" else beside.device).double()


def set_random_state(state: list[Tensor]) -> None:
    """Put torch's global generators into a state that `random_state` returned."""
    torch.set_rng_state(state[0])
    if len(state) > 1:
        torch.cuda.set_rng_state_all(state[1:])


def random_state() -> list[Tensor]:
    """Return the state of torch's global generators, the CPU's first."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:FEW]) + (f" and {len(words) - FEW} more" if len(words) > FEW else "")
