"""Watches a training: judges windows as they end, and that what follows is done once, and gives one verdict.

torch only. It works on a copy of the model, leaves gradients, buffers and random state as they are, and never fails the
run: where the full batch does not fit, the verdict says so.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from accum_sweep import ranks
from accum_sweep.accumulate import Loss, Normalization, Window, mean_loss
from accum_sweep.boundary import Boundary, Step
from accum_sweep.equivalence import Case, Verdict, judge
from accum_sweep.full_batch import finite_full_batch, random_state, set_random_state
from accum_sweep.gradients import compare, dense, l2_norm, trainable
from accum_sweep.memory import out_of_memory

When = Literal["first_step", "every_step"]
NORM_TOLERANCE = 0.01
SEVERITY = ("equivalent", "not comparable", "different")


class FullWindow(Protocol):
    """Micro-batches of one rank that know the whole window, so that it can be computed again."""

    def whole(self, device: torch.device) -> Any:
        """Return all samples of the window, on all ranks, as one batch."""

    def pieces(self, device: torch.device) -> Sequence[Any]:
        """Return the micro-batches of all ranks."""


class Referee:
    """Give `watch` to `train`, call `begins` before a window and `ended` after its step; then ask for the `verdict`.

    `model` is a copy of the one that is trained, before it is wrapped, for the referee's own use. `first_step` judges
    the first step, and the first of each other form of window, such as a short last one. `fits` tells whether there is
    room for a full batch of so many micro-batches on a device. `lr_at` is the learning rate due in a step, counted from
    0. What is done when the optimizer is called, is done inside `aside`, so that a clock may leave it out.
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
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
        compiled: bool = False,
    ) -> None:
        self._twin = model
        self._aside, self._compiled = aside, compiled
        self._loss, self._normalization, self._unit = loss, normalization, unit
        self._when, self._boundary, self._lr_at, self._fits = when, boundary, lr_at, fits
        self._steps = 0  # taken so far
        self._verdicts: list[tuple[int, Verdict]] = []
        self._reported: float | None = None  # the loss of the window
        self._due: list[Tensor] | None = None  # the gradient that the optimizer must see
        self._seen = 0  # calls of the optimizer in this window
        self._model: nn.Module | None = None
        self._random: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._form: tuple[int, ...] = ()
        self._forms: set[tuple[int, ...]] = set()  # judged
        self._hooks = [optimizer.register_step_pre_hook(self._stepping) for optimizer in boundary.optimizers]

    def begins(self, model: nn.Module, form: tuple[int, ...]) -> None:
        """Remember what the window begins with, so that the full batch begins with it too.

        `form` is the number of samples in each micro-batch.
        """
        self._model, self._form, self._seen = model, form, 0
        if self._wanted():
            self._random = random_state()
            self._buffers = [ranks.whole(buffer.detach()).clone() for buffer in ranks.unwrapped(model).buffers()]

    def watch(self, model: nn.Module, micro_batches: FullWindow, window: Window) -> None:
        """Judge a finished gradient."""
        if not self._wanted():
            return
        try:
            gradient = [dense(parameter.grad, parameter) for parameter in trainable(model)]
            verdict = self._judged(model, micro_batches, window, gradient)
            self._due = gradient
        except Exception as error:  # no room for a copy of the gradient, say
            verdict = Verdict("not comparable", f"the check fails ({type(error).__name__}: {error})")
        self._reported = mean_loss(window)
        self._verdicts.append((self._steps, verdict))
        self._forms.add(self._form)

    def ended(self, step: Step) -> None:
        """Judge what was made of the window."""
        if step.outcome == "stepped":
            if self._reported is not None:
                if abs(step.loss - self._reported) > 1e-6 * abs(self._reported):
                    whole = f"that of the whole window {self._reported:.4g}"
                    self._accuse(f"the loss it reports is {step.loss:.4g}, {whole}")
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
        return self._when == "every_step" or self._form not in self._forms

    def _judged(self, model: nn.Module, micro_batches: FullWindow, window: Window, gradient: list[Tensor]) -> Verdict:
        """Judge on the device of the run, or where its memory does not suffice, on the CPU."""
        state = [ranks.whole(parameter.detach()) for parameter in ranks.unwrapped(model).parameters()] + self._buffers
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
                        mean_loss=mean_loss(window),
                        normalization=self._normalization,
                        unit=self._unit,
                        scale=1.0 if scaler is None else scaler.get_scale(),
                        reproducible=not self._compiled and device == here and here.type in ("cpu", "cuda"),
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

    def _stepping(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Judge, at the last moment before the weights move, gradient and learning rate."""
        self._seen += 1
        if self._due is None or self._model is None:
            return
        with self._aside():
            try:
                seen = [dense(parameter.grad, parameter) for parameter in trainable(self._model)]
                if fault := self._clipping_fault(seen, self._due):
                    self._accuse(f"the optimizer saw another gradient than the window's ({fault})")
            except Exception as error:  # no room for a copy of the gradient, say
                step, verdict = self._verdicts[-1]
                reason = f"the check fails ({type(error).__name__}: {error})"
                self._verdicts[-1] = step, replace(verdict, outcome="not comparable", reason=reason)
            lr, due = float(optimizer.param_groups[0]["lr"]), self._lr_at(self._steps)
            if not math.isclose(lr, due, rel_tol=1e-9):
                self._accuse(f"the learning rate was {lr:.6g}, due was {due:.6g}")

    def _clipping_fault(self, seen: list[Tensor], finished: list[Tensor]) -> str | None:
        """Say how what the optimizer sees is not the finished gradient, clipped as it should be."""
        value, norm, factor = self._boundary.clip_value, self._boundary.clip_norm, 1.0
        if value is not None:
            finished = [entry.clamp(-value, value) for entry in finished]
        if norm is not None and (length := l2_norm(finished)) > norm:
            # By its direction to the last digits, by its length not: float32 norms of many weights are coarse.
            factor = l2_norm(seen) / length
            if not math.isclose(factor, norm / length, rel_tol=NORM_TOLERANCE):
                return f"clipped to a norm of {l2_norm(seen):.6g}, due was {norm:.6g}"
        error, _ = compare(seen, [factor * entry for entry in finished])
        return f"relative error {error:.2g}" if error > 16 * torch.finfo(seen[0].dtype).eps else None

    def _accuse(self, reason: str) -> None:
        step, verdict = self._verdicts[-1]
        if verdict.outcome != "different":
            self._verdicts[-1] = step, replace(verdict, outcome="different", reason=reason)


def _badness(verdict: Verdict) -> float:
    """Return how far beyond its tolerance an error is."""
    return (verdict.relative_error or 0.0) / (verdict.tolerance or 1.0)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
