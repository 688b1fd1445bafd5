"""From a problem's model to the one that is trained: on its device, with BatchNorm, blocks and ranks as configured.

And to the end of a window as configured: optimizer, learning rate, clipping, scaler.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from accum_sweep import optimizers, precision
from accum_sweep.accumulate import Loss, Window, accumulate_gradients
from accum_sweep.boundary import Boundary
from accum_sweep.errors import UserError
from accum_sweep.fused_linear import fuse_linears
from accum_sweep.ranks import Agreement
from accum_sweep.step_in_backward import step_in_backward

if TYPE_CHECKING:
    from accum_sweep.config import Config


def prepare(config: Config, model: nn.Module, blocks: tuple[str, ...], device: torch.device) -> nn.Module:
    """Return `model`, changed in place, as it is trained. Raises UserError where it lacks what a setting works on."""
    model = model.to(device).train()
    set_batchnorm(config, model)
    if config.fused_linear and not fuse_linears(model):
        raise UserError("fused_linear=true has nothing to work on: no nn.Linear of the model is trained; leave it out")
    if config.checkpointing:
        for block in _blocks(model, blocks, "checkpointing=true"):
            _checkpoint(block)
    if config.processes == 1:
        # Not model.compile(): of torch's own containers, such as nn.Sequential, that compiles nothing.
        return cast(nn.Module, torch.compile(model)) if config.compile else model
    if config.parallel == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (config.processes,))
    for block in _blocks(model, blocks, None):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _checkpoint(block: nn.Module) -> None:
    """Let a block compute its activations anew in the backward pass."""
    plain = type(block)
    if "forward" in vars(block):
        raise UserError(
            f"checkpointing=true: a block ({plain.__name__}) has a forward that is not its class's; leave it out"
        )

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(plain.forward, self), *args, use_reentrant=False, **kwargs)

    # Not a new `forward` in the block, which would tie it into a cycle.
    block.__class__ = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})


def set_batchnorm(config: Config, model: nn.Module) -> None:
    """Put BatchNorm into the mode that `batchnorm` names.

    eval: running statistics, which stay as they are, normalize; samples no longer meet in a layer. corrected_momentum:
    k updates of the running statistics in a window move them as far as one did; the gradient is not touched.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            if config.batchnorm == "eval":
                module.eval()
            elif config.batchnorm == "corrected_momentum" and module.momentum is not None and config.accum_steps:
                module.momentum = 1 - (1 - module.momentum) ** (1 / config.accum_steps)


def boundary(config: Config, model: nn.Module, device: torch.device, steps: int) -> Boundary:
    """Return how the model's windows end; `steps` is the length of the whole training."""
    optimizer = optimizers.build(config.optimizer, config.lr, model.parameters())
    schedulers = []
    if config.lr_schedule != "constant" or config.warmup_steps:
        factor = functools.partial(optimizers.lr_factor, config.lr_schedule, config.warmup_steps, steps)
        schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizer, factor))
    if config.step_in_backward:
        return step_in_backward(model, optimizer, schedulers)
    scaler = torch.amp.GradScaler(device.type) if config.precision == "fp16" else None
    return Boundary([optimizer], schedulers, config.clip_norm, config.clip_value, config.on_nonfinite, scaler)


def in_precision(config: Config, loss: Loss, device: torch.device) -> Loss:
    """Return the loss, computed in the arithmetic that `precision` names."""
    if config.precision not in precision.AUTOCAST:
        return loss

    def computed(model: nn.Module, batch: Any) -> Any:
        with precision.arithmetic(config.precision, device):
            return loss(model, batch)

    return computed


def accumulation(
    config: Config, loss: Loss, scaler: torch.amp.GradScaler | None = None, agreement: Agreement | None = None
) -> Callable[[nn.Module, Sequence[Any]], Window]:
    """Return how a model's windows are accumulated."""
    return functools.partial(
        accumulate_gradients,
        loss=loss,
        normalization=config.normalization,
        accumulator=torch.float32 if config.accumulator else None,
        scaler=scaler,
        sync_every_micro_batch=config.sync_every_micro_batch,
        agreement=agreement,
    )


def notes(config: Config, model: nn.Module) -> list[str]:
    """Say what a user might not expect of these settings; also logged."""
    said = []
    batchnorms = any(isinstance(module, _BatchNorm) for module in model.modules())
    if config.batchnorm != "train" and not batchnorms:
        said.append(f"batchnorm={config.batchnorm} changes nothing: the model has no BatchNorm")
    samples = sum(next(config.plan(0)))
    if config.epochs is not None and config.last_window == "flush" and samples > config.problem.train_samples:
        short = f"an epoch is shorter than a window: of {samples} samples a step sees {config.problem.train_samples}"
        said.append(f"{short}; give steps instead of epochs, last_window=carry or a smaller window")
    for note in said:
        logging.getLogger(__name__).warning("%s", note)
    return said


def _blocks(model: nn.Module, names: tuple[str, ...], wanted: str | None) -> list[nn.Module]:
    if not names and wanted is not None:
        raise UserError(f"{wanted} has nothing to work on: the problem names no blocks; leave it out")
    return [model.get_submodule(name) for name in names]
