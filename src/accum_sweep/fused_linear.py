"""Linear layers that add the gradient of their weight to the one that is there, while they compute it.

torch only. Autograd makes each micro-batch's gradient of a weight as a tensor of its own and then adds it: at the peak
there are two, and each addition reads and writes memory once more. Here one matrix product does both
(`grad.addmm_(...)`), from a window's second micro-batch on; the first one's gradient is still made by autograd. The
sum is the same but for its rounding. Left alone is what has to see, or convert, the gradient of one micro-batch: a
weight with hooks, and autocast.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F


def fuse_linears(model: nn.Module) -> int:
    """Turn each trained `nn.Linear` of a model, in place, into one that fuses; return how many there were.

    Subclasses of `nn.Linear` are left alone: they may compute something else.
    """
    found = [module for module in model.modules() if type(module) is nn.Linear and _is_plain(module.weight)]
    for module in found:
        module.__class__ = FusedLinear  # not a new `forward` in it, which would tie it into a cycle
    return len(found)


class FusedLinear(nn.Linear):
    """`nn.Linear` in all but how the gradient of its weight is summed."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute what `nn.Linear` does."""
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        output: Tensor = _Linear.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return output


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight  # what is saved may come back as a copy, as it does under checkpointing
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])  # (samples, outputs)
        inputs = x.reshape(-1, x.shape[-1])  # (samples, inputs)
        own = None
        if for_weight and _may_add(ctx.parameter):
            ctx.parameter.grad.addmm_(rows.t(), inputs)
        elif for_weight:
            own = rows.t() @ inputs
        return gradient @ weight if for_x else None, own, rows.sum(dim=0) if for_bias else None


def _is_plain(weight: Tensor) -> bool:
    """Tell whether a weight is trained, real, no product of other tensors, and without hooks that want its gradient."""
    plain = isinstance(weight, nn.Parameter) and weight.requires_grad and not weight.is_complex()
    return plain and not _is_hooked(weight)


def _is_hooked(weight: Tensor) -> bool:
    return bool(weight._backward_hooks) or bool(getattr(weight, "_post_accumulate_grad_hooks", None))


def _may_add(weight: Tensor) -> bool:
    """Tell whether there is a sum to add to, and this backward is one that adds to it.

    `torch.autograd.grad` in a loss, for the norm of an input's gradient say, leaves `.grad` as it is.
    """
    if weight.grad is None or weight.grad.layout != torch.strided or torch.is_grad_enabled() or _is_hooked(weight):
        return False
    try:
        # What torch's own register_multi_grad_hook asks: does autograd reach this weight in this backward?
        return torch._C._will_engine_execute_node(get_gradient_edge(weight).node)
    except RuntimeError:  # the weight's own gradient is asked for by torch.autograd.grad
        return False
