"""What happens once a window, on its finished gradient: unscaling, the norm, clipping, the step, the learning rate.

torch only. None of this may happen at a micro-batch: a gradient clipped, unscaled or stepped on halfway is another one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from accum_sweep.accumulate import Window, exact_sum, gradient_norm

Outcome = Literal["stepped", "empty", "overflow", "skipped", "diverged"]
Watch = Callable[[Sequence[Any], Window], None]


@dataclass(frozen=True)
class Step:
    """One window's end. Only under the outcome `stepped` have the weights moved.

    `empty`: no micro-batch held an item. `overflow`: the gradient exceeded float16, and its scale is lower now.
    `skipped`, `diverged`: the loss or the gradient is not finite.
    """

    window: Window
    outcome: Outcome
    loss: float  # mean over the window's items, on all ranks
    micro_losses: tuple[float, ...]  # this rank's, each the mean over its micro-batch's items; NaN without items
    grad_norm: float  # L2 over all parameters, of the finished gradient
    clipped_norm: float  # the same after clipping: of what the optimizer sees
    lr: float  # the learning rate of the step


@dataclass
class Boundary:
    """How windows end. `optimizers` are stepped in order, `schedulers` once after each step that was taken.

    `clip_norm` bounds the L2 norm of the whole gradient, `clip_value` each of its entries. `on_nonfinite` says what a
    loss or gradient that is not finite does: "stop" the training, or "skip" its window. `norm` returns that of the
    model's whole gradient, a scalar.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[torch.optim.lr_scheduler.LRScheduler] = ()
    clip_norm: float | None = None
    clip_value: float | None = None
    on_nonfinite: Literal["stop", "skip"] = "stop"
    scaler: torch.amp.GradScaler | None = None
    norm: Callable[[nn.Module], Tensor] = gradient_norm

    def cross(self, model: nn.Module, window: Window, watch: Callable[[], None] | None = None) -> Step:
        """End the window: take the step if there is one to take, and clear the gradients.

        Waits for the device once, to know whether all is finite before the weights move. `watch` is called on the
        finished gradient, before clipping.
        """
        lr = float(self.optimizers[0].param_groups[0]["lr"])
        if window.total_items == 0:
            self.clear()
            return Step(window, "empty", math.nan, (math.nan,) * len(window.items), 0.0, 0.0, lr)
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        norm, *loss_sums = torch.stack([self.norm(model), *window.loss_sums]).tolist()
        total = exact_sum(loss_sums) if window.total_loss_sum is None else window.total_loss_sum
        loss = total / window.total_items
        micro_losses = tuple(s / n if n else math.nan for s, n in zip(loss_sums, window.items, strict=True))
        outcome = self._outcome(loss, norm)
        clipped = norm
        if outcome == "stepped":
            if watch is not None:
                watch()
            clipped = self._clip(model, norm)
            for optimizer in self.optimizers:
                optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
            for scheduler in self.schedulers:
                scheduler.step()
        if self.scaler is not None:
            before = self.scaler.get_scale()
            self.scaler.update()
            # Where a lower scale does not help either, the gradient itself is not finite.
            if outcome == "overflow" and not 1 <= self.scaler.get_scale() < before:
                outcome = "diverged" if self.on_nonfinite == "stop" else "skipped"
        self.clear()
        return Step(window, outcome, loss, micro_losses, norm, clipped, lr)

    def _outcome(self, loss: float, norm: float) -> Outcome:
        if math.isfinite(loss) and math.isfinite(norm):
            return "stepped"
        if self.scaler is not None and math.isfinite(loss):
            return "overflow"
        return "diverged" if self.on_nonfinite == "stop" else "skipped"

    def _clip(self, model: nn.Module, norm: float) -> float:
        """Clip, and return the norm afterwards."""
        if self.clip_value is not None:
            for parameter in model.parameters():
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()  # its entries may be spread over several
                    parameter.grad._values().clamp_(-self.clip_value, self.clip_value)
                elif parameter.grad is not None:
                    parameter.grad.clamp_(-self.clip_value, self.clip_value)
            return float(gradient_norm(model))
        if self.clip_norm is not None and norm > self.clip_norm:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(self.clip_norm / norm)
            return self.clip_norm
        return norm

    def clear(self) -> None:
        """Let go of all gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def train(
    model: nn.Module,
    boundary: Boundary,
    windows: Iterable[Sequence[Any]],
    accumulate: Callable[[nn.Module, Sequence[Any]], Window],
    watch: Watch | None = None,
) -> Iterator[Step]:
    """Accumulate and step, window by window, and yield each step; the last one is the first that diverged.

    `accumulate` is `accumulate_gradients` with its settings bound. `watch` is called with each window's micro-batches
    and what they computed, when its gradient is finished and finite, and nothing has moved.
    """
    boundary.clear()
    for micro_batches in windows:
        window = accumulate(model, micro_batches)
        step = boundary.cross(model, window, watch and partial(watch, micro_batches, window))
        yield step
        if step.outcome == "diverged":
            return
