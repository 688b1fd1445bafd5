"""The verdict on trial: faults planted in one place of a real run must be found and named, right runs never accused.

Faults are loops as others write them, put in the place of the engine's own. Each is judged under SGD, under AdamW and
under clipping so tight that it always bites, where the weights hide a wrong factor. The same run without its fault is
the control.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from accum_sweep import preparation, short_pass
from accum_sweep.accumulate import Window, accumulate_gradients
from accum_sweep.boundary import Boundary, Step
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.config import Config
from accum_sweep.equivalence import tolerance
from accum_sweep.execute import execute
from accum_sweep.full_batch import full_batch
from accum_sweep.gradients import compare
from accum_sweep.problems import Problem
from accum_sweep.record import Identity, Record
from test_problems import HF

EVERY = "equivalence=every_step"
MLP = ("problem=digits_mlp", "problem.hidden=8", "micro_batch_size=16", "accum_steps=4")
SENTENCES = ("problem.context=16", "problem.train_sequences=64", "problem.test_sequences=8")
GPT = ("problem=char_gpt", *SENTENCES, "problem.width=8", "problem.heads=2", "problem.layers=1")
GPT = (*GPT, "micro_batch_size=8", "accum_steps=4")
CNN = ("problem=digits_cnn", "problem.channels=4", "micro_batch_size=16", "accum_steps=4")
LLAMA = "problem.config={hidden_size:8,num_hidden_layers:1,num_attention_heads:2,intermediate_size:16}"
LLAMA = ("problem=causal_lm", *SENTENCES, LLAMA, "micro_batch_size=8", "accum_steps=4")
OWN = ("problem=custom", "problem.samples=64", "micro_batch_size=8", "accum_steps=4")
RAGGED = "problem.batches=[{x:[[1,2],[3,1],[2,2]],y:[1,-1,0]},{x:[[0,1]],y:[4]},{x:[[1,1],[-1,2]],y:[2,3]}]"
RAGGED = ("problem=linear", RAGGED, "problem.held_out=null", "normalization=items")

TIGHT = 0.01  # less than the norm of any gradient here
OPTIMIZERS = {
    "sgd": ("optimizer=sgd",),
    "adamw": ("optimizer=adamw",),
    "clipped": ("optimizer=sgd", f"clip_norm={TIGHT}"),
}

Patch = pytest.MonkeyPatch
Accumulate = Callable[..., Window]
Cross = Callable[..., Step]


@functools.cache  # composing takes longer than these runs, and a fault and its control have the same settings
def configured(*overrides: str) -> Config:
    return check(compose([*overrides, "tracking=none", "device=cpu"]))


def run_here(folder: Path, *overrides: str) -> Record:
    return execute(configured(*overrides), folder, Identity("r", "r", []))


def verdict(record: Record) -> tuple[str, str]:
    return record.equivalence["verdict"], record.equivalence["reason"]


# Faults


def loop(
    weigh: Callable[[int, int], float],
    each: Callable[[nn.Module, int], object] = lambda *_: None,
    seen: Callable[[Sequence[Any]], Iterable[Any]] = list,
    reported: Callable[[list[Tensor]], list[Tensor]] = list,
) -> Accumulate:
    """The loop everybody writes: `weigh(items, micro-batches)` times each loss sum, and `each` after each backward."""

    def accumulate(model: nn.Module, micro_batches: Sequence[Any], loss: Any, *, scaler: Any, **_: Any) -> Window:
        sums, counts = list[Tensor](), list[int]()
        for number, batch in enumerate(seen(micro_batches)):
            loss_sum, items = loss(model, batch)
            weighed = loss_sum * weigh(int(items), len(micro_batches))
            (weighed if scaler is None else scaler.scale(weighed)).backward()
            each(model, number)
            sums.append(loss_sum.detach().clone())
            counts.append(int(items))
        return Window(tuple(reported(sums)), tuple(counts), sum(counts))

    return accumulate


def nominal(items: int, micro_batches: int) -> float:
    """What `loss / accum_steps` makes of a mean loss in the full windows of MLP."""
    return 1 / (4 * 16)


def in_the_loop(faulty: Accumulate) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(preparation, "accumulate_gradients", faulty)


def at_the_boundary(name: str, faulty: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(Boundary, name, faulty(getattr(Boundary, name)))


def not_cleared(patch: Patch) -> None:
    """zero_grad() forgotten. The engine refuses to begin with gradients, so its loop goes too."""
    patch.setattr(preparation, "accumulate_gradients", loop(nominal))
    patch.setattr(Boundary, "clear", lambda _: None)


def cleared_halfway(model: nn.Module, number: int) -> None:
    if number == 1:
        model.zero_grad()


def clipped_each_time(model: nn.Module, number: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), TIGHT)


def scheduler_each_time(cross: Cross) -> Cross:
    def faulty(boundary: Boundary, model: nn.Module, window: Window, watch: Any = None) -> Step:
        step = cross(boundary, model, window, watch)
        for _ in window.items[1:]:
            boundary.schedulers[0].step()
        return step

    return faulty


def unscaled_twice(cross: Cross) -> Cross:
    def faulty(boundary: Boundary, model: nn.Module, window: Window, watch: Any = None) -> Step:
        assert boundary.scaler is not None
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= boundary.scaler.get_scale()
        return cross(boundary, model, window, watch)

    return faulty


def last_loss_reported(cross: Cross) -> Cross:
    def faulty(boundary: Boundary, model: nn.Module, window: Window, watch: Any = None) -> Step:
        step = cross(boundary, model, window, watch)
        return replace(step, loss=step.micro_losses[-1])

    return faulty


def stepped_twice(cross: Cross) -> Cross:
    def faulty(boundary: Boundary, model: nn.Module, window: Window, watch: Any = None) -> Step:
        def and_step() -> None:
            if watch is not None:
                watch()
            boundary.optimizers[0].step()

        return cross(boundary, model, window, and_step)

    return faulty


def each_tensor_clipped(clip: Any) -> Any:
    def faulty(boundary: Boundary, model: nn.Module, norm: float) -> float:
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_([parameter], TIGHT)
        return TIGHT

    return faulty


def never_clipped(clip: Any) -> Any:
    return lambda _boundary, _model, norm: norm


NOT_RIGHTLY = (
    r"the gradients were not accumulated rightly: summed one by one, they do give the full batch's \(step \d\)"
)
COSINE = ("steps=3", "lr_schedule=cosine", "warmup_steps=1")
SHORT_WINDOW = ("problem.test_samples=1701", "epochs=1")  # of 96 samples: four micro-batches, and two
ALL = tuple(OPTIMIZERS)

ANOTHER_GRADIENT = (
    r"the optimizer saw another gradient than the window's "
    r"\((relative error|clipped to a norm of) [^()]+\) \(step \d\)"
)

# What is planted, in which run, under which optimizers, and the reason that must be found.
FAULTS: dict[str, tuple[Callable[[Patch], None], tuple[str, ...], tuple[str, ...], str]] = {
    "undivided sum": (
        in_the_loop(loop(lambda items, _: 1 / items)),
        (*MLP, "steps=3"),
        ALL,
        r"the gradient is 4 times the full batch's \(step \d\)",
    ),
    "mean of means, ragged": (
        in_the_loop(loop(lambda items, micro_batches: 1 / (items * micro_batches))),
        (*GPT, "steps=3"),
        ALL,
        NOT_RIGHTLY,
    ),
    "mean of means, uneven micro-batches": (
        in_the_loop(loop(lambda items, micro_batches: 1 / (items * micro_batches))),
        ("problem=digits_mlp", "problem.hidden=8", "micro_batch_size=30", "effective_batch_size=64", "steps=3"),
        ALL,
        NOT_RIGHTLY,
    ),
    "nominal divisor in a short last window": (
        in_the_loop(loop(nominal)),
        (*MLP, *SHORT_WINDOW),
        ALL,
        r"the gradient is 0\.5 times the full batch's \(step 2\)",
    ),
    "zero_grad forgotten": (not_cleared, (*MLP, "steps=3"), ALL, NOT_RIGHTLY),
    "zero_grad in mid-window": (in_the_loop(loop(nominal, each=cleared_halfway)), (*MLP, "steps=3"), ALL, NOT_RIGHTLY),
    "clipped at each micro-batch": (
        in_the_loop(loop(nominal, each=clipped_each_time)),
        (*MLP, "steps=3"),
        ALL,
        NOT_RIGHTLY,
    ),
    "last micro-batch's loss, in the loop": (
        in_the_loop(loop(nominal, reported=lambda sums: sums[-1:] * len(sums))),
        (*MLP, "steps=3"),
        ALL,
        r"the loss it reports is [\d.]+, the full batch's is [\d.]+ \(step \d\)",
    ),
    "last micro-batch's loss, at the boundary": (
        at_the_boundary("cross", last_loss_reported),
        (*MLP, "steps=3"),
        ALL,
        r"the loss it reports is [\d.]+, that of the whole window [\d.]+ \(step \d\)",
    ),
    "last micro-batch dropped": (
        in_the_loop(loop(lambda *_: 1 / 48, seen=lambda micro_batches: list(micro_batches)[:-1])),
        (*MLP, "steps=3"),
        ALL,
        r"different data, or a wrong count: 48 items in the window, 64 in its full batch \(step \d\)",
    ),
    "one micro-batch over and over": (
        in_the_loop(loop(nominal, seen=lambda micro_batches: [micro_batches[0]] * len(micro_batches))),
        (*MLP, "steps=3"),
        ALL,
        NOT_RIGHTLY,
    ),
    "scheduler at each micro-batch": (
        at_the_boundary("cross", scheduler_each_time),
        (*MLP, *COSINE),
        ALL,
        r"the learning rate was [\d.e-]+, due was [\d.e-]+ \(step 2\)",
    ),
    "unscaled twice": (
        at_the_boundary("cross", unscaled_twice),
        (*MLP, "steps=3", "precision=fp16"),
        ALL,
        r"the gradient is 1\.526e-05 times the full batch's \(step \d\)",  # 1 / 65536
    ),
    "optimizer called twice": (
        at_the_boundary("cross", stepped_twice),
        (*MLP, "steps=3"),
        ("sgd", "adamw"),
        r"the optimizer was called 2 times in one window \(step \d\)",
    ),
    "clipping forgotten": (
        at_the_boundary("_clip", never_clipped),
        (*MLP, "steps=3"),
        ("clipped",),
        ANOTHER_GRADIENT,
    ),
    "each tensor clipped for itself": (
        at_the_boundary("_clip", each_tensor_clipped),
        (*MLP, "steps=3"),
        ("clipped",),
        ANOTHER_GRADIENT,
    ),
}
PLANTED = [(name, optimizer) for name, (_, _, optimizers, _) in FAULTS.items() for optimizer in optimizers]


@pytest.mark.parametrize(("name", "optimizer"), PLANTED)
def test_a_planted_fault_is_found_and_named(tmp_path: Path, monkeypatch: Patch, name: str, optimizer: str) -> None:
    plant, settings, _, reason = FAULTS[name]
    words = (*settings, *OPTIMIZERS[optimizer], EVERY)
    assert verdict(run_here(tmp_path / "right", *words)) == ("equivalent", "")
    plant(monkeypatch)
    record = run_here(tmp_path / "faulty", *words)
    assert record.status == "finished", record.reason
    found, why = verdict(record)
    assert found == "different"
    assert re.fullmatch(reason, why)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_of_ones_own_that_is_right_is_not_accused(tmp_path: Path, monkeypatch: Patch, optimizer: str) -> None:
    monkeypatch.setattr(preparation, "accumulate_gradients", loop(nominal))
    record = run_here(tmp_path, *MLP, "steps=3", *OPTIMIZERS[optimizer], EVERY)
    assert verdict(record) == ("equivalent", "")


@pytest.mark.parametrize("optimizer", ["adamw", "clipped"])
def test_the_weights_would_hide_the_undivided_sum_that_the_verdict_finds(
    tmp_path: Path, monkeypatch: Patch, optimizer: str
) -> None:
    words = (*MLP, "steps=3", "save_weights=true", EVERY)
    after = {}
    for chosen in (optimizer, "sgd"):
        run_here(tmp_path / chosen, *words, *OPTIMIZERS[chosen])
        with monkeypatch.context() as patch:
            FAULTS["undivided sum"][0](patch)
            record = run_here(tmp_path / f"{chosen} faulty", *words, *OPTIMIZERS[chosen])
        assert record.equivalence["verdict"] == "different"
        right, faulty = (flat(tmp_path / name / "final.safetensors") for name in (chosen, f"{chosen} faulty"))
        moved = (right - flat(tmp_path / chosen / "initial.safetensors")).norm()
        after[chosen] = float((faulty - right).norm() / moved)
    assert after[optimizer] < 1e-3
    assert after["sgd"] > 1


def flat(path: Path) -> Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(path).items())])


def test_the_engine_itself_refuses_gradients_that_were_not_cleared(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Boundary, "clear", lambda _: None)
    record = run_here(tmp_path, *MLP, "steps=3")
    assert record.status == "failed"
    assert "the model holds gradients already" in (record.reason or "")


def test_a_fault_in_a_later_window_is_seen_where_that_is_of_another_form(tmp_path: Path, monkeypatch: Patch) -> None:
    FAULTS["nominal divisor in a short last window"][0](monkeypatch)
    first, every = (run_here(tmp_path / when, *MLP, *SHORT_WINDOW, f"equivalence={when}") for when in WHEN)
    for record in (first, every):
        assert record.equivalence["verdict"] == "different"
        assert record.metrics["steps_judged"] == 2
        assert record.equivalence["relative_errors"][0] < 1e-6
        assert record.equivalence["relative_errors"][1] == record.metrics["gradient_error"] == pytest.approx(0.5)
    # Windows that are all alike are judged by the first.
    assert run_here(tmp_path / "alike", *MLP, "steps=5").metrics["steps_judged"] == 1


WHEN = ("first_step", "every_step")


# Settings that are another training, said in words


@pytest.mark.parametrize("pieces", [2, 4, 8])
def test_sum_is_the_full_batch_times_the_number_of_micro_batches(tmp_path: Path, pieces: int) -> None:
    words = ("problem=digits_mlp", "problem.hidden=8", f"accum_steps={pieces}", "effective_batch_size=64", "steps=2")
    summed = run_here(tmp_path / "sum", *words, "normalization=sum")
    cause = rf"the gradient is {pieces} times the full batch's \(sum: {pieces} micro-batches, never divided\)"
    assert summed.equivalence["verdict"] == "different"
    assert re.fullmatch(cause, summed.equivalence["reason"])
    assert summed.metrics["gradient_error"] == pytest.approx(pieces - 1, rel=1e-5)
    assert summed.metrics["gradient_cosine"] == pytest.approx(1)
    assert verdict(run_here(tmp_path / "mean", *words, "normalization=mean")) == ("equivalent", "")


def test_sum_of_one_micro_batch_is_right(tmp_path: Path) -> None:
    assert verdict(run_here(tmp_path, *MLP[:-1], "accum_steps=1", "steps=3", "normalization=sum", EVERY))[0] == (
        "equivalent"
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mean_of_ragged_micro_batches_is_told_by_their_counts(tmp_path: Path, optimizer: str) -> None:
    words = (*RAGGED, *OPTIMIZERS[optimizer])
    mean = run_here(tmp_path / "mean", *words, "normalization=mean")
    told = "mean gives micro-batches of 3, 1, 2 items the same weight; use normalization=items"
    assert verdict(mean) == ("different", told)
    assert verdict(run_here(tmp_path / "items", *words)) == ("equivalent", "")


def test_sum_of_ragged_micro_batches_is_told(tmp_path: Path) -> None:
    found, why = verdict(run_here(tmp_path, *RAGGED, "normalization=sum"))
    assert (found, why) == ("different", "sum adds 3 micro-batches of 3, 1, 2 items, each divided by its own")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_summing_in_bfloat16_is_told(tmp_path: Path, optimizer: str) -> None:
    words = ("problem=digits_mlp", "problem.hidden=8", "precision=bf16-params", "micro_batch_size=1", "accum_steps=512")
    words = (*words, "steps=1", *OPTIMIZERS[optimizer])
    told = "low-precision accumulator: 512 gradients summed in bfloat16; use accumulator=fp32"
    assert verdict(run_here(tmp_path / "bf16", *words)) == ("different", told)
    assert verdict(run_here(tmp_path / "fp32", *words, "accumulator=fp32"))[0] == "equivalent"


@pytest.mark.parametrize("accumulator", ["null", "fp32"])
def test_a_wrong_divisor_is_named_in_bfloat16_too(tmp_path: Path, monkeypatch: Patch, accumulator: str) -> None:
    """Five micro-batches of 16, and a short window of four."""
    monkeypatch.setattr(preparation, "accumulate_gradients", loop(lambda *_: 1 / (5 * 16)))
    words = (*MLP[:3], "accum_steps=5", "problem.test_samples=1653", "epochs=1", "precision=bf16-params", EVERY)
    found, why = verdict(run_here(tmp_path, *words, f"accumulator={accumulator}"))
    assert found == "different"
    assert re.fullmatch(r"the gradient is 0\.(8\d*|79\d*) times the full batch's \(step 2\)", why)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_batch_statistics_cannot_be_compared(tmp_path: Path, optimizer: str) -> None:
    words = (*CNN, "steps=2", "problem.norm=batch", EVERY, *OPTIMIZERS[optimizer])
    told = "BatchNorm in training mode (1.1, 2.1) takes its statistics from the micro-batch"
    assert verdict(run_here(tmp_path / "four", *words)) == ("not comparable", told)
    assert verdict(run_here(tmp_path / "eval", *words, "batchnorm=eval")) == ("equivalent", "")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_dropout_cannot_be_compared(tmp_path: Path, optimizer: str) -> None:
    words = (*GPT, "steps=2", EVERY, *OPTIMIZERS[optimizer])
    found, why = verdict(run_here(tmp_path / "four", *words, "problem.dropout=0.1"))
    assert found == "not comparable"
    assert "draws random numbers in training, as dropout does (dropout, blocks.0.dropout)" in why
    assert verdict(run_here(tmp_path / "none", *words)) == ("equivalent", "")


@pytest.mark.parametrize("words", [(*CNN, "problem.norm=batch"), (*GPT, "problem.dropout=0.1")])
def test_one_micro_batch_is_the_full_batch_with_the_same_draws(tmp_path: Path, words: tuple[str, ...]) -> None:
    record = run_here(tmp_path, *words, "accum_steps=1", "steps=3", EVERY)
    assert verdict(record) == ("equivalent", "")
    assert record.equivalence["relative_errors"] == [0, 0, 0]


def test_a_fault_at_the_boundary_is_worse_than_what_cannot_be_compared(tmp_path: Path, monkeypatch: Patch) -> None:
    FAULTS["scheduler at each micro-batch"][0](monkeypatch)
    found, why = verdict(run_here(tmp_path, *GPT, "problem.dropout=0.1", *COSINE, EVERY))
    assert found == "different"
    assert why.startswith("the learning rate was ")


# Problems of one's own, with a fault of their own


class Centred(nn.Module):
    """Couples the samples of a batch, as contrastive losses and batch statistics do, and nothing says so."""

    def __init__(self, only_backward: bool) -> None:
        super().__init__()
        self.only_backward = only_backward  # the loss is a sum over samples then, and its gradient is not

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=0)
        return x - (mean - mean.detach() if self.only_backward else mean)


def squared(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), len(y)


def own(dtype: torch.dtype, fault: str = "") -> Problem:
    """A small perceptron; `fault` is what its author got wrong."""

    def mean(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        x, y = batch
        return F.mse_loss(model(x), y), len(y)

    def miscounted(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        loss_sum, items = squared(model, batch)
        return loss_sum, max(1, items // 3)

    def micro_batches_only(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        if len(batch[0]) > 8:
            raise ValueError("batches of 8 only")
        return squared(model, batch)

    def tiny(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        loss_sum, items = squared(model, batch)
        return loss_sum * 1e-7, items  # in float16 its slopes vanish unless they are scaled

    def drawing(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        loss_sum, items = squared(model, batch)
        return loss_sum * (1 + torch.rand(())), items  # once a pass, so splits differ in how often

    losses = {"mean": mean, "miscounted": miscounted, "micro-batches only": micro_batches_only, "tiny": tiny}
    losses["drawing"] = drawing
    between: nn.Module = Centred(fault == "coupled backward") if "coupled" in fault else nn.Identity()
    model = nn.Sequential(nn.Linear(3, 4), between, nn.Tanh(), nn.Linear(4, 1)).to(dtype)
    x = torch.rand(64, 3, dtype=dtype)
    return Problem(model, (x, x.square().sum(dim=1, keepdim=True) + 1), losses.get(fault, squared))


def own_problem(folder: Path, fault: str, *words: str) -> tuple[str, str]:
    name = ("problem.factory=test_equivalence:own", f"problem.arguments={{fault:'{fault}'}}")
    record = run_here(folder, *OWN, *name, "steps=2", EVERY, *words)
    assert record.status == "finished", record.reason
    return verdict(record)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loss_that_is_no_sum_is_told(tmp_path: Path, optimizer: str) -> None:
    found, why = own_problem(tmp_path / "a", "mean", *OPTIMIZERS[optimizer])
    assert found == "different"
    assert "the loss is no sum over items" in why
    assert "is reduction='sum' missing?" in why
    assert own_problem(tmp_path / "b", "", *OPTIMIZERS[optimizer]) == ("equivalent", "")


def test_a_wrong_count_is_told(tmp_path: Path) -> None:
    found, why = own_problem(tmp_path, "miscounted")
    assert found == "different"
    assert (
        "different data, or a wrong count: 8 items in the window, 10 in its full batch" in why
    )  # 4 x (8 // 3), 32 // 3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("fault", ["coupled", "coupled backward"])
def test_a_layer_that_couples_samples_is_found(tmp_path: Path, fault: str, optimizer: str) -> None:
    assert own_problem(tmp_path / "four", fault, *OPTIMIZERS[optimizer])[0] == "different"
    assert own_problem(tmp_path / "one", fault, *OPTIMIZERS[optimizer], "accum_steps=1") == ("equivalent", "")


@pytest.mark.parametrize("fault", ["coupled", "coupled backward"])
def test_a_layer_that_couples_samples_is_named(tmp_path: Path, fault: str) -> None:
    assert "couples the samples of a micro-batch" in own_problem(tmp_path, fault)[1]


def test_a_wrong_divisor_is_named_where_float16_needs_its_scale(tmp_path: Path, monkeypatch: Patch) -> None:
    assert own_problem(tmp_path / "right", "tiny", "precision=fp16") == ("equivalent", "")
    FAULTS["undivided sum"][0](monkeypatch)
    found, why = own_problem(tmp_path / "faulty", "tiny", "precision=fp16")
    assert found == "different"
    assert re.fullmatch(r"the gradient is (4|3\.99\d|4\.00\d) times the full batch's \(step \d\)", why)


def test_a_model_that_takes_micro_batches_only_is_told_and_trains(tmp_path: Path) -> None:
    found, why = own_problem(tmp_path, "micro-batches only")
    assert (found, why) == ("not comparable", "the full batch fails (ValueError: batches of 8 only)")


def test_a_loss_that_draws_random_numbers_is_told(tmp_path: Path) -> None:
    found, why = own_problem(tmp_path / "four", "drawing")
    assert found == "not comparable"
    assert why.startswith("the model draws random numbers in training, as dropout does: ")
    assert own_problem(tmp_path / "one", "drawing", "accum_steps=1") == ("equivalent", "")


def test_a_full_batch_that_does_not_fit_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch: Patch) -> None:
    words = (*MLP, "steps=3", EVERY)
    peak = run_here(tmp_path / "measured", *words).metrics["peak_allocated_bytes"]
    assert peak is not None
    # Weights and all need room once, activations four times: more than what one micro-batch just fits into, and less
    # than four times that.
    monkeypatch.setattr(short_pass, "free_bytes", lambda _: peak + 1)
    record = run_here(tmp_path / "small", *words)
    assert (record.status, record.metrics["steps_done"]) == ("finished", 3)
    assert verdict(record) == ("not comparable", "the full batch does not fit into memory")
    assert record.metrics["gradient_error"] is None
    assert verdict(run_here(tmp_path / "one", *words, "accum_steps=1")) == ("equivalent", "")
    monkeypatch.setattr(short_pass, "free_bytes", lambda _: 4 * peak)
    assert verdict(run_here(tmp_path / "large", *words)) == ("equivalent", "")


def test_memory_that_runs_out_all_the_same_is_told_and_the_run_goes_on(tmp_path: Path, monkeypatch: Patch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("accum_sweep.referee.finite_full_batch", too_large)
    record = run_here(tmp_path, *MLP, "steps=3", EVERY)
    assert (record.status, record.metrics["steps_done"]) == ("finished", 3)
    assert verdict(record) == ("not comparable", "the full batch does not fit into memory")


# Right runs


def right(*words: str, **marks: Any) -> Any:
    return pytest.param(words, id=" ".join(words).replace("problem.", ""), **marks)


PRECISIONS = [
    ("precision=fp64",),
    ("precision=fp32",),
    ("precision=bf16",),
    ("precision=fp16",),
    ("precision=bf16-params", "accumulator=fp32"),
]
LONG = ("problem.context=64", "micro_batch_size=16", "optimizer=momentum", "lr=0.5", "steps=6")  # 4096 tokens a window
RIGHT = [
    *[right(*problem, "steps=6", *precision) for problem in (MLP, GPT, CNN) for precision in PRECISIONS],
    *[right(*RAGGED, "steps=6", *precision) for precision in PRECISIONS],
    right(*GPT, *PRECISIONS[-1], *LONG),  # LayerNorm sums the full batch's gradient in bf16
    right(*LLAMA, *PRECISIONS[0], "steps=6", marks=HF),  # rounds to float32 inside
    *[right(*CNN, "problem.norm=none", "steps=6", *precision) for precision in PRECISIONS],
    *[right(*CNN, "problem.norm=batch", "batchnorm=eval", "steps=6", *precision) for precision in PRECISIONS],
    *[right(*LLAMA, "steps=2", *precision, marks=HF) for precision in PRECISIONS[1:]],
    *[right(*MLP, "steps=6", f"optimizer={name}") for name in ("sgd", "momentum", "adamw")],
    *[right(*MLP, "steps=6", "optimizer=adamw", *words) for words in (("clip_norm=0.01",), ("clip_value=0.001",))],
    right(*GPT, "steps=6", "clip_norm=0.5", "precision=fp16", "optimizer=adamw"),
    right(*MLP, "steps=12", "lr_schedule=cosine", "warmup_steps=3"),
    right(*MLP, "steps=12", "warmup_steps=12", "optimizer=momentum"),
    right(*MLP[:2], "effective_batch_size=64", "accum_steps=7", "steps=4"),
    right(*MLP[:2], "effective_batch_size=64", "micro_batch_size=30", "steps=4"),
    right(*MLP[:2], "effective_batch_size=64", "accum_steps=64", "steps=2"),
    right(*MLP[:3], "accum_schedule={0:1,2:3,4:2}", "steps=6", "lr_schedule=cosine"),
    *[right(*MLP, "problem.test_samples=1654", "epochs=3", f"last_window={how}") for how in ("flush", "drop", "carry")],
    *[right(*problem, "checkpointing=true", "steps=3") for problem in (GPT, CNN)],
    right(*GPT, "checkpointing=true", "steps=3", "precision=bf16"),
    right(*MLP, "normalization=mean", "steps=3"),
    right("problem=linear", "normalization=items", "steps=300"),
    right("problem=linear", "normalization=items", "steps=300", "precision=fp64"),
    right("problem=linear", "normalization=items", "steps=300", "precision=bf16"),
    right("problem=linear", "normalization=items", "steps=300", "accum_steps=1", "micro_batch_size=8"),
    right(*GPT, "problem.train_sequences=8", "micro_batch_size=2", "optimizer=adamw", "lr=0.01", "steps=60"),
]


@pytest.mark.parametrize("words", RIGHT)
def test_a_right_run_is_not_accused_at_any_step(tmp_path: Path, words: tuple[str, ...]) -> None:
    record = run_here(tmp_path, *words, EVERY)
    assert record.status == "finished", record.reason
    assert record.equivalence["verdict"] == "equivalent", record.equivalence["reason"]
    assert record.metrics["steps_judged"] == record.metrics["steps_done"] == len(record.equivalence["relative_errors"])


def test_what_is_left_of_a_gradient_that_has_vanished_is_rounding(tmp_path: Path) -> None:
    """At the minimum the samples' gradients cancel. No other sum of them is near theirs, and yet nothing is wrong."""
    words = (*RAGGED, "optimizer=momentum", "lr=0.1", "steps=300", EVERY)
    record = run_here(tmp_path / "items", *words)
    assert record.series["train/grad_norm"][-1] < 1e-4 * record.series["train/grad_norm"][0]
    assert max(record.equivalence["relative_errors"]) > 1e-3
    assert record.equivalence["verdict"] == "equivalent"
    # A mean of means has its minimum elsewhere: there its error is no rounding.
    faulty = run_here(tmp_path / "mean", *words, "normalization=mean")
    assert verdict(faulty)[0] == "different"
    assert min(faulty.equivalence["relative_errors"][-10:]) > 0.5


SPLITS = [("accum_steps=1",), ("accum_steps=2",), ("accum_steps=4",), ("accum_steps=16",), ("accum_steps=64",)]
SPLITS += [("accum_steps=7",), ("micro_batch_size=30",)]


@pytest.mark.parametrize(("precision", "limit"), [("fp64", 1e-14), ("fp32", 1e-6)])
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("problem", [MLP[:2], GPT[:-2], CNN[:2]])
def test_the_error_on_record_is_rounding(
    tmp_path: Path, problem: tuple[str, ...], split: tuple[str, ...], precision: str, limit: float
) -> None:
    words = (*problem, *split, "effective_batch_size=64", f"precision={precision}", "steps=2", EVERY)
    record = run_here(tmp_path, *words)
    error = record.metrics["gradient_error"]
    assert error is not None
    assert error <= limit
    assert max(record.equivalence["relative_errors"]) <= limit
    assert record.metrics["gradient_cosine"] == pytest.approx(1)


# The check changes nothing

UNCHANGED = {
    "momentum": (*MLP, "optimizer=momentum"),
    "fp16": (*MLP, "precision=fp16"),
    "bf16-params": (*MLP, "precision=bf16-params"),
    "dropout": (*GPT, "problem.dropout=0.1", "optimizer=adamw"),
    "dropout, one micro-batch": (*GPT, "problem.dropout=0.1", "accum_steps=1"),
    "draws once a pass": (*OWN, "problem.factory=test_equivalence:own", "problem.arguments={fault:drawing}"),
    "buffers": (*CNN, "problem.norm=batch"),
    "buffers, corrected": (*CNN, "problem.norm=batch", "batchnorm=corrected_momentum"),
    "a fault": (*MLP, "normalization=sum", "lr=0.01"),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_the_check_changes_nothing(tmp_path: Path, case: str) -> None:
    words = (*UNCHANGED[case], "steps=4", "save_weights=true")
    off, *watched = (run_here(tmp_path / when, *words, f"equivalence={when}") for when in ("off", *WHEN))
    other = run_here(tmp_path / "other", *words, "equivalence=off", "seed=1")
    expected = load_file(tmp_path / "off" / "final.safetensors")
    for record, when in zip(watched, WHEN, strict=True):
        found = load_file(tmp_path / when / "final.safetensors")
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert record.series == off.series
        assert record.metrics["peak_allocated_bytes"] == off.metrics["peak_allocated_bytes"]
        assert record.run_key == off.run_key
    assert other.series != off.series, "and it would be seen if they differed"
    if "buffers" in case:
        assert any("running_mean" in name for name in expected)


def test_without_the_check_there_is_no_verdict(tmp_path: Path) -> None:
    record = run_here(tmp_path / "off", *MLP, "steps=2", "equivalence=off")
    assert not {"verdict", "reason", "relative_errors"} & record.equivalence.keys()
    assert not {"gradient_error", "gradient_cosine", "gradient_tolerance", "steps_judged"} & record.metrics.keys()
    record = run_here(tmp_path / "on", *MLP, "steps=2")
    assert {"verdict", "reason", "relative_errors"} <= record.equivalence.keys()
    assert {"gradient_error", "gradient_cosine", "gradient_tolerance", "steps_judged"} <= record.metrics.keys()


# Numbers, in closed form


@pytest.mark.parametrize(
    ("found", "expected", "error", "cosine"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0, 1.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0, 1.0),
        ([3.0, 4.0], [0.0, 0.0], math.inf, 0.0),
        ([0.0, 0.0], [3.0, 4.0], math.inf, 0.0),
        ([12.0, 16.0], [3.0, 4.0], 3.0, 1.0),
        ([-3.0, -4.0], [3.0, 4.0], 2.0, -1.0),
        ([-4.0, 3.0], [3.0, 4.0], math.sqrt(2), 0.0),
        ([3.0, 0.0], [3.0, 4.0], 0.8, 0.6),
        ([3e30, 4e30], [0.0, 4e30], 0.75, 0.8),  # beyond float32 when squared
    ],
)
def test_errors_and_cosines_are_over_all_parameters_together(
    found: list[float], expected: list[float], error: float, cosine: float
) -> None:
    whole = compare([torch.tensor(found)], [torch.tensor(expected)])
    apart = compare([torch.tensor([x]) for x in found], [torch.tensor([x]) for x in expected])
    assert whole == pytest.approx((error, cosine), abs=1e-7)
    assert apart == whole


def test_what_differs_by_the_last_digit_of_a_coarse_type_is_seen_exactly() -> None:
    one = torch.ones(1, dtype=torch.bfloat16)
    assert compare([one + 2**-7], [one])[0] == 2**-7


@pytest.mark.parametrize(
    ("unit", "summed_with", "micro_batches", "expected"),
    [
        (2**-24, 2**-24, 1, 2**-20),
        (2**-24, 2**-24, 4, 2**-19),
        (2**-53, 2**-53, 64, 2**-46),
        (2**-8, 2**-24, 1, 2**-20 + 2**-6),
        (2**-8, 2**-24, 400, 20 * 2**-20 + 2**-6),
    ],
)
def test_the_tolerance_grows_with_the_root_of_the_micro_batches(
    unit: float, summed_with: float, micro_batches: int, expected: float
) -> None:
    assert tolerance(unit, summed_with, micro_batches) == expected


def test_the_full_batch_is_computed_beside_the_gradients_there_are() -> None:
    problem = own(torch.float64)
    for parameter in problem.model.parameters():
        parameter.grad = torch.full_like(parameter, 7)
    reference = full_batch(problem.model, problem.train, problem.loss, scale=1024.0)
    assert all(parameter.grad is not None and (parameter.grad == 7).all() for parameter in problem.model.parameters())
    problem.model.zero_grad()
    x, y = problem.train
    mean = (problem.model(x) - y).square().mean()
    expected = torch.autograd.grad(mean, list(problem.model.parameters()))
    assert compare(reference.gradient, list(expected))[0] < 1e-15
    assert (reference.loss, reference.items, reference.draws) == (pytest.approx(mean.item(), rel=1e-14), 64, False)
    drawing = full_batch(nn.Sequential(problem.model, nn.Dropout()), problem.train, problem.loss)
    assert drawing.draws


def test_a_parameter_that_is_not_used_has_a_zero_gradient_on_both_sides() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(2, 2)})

    def loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, int]:
        return model["used"](batch).square().sum(), len(batch)  # type: ignore[index]

    x = torch.rand(8, 3)
    reference = full_batch(model, x, loss)
    accumulate_gradients(model, x.split(2), loss)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    assert compare(found, reference.gradient)[0] < 1e-6
    assert not reference.gradient[2].any()


# Models with a state of their own


def spectral(dtype: torch.dtype) -> Problem:
    x = torch.rand(64, 3, dtype=dtype)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 1)).to(dtype)
    return Problem(model, (x, x.sum(dim=1, keepdim=True)), squared)


def test_a_model_that_changes_in_every_forward_is_judged_from_where_the_window_began(tmp_path: Path) -> None:
    words = (*OWN, "problem.factory=test_equivalence:spectral", "precision=fp64", "steps=3", EVERY)
    assert verdict(run_here(tmp_path / "one", *words, "accum_steps=1")) == ("equivalent", "")
    found, why = verdict(run_here(tmp_path / "four", *words))
    assert found == "not comparable"
    assert "the model changes in every forward pass (0.parametrizations.weight.0._u" in why


def test_float32_norms_of_many_weights_accuse_nobody(tmp_path: Path) -> None:
    words = ("problem=digits_mlp", "problem.hidden=20000", "effective_batch_size=8", "accum_steps=2", "steps=1")
    record = run_here(tmp_path, *words, "clip_norm=0.001")
    assert verdict(record) == ("equivalent", "")
