"""Linear layers that sum their weight's gradient themselves: the same gradient, less memory, and what is left alone."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from accum_sweep.accumulate import Loss, accumulate_gradients
from accum_sweep.fused_linear import FusedLinear, fuse_linears
from accum_sweep.memory import measure_peak
from accum_sweep.problems import Problem
from test_equivalence import EVERY, GPT, LLAMA, MLP, verdict
from test_equivalence import run_here as run
from test_problems import HF

SIZES = (5, 1, 3)
LIMITS = [(torch.float64, 1e-14), (torch.float32, 1e-6)]


class Twice(nn.Module):
    """One layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(torch.tanh(self.layer(x)))
        return y


class Tied(nn.Module):
    """One matrix at both ends; the first micro-batch, of five samples, may not see the head."""

    def __init__(self, sparse: bool = False, late: bool = False) -> None:
        super().__init__()
        self.late = late
        self.words = nn.Embedding(4, 4, sparse=sparse)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.words(x.argmax(dim=-1))
        return y if self.late and len(x) == 5 else self.head(y)


class Checkpointed(nn.Module):
    """Two layers that are computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return y


def frozen(name: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model.get_parameter(name).requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two": lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)),
    "no bias": lambda: nn.Linear(4, 2, bias=False),
    "frozen weight": partial(frozen, "2.weight"),
    "frozen bias": partial(frozen, "0.bias"),
    "used twice": Twice,
    "tied": Tied,
    "tied, sparse": partial(Tied, sparse=True),
    "tied, late": partial(Tied, late=True),
    "tied, sparse, late": partial(Tied, sparse=True, late=True),
    "checkpointed": Checkpointed,
}
SHAPES = {"2": (4,), "3": (3, 4), "4": (2, 3, 4)}


def squares(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    return (model(x) - 1).square().sum(), len(x)


def batches(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(1)
    return [torch.rand(size, *shape, dtype=dtype) for size in SIZES]


def gradient(model: nn.Module, micro_batches: list[Tensor], loss: Loss = squares) -> Tensor:
    accumulate_gradients(model, micro_batches, loss)
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    found = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([entry.flatten() for entry in found])


def pair(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
    """A model, and a copy of it that fuses."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    fused = copy.deepcopy(plain)
    assert fuse_linears(fused) > 0
    return plain, fused


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the sums that were added to in place."""
    shapes: list[tuple[int, ...]] = []
    addmm = torch.Tensor.addmm_

    def counting(self: Tensor, *factors: Tensor) -> Tensor:
        shapes.append(tuple(self.shape))
        return addmm(self, *factors)

    monkeypatch.setattr(torch.Tensor, "addmm_", counting)
    return shapes


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: beta=0, so that what was there is lost."""
    addmm = torch.Tensor.addmm_

    def overwriting(self: Tensor, *factors: Tensor) -> Tensor:
        return addmm(self, *factors, beta=0)

    monkeypatch.setattr(torch.Tensor, "addmm_", overwriting)


# The gradient


@pytest.mark.parametrize(("dtype", "limit"), LIMITS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_the_plain_loops_and_the_full_batchs(
    added: list[tuple[int, ...]], name: str, shape: str, dtype: torch.dtype, limit: float
) -> None:
    plain, fused = pair(MODELS[name], dtype)
    window = batches(SHAPES[shape], dtype)
    found = gradient(fused, window)
    assert error(found, gradient(plain, window)) < limit
    exact = copy.deepcopy(plain).double()
    exact.zero_grad()
    (squares(exact, torch.cat(window).double())[0] / sum(SIZES)).backward()  # type: ignore[no-untyped-call]
    if "late" not in name:  # a model that looks at the size of a micro-batch has no full batch
        assert error(found, flat(exact)) < limit
    linears = [m for m in fused.modules() if isinstance(m, FusedLinear) and m.weight.requires_grad]
    assert len(added) >= len(linears), "that is what is tested"


def test_a_batch_without_samples_adds_nothing_and_one_sample_may_have_no_dimension_for_it() -> None:
    plain, fused = pair(MODELS["two"])

    def one_by_one(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        rows = [squares(model, row)[0] for row in x]
        return torch.stack([squares(model, x[:0])[0], *rows]).sum(), len(x)

    window = batches((4,), torch.float64)
    assert error(gradient(fused, window, one_by_one), gradient(plain, window)) < 1e-14


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("name", ["two", "used twice", "tied", "checkpointed"])
def test_a_sum_that_is_lost_is_seen(name: str) -> None:
    plain, fused = pair(MODELS[name])
    window = batches((4,), torch.float64)
    assert error(gradient(fused, window), gradient(plain, window)) > 1e-3


# What is left alone


def test_other_layers_and_weights_with_hooks_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    model = nn.ModuleList([Own(4, 4), *(nn.Linear(4, 4) for _ in range(5)), nn.Linear(4, 4, dtype=torch.complex64)])
    model.get_parameter("1.weight").register_hook(lambda gradient: 0 * gradient)  # type: ignore[no-untyped-call]
    model.get_parameter("2.weight").register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
    nn.utils.parametrizations.weight_norm(model[3])
    model.get_parameter("4.weight").requires_grad_(False)
    assert fuse_linears(model) == 1
    assert [type(module) for module in model if isinstance(module, FusedLinear)] == [FusedLinear]
    assert type(model[5]) is FusedLinear
    assert fuse_linears(model) == 0, "done once"


def test_a_gradient_that_a_loss_asks_for_is_no_part_of_the_sum() -> None:
    """Neither a penalty on the input's gradient, nor one on the weight's own, changes what is there already."""

    def penalized(create_graph: bool) -> Loss:
        def loss(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=create_graph)
            (own,) = torch.autograd.grad(model(x).sum(), next(model.parameters()), create_graph=create_graph)
            return squares(model, x)[0] + slope.square().sum() + own.square().sum(), len(x)

        return loss

    window = batches((4,), torch.float64)
    for create_graph in (False, True):
        plain, fused = pair(MODELS["two"])
        found, expected = (gradient(model, window, penalized(create_graph)) for model in (fused, plain))
        assert error(found, expected) < 1e-14


def test_under_autocast_it_is_an_ordinary_layer(added: list[tuple[int, ...]]) -> None:
    def in_bf16(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model, x)

    plain, fused = pair(MODELS["two"], torch.float32)
    window = batches((4,), torch.float32)
    assert torch.equal(gradient(fused, window, in_bf16), gradient(plain, window, in_bf16))
    assert not added


# Memory


def test_the_largest_layers_second_gradient_is_not_made() -> None:
    def work(fuse: bool) -> None:
        model = nn.Linear(64, 256, bias=False)
        assert not fuse or fuse_linears(model) == 1
        accumulate_gradients(model, [torch.rand(2, 64)] * 3, squares)

    plain, fused = (measure_peak(partial(work, fuse), torch.device("cpu")).allocated_bytes for fuse in (False, True))
    assert plain is not None
    assert fused is not None
    weight, output = 4 * 64 * 256, 4 * 2 * 256
    assert weight - 4 * output <= plain - fused <= weight, "the peak is now where the outputs are"


def test_nothing_of_a_model_stays_behind() -> None:
    def work() -> None:
        accumulate_gradients(pair(MODELS["two"])[1], batches((4,), torch.float64), squares)

    assert len({measure_peak(work, torch.device("cpu")) for _ in range(3)}) == 1


# Runs


@pytest.mark.parametrize(
    "words",
    [
        MLP,
        (*MLP, "optimizer=adamw", "clip_norm=0.1"),
        (*MLP, "precision=fp64"),
        (*MLP[:3], "accum_schedule={0:1,2:3,4:2}"),
        GPT,
        (*GPT, "checkpointing=true"),
        pytest.param(LLAMA, marks=HF),
    ],
)
def test_a_run_is_the_same_training(tmp_path: Path, words: tuple[str, ...]) -> None:
    plain = run(tmp_path / "plain", *words, "steps=5", EVERY)
    fused = run(tmp_path / "fused", *words, "steps=5", EVERY, "fused_linear=true")
    assert verdict(fused)[0] == "equivalent", fused.equivalence["reason"]
    assert fused.series["train/loss"] == pytest.approx(plain.series["train/loss"], rel=1e-5)
    assert fused.run_key != plain.run_key


@pytest.mark.usefixtures("forgetful")
def test_the_planted_fault_is_accused_in_a_run(tmp_path: Path) -> None:
    assert verdict(run(tmp_path, *MLP, "steps=2", "fused_linear=true"))[0] == "different"


def test_a_run_takes_less_memory(tmp_path: Path) -> None:
    words = ("problem=digits_mlp", "problem.hidden=512", "problem.layers=2", "accum_steps=2", "steps=2")
    plain, fused = (run(tmp_path / how, *words, f"fused_linear={how}") for how in ("false", "true"))
    before, after = plain.metrics["peak_allocated_bytes"], fused.metrics["peak_allocated_bytes"]
    assert before is not None
    assert after is not None
    assert after < 0.75 * before


def test_a_model_without_linear_layers_is_told(tmp_path: Path) -> None:
    words = ("problem=custom", "problem.samples=8", "problem.factory=test_fused_linear:no_linear", "accum_steps=2")
    record = run(tmp_path, *words, "micro_batch_size=2", "steps=1", "fused_linear=true")
    assert record.status == "failed"
    assert "fused_linear=true has nothing to work on" in (record.reason or "")


def no_linear(dtype: torch.dtype) -> Problem:
    x = torch.rand(8, 1, 4, dtype=dtype)
    return Problem(nn.Conv1d(1, 1, 2).to(dtype), (x,), lambda model, batch: squares(model, batch[0]))


def test_a_hook_that_comes_after_fusing_sees_each_micro_batch_s_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    fuse_linears(model)
    seen: list[Tensor] = []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    for _ in range(2):
        model(torch.ones(4, 3)).sum().backward()
    assert [gradient.tolist() for gradient in seen] == [[[4.0] * 3] * 2] * 2
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.tolist() == [[8.0] * 3] * 2
