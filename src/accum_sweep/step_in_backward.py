"""The optimizer's step inside backward: each weight moves as soon as its gradient is there, which is then let go.

torch only, and only for windows of one micro-batch: there is never a whole gradient. So nothing can be done to it that
needs all of it, such as clipping or unscaling, and a gradient that is not finite is seen when weights have moved.
Source of the idea: LOMO (Lv et al., 2023), and PyTorch's tutorial on the optimizer step in backward.
"""

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from accum_sweep.boundary import Boundary
from accum_sweep.gradients import trainable


def step_in_backward(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedulers: Sequence[torch.optim.lr_scheduler.LRScheduler] = (),
) -> Boundary:
    """Let every backward of `model` step, and return how its windows end: with the norm, the learning rate, the checks.

    `optimizer` must treat each parameter on its own, as all in torch.optim but LBFGS do. Backward raises RuntimeError
    in a window's second micro-batch.
    """
    norms: dict[int, Tensor] = {}  # of this window's gradients, by number of the parameter
    held = weakref.ref(optimizer)  # the hooks hang on its parameters, and a cycle would keep all of them alive

    def stepping(number: int, parameter: Tensor) -> None:
        optimizer = held()
        if parameter.grad is None or optimizer is None:
            return
        if number in norms:
            raise RuntimeError("a step in backward needs windows of one micro-batch: this weight has moved already")
        entries = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
        norms[number] = torch.linalg.vector_norm(entries)
        optimizer.step()  # finds this gradient only: the others are gone, or not there yet
        parameter.grad = None

    def norm(_: nn.Module) -> Tensor:
        found = [norms[number] for number in sorted(norms)]
        norms.clear()
        return nn.utils.get_total_norm(found)

    for number, parameter in enumerate(trainable(model)):
        parameter.register_post_accumulate_grad_hook(partial(stepping, number))  # type: ignore[no-untyped-call]
    return Boundary([optimizer], schedulers, norm=norm)
