"""The predicted peak against the measured one, byte for byte; planted faults; what cannot be predicted."""

import dataclasses
import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import accum_sweep
from accum_sweep import kernels, precision, predict, short_pass
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.config import Config
from accum_sweep.problems import Problem

CPU = torch.device("cpu")
TEXT = "problem.context=64 problem.train_sequences=64 problem.test_sequences=8 micro_batch_size=4"
GPT, CNN, MLP = f"problem=char_gpt {TEXT}", "problem=digits_cnn micro_batch_size=32", "problem=digits_mlp"


def configured(text: str) -> tuple[Config, Problem]:
    config = check(compose(text.split()))
    torch.manual_seed(config.seed)
    return config, config.problem.build(precision.weights_dtype(config.precision))


def both(text: str) -> tuple[int, int]:
    """Return the peak predicted and the one measured."""
    config, problem = configured(text)
    gc.collect()
    measured = short_pass.measure(config, problem, CPU).peak.allocated_bytes
    assert measured is not None
    return predict.predict(config, problem, "cpu").peak_allocated_bytes, measured


@pytest.mark.parametrize("accum_steps", [1, 2, 8])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("problem", [MLP, f"{GPT} checkpointing=false", f"{GPT} checkpointing=true"])
def test_perceptron_and_transformer_are_exact(problem: str, optimizer: str, accum_steps: int) -> None:
    predicted, measured = both(f"{problem} optimizer={optimizer} accum_steps={accum_steps}")
    assert predicted == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("kind", ["fp64", "bf16", "bf16-params", "fp16"])
@pytest.mark.parametrize("problem", [MLP, GPT, f"{CNN} problem.norm=group", f"{CNN} problem.norm=batch"])
def test_other_precisions_and_convolutions_are_within_three_percent(problem: str, kind: str) -> None:
    predicted, measured = both(f"{problem} precision={kind} accum_steps=2")
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("accum_steps", [1, 4, 8])
def test_the_textbook_is_exact(accum_steps: int) -> None:
    predicted, measured = both(f"accum_steps={accum_steps}")
    assert predicted == measured


@pytest.mark.parametrize(
    "settings",
    ["clip_norm=0.1", "clip_value=0.1", "precision=bf16-params accumulator=fp32", "problem.dropout=0.2"],
)
def test_settings_that_cost_memory_are_in_it(settings: str) -> None:
    predicted, measured = both(f"{GPT} accum_steps=2 {settings}")
    assert predicted == pytest.approx(measured, rel=1e-3)


def test_a_model_of_transformers_is_exact() -> None:
    pytest.importorskip("transformers")
    predicted, measured = both(f"problem=causal_lm {TEXT} accum_steps=2")
    assert predicted == pytest.approx(measured, rel=1e-3)


def test_an_outline_is_predicted_as_the_problem_itself_is() -> None:
    config, problem = configured(f"{GPT} accum_steps=2 optimizer=adamw")
    outline = predict.outline(config)
    assert all(parameter.untyped_storage().device.type == "meta" for parameter in outline.model.parameters())
    assert predict.predict(config, outline, "cpu") == predict.predict(config, problem, "cpu")


def test_prediction_changes_neither_the_problem_nor_the_random_numbers() -> None:
    config, problem = configured(f"{GPT} accum_steps=2")
    before, state = {name: weight.clone() for name, weight in problem.model.state_dict().items()}, torch.get_rng_state()
    predict.predict(config, problem, "cpu")
    assert all(torch.equal(before[name], weight) for name, weight in problem.model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())


# Negative controls


class Planted(nn.Module):
    """A model whose forward pass holds so many bytes more until backward."""

    def __init__(self, model: nn.Module, size: int) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.model(x)
        output.planted = torch.empty(self.size, dtype=torch.uint8)  # type: ignore[attr-defined]
        return output


def test_a_planted_buffer_is_predicted_and_measured_alike() -> None:
    config, problem = configured(f"{MLP} accum_steps=2")

    def peaks(size: int) -> tuple[int, int]:
        with_it = dataclasses.replace(problem, model=Planted(problem.model, size))
        measured = short_pass.measure(config, with_it, CPU).peak.allocated_bytes
        return predict.predict(config, with_it, "cpu").peak_allocated_bytes, measured or 0

    (predicted, measured), (more_predicted, more_measured) = peaks(0), peaks(200_000)
    assert more_predicted - predicted == more_measured - measured > 150_000


def test_without_what_kernels_take_for_themselves_a_convolution_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "problem=digits_cnn micro_batch_size=16 precision=bf16 accum_steps=2"
    predicted, measured = both(text)
    monkeypatch.setattr(predict, "own_bytes", lambda *_: 0)
    missed, _ = both(text)
    assert predicted == pytest.approx(measured, rel=0.03)
    assert missed != pytest.approx(measured, rel=0.03)


def test_an_operation_takes_what_it_takes() -> None:
    def work(x: Tensor) -> Tensor:
        buffer = torch.empty(1000, dtype=torch.uint8)
        y = torch.empty_like(x)
        del buffer
        return y

    assert kernels._learn(work, (torch.zeros(5),), {}) == 1000


# What depends on content


def test_what_needs_content_has_no_prediction_and_the_run_goes_on(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "picky.py").write_text(
        "import torch\n"
        "from accum_sweep.problems import Problem\n"
        "def make(dtype):\n"
        "    return Problem(torch.nn.Linear(2, 1).to(dtype), (torch.rand(8, 2, dtype=dtype),), loss)\n"
        "def loss(model, batch):\n"
        "    y = model(batch[0])\n"
        "    chosen = y[y > 0]\n"  # as many as there are
        "    return chosen.square().sum(), len(y)\n"
    )
    record = accum_sweep.run(
        ["problem=custom", "problem.factory=picky:make", "problem.samples=8", "tracking=none", "micro_batch_size=4"]
    )
    assert record.status == "finished"
    assert record.metrics["peak_allocated_bytes"]
    assert "predicted_allocated_bytes" not in record.metrics


# A CUDA device that is elsewhere


def test_for_cuda_the_blocks_go_through_its_allocator() -> None:
    config, problem = configured(f"{GPT} accum_steps=2 optimizer=adamw")
    here, there = (predict.predict(config, problem, device) for device in ("cpu", "cuda"))
    assert here.peak_reserved_bytes is None
    assert there.peak_reserved_bytes is not None
    assert there.peak_reserved_bytes % (2 << 20) == 0
    assert there.peak_allocated_bytes % 512 == 0
    assert there.peak_reserved_bytes > there.peak_allocated_bytes > here.peak_allocated_bytes * 0.9
    assert sum(there.parts.values()) == there.peak_allocated_bytes


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_on_cuda_the_prediction_is_close(optimizer: str) -> None:
    text = f"problem=char_gpt problem.width=256 problem.layers=4 optimizer={optimizer} accum_steps=2 device=cuda"
    config, problem = configured(text)
    measured = short_pass.measure(config, problem, torch.device("cuda")).peak
    predicted = predict.predict(config, problem, "cuda")
    assert predicted.peak_allocated_bytes == pytest.approx(measured.allocated_bytes, rel=0.05)
    assert predicted.peak_reserved_bytes == pytest.approx(measured.reserved_bytes, rel=0.1)


# In the record


def test_a_run_records_who_holds_its_peak_and_what_was_predicted(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = accum_sweep.run(["problem=digits_mlp", "steps=2", "optimizer=momentum", "tracking=none", "accum_steps=2"])
    metrics = record.metrics
    weights = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    kinds = ("parameters", "gradients", "optimizer", "activations", "data", "temporaries")
    found = {kind: metrics[f"peak_{kind}_bytes"] for kind in kinds}
    assert sum(size or 0 for size in found.values()) == metrics["peak_allocated_bytes"]
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (weights, weights, weights)
    assert found["data"] == 16 * (64 * 4 + 8)  # images in float32, labels in int64
    assert record.peak_phase == "backward"
    assert metrics["predicted_allocated_bytes"] == metrics["peak_allocated_bytes"]
    assert metrics["prediction_error"] == 0


def test_measuring_costs_a_tiny_run_no_more_than_20_milliseconds() -> None:
    config = check(compose(["problem=linear"]))
    problem = config.problem.build(torch.float32)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        short_pass.measure(config, problem, CPU)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02  # of ten, as other work goes on beside the tests


def test_only_weights_that_are_trained_have_a_gradient_in_what_is_always_there() -> None:
    config = check(compose(["problem=digits_mlp", "effective_batch_size=16", "accum_steps=2", "optimizer=sgd"]))
    problem = config.problem.build(torch.float32)
    weights = sum(parameter.nbytes for parameter in problem.model.parameters())
    assert short_pass.measure(config, problem, CPU).fixed_bytes == 2 * weights
    frozen = next(problem.model.parameters()).requires_grad_(False)
    assert short_pass.measure(config, problem, CPU).fixed_bytes == 2 * weights - frozen.nbytes


def test_of_a_schedule_only_what_the_training_reaches_counts() -> None:
    def peak(*words: str) -> int | None:
        config = check(compose(["problem=digits_mlp", "micro_batch_size=4", *words]))
        return short_pass.measure(config, config.problem.build(torch.float32), CPU).peak.allocated_bytes

    for steps in (1, 3):
        never = peak("accum_schedule={0:1,1000:4}", f"steps={steps}")
        assert never == peak("accum_schedule={0:1}", f"steps={steps}")
        assert never != peak("accum_schedule={0:1,2:4}", "steps=3")
