"""The loop: what the gradient is, in every split, and that nothing moves inside a window. Each check bites."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accum_sweep.accumulate import Loss, Normalization, Window, accumulate_gradients, gradient_norm
from accum_sweep.boundary import Boundary, train
from accum_sweep.problems import Problem, params_class

EVEN = [(64,), (32, 32), (16,) * 4, (8,) * 8]
UNEVEN = [(60, 2, 2), (1,) * 64, (31, 33), (7,) * 9 + (1,)]


def digits(dtype: torch.dtype) -> Problem:
    torch.manual_seed(0)
    return params_class("digits_mlp")(name="digits_mlp", hidden=32).build(dtype)


def accumulating(loss: Loss, normalization: Normalization = "items") -> Callable[[nn.Module, Sequence[Any]], Window]:
    return partial(accumulate_gradients, loss=loss, normalization=normalization)


def gradient(problem: Problem, sizes: Sequence[int], normalization: Normalization, loss: Loss | None = None) -> Tensor:
    """The flattened gradient that one window of micro-batches of these sizes leaves, over the first 64 samples."""
    problem.model.zero_grad()
    columns = [column[: sum(sizes)].split(list(sizes)) for column in problem.train]
    accumulate_gradients(
        problem.model, list(zip(*columns, strict=True)), loss or problem.loss, normalization=normalization
    )
    return torch.cat([p.grad.flatten() for p in problem.model.parameters() if p.grad is not None])


def full_batch_gradient(problem: Problem, samples: int = 64) -> Tensor:
    """What autograd says of the mean loss over the full batch, without our loop."""
    x, y = (column[:samples] for column in problem.train)
    grads = torch.autograd.grad(F.cross_entropy(problem.model(x), y), list(problem.model.parameters()))
    return torch.cat([g.flatten() for g in grads])


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


LIMITS = [(torch.float64, 1e-14), (torch.float32, 1e-6)]


@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("sizes", EVEN + UNEVEN)
def test_items_is_the_full_batch_in_every_split(sizes: tuple[int, ...], dtype: torch.dtype, limit: float) -> None:
    problem = digits(dtype)
    assert relative_error(gradient(problem, sizes, "items"), full_batch_gradient(problem)) < limit


@pytest.mark.parametrize("sizes", EVEN)
def test_mean_is_the_full_batch_where_micro_batches_are_equal(sizes: tuple[int, ...]) -> None:
    problem = digits(torch.float64)
    assert relative_error(gradient(problem, sizes, "mean"), full_batch_gradient(problem)) < 1e-14


def test_sum_is_the_full_batch_times_the_number_of_micro_batches() -> None:
    problem = digits(torch.float64)
    assert relative_error(gradient(problem, (16,) * 4, "sum"), 4 * full_batch_gradient(problem)) < 1e-14


def test_mean_weighs_every_micro_batch_the_same_however_small() -> None:
    problem = digits(torch.float64)
    parts = [
        torch.cat(
            [g.flatten() for g in torch.autograd.grad(F.cross_entropy(problem.model(x), y), problem.model.parameters())]
        )
        for x, y in zip(*(column[:64].split([60, 2, 2]) for column in problem.train), strict=True)
    ]
    found = gradient(problem, (60, 2, 2), "mean")
    assert relative_error(found, torch.stack(parts).mean(dim=0)) < 1e-14
    assert relative_error(found, full_batch_gradient(problem)) > 0.1  # the fault that `items` avoids


def _mean_of_means(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y), 1


def _zeroed_inside(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    model.zero_grad()
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)


def _miscounted(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), 16  # nominal, whatever is there


@pytest.mark.parametrize("fault", [_mean_of_means, _zeroed_inside, _miscounted])
def test_planted_faults_are_seen(fault: Loss) -> None:
    problem = digits(torch.float64)
    error = relative_error(gradient(problem, (16, 16, 16, 5), "items", fault), full_batch_gradient(problem, 53))
    assert error > 1e-3


def test_an_undivided_sum_and_a_dropped_micro_batch_are_seen() -> None:
    problem = digits(torch.float64)
    assert relative_error(gradient(problem, (16,) * 4, "sum"), full_batch_gradient(problem)) > 1
    assert relative_error(gradient(problem, (16,) * 3, "items"), full_batch_gradient(problem)) > 1e-3


def _steps(
    optimizer: Callable[..., torch.optim.Optimizer],
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float64,
    normalization: Normalization = "items",
    **settings: float,
) -> Tensor:
    """Weights after five steps of 64 samples each."""
    problem = digits(dtype)
    windows = (
        list(zip(*(column[64 * i : 64 * i + 64].split(list(sizes)) for column in problem.train), strict=True))
        for i in range(5)
    )
    chosen = optimizer(problem.model.parameters(), **settings)
    for _ in train(problem.model, Boundary([chosen]), windows, accumulating(problem.loss, normalization)):
        pass
    return torch.cat([p.detach().flatten() for p in problem.model.parameters()])


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.001}),
    ],
)
@pytest.mark.parametrize("sizes", [*EVEN[1:], (60, 2, 2)])
def test_the_weights_after_training_agree_in_every_split(
    optimizer: Callable[..., torch.optim.Optimizer], settings: dict[str, float], sizes: tuple[int, ...]
) -> None:
    whole = _steps(optimizer, (64,), **settings)
    assert relative_error(_steps(optimizer, sizes, **settings), whole) < 1e-12


@pytest.mark.parametrize("sizes", [*EVEN[1:], (60, 2, 2)])
def test_the_weights_agree_in_float32_too_and_would_not_with_an_undivided_sum(sizes: tuple[int, ...]) -> None:
    whole = _steps(torch.optim.SGD, (64,), torch.float32, lr=0.1)
    assert relative_error(_steps(torch.optim.SGD, sizes, torch.float32, lr=0.1), whole) < 1e-6
    assert relative_error(_steps(torch.optim.SGD, sizes, torch.float32, "sum", lr=0.1), whole) > 1e-2


def test_nothing_moves_inside_a_window_and_everything_after_it() -> None:
    problem = digits(torch.float32)
    seen: list[list[Tensor]] = []

    def watching(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        seen.append([p.detach().clone() for p in model.parameters()])
        return problem.loss(model, batch)

    window = list(zip(*(column[:64].split(16) for column in problem.train), strict=True))
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
    for _ in train(problem.model, Boundary([optimizer]), [window, window], accumulating(watching)):
        assert all(p.grad is None for p in problem.model.parameters()), "gradients are cleared after the step"
    first, second = seen[:4], seen[4:]
    for weights in zip(*first, strict=True):
        assert all(torch.equal(weights[0], later) for later in weights)
    for before, after in zip(first[-1], second[0], strict=True):
        assert not torch.equal(before, after)


def test_gradients_left_from_before_are_no_part_of_the_first_step() -> None:
    problem = digits(torch.float64)
    for parameter in problem.model.parameters():
        parameter.grad = torch.full_like(parameter, 1e3)
    window = [tuple(column[:64] for column in problem.train)]
    optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.0)
    (step,) = train(problem.model, Boundary([optimizer]), [window], accumulating(problem.loss))
    assert step.grad_norm == pytest.approx(full_batch_gradient(problem).norm().item(), rel=1e-12)


def test_the_gradient_norm_is_that_of_the_finished_gradient() -> None:
    problem = digits(torch.float64)
    found = gradient(problem, (60, 2, 2), "items")
    assert gradient_norm(problem.model).item() == pytest.approx(found.norm().item(), rel=1e-12)


def test_frozen_and_unused_parameters_are_left_alone() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "frozen": nn.Linear(3, 3), "unused": nn.Linear(2, 2)})
    model["frozen"].requires_grad_(False)

    def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        return model["used"](model["frozen"](x)).square().sum(), len(x)  # type: ignore[index]

    accumulate_gradients(model, [torch.rand(2, 3), torch.rand(1, 3)], loss)
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {"used.weight", "used.bias"}


def test_a_window_without_micro_batches_is_refused() -> None:
    problem = digits(torch.float32)
    with pytest.raises(ValueError, match="at least one micro-batch"):
        accumulate_gradients(problem.model, [], problem.loss)
