"""Watches a training: judges windows as they end, and that what follows is done once, and gives one verdict.

torch only. It works on a copy of the model, leaves gradients, buffers and random state as they are, and never fails the
run: where the full batch does not fit, the verdict says so.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from accum_sweep import ranks
from accum_sweep.accumulate import Loss, Normalization, Window
from accum_sweep.boundary import Boundary, Step
from accum_sweep.equivalence import (
    Case,
    Verdict,
    compare,
    dense,
    finite_full_batch,
    judge,
    random_state,
    set_random_state,
    trainable,
)
from accum_sweep.memory import out_of_memory

When = Literal["first_step", "every_step"]
SEVERITY = ("equivalent", "not comparable", "different")


class FullWindow(Protocol):
    """Micro-batches of one rank that know the whole window, so that it can be computed again."""

    def whole(self, device: torch.device) -> Any:
        """Return all samples of the window, on all ranks, as one batch."""

    def pieces(self, device: torch.device) -> Sequence[Any]:
        """Return the micro-batches of all ranks."""


class Referee:
    """Give `watch` to `train`, call `begins` before a window and `ended` after its step; then ask for the `verdict`.

    `model` is the one that is trained, before it is wrapped; it is copied here. `fits` tells whether there is room for
    a full batch of so many micro-batches on a device. `lr_at` is the learning rate due in a step, counted from 0.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[torch.device], Loss],
        normalization: Normalization,
        unit: float,
        when: When,
        boundary: Boundary,
        lr_at: Callable[[int], float],
        fits: Callable[[int, torch.device], bool],
    ) -> None:
        self._twin = copy.deepcopy(model)
        self._loss, self._normalization, self._unit = loss, normalization, unit
        self._when, self._boundary, self._lr_at, self._fits = when, boundary, lr_at, fits
        self._steps = 0  # taken so far
        self._verdicts: list[tuple[int, Verdict]] = []
        self._reported: tuple[Window, float] | None = None
        self._due: list[Tensor] | None = None  # the gradient that the optimizer must see
        self._seen = 0  # calls of the optimizer in this window
        self._model: nn.Module | None = None
        self._random: list[Tensor] = []
        self._hooks = [optimizer.register_step_pre_hook(self._stepping) for optimizer in boundary.optimizers]

    def begins(self) -> None:
        """Remember the random state, so that a full batch of one micro-batch draws what that drew."""
        if self._wanted():
            self._random = random_state()
        self._seen = 0

    def watch(self, model: nn.Module, micro_batches: FullWindow, window: Window) -> None:
        """Judge a finished gradient."""
        if not self._wanted():
            return
        self._model = model
        gradient = [dense(parameter.grad, parameter) for parameter in trainable(model)]
        mean_loss = _mean_loss(window)
        self._reported = window, mean_loss
        verdict = self._judged(model, micro_batches, window, gradient, mean_loss)
        self._verdicts.append((self._steps, verdict))
        self._due = self._clipped(gradient)

    def ended(self, step: Step) -> None:
        """Judge what was made of the window."""
        if step.outcome == "stepped":
            if self._reported is not None:
                reported = self._reported[1]
                if abs(step.loss - reported) > 1e-6 * abs(reported):
                    self._accuse(f"the loss it reports is {step.loss:.4g}, that of the whole window {reported:.4g}")
                if self._seen != len(self._hooks):
                    self._accuse(f"the optimizer was called {self._seen} times in one window")
            self._steps += 1
        self._reported = self._due = None

    def verdict(self) -> tuple[Verdict, int, list[float | None]]:
        """Return the gravest verdict, how many steps were judged, and the relative error of each."""
        for hook in self._hooks:
            hook.remove()
        if not self._verdicts:
            return Verdict("not comparable", "no step was taken with a finite gradient"), 0, []
        step, worst = max(self._verdicts, key=lambda pair: (SEVERITY.index(pair[1].outcome), _badness(pair[1])))
        if worst.outcome == "different" and len(self._verdicts) > 1:
            worst = replace(worst, reason=f"{worst.reason} (step {step + 1})")
        return worst, len(self._verdicts), [verdict.relative_error for _, verdict in self._verdicts]

    def _wanted(self) -> bool:
        return self._when == "every_step" or not self._verdicts

    def _judged(
        self, model: nn.Module, micro_batches: FullWindow, window: Window, gradient: list[Tensor], mean_loss: float
    ) -> Verdict:
        """Judge on the device of the run, or where its memory does not suffice, on the CPU."""
        state = [ranks.whole(tensor.detach()) for tensor in _tensors(ranks.unwrapped(model))]
        here, cpu = gradient[0].device, torch.device("cpu")
        pieces = {device: micro_batches.pieces(device) for device in (here, cpu)}
        for device in pieces:
            if not self._fits(len(pieces[device]), device):
                continue
            scaler = self._boundary.scaler
            try:
                with torch.random.fork_rng(devices=[here] if here.type == "cuda" else []):
                    case = Case(
                        model=self._copy_at(state, device),
                        loss=self._loss(device),
                        micro_batches=pieces[device],
                        batch=micro_batches.whole(device),
                        gradient=gradient,
                        items=window.total_items,
                        mean_loss=mean_loss,
                        counts=window.items,
                        normalization=self._normalization,
                        unit=self._unit,
                        scale=1.0 if scaler is None else scaler.get_scale(),
                    )
                    set_random_state(self._random)
                    reference, scale = finite_full_batch(case.model, case.batch, case.loss, case.scale)
                    return judge(replace(case, scale=scale), reference)
            except Exception as error:  # of the user's model, which may know micro-batches only
                if not out_of_memory(error):
                    return Verdict("not comparable", f"the full batch fails ({type(error).__name__}: {error})")
            finally:
                self._twin.to(cpu)
        return Verdict("not comparable", "the full batch does not fit into memory")

    def _copy_at(self, state: list[Tensor], device: torch.device) -> nn.Module:
        twin = self._twin.to(device)
        with torch.no_grad():
            for own, tensor in zip(_tensors(twin), state, strict=True):
                own.copy_(tensor)
        return twin

    def _clipped(self, gradient: list[Tensor]) -> list[Tensor]:
        """Return, apart from the loop's own clipping, what must be left of a gradient."""
        value, norm = self._boundary.clip_value, self._boundary.clip_norm
        if value is not None:
            return [entry.clamp(-value, value) for entry in gradient]
        if norm is not None:
            total = math.sqrt(math.fsum(float(entry.double().square().sum()) for entry in gradient))
            return [entry * min(1.0, norm / total) if total else entry for entry in gradient]
        return gradient

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Judge, at the last moment before the weights move, gradient and learning rate."""
        self._seen += 1
        if self._due is None or self._model is None:
            return
        seen = [dense(parameter.grad, parameter) for parameter in trainable(self._model)]
        error = compare(seen, self._due)[0]
        if error > 16 * torch.finfo(seen[0].dtype).eps:
            self._accuse(f"the optimizer saw another gradient than the window's (relative error {error:.2g})")
        lr, due = float(optimizer.param_groups[0]["lr"]), self._lr_at(self._steps)
        if not math.isclose(lr, due, rel_tol=1e-9):
            self._accuse(f"the learning rate was {lr:.6g}, due was {due:.6g}")

    def _accuse(self, reason: str) -> None:
        step, verdict = self._verdicts[-1]
        if verdict.outcome != "different":
            self._verdicts[-1] = step, replace(verdict, outcome="different", reason=reason)


def _badness(verdict: Verdict) -> float:
    """Return how far beyond its tolerance an error is."""
    return (verdict.relative_error or 0.0) / (verdict.tolerance or 1.0)


def _mean_loss(window: Window) -> float:
    if window.total_loss_sum is not None:
        return window.total_loss_sum / window.total_items
    return math.fsum(torch.stack(window.loss_sums).tolist()) / window.total_items


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
