"""What every problem owes: a loss that is a sum, items counted right, gradients that add up, held-out metrics."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from accum_sweep.problems import Problem, params_class
from accum_sweep.problems.corpus import sentences

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
SAMPLES = 64
SENTENCES = {"context": 32, "train_sequences": SAMPLES, "test_sequences": 16}
POINTS = [[math.sin(3 * n), math.cos(5 * n)] for n in range(SAMPLES)]

# Each problem, small.
SMALL: dict[str, dict[str, Any]] = {
    "linear": {"batches": [{"x": POINTS, "y": [x1 + 2 * x2 for x1, x2 in POINTS]}]},
    "digits_mlp": {"hidden": 16},
    "digits_cnn": {"channels": 4},
    "digits_cnn norm=none": {"channels": 4, "norm": "none"},
    "char_gpt": {"width": 16, **SENTENCES},
    "causal_lm": {"config": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}, **SENTENCES},
    "custom": {"factory": "custom_problem:make", "arguments": {"hidden": 8}, "samples": 512},
}
HF = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed; it is the extra [hf]"
)
ALL = [pytest.param(case, marks=HF) if case == "causal_lm" else case for case in SMALL]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
SPLITS = {"even": [16] * 4, "uneven": [40, 20, 4], "one by one": [1] * SAMPLES}


@pytest.fixture(autouse=True)
def _examples_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")


def build(case: str, dtype: torch.dtype = torch.float64, **settings: Any) -> Problem:
    """Build a problem from its file in conf/, made small, with `settings` on top."""
    name = case.split()[0]
    written = yaml.safe_load((ROOT / f"conf/problem/{name}.yaml").read_text())["problem"]
    torch.manual_seed(0)
    params = params_class(name)(**(written | SMALL[case] | settings))
    problem = params.build(dtype)
    columns = problem.train.values() if isinstance(problem.train, dict) else problem.train
    assert {len(column) for column in columns} == {params.train_samples}
    return problem


def cut(columns: Any, index: Tensor) -> Any:
    """Take samples, in the form of `columns`."""
    if isinstance(columns, dict):
        return {name: column[index] for name, column in columns.items()}
    return tuple(column[index] for column in columns)


def batch(problem: Problem, start: int = 0, stop: int = SAMPLES) -> Any:
    return cut(problem.train, torch.arange(start, stop))


def gradient(problem: Problem, sizes: list[int]) -> Tensor:
    """Gradient of the mean over all items of 64 samples, from micro-batches of these sizes; autograd alone."""
    problem.model.zero_grad()
    items = 0
    for index in torch.arange(SAMPLES).split(sizes):
        loss_sum, count = problem.loss(problem.model, cut(problem.train, index))
        loss_sum.backward()
        items += int(count)
    return gradients(problem.model) / items


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("case", ALL)
def test_it_is_built_in_the_type_asked_for(case: str, precision: str) -> None:
    problem, dtype = build(case, DTYPES[precision]), DTYPES[precision]
    assert {parameter.dtype for parameter in problem.model.parameters()} == {dtype}
    columns = problem.train.values() if isinstance(problem.train, dict) else problem.train
    assert {column.dtype for column in columns if column.is_floating_point()} <= {dtype}
    assert problem.loss(problem.model, batch(problem))[0].dtype == dtype
    assert all(problem.model.get_submodule(name) for name in problem.blocks)


def is_a_sum(loss: Callable[[nn.Module, Any], tuple[Tensor, Any]], problem: Problem) -> bool:
    whole, first, second = (
        loss(problem.model, batch(problem, *part)) for part in ((0, SAMPLES), (0, 20), (20, SAMPLES))
    )
    assert int(whole[1]) == int(first[1]) + int(second[1])
    return bool(abs(first[0] + second[0] - whole[0]) <= 1e-12 * whole[0])


@pytest.mark.parametrize("case", ALL)
def test_the_loss_is_a_sum(case: str) -> None:
    problem = build(case)

    def mean(model: nn.Module, part: Any) -> tuple[Tensor, Any]:
        loss_sum, items = problem.loss(model, part)
        return loss_sum / items, items

    assert is_a_sum(problem.loss, problem)
    assert not is_a_sum(mean, problem), "the check would see a mean"


@pytest.mark.parametrize("case", ALL)
def test_items_are_counted_right(case: str) -> None:
    problem = build(case)
    lengths = [len(text) for text in sentences()[:SAMPLES]]
    expected = {
        "char_gpt": sum(min(length, 32) for length in lengths),
        "causal_lm": sum(min(length, 31) for length in lengths),  # nothing predicts the first of 32 tokens
        "custom": sum(map(sum, problem.train["measured"][:SAMPLES].tolist())) if case == "custom" else None,
    }
    assert int(problem.loss(problem.model, batch(problem))[1]) == expected.get(case, SAMPLES)


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("case", ALL)
def test_any_split_gives_the_gradient_of_the_full_batch(case: str, precision: str) -> None:
    problem = build(case, DTYPES[precision])
    full = gradient(problem, [SAMPLES])
    bound = {"fp32": 1e-6, "fp64": 1e-14}[precision]
    errors = {name: difference(gradient(problem, sizes), full) for name, sizes in SPLITS.items()}
    assert max(errors.values()) <= bound, errors


@pytest.mark.parametrize("case", [pytest.param("causal_lm", marks=HF), "char_gpt", "custom"])
def test_a_mean_of_means_is_not_the_full_batch_where_items_are_ragged(case: str) -> None:
    problem = build(case)
    full = gradient(problem, [SAMPLES])
    problem.model.zero_grad()
    for index in torch.arange(SAMPLES).split(SPLITS["even"]):
        loss_sum, items = problem.loss(problem.model, cut(problem.train, index))
        (loss_sum / items / 4).backward()
    assert difference(gradients(problem.model), full) > 1e-3


def test_batch_norm_is_another_function_of_each_split() -> None:
    problem = build("digits_cnn", norm="batch")
    full = gradient(problem, [SAMPLES])
    assert difference(gradient(problem, SPLITS["even"]), full) > 0.01
    assert problem.blocks == (), "a checkpointed block would count its batches twice"
    problem.model.eval()  # with fixed statistics it is one function again
    full = gradient(problem, [SAMPLES])
    assert difference(gradient(problem, SPLITS["even"]), full) <= 1e-14


@pytest.mark.parametrize("case", ALL)
def test_a_micro_batch_without_samples_adds_nothing(case: str) -> None:
    problem = build(case)
    loss_sum, items = problem.loss(problem.model, batch(problem, 0, 0))
    loss_sum.backward()
    assert (loss_sum.item(), int(items)) == (0, 0)
    assert all(parameter.grad is not None for parameter in problem.model.parameters()), "every layer is passed"
    assert not gradients(problem.model).any()


@pytest.mark.parametrize("case", [*ALL, "digits_cnn norm=batch"])
def test_held_out_metrics_leave_the_model_as_it_was(case: str) -> None:
    problem = build("digits_cnn", norm="batch") if case == "digits_cnn norm=batch" else build(case)
    next(problem.model.children(), problem.model).eval()  # a part that somebody froze
    modes = [module.training for module in problem.model.modules()]
    state = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    assert problem.evaluate is not None
    metrics = problem.evaluate(problem.model, CPU)
    assert metrics["test/loss"] > 0
    assert all(map(math.isfinite, metrics.values()))
    assert [module.training for module in problem.model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in problem.model.state_dict().items())


def test_held_out_metrics_are_means_over_what_is_not_trained_on() -> None:
    from accum_sweep.problems.digits import load

    problem = build("digits_cnn", norm="batch", test_samples=300)
    images, labels = map(torch.from_numpy, load())
    problem.model.eval()
    logits = problem.model(images[-300:])
    expected = {
        "test/loss": nn.functional.cross_entropy(logits, labels[-300:]).item(),
        "test/accuracy": (logits.argmax(dim=1) == labels[-300:]).double().mean().item(),
    }
    problem.model.train()
    assert problem.evaluate is not None
    assert problem.evaluate(problem.model, CPU) == pytest.approx(expected, rel=1e-12)
    zero = build("linear", bias=False, initial_weight=[0, 0], held_out={"x": [[9, 9], [8, 8]], "y": [3, 1]})
    assert zero.evaluate is not None
    assert zero.evaluate(zero.model, CPU) == {"test/loss": 5}
    assert build("linear", held_out=None).evaluate is None
