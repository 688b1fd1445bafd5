"""How a window ends: clipped, unscaled and stepped once, on the finished gradient, or not at all; and what goes in."""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from accum_sweep.accumulate import Loss, Normalization, Window, accumulate_gradients, gradient_norm
from accum_sweep.boundary import Boundary, Step, train
from accum_sweep.optimizers import lr_factor
from accum_sweep.problems import Problem
from test_equivalence import run_here

Batch = tuple[Tensor, Tensor]
DIGITS = ("problem=digits_mlp", "problem.hidden=8", "micro_batch_size=16", "accum_steps=4")


def squared(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), len(y)


def perceptron(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def data(samples: int = 24, dtype: torch.dtype = torch.float64) -> Batch:
    x = torch.rand(samples, 3, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x, 5 + x.square().sum(dim=1, keepdim=True)


def split(batch: Batch, *sizes: int) -> list[Batch]:
    return list(zip(*(column.split(list(sizes)) for column in batch), strict=True))


WINDOW = split(data(), 10, 8, 6)


def cross(
    model: nn.Module,
    boundary: Boundary,
    window: Sequence[Any] = WINDOW,
    loss: Loss = squared,
    normalization: Normalization = "items",
) -> Step:
    """Train for one window."""
    (step,) = train(model, boundary, [window], partial(accumulate_gradients, loss=loss, normalization=normalization))
    return step


def full_batch_gradient(model: nn.Module, batch: Batch | None = None) -> list[Tensor]:
    """The gradient of the mean loss by autograd alone."""
    x, y = batch or data()
    return list(torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters())))


def norm(tensors: Sequence[Tensor]) -> float:
    return torch.cat([tensor.flatten() for tensor in tensors]).norm().item()


def seen_by(model: nn.Module, **settings: Any) -> tuple[list[Tensor], Step]:
    """What reached the optimizer: with SGD of rate 1, the way the weights went."""
    before = copied(model)
    step = cross(model, Boundary([torch.optim.SGD(model.parameters(), lr=1.0)], **settings))
    return [old - new for old, new in zip(before, copied(model), strict=True)], step


def copied(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def close(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float = 1e-12) -> bool:
    return all(torch.allclose(a, b, rtol=rtol, atol=1e-13) for a, b in zip(found, expected, strict=True))


# Clipping


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e3])
def test_the_norm_is_clipped_on_the_finished_gradient(limit: float) -> None:
    model = perceptron()
    gradient = full_batch_gradient(model)
    whole = norm(gradient)
    expected = [entry * min(1, limit / whole) for entry in gradient]
    torchs = with_gradient(model, gradient)
    nn.utils.clip_grad_norm_(torchs, limit)
    found, step = seen_by(model, clip_norm=limit)
    assert close(found, expected, rtol=1e-11)
    assert close(found, [parameter.grad for parameter in torchs if parameter.grad is not None], rtol=1e-5)
    assert step.grad_norm == pytest.approx(whole, rel=1e-13)
    assert step.clipped_norm == pytest.approx(min(whole, limit), rel=1e-13)
    assert 0.5 < whole < 1e3, "so that two of the limits bite, and one does not"


@pytest.mark.parametrize("limit", [1e-3, 0.5, 1e3])
def test_values_are_clipped_on_the_finished_gradient(limit: float) -> None:
    model = perceptron()
    gradient = full_batch_gradient(model)
    torchs = with_gradient(model, gradient)
    nn.utils.clip_grad_value_(torchs, limit)
    expected = [parameter.grad for parameter in torchs if parameter.grad is not None]
    found, step = seen_by(model, clip_value=limit)
    assert close(found, expected, rtol=1e-11)
    assert step.grad_norm == pytest.approx(norm(gradient), rel=1e-13)
    assert step.clipped_norm == pytest.approx(norm(expected), rel=1e-13)
    assert same(expected, gradient) == (limit == 1e3)


def with_gradient(model: nn.Module, gradient: Sequence[Tensor]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    for parameter, entry in zip(parameters, gradient, strict=True):
        parameter.grad = entry.clone()
    return parameters


def test_clipping_each_micro_batch_is_another_gradient() -> None:
    """The control: the same limit, at the wrong time."""
    model = perceptron()
    right, _ = seen_by(copy.deepcopy(model), clip_norm=0.5)
    for batch in WINDOW:
        squared(model, batch)[0].div(24).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    wrong = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert not close(wrong, right, rtol=1e-2)


def test_norms_before_and_after_clipping_are_on_record(tmp_path: Path) -> None:
    plain, clipped = (run_here(tmp_path / str(len(w)), *DIGITS, "steps=1", *w) for w in ((), ("clip_norm=0.125",)))
    assert clipped.series["train/grad_norm"] == plain.series["train/grad_norm"]
    assert clipped.series["train/clipped_norm"] == [0.125]
    assert clipped.metrics["last_clipped_norm"] == 0.125
    assert plain.metrics["last_clipped_norm"] == plain.metrics["last_grad_norm"] > 0.125
    assert "train/clipped_norm" not in plain.series, "nothing was clipped"


# The learning rate


def test_the_learning_rate_warms_up_and_falls_along_half_a_cosine(tmp_path: Path) -> None:
    words = (*DIGITS, "optimizer=sgd", "lr=0.5", "steps=10")
    record = run_here(tmp_path / "a", *words, "lr_schedule=cosine", "warmup_steps=4")
    rising = [0.125, 0.25, 0.375, 0.5]
    falling = [0.25 + 0.25 * math.cos(math.pi * step / 6) for step in range(6)]
    assert record.series["train/lr"] == pytest.approx(rising + falling, rel=1e-12)
    assert record.metrics["last_lr"] == record.series["train/lr"][-1]
    record = run_here(tmp_path / "b", *words, "warmup_steps=4")
    assert record.series["train/lr"] == pytest.approx(rising + [0.5] * 6, rel=1e-12)
    assert run_here(tmp_path / "c", *words).series["train/lr"] == [0.5] * 10


@pytest.mark.parametrize("accum_steps", [1, 4])
def test_the_schedule_is_over_windows_however_they_are_split(tmp_path: Path, accum_steps: int) -> None:
    words = ("problem=digits_mlp", "problem.hidden=8", "effective_batch_size=256", f"accum_steps={accum_steps}")
    record = run_here(tmp_path, *words, "epochs=2", "optimizer=sgd", "lr=0.5", "lr_schedule=cosine")
    steps = 2 * math.ceil(1437 / 256)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert record.series["train/lr"] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_the_factor_begins_above_zero_and_is_one_after_the_warm_up() -> None:
    assert lr_factor("cosine", 4, 10, 0) == 0.25
    assert lr_factor("cosine", 4, 10, 3) == lr_factor("cosine", 4, 10, 4) == 1
    assert lr_factor("cosine", 0, 10, 5) == pytest.approx(0.5)
    assert lr_factor("cosine", 0, 10, 10) == pytest.approx(0, abs=1e-15)
    assert lr_factor("constant", 0, 10, 9) == 1


class Ended:
    """A model, momentum and a schedule, and what they were before a window."""

    def __init__(self, optimizer: str = "SGD", dtype: torch.dtype = torch.float64, **settings: Any) -> None:
        self.model = perceptron(dtype=dtype)
        options = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 0.1}}[optimizer]
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), weight_decay=0.1, **options)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.boundary = Boundary([self.optimizer], [self.scheduler], **settings)

    def window(self, window: Sequence[Any] = WINDOW, loss: Loss = squared) -> tuple[Step, bool]:
        """Train for one window, and tell whether anything moved: weights, the optimizer's state, learning rate."""
        before = self.state()
        step = cross(self.model, self.boundary, window, loss)
        assert all(parameter.grad is None for parameter in self.model.parameters())
        return step, not same(self.state(), before)

    def state(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        tensors = [torch.as_tensor(value).detach().clone() for value in states if value is not None]
        rates = torch.tensor([*self.scheduler.get_last_lr(), self.scheduler.last_epoch], dtype=torch.float64)
        empty = [torch.empty(0)] * (100 - len(tensors))  # so that a state that comes to be is seen
        return [*copied(self.model), rates, *tensors, *empty]


OPTIMIZERS = ["SGD", "AdamW"]

# What holds no item


def no_items(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    return squared(model, batch)[0] * math.nan, 0  # a mean over nothing


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_window_without_items_moves_nothing(optimizer: str) -> None:
    ended = Ended(optimizer)
    assert ended.window()[1]
    step, moved = ended.window(loss=no_items)
    assert (step.outcome, step.grad_norm, moved) == ("empty", 0, False)
    assert math.isnan(step.loss)
    assert len(step.micro_losses) == 3
    assert all(map(math.isnan, step.micro_losses))
    step, moved = ended.window()
    assert (step.outcome, step.lr, moved) == ("stepped", 0.05, True)  # the schedule's second step


@pytest.mark.parametrize("normalization", ["items", "mean", "sum"])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_micro_batch_without_items_counts_for_nothing(normalization: Normalization, place: int) -> None:
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        return squared(model, batch) if len(batch[0]) else no_items(model, batch)

    without, within = perceptron(), perceptron()
    expected = accumulate_gradients(without, WINDOW, loss, normalization=normalization)
    nothing = data(0)
    found = accumulate_gradients(within, [*WINDOW[:place], nothing, *WINDOW[place:]], loss, normalization=normalization)
    assert found.items[place] == 0
    assert found.total_items == expected.total_items == 24
    assert sum(map(float, found.loss_sums)) == pytest.approx(sum(map(float, expected.loss_sums)))
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (within, without)]
    assert close(*gradients)  # type: ignore[arg-type]
    parts = [full_batch_gradient(within, batch) for batch in WINDOW]  # each of the mean
    weights = {"sum": (1, 1, 1), "mean": (1 / 3,) * 3, "items": (10 / 24, 8 / 24, 6 / 24)}[normalization]
    summed = [
        sum(weight * entry for weight, entry in zip(weights, entries, strict=True))
        for entries in zip(*parts, strict=True)
    ]
    assert close(gradients[0], summed)  # type: ignore[arg-type]
    if normalization == "mean":
        assert not close([entry * 3 / 4 for entry in summed], summed), "dividing by all four would be seen"


@pytest.mark.parametrize("count", [-1, 1.5, torch.tensor(2.5), torch.tensor(-3), math.nan])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    with pytest.raises(ValueError, match=r"whole number|NaN"):
        accumulate_gradients(perceptron(), WINDOW, lambda model, batch: (squared(model, batch)[0], count))


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3), torch.tensor(3.0)])
def test_a_whole_count_of_any_type_is_taken(count: Any) -> None:
    window = accumulate_gradients(perceptron(), WINDOW, lambda model, batch: (squared(model, batch)[0], count))
    assert (window.items, window.total_items) == ((3, 3, 3), 9)


def test_gradients_left_from_before_are_refused() -> None:
    model = perceptron()
    accumulate_gradients(model, WINDOW, squared)
    with pytest.raises(ValueError, match=r"holds gradients already; call optimizer\.zero_grad\(\)"):
        accumulate_gradients(model, WINDOW, squared)
    model.zero_grad()
    accumulate_gradients(model, WINDOW, squared)


# What is not finite


def infinite_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    loss_sum, items = squared(model, batch)
    return loss_sum * (math.inf if items == 8 else 1), items


def infinite_gradient(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    """The loss is finite: the root's slope at 0 is not."""
    loss_sum, items = squared(model, batch)
    return loss_sum + (loss_sum * 0).sqrt(), items


@pytest.mark.parametrize("loss", [infinite_loss, infinite_gradient])
@pytest.mark.parametrize(("on_nonfinite", "outcome"), [("stop", "diverged"), ("skip", "skipped")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_not_finite_moves_nothing(optimizer: str, on_nonfinite: str, outcome: str, loss: Loss) -> None:
    ended = Ended(optimizer, on_nonfinite=on_nonfinite, clip_norm=1.0)
    assert ended.window()[1]
    step, moved = ended.window(loss=loss)
    assert (step.outcome, moved) == (outcome, False)
    assert math.isfinite(step.loss) == (loss is infinite_gradient)
    assert ended.window()[1], "and a window that is finite does"


def test_training_ends_with_the_first_window_that_diverges_and_goes_on_after_those_skipped() -> None:
    def outcomes(on_nonfinite: Any) -> list[str]:
        model = perceptron()
        boundary = Boundary([torch.optim.SGD(model.parameters(), lr=0.01)], on_nonfinite=on_nonfinite)
        bad = [(x, y * math.nan) for x, y in WINDOW]
        windows = [WINDOW, bad, WINDOW, bad]
        steps = train(model, boundary, windows, partial(accumulate_gradients, loss=squared))
        return [step.outcome for step in steps]

    assert outcomes("stop") == ["stepped", "diverged"]
    assert outcomes("skip") == ["stepped", "skipped", "stepped", "skipped"]


def poisoned(dtype: torch.dtype, at: int = 17, left_out: bool = False) -> Problem:
    """32 samples in their order, eight a window, of which one is NaN; or all but its window."""
    x, y = data(32, dtype)
    x[at] = math.nan
    if left_out:
        x, y = (torch.cat([column[:16], column[24:], column[:8]]) for column in (x, y))
    return Problem(perceptron(dtype=dtype), (x, y), squared, shuffle=False)


POISONED = ("problem=custom", "problem.factory=test_boundary:poisoned", "problem.samples=32", "save_weights=true")
POISONED = (*POISONED, "micro_batch_size=2", "accum_steps=4", "optimizer=momentum", "lr_schedule=cosine")


def test_a_run_that_diverges_keeps_the_weights_before(tmp_path: Path) -> None:
    record = run_here(tmp_path / "diverged", *POISONED, "epochs=1", "lr_schedule=constant")
    assert (record.status, record.reason) == (
        "diverged",
        "the loss is not finite in step 3; the weights are those before it",
    )
    assert (record.metrics["steps_done"], record.metrics["windows_skipped"]) == (2, 0)
    run_here(tmp_path / "before", *POISONED, "steps=2", "lr_schedule=constant")
    run_here(tmp_path / "shorter", *POISONED, "steps=1", "lr_schedule=constant")
    diverged, before, shorter = (load_file(tmp_path / name / "final.safetensors") for name in NAMES)
    assert same(list(diverged.values()), list(before.values()))
    assert not same(list(diverged.values()), list(shorter.values()))


NAMES = ("diverged", "before", "shorter")


def test_a_run_that_skips_goes_on_as_if_the_window_had_not_been_there(tmp_path: Path) -> None:
    record = run_here(tmp_path / "skips", *POISONED, "epochs=1", "on_nonfinite=skip", "equivalence=every_step")
    assert record.status == "finished"
    assert (record.metrics["steps_done"], record.metrics["windows_skipped"]) == (3, 1)
    assert record.metrics["steps_judged"] == 3
    assert record.equivalence["verdict"] == "equivalent"
    words = (*POISONED, "steps=4", "problem.arguments={left_out:true}")  # the schedule is one over four windows
    whole = run_here(tmp_path / "without", *words)
    assert record.series["train/lr"] == pytest.approx(
        [0.025 + 0.025 * math.cos(math.pi * step / 4) for step in (0, 1, 2, 2)]
    )
    finite = [loss for loss in record.series["train/loss"] if loss is not None]
    assert finite == whole.series["train/loss"][:3]


def test_a_run_that_skips_every_window_has_not_finished(tmp_path: Path) -> None:
    words = ("problem.samples=8", "problem.arguments={at:1}", "on_nonfinite=skip", "epochs=2")
    record = run_here(tmp_path, *POISONED, *words, "problem.factory=test_boundary:all_poisoned")
    assert record.status == "diverged"
    assert "no step was taken" in (record.reason or "")
    assert record.metrics["windows_skipped"] == 2


def all_poisoned(dtype: torch.dtype, at: int) -> Problem:
    problem = poisoned(dtype, at)
    return Problem(problem.model, tuple(column[:8] for column in problem.train), squared, shuffle=False)


# float16


def scaled(init_scale: float, **settings: Any) -> Ended:
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return Ended(dtype=torch.float32, scaler=scaler, **settings)


FLOAT32 = split(data(dtype=torch.float32), 8, 8, 8)


def half(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    with torch.autocast("cpu", torch.float16):
        return squared(model, batch)


def crossed(ended: Ended, loss: Loss = half) -> tuple[Step, bool]:
    """As Ended.window, with the boundary's scaler in the loop."""
    before = ended.state()
    accumulate = partial(accumulate_gradients, loss=loss, scaler=ended.boundary.scaler)
    (step,) = train(ended.model, ended.boundary, [FLOAT32], accumulate)
    return step, not same(ended.state(), before)


def test_an_overflow_moves_nothing_and_halves_the_scale_until_it_fits() -> None:
    ended = scaled(2.0**24)
    scaler = ended.boundary.scaler
    assert scaler is not None
    scales, outcomes = [scaler.get_scale()], []
    while "stepped" not in outcomes:
        step, moved = crossed(ended)
        assert moved == (step.outcome == "stepped")
        assert math.isfinite(step.loss)
        assert math.isfinite(step.grad_norm) == moved
        outcomes.append(step.outcome)
        scales.append(scaler.get_scale())
    assert set(outcomes[:-1]) == {"overflow"}
    assert scales[:-1] == [2.0 ** (24 - n) for n in range(len(outcomes))]
    assert scales[-1] == scales[-2], "a step that is taken leaves the scale"
    double = perceptron()  # the same weights, to find what a micro-batch's part of the gradient comes to
    parts = [
        torch.autograd.grad(squared(double, batch)[0] / 24, list(double.parameters()))
        for batch in split(data(), 8, 8, 8)
    ]
    largest = max(float(entry.abs().max()) for part in parts for entry in part)
    assert scales[-1] == 2 ** math.floor(math.log2(torch.finfo(torch.float16).max / largest))
    assert ended.scheduler.last_epoch == 1


def test_a_scale_that_fits_overflows_nowhere_and_is_gone_from_the_gradient() -> None:
    step, moved = crossed(scaled(2.0**8))
    assert (step.outcome, moved) == ("stepped", True)
    plain = norm(full_batch_gradient(perceptron(dtype=torch.float32), data(dtype=torch.float32)))
    assert step.grad_norm == pytest.approx(plain, rel=1e-2)


def test_a_gradient_that_no_scale_helps_has_diverged() -> None:
    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        with torch.autocast("cpu", torch.float16):
            return infinite_gradient(model, batch)

    for on_nonfinite, end in (("stop", "diverged"), ("skip", "skipped")):
        ended = scaled(4.0, on_nonfinite=on_nonfinite)
        steps = [crossed(ended, loss) for _ in range(3)]  # at scales of 4, 2 and 1
        assert [step.outcome for step, _ in steps] == ["overflow", "overflow", end]
        assert not any(moved for _, moved in steps)


def test_overflows_are_counted_and_are_no_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = run_here(tmp_path / "plain", *OVERFLOWING)
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**30))
    record = run_here(tmp_path / "planted", *OVERFLOWING)
    overflowed = record.metrics["windows_overflowed"]
    assert plain.metrics["windows_overflowed"] == 0
    assert overflowed == sum(value is None for value in record.series["train/grad_norm"]) > 5
    assert record.metrics["steps_done"] == 30 - overflowed
    assert record.status == "finished"
    taken, expected = 0, []
    for grad_norm in record.series["train/grad_norm"]:
        expected.append(0.025 + 0.025 * math.cos(math.pi * taken / 30))  # the schedule waits while nothing is stepped
        taken += grad_norm is not None
    assert record.series["train/lr"] == pytest.approx(expected, rel=1e-9)


OVERFLOWING = (*DIGITS, "precision=fp16", "steps=30", "lr_schedule=cosine", "optimizer=momentum")


def test_overflows_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**30))
    record = run_here(tmp_path, *OVERFLOWING, "equivalence=every_step")
    assert record.metrics["steps_judged"] == record.metrics["steps_done"] == 30 - record.metrics["windows_overflowed"]
    assert record.equivalence["verdict"] == "equivalent"


def test_a_first_window_that_overflows_leaves_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**30))
    record = run_here(tmp_path, *DIGITS, "precision=fp16", "steps=1", "save_weights=true")
    initial, final = (load_file(tmp_path / f"{when}.safetensors") for when in ("initial", "final"))
    assert same(list(final.values()), list(initial.values()))
    assert (record.metrics["windows_overflowed"], record.metrics["steps_done"]) == (1, 0)


# Several optimizers, and what they hold


def test_several_optimizers_step_as_one_would() -> None:
    one, two = perceptron(), perceptron()
    whole = Boundary([torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)], clip_norm=0.5)
    parts = [torch.optim.SGD(two[place].parameters(), lr=0.1, momentum=0.9) for place in (0, 2)]  # type: ignore[index]
    schedulers = [torch.optim.lr_scheduler.ConstantLR(part, factor=1.0) for part in parts]
    apart = Boundary(parts, schedulers, clip_norm=0.5)
    for _ in range(3):
        first, second = cross(one, whole), cross(two, apart)
        assert (first.grad_norm, first.clipped_norm) == (second.grad_norm, second.clipped_norm)
    assert same(copied(two), copied(one))
    assert [scheduler.last_epoch for scheduler in schedulers] == [3, 3]
    assert not same(copied(one), copied(perceptron()))


def test_an_optimizer_left_out_would_be_seen() -> None:
    model = perceptron()
    before = copied(model)
    cross(model, Boundary([torch.optim.SGD(model[0].parameters(), lr=0.1)]))  # type: ignore[index]
    after = copied(model)
    assert not same(after[:2], before[:2])
    assert same(after[2:], before[2:])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nothing_moves_inside_a_window(optimizer: str) -> None:
    ended = Ended(optimizer)
    seen: list[list[Tensor]] = []

    def watched(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        seen.append(ended.state())
        return squared(model, batch)

    def stepping(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        ended.optimizer.step()  # the control
        return watched(model, batch)

    for loss in (watched, watched, stepping):
        ended.window(loss=loss)
    windows = [seen[:3], seen[3:6], seen[6:]]
    assert [all(same(state, states[0]) for state in states) for states in windows] == [True, True, False]
    assert not same(windows[0][0], windows[1][0])


# Models and batches of all kinds


class Words(nn.Module):
    """Mean of a sample's word vectors, and from it a number. Words come more than once, and some never do."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(20, 4, sparse=sparse)
        self.value = nn.Linear(4, 1)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        value: Tensor = self.value(self.words(words).mean(dim=1))
        return value


WORDS = (torch.randint(0, 12, (24, 6), generator=torch.Generator().manual_seed(0)), data()[1])


@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.1}, {"clip_value": 0.05}, {"clip_norm": 1e3}])
def test_sparse_gradients_are_as_good_as_dense_ones(settings: dict[str, float]) -> None:
    found = []
    for sparse in (True, False):
        model = Words(sparse)
        boundary = Boundary([torch.optim.SGD(model.parameters(), lr=0.1)], **settings)  # type: ignore[arg-type]
        window = split(WORDS, 10, 8, 6)
        steps = [cross(model, boundary, window) for _ in range(3)]
        accumulate_gradients(model, window, squared)
        assert model.words.weight.grad is not None
        assert model.words.weight.grad.is_sparse == sparse
        found.append((copied(model), [(step.loss, step.grad_norm, step.clipped_norm) for step in steps]))
    (weights, steps), (expected, numbers) = found
    assert close(weights, expected)
    assert [number for step in steps for number in step] == pytest.approx([n for step in numbers for n in step])
    assert close([weights[0][12:]], [copied(Words(True))[0][12:]]), "words that never come stay"
    assert not close([weights[0][:12]], [copied(Words(True))[0][:12]])


def test_sparse_gradients_take_an_accumulator_too() -> None:
    gradients = []
    for accumulator in (None, torch.float64):
        model = Words(sparse=True)
        accumulate_gradients(model, split(WORDS, 10, 8, 6), squared, accumulator=accumulator)
        assert model.words.weight.grad is not None
        gradients.append(model.words.weight.grad.to_dense())
    assert close(gradients[:1], gradients[1:])
    assert gradients[0].any()


class Tied(nn.Module):
    """One matrix at both ends."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.words.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(words))
        return logits


def next_word(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    words, targets = batch
    return F.cross_entropy(model(words), targets, reduction="sum"), len(targets)


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_shared_weight_is_summed_over_its_uses_and_counted_once(clip_norm: float | None) -> None:
    model = Tied()
    words, targets = torch.arange(24) % 5, torch.arange(24) % 3
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(words), targets), [model.words.weight])
    before = copied(model)
    assert len(before) == 1
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    window = split((words, targets), 10, 8, 6)
    step = cross(model, Boundary([optimizer], clip_norm=clip_norm), window, next_word)
    whole = gradient.norm().item()
    assert step.grad_norm == pytest.approx(whole, rel=1e-12)
    expected = gradient * (clip_norm / whole if clip_norm else 1)
    assert close([before[0] - copied(model)[0]], [expected])
    assert whole > 0.01
    assert model.head.weight is model.words.weight


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_frozen_and_unused_weights_stay_and_weigh_nothing(optimizer: str) -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "frozen": nn.Linear(3, 3), "unused": nn.Linear(2, 2)}).double()
    model["frozen"].requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def loss(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
        x, y = batch
        return F.mse_loss(model["used"](model["frozen"](x)), y, reduction="sum"), len(y)  # type: ignore[index]

    x, y = data()
    mean = F.mse_loss(model["used"](model["frozen"](x)), y)
    expected = norm(torch.autograd.grad(mean, list(model["used"].parameters())))
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, weight_decay=0.5)
    step = cross(model, Boundary([chosen]), loss=loss)
    assert step.grad_norm == pytest.approx(expected, rel=1e-12)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {"used.weight", "used.bias"}


FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Batch]]] = {
    "tuple": (lambda x, y: (x, y), lambda batch: batch),
    "list": (lambda x, y: [x, y], lambda batch: (batch[0], batch[1])),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda batch: (batch["x"], batch["y"])),
    "nested": (lambda x, y: {"x": [x], "rest": (y, "words")}, lambda batch: (batch["x"][0], batch["rest"][0])),
    "tensor": (lambda x, y: torch.cat([x, y], dim=1), lambda batch: (batch[:, :3], batch[:, 3:])),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_may_have_any_form(form: str) -> None:
    pack, unpack = FORMS[form]
    model = perceptron()
    expected = full_batch_gradient(model)
    window = [pack(*batch) for batch in WINDOW]
    accumulate_gradients(model, window, lambda model, batch: squared(model, unpack(batch)))
    assert close([parameter.grad for parameter in model.parameters()], expected)  # type: ignore[misc]


def test_the_norm_is_over_all_gradients_and_zero_without_any() -> None:
    model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Linear(1, 1)])
    assert gradient_norm(model).item() == 0
    model[0].weight.grad, model[1].weight.grad = torch.tensor([[3.0]]), torch.tensor([[-4.0]])
    assert gradient_norm(model).item() == 5


def test_a_step_says_what_its_window_computed() -> None:
    model = perceptron()
    x, y = data()
    errors = (model(x) - y).detach().square().flatten()
    step = cross(model, Boundary([torch.optim.SGD(model.parameters(), lr=0.25)]))
    assert step.loss == pytest.approx(errors.mean().item(), rel=1e-13)
    assert step.micro_losses == pytest.approx([part.mean().item() for part in errors.split([10, 8, 6])], rel=1e-13)
    assert (step.window.items, step.window.total_items, step.lr) == ((10, 8, 6), 24, 0.25)
    assert isinstance(step.window, Window)
    assert step.loss != pytest.approx(sum(step.micro_losses) / 3, rel=1e-6), "a mean of means would be seen"
