"""What precision, accumulator, BatchNorm, checkpointing and compile settings really do to types, errors and memory."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from accum_sweep import precision
from accum_sweep.accumulate import accumulate_gradients
from accum_sweep.boundary import Boundary
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.errors import ConfigError, UserError
from accum_sweep.problems import Problem
from accum_sweep.record import Record
from test_equivalence import run_here

CPU = torch.device("cpu")
MLP = ("problem=digits_mlp", "problem.hidden=8", "micro_batch_size=16", "accum_steps=4")
GPT = ("problem=char_gpt", "problem.context=64", "problem.train_sequences=64", "problem.test_sequences=8")
GPT = (*GPT, "problem.width=16", "problem.heads=2", "micro_batch_size=8", "accum_steps=2")
OWN = ("problem=custom", "problem.samples=32", "micro_batch_size=8", "accum_steps=4")


# Types

SEEN: list[dict[str, Any]] = []  # by forward pass of Watched


class Watched(nn.Linear):
    """Notes the types it meets, and whether TF32 is allowed."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        SEEN.append({"data": x.dtype, "weight": self.weight.dtype, "output": y.dtype, "tf32": allowed})
        return y


def squared(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), len(y)


def watched(dtype: torch.dtype, failing: bool = False) -> Problem:
    def fail(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
        model(batch[0])
        raise RuntimeError("no")

    x = torch.rand(32, 3, dtype=dtype)
    return Problem(Watched(3, 1).to(dtype), (x, x[:, :1]), fail if failing else squared)


WATCHED = (*OWN, "problem.factory=test_precision:watched")
F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
TYPES = {"fp64": (F64, F64), "fp32": (F32, F32), "bf16": (F32, BF16), "fp16": (F32, F16), "bf16-params": (BF16, BF16)}


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


@pytest.mark.parametrize("name", TYPES)
def test_weights_and_arithmetic_are_of_the_types_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    weights, arithmetic = TYPES[name]
    gradients = set()
    clip = Boundary._clip

    def noting(boundary: Boundary, model: nn.Module, norm: float) -> float:
        gradients.update(parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None)
        return clip(boundary, model, norm)

    monkeypatch.setattr(Boundary, "_clip", noting)
    words = (*WATCHED, "steps=2", f"precision={name}", "save_weights=true", "equivalence=off")
    record = run_here(tmp_path, *words)
    assert record.metrics["steps_done"] == 2
    assert len(SEEN) >= 8
    assert {(seen["data"], seen["weight"], seen["output"]) for seen in SEEN} == {(weights, weights, arithmetic)}
    assert gradients == {weights}
    assert {tensor.dtype for tensor in load_file(tmp_path / "final.safetensors").values()} == {weights}


def test_the_accumulator_leaves_gradients_in_the_weights_type() -> None:
    model = nn.Linear(3, 1).to(BF16)
    accumulate_gradients(
        model, [(torch.ones(2, 3, dtype=BF16), torch.ones(2, 1, dtype=BF16))], squared, accumulator=F32
    )
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {BF16}


@pytest.mark.parametrize(
    ("name", "fraction_bits"), [("fp64", 52), ("fp32", 23), ("tf32", 10), ("bf16", 7), ("fp16", 10), ("bf16-params", 7)]
)
def test_one_rounding_is_half_the_last_bit(name: str, fraction_bits: int) -> None:
    assert precision.unit_roundoff(name) == 2.0 ** -(fraction_bits + 1)


# TF32


def test_tf32_is_refused_on_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only CUDA devices have TF32"):
        check(compose([*MLP, "precision=tf32", "device=cpu", "tracking=none"]))
    with (
        pytest.raises(UserError, match="precision=tf32 needs a CUDA device, but device is cpu"),
        precision.matrix_products("tf32", CPU),
    ):
        pass
    check(compose([*MLP, "precision=fp32", "device=cpu", "tracking=none"]))


def flags() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def set_flags(matmul: bool, cudnn: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn


@pytest.fixture
def _tf32_allowed() -> Iterator[None]:
    before = flags()
    set_flags(True, True)
    yield
    set_flags(*before)


@pytest.mark.usefixtures("_tf32_allowed")
@pytest.mark.parametrize("failing", [False, True])
def test_fp32_is_never_tf32_and_the_flags_are_given_back(tmp_path: Path, failing: bool) -> None:
    record = run_here(tmp_path, *WATCHED, "steps=1", f"problem.arguments={{failing:{str(failing).lower()}}}")
    assert record.status == ("failed" if failing else "finished")
    assert {seen["tf32"] for seen in SEEN} == {(False, False)}
    assert flags() == (True, True)


@pytest.mark.usefixtures("_tf32_allowed")
def test_tf32_is_allowed_where_it_is_asked_for_and_nowhere_else() -> None:
    cuda = torch.device("cuda")
    with precision.matrix_products("fp32", cuda):
        assert flags() == (False, False)
        with precision.matrix_products("tf32", cuda):
            assert flags() == (True, True)
        assert flags() == (False, False)
    assert flags() == (True, True)
    set_flags(True, False)
    with contextlib.suppress(KeyError), precision.matrix_products("bf16", cuda):
        assert flags() == (False, False)
        raise KeyError
    assert flags() == (True, False)


# Sums in a low precision


@pytest.mark.parametrize(("pieces", "coarse"), [(2, 2), (64, 64), (256, 256), (512, 256)])
def test_ones_add_up_in_float32_where_bfloat16_stands_still(pieces: int, coarse: int) -> None:
    """256 + 1 is 256 in bfloat16: seven bits of fraction."""
    model = nn.Linear(1, 1, bias=False).to(BF16)
    batch = torch.ones(1, 1, dtype=BF16)
    sums = {}
    for accumulator in (None, F32):
        model.zero_grad()
        accumulate_gradients(
            model,
            [batch] * pieces,
            lambda model, x: (model(x).sum(), len(x)),
            normalization="sum",
            accumulator=accumulator,
        )
        assert model.weight.grad is not None
        sums[accumulator] = int(model.weight.grad)
    assert sums == {None: coarse, F32: pieces}


def test_the_error_stays_flat_with_an_accumulator_and_grows_without(tmp_path: Path) -> None:
    errors: dict[str, list[float]] = {"null": [], "fp32": []}
    words = ("problem=digits_mlp", "problem.hidden=8", "precision=bf16-params", "micro_batch_size=1", "steps=1")
    for accumulator, found in errors.items():
        for pieces in (2, 64, 512):
            named = f"accum_steps={pieces}", f"accumulator={accumulator}"
            error = run_here(tmp_path / accumulator / str(pieces), *words, *named).metrics["gradient_error"]
            assert error is not None
            found.append(error)
    assert max(errors["fp32"]) < 2 * 2.0**-8, "a few roundings of bfloat16, however many micro-batches"
    assert errors["null"][0] < 2 * 2.0**-8
    assert errors["null"][2] > 2 * errors["null"][1] > 2 * errors["null"][0]
    assert errors["null"][2] > 8 * errors["fp32"][2]


def peak(record: Record) -> int:
    found = record.metrics["peak_allocated_bytes"]
    assert record.status == "finished", record.reason
    assert isinstance(found, int)
    return found


def test_what_an_accumulator_costs_is_measured(tmp_path: Path) -> None:
    words = ("problem=digits_mlp", "problem.hidden=512", "problem.layers=2", "precision=bf16-params", "steps=1")
    words = (*words, "micro_batch_size=1", "accum_steps=2", "equivalence=off", "optimizer=sgd")
    without, with_sums = (run_here(tmp_path / name, *words, f"accumulator={name}") for name in ("null", "fp32"))
    weights = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
    largest = 512 * 512
    assert without.metrics["parameters"] == with_sums.metrics["parameters"] == weights
    cost = peak(with_sums) - peak(without)
    # Sums of 4 bytes a weight; and beside them a whole gradient of 2, where without them only the last layer's.
    assert 4 * weights <= cost <= 6 * weights + 4 * largest
    assert peak(without) < 2 * 2 * weights + 2 * 2 * largest, "weights and gradients, and little else"


# Recomputed and compiled


def test_checkpointing_takes_less_memory_and_changes_no_loss(tmp_path: Path) -> None:
    words = (*GPT, "problem.layers=4", "steps=4")
    plain, saving = (run_here(tmp_path / how, *words, f"checkpointing={how}") for how in ("false", "true"))
    assert saving.series == plain.series
    assert len(plain.series["train/loss"]) == 4
    # Each block keeps its input, of 8 x 64 x 16 floats, and not the perceptron's hidden layer, which is four times it.
    hidden = 4 * 8 * 64 * (4 * 16)
    assert peak(plain) - peak(saving) > 3 * hidden


def test_checkpointing_needs_blocks(tmp_path: Path) -> None:
    record = run_here(tmp_path, *MLP, "steps=1", "checkpointing=true")
    assert record.status == "failed"
    assert "checkpointing=true has nothing to work on" in (record.reason or "")


@pytest.fixture
def _compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # torch sets it and leaves it
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # or it keeps a pool
    counters.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("_compiling")
@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="torch.compile needs a C++ compiler"
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own compiler uses it
def test_a_compiled_model_learns_the_same(tmp_path: Path) -> None:
    def graphs() -> int:
        return counters["stats"]["unique_graphs"]

    words = (*MLP, "steps=3", "equivalence=every_step")
    eager = run_here(tmp_path / "eager", *words)
    assert graphs() == 0
    compiled = run_here(tmp_path / "compiled", *words, "compile=true")
    assert compiled.status == "finished", compiled.reason
    assert graphs() > 0
    other = run_here(tmp_path / "other", *words, "seed=1")
    assert compiled.series["train/loss"] == pytest.approx(eager.series["train/loss"], rel=1e-5)
    assert compiled.series["train/grad_norm"] == pytest.approx(eager.series["train/grad_norm"], rel=1e-4)
    assert other.series["train/loss"] != pytest.approx(eager.series["train/loss"], rel=1e-2)
    assert compiled.equivalence["verdict"] == "equivalent", compiled.equivalence["reason"]


# BatchNorm

PIECES = 4


def normalized(dtype: torch.dtype, momentum: float | None = 0.1) -> Problem:
    """The same eight samples in each micro-batch, in their order, so that all have the same statistics."""
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 1)).to(dtype)
    x = samples().to(dtype).repeat(PIECES, 1)
    return Problem(model, (x, x[:, :1]), squared, shuffle=False)


def samples() -> Tensor:
    return torch.arange(24, dtype=F64).reshape(8, 3).square() / 100 + 2


def statistics(folder: Path, *words: str) -> tuple[Tensor, Tensor, int]:
    """Running mean, running variance and number of batches after one window of PIECES micro-batches."""
    name = ("problem.factory=test_precision:normalized", "precision=fp64", "steps=1", "save_weights=true")
    run_here(folder, *OWN, *name, *words)
    state = load_file(folder / "final.safetensors")
    return state["0.running_mean"], state["0.running_var"], int(state["0.num_batches_tracked"])


def moved(share: float) -> tuple[Tensor, Tensor]:
    """Where the statistics are when they have gone so far from 0 and 1 to those of the samples."""
    x = samples()
    return share * x.mean(dim=0), (1 - share) + share * x.var(dim=0)


@pytest.mark.parametrize(("mode", "share"), [("corrected_momentum", 0.1), ("train", 1 - 0.9**PIECES), ("eval", 0.0)])
def test_running_statistics_move_as_said(tmp_path: Path, mode: str, share: float) -> None:
    mean, variance, batches = statistics(tmp_path, f"batchnorm={mode}")
    expected = moved(share)
    torch.testing.assert_close((mean, variance), expected, rtol=1e-12, atol=1e-14)
    assert batches == (0 if mode == "eval" else PIECES)


def test_one_micro_batch_needs_no_correction(tmp_path: Path) -> None:
    for mode in ("corrected_momentum", "train"):
        mean, variance, _ = statistics(tmp_path / mode, f"batchnorm={mode}", "accum_steps=1")
        torch.testing.assert_close((mean, variance), moved(0.1), rtol=1e-12, atol=1e-14)


def test_a_cumulative_average_keeps_its_pace_by_itself(tmp_path: Path) -> None:
    words = ("batchnorm=corrected_momentum", "problem.arguments={momentum:null}")
    mean, variance, _ = statistics(tmp_path, *words)
    torch.testing.assert_close((mean, variance), moved(1.0), rtol=1e-12, atol=1e-14)


def test_the_correction_leaves_the_gradient_alone(tmp_path: Path) -> None:
    words = ("problem=digits_cnn", "problem.channels=4", "problem.norm=batch", "micro_batch_size=16", "accum_steps=4")
    words = (*words, "steps=4")
    train, corrected, fixed = (
        run_here(tmp_path / mode, *words, f"batchnorm={mode}").series
        for mode in ("train", "corrected_momentum", "eval")
    )
    assert corrected == train
    assert fixed != train


def test_a_model_without_batchnorm_says_so(tmp_path: Path) -> None:
    record = run_here(tmp_path, *MLP, "steps=1", "batchnorm=eval")
    assert record.notes == ["batchnorm=eval changes nothing: the model has no BatchNorm"]
    assert run_here(tmp_path / "plain", *MLP, "steps=1").notes == []
