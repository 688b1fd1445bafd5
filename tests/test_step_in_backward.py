"""The optimizer's step inside backward: the plain loop's weights, one gradient at a time, and what cannot be had."""

import copy
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accum_sweep.accumulate import accumulate_gradients
from accum_sweep.boundary import Boundary, Step, train
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.config import run_key
from accum_sweep.memory import measure_peak
from accum_sweep.problems import Problem
from accum_sweep.record import Record
from accum_sweep.step_in_backward import step_in_backward
from test_equivalence import run_here as run
from test_equivalence import verdict

Batch = tuple[Tensor, Tensor]
Optimizer = Callable[..., torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, amsgrad=True),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.01),
}
MLP = ("problem=digits_mlp", "problem.hidden=64", "problem.layers=6", "micro_batch_size=16", "accum_steps=1")
GPT = ("problem=char_gpt", "problem.context=16", "problem.train_sequences=64", "problem.test_sequences=8")
GPT = (*GPT, "problem.width=8", "problem.heads=2", "problem.layers=2", "micro_batch_size=8", "accum_steps=1")
IN_BACKWARD = "step_in_backward=true"
NOT_JUDGED = ("not comparable", "step_in_backward=true lets go of each gradient before there is a whole one to compare")


class Words(nn.Module):
    """One matrix at both ends, sparse or not, a layer that is used twice, a frozen weight and one that is not used."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(5, 3, sparse=sparse)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5)
        self.unused = nn.Linear(2, 2)
        self.head.bias.requires_grad_(False)
        if not sparse:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(torch.tanh(self.layer(self.words(words)))))
        return y


def next_word(model: nn.Module, batch: Batch) -> tuple[Tensor, int]:
    words, targets = batch
    return F.cross_entropy(model(words), targets, reduction="sum"), len(targets)


def windows(sizes: tuple[int, ...] = (6, 1, 4, 8)) -> Iterator[list[Batch]]:
    torch.manual_seed(1)
    for size in sizes:
        yield [(torch.randint(0, 5, (size,)), torch.randint(0, 5, (size,)))]


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, in_backward: bool, halve: bool = False
) -> tuple[list[Step], Tensor]:
    """The steps of a short training, and the weights after it."""
    schedulers = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)] if halve else []
    boundary = step_in_backward(model, optimizer, schedulers) if in_backward else Boundary([optimizer], schedulers)
    steps = list(train(model, boundary, windows(), partial(accumulate_gradients, loss=next_word)))
    assert all(parameter.grad is None for parameter in model.parameters())
    return steps, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# The weights


@pytest.mark.parametrize("halve", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_are_the_plain_loops_to_the_last_digit(name: str, halve: bool) -> None:
    model = Words()
    twin = copy.deepcopy(model)
    plain, expected = trained(twin, OPTIMIZERS[name](twin.parameters()), in_backward=False, halve=halve)
    steps, found = trained(model, OPTIMIZERS[name](model.parameters()), in_backward=True, halve=halve)
    assert torch.equal(found, expected)
    assert [step.outcome for step in steps] == ["stepped"] * 4
    assert [(step.loss, step.lr) for step in steps] == [(step.loss, step.lr) for step in plain]
    for step, other in zip(steps, plain, strict=True):
        assert step.grad_norm == step.clipped_norm == pytest.approx(other.grad_norm, rel=1e-12)


def test_sparse_gradients_are_stepped_on_too() -> None:
    model = Words(sparse=True)
    twin = copy.deepcopy(model)
    _, expected = trained(twin, torch.optim.SGD(twin.parameters(), lr=0.1), in_backward=False)
    _, found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), in_backward=True)
    assert torch.equal(found, expected)


class Twice(torch.optim.SGD):
    """The planted fault: it takes every step twice."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        super().step(closure)


def test_a_step_too_many_is_seen() -> None:
    model = Words()
    twin = copy.deepcopy(model)
    _, expected = trained(twin, torch.optim.SGD(twin.parameters(), lr=0.1), in_backward=False)
    _, found = trained(model, Twice(model.parameters(), lr=0.1), in_backward=True)
    assert not torch.allclose(found, expected)


def test_a_window_of_two_micro_batches_is_refused_before_the_second_moves_a_weight() -> None:
    model = Words()
    boundary = step_in_backward(model, torch.optim.SGD(model.parameters(), lr=0.1))
    window = [micro_batch for (micro_batch,) in windows()]
    with pytest.raises(RuntimeError, match="windows of one micro-batch"):
        list(train(model, boundary, [window], partial(accumulate_gradients, loss=next_word)))


# Memory


@pytest.mark.parametrize(("in_backward", "at_once"), [(True, 1), (False, 4)])
def test_one_gradient_is_there_at_a_time(in_backward: bool, at_once: int) -> None:
    model = Words(sparse=True)
    seen = []

    class Watching(torch.optim.SGD):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            seen.append(sum(parameter.grad is not None for parameter in model.parameters()))
            super().step(closure)

    trained(model, Watching(model.parameters(), lr=0.1), in_backward)
    assert max(seen) == at_once


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
def test_a_run_takes_less_memory(tmp_path: Path, optimizer: str) -> None:
    words = (*MLP, "problem.hidden=256", f"optimizer={optimizer}", "steps=2")
    before, after = (peak(run(tmp_path / how, *words, f"step_in_backward={how}")) for how in ("false", "true"))
    assert after < 0.9 * before


def peak(record: Record) -> int:
    found = record.metrics["peak_allocated_bytes"]
    assert isinstance(found, int)
    return found


def test_nothing_of_a_model_stays_behind() -> None:
    held: list[weakref.ref[nn.Module]] = []

    def work() -> None:
        model = Words()
        held.append(weakref.ref(model))
        trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), in_backward=True)

    assert len({measure_peak(work, torch.device("cpu")) for _ in range(3)}) == 1
    assert [ref() for ref in held] == [None] * 3


# Runs


@pytest.mark.parametrize(
    "words",
    [
        MLP,
        (*MLP, "optimizer=adamw", "lr_schedule=cosine", "warmup_steps=2"),
        (*MLP, "precision=bf16"),
        (*MLP, "precision=bf16-params"),
        (*MLP[:-1], "accum_schedule={0:1}"),
        (*MLP, "normalization=sum"),
        (*GPT, "optimizer=momentum"),
        (*GPT, "optimizer=adamw", "checkpointing=true"),
    ],
)
def test_a_run_is_the_plain_run(tmp_path: Path, words: tuple[str, ...]) -> None:
    plain, found = (run(tmp_path / how, *words, "steps=5", f"step_in_backward={how}") for how in ("false", "true"))
    assert found.status == "finished", found.reason
    assert found.series["train/loss"] == plain.series["train/loss"]
    assert found.series["train/lr"] == plain.series["train/lr"]
    assert found.series["train/grad_norm"] == pytest.approx(plain.series["train/grad_norm"], rel=1e-2)
    assert found.equivalence["final_sketch"] == plain.equivalence["final_sketch"]
    assert (verdict(plain)[0], verdict(found)) == ("equivalent", NOT_JUDGED)
    assert found.metrics["steps_judged"] == 0


def test_a_check_that_is_off_says_nothing(tmp_path: Path) -> None:
    assert "verdict" not in run(tmp_path, *MLP, "steps=1", IN_BACKWARD, "equivalence=off").equivalence


@pytest.mark.parametrize(
    ("how", "said"), [("false", "the weights are those before it"), ("true", "weights have moved")]
)
def test_a_run_that_diverges_says_what_has_become_of_its_weights(tmp_path: Path, how: str, said: str) -> None:
    words = ("problem=custom", "problem.samples=8", "problem.factory=test_step_in_backward:steep", "accum_steps=1")
    record = run(tmp_path, *words, "micro_batch_size=2", "steps=3", f"step_in_backward={how}")
    assert record.status == "diverged"
    assert said in (record.reason or "")
    assert record.series["train/grad_norm"][-1] is None, "not finite"


def steep(dtype: torch.dtype) -> Problem:
    """The loss is 0 and its slope is infinite times nothing."""
    x = torch.zeros(8, 3, dtype=dtype)
    return Problem(nn.Linear(3, 1, bias=False).to(dtype), (x,), lambda model, batch: (model(batch[0]).sqrt().sum(), 2))


def test_it_is_a_run_of_its_own() -> None:
    plain, found = (check(compose(["accum_steps=1", f"step_in_backward={how}"])) for how in ("false", "true"))
    assert run_key(plain, "cpu") != run_key(found, "cpu")
