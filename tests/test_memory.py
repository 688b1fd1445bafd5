"""Peak memory, held against an allocator that counts on its own, byte for byte.

Run as a program with `counting_allocator.c` preloaded, this file does each piece of work twice, once under the count
and once under `measure_peak`, and prints what either saw.
"""

import ctypes
import functools
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import accum_sweep
from accum_sweep import memory
from accum_sweep.accumulate import accumulate_gradients
from accum_sweep.boundary import Boundary, train
from accum_sweep.memory import Peak, measure_peak

SOURCE = Path(__file__).with_name("counting_allocator.c")
EXAMPLES = Path(__file__).parents[1] / "examples"
TORCH, OTHERS = 0, 1  # as the counting allocator tells them apart
CPU = torch.device("cpu")
FP32 = 4  # bytes

ACCUM_STEPS = {"linear": (1, 2, 4), "digits_mlp": (1, 2, 4, 8)}
OPTIMIZERS, PRECISIONS = ("sgd", "momentum", "adamw"), ("fp32", "fp64")
RUNS = [
    f"problem={problem} optimizer={optimizer} precision={precision} accum_steps={accum_steps}"
    for problem in ACCUM_STEPS
    for optimizer, precision, accum_steps in itertools.product(OPTIMIZERS, PRECISIONS, ACCUM_STEPS[problem])
]
# The others, in little: convolutions, attention, a model of transformers, one from outside.
TEXT = "problem.context=32 problem.train_sequences=64 problem.test_sequences=8 micro_batch_size=4 accum_steps=2"
RUNS += [
    f"problem=digits_cnn problem.norm={norm} precision={precision} accum_steps={accum_steps}"
    for norm, precision, accum_steps in itertools.product(("batch", "group"), PRECISIONS, (1, 2))
]
RUNS += [f"problem={problem} {TEXT} optimizer=adamw" for problem in ("char_gpt", "causal_lm")]
RUNS += [f"problem=char_gpt {TEXT} optimizer=adamw checkpointing=true"]
RUNS += ["problem=custom problem.factory=custom_problem:make problem.samples=512 accum_steps=2"]
CNNS = list(itertools.product((4, 32), PRECISIONS))  # samples, precision
IMAGE = 3, 16, 16
Criterion = Callable[..., Tensor]


# Work to be measured


def cnn(samples: int, precision: str) -> Callable[[], None]:
    """Two steps of a net whose convolution takes buffers of its own: oneDNN's in fp32, torch's own kernel's in fp64."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64}[precision]

    def work() -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4)).to(dtype)
        batch = torch.rand(samples, *IMAGE, dtype=dtype), torch.rand(samples, 4, dtype=dtype)
        two_steps(model, [batch, batch])

    return work


def perceptron(
    accum_steps: int = 2, criterion: Criterion = F.huber_loss, held: int = 0, dropped: int = 0
) -> Callable[[], None]:
    """Two steps of a small perceptron; each loss holds, or takes and gives back, so many bytes more."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        x, y = batch
        loss_sum = criterion(model(x), y, reduction="sum")
        torch.empty(dropped, dtype=torch.uint8)
        loss_sum.planted = torch.empty(held, dtype=torch.uint8)  # as long as the loss: through backward, at the peak
        return loss_sum, y.shape[0]

    def work() -> None:
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        batch = torch.rand(16, 64), torch.rand(16, 10)
        two_steps(model, [batch] * accum_steps, loss)

    return work


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    x, y = batch
    return F.mse_loss(model(x), y, reduction="sum"), y.shape[0]


def two_steps(model: nn.Module, window: list[Any], loss: Any = squared_error) -> None:
    boundary = Boundary([torch.optim.SGD(model.parameters(), lr=0.01)])
    for _ in train(model, boundary, [window, window], functools.partial(accumulate_gradients, loss=loss)):
        pass


# Against the counting allocator


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the count and `measure_peak` saw, by piece of work."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the counting allocator goes in front of the C library's by LD_PRELOAD, as Linux has it")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is neither gcc nor cc to compile the counting allocator with")
    folder = tmp_path_factory.mktemp("counting")
    library = folder / "counting_allocator.so"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE, "-ldl", "-lpthread"], check=True)
    # Passive: threads that spin while they wait slow each other where cores are shared.
    environment = os.environ | {"LD_PRELOAD": str(library), "OMP_WAIT_POLICY": "passive", "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, "-W", "error", __file__]
    program = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout)


def test_the_count_is_of_what_torch_asked_for_and_of_nothing_else(seen: dict[str, Any]) -> None:
    assert seen["1000 bytes"]["counted"] == 1000
    assert seen["no tensor"]["counted"] == 0


@pytest.mark.parametrize("run", RUNS)
def test_a_run_records_the_counted_peak(seen: dict[str, Any], run: str) -> None:
    assert seen[run]["counted"] > 0
    assert seen[run]["recorded"] == seen[run]["measured"] == seen[run]["counted"]


@pytest.mark.parametrize(("samples", "precision"), CNNS)
def test_buffers_of_convolution_kernels_are_in_the_peak(seen: dict[str, Any], samples: int, precision: str) -> None:
    work = seen[f"cnn {samples} {precision}"]
    assert work["measured"] == work["counted"]


def test_what_onednn_takes_past_torch_is_bookkeeping(seen: dict[str, Any]) -> None:
    """oneDNN's descriptors (some 30 kB) are not in the peak. Its buffers for data are, or this would grow with them."""
    growth = seen["cnn 32 fp32"]["others"] - seen["cnn 4 fp32"]["others"]
    assert growth < FP32 * math.prod(IMAGE), "one image, where there are 28 more"


def test_nothing_measured_stays_behind(seen: dict[str, Any]) -> None:
    assert {name: work["left"] for name, work in seen.items() if work["left"]} == {}


def test_a_planted_buffer_raises_the_peak_by_its_size(seen: dict[str, Any]) -> None:
    plain = seen["perceptron"]
    for planted in (1, 1000):
        work = seen[f"perceptron, {planted} held"]
        assert work["measured"] - plain["measured"] == planted
        assert work["counted"] - plain["counted"] == planted


def test_a_buffer_gone_before_the_peak_does_not_raise_it(seen: dict[str, Any]) -> None:
    assert seen["perceptron, 1000 dropped"]["measured"] == seen["perceptron"]["measured"]
    assert seen["perceptron, 1000 dropped"]["counted"] == seen["perceptron"]["counted"]


def test_wrong_methods_do_not_find_the_counted_peak(seen: dict[str, Any]) -> None:
    work = seen["perceptron"]
    weights = FP32 * (64 * 128 + 128 + 128 * 10 + 10)
    assert work["measured"] == work["counted"]
    assert work["counted"] not in (weights, 2 * weights, work["by operator"])


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_second_micro_batch_of_one_size_raises_the_peak_and_no_further_one_does(
    seen: dict[str, Any], optimizer: str, precision: str
) -> None:
    run = f"problem=digits_mlp optimizer={optimizer} precision={precision} accum_steps="
    one, two, four, eight = (seen[f"{run}{accum_steps}"]["recorded"] for accum_steps in (1, 2, 4, 8))
    assert one < two == four == eight


# By hand


def test_the_peak_is_the_highest_sum_of_what_is_held_at_once() -> None:
    def work() -> Tensor:
        first, second = torch.empty(1000, dtype=torch.uint8), torch.empty(500, dtype=torch.uint8)
        del first
        return torch.cat([second, second[:300]])

    assert measure_peak(work, CPU) == Peak(allocated_bytes=1500)


@pytest.mark.parametrize(("momentum", "copies"), [(0.0, 2), (0.9, 3)])
def test_a_step_holds_weights_gradients_state_and_output(momentum: float, copies: int) -> None:
    x, output_gradient = torch.rand(3, 5), torch.rand(3, 7)

    def work() -> None:
        layer = nn.Linear(5, 7)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=momentum)
        output = layer(x)
        output.backward(output_gradient)
        optimizer.step()

    weights, output = 5 * 7 + 7, 3 * 7
    assert measure_peak(work, CPU).allocated_bytes == FP32 * (copies * weights + output)


@pytest.mark.parametrize(
    "criterion",
    [
        F.huber_loss,
        F.cross_entropy,
        F.mse_loss,  # its scalar sits on a buffer as large as the model's output, which must not be kept
    ],
)
def test_beyond_two_micro_batches_a_window_holds_only_their_losses(criterion: Criterion) -> None:
    """So two are enough to measure. The losses are this window's, and those of the step that the caller still holds."""
    one, two, four, eight = (measure_peak(perceptron(steps, criterion), CPU).allocated_bytes for steps in (1, 2, 4, 8))
    assert one < two
    assert (four - two, eight - two) == (2 * FP32 * 2, 2 * FP32 * 6)


# On its own


def test_a_second_measurement_gives_the_same_number() -> None:
    assert measure_peak(perceptron(), CPU) == measure_peak(perceptron(), CPU)


def test_work_that_raises_or_leaves_tensors_does_not_disturb_the_next_measurement() -> None:
    alone = measure_peak(perceptron(), CPU)
    kept = []

    def fail() -> None:
        kept.append(torch.empty(1000))
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        measure_peak(fail, CPU)
    assert measure_peak(perceptron(), CPU) == alone
    kept.clear()
    assert measure_peak(perceptron(), CPU) == alone


def test_a_device_that_cannot_tell_says_none_and_does_the_work() -> None:
    done = []
    assert measure_peak(lambda: done.append(True), torch.device("meta")) == Peak(None, None)
    assert done == [True]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_the_peaks_are_those_of_this_work_alone() -> None:
    device = torch.device("cuda")

    def take(mebibytes: int) -> Peak:
        return measure_peak(lambda: torch.empty(mebibytes << 20, dtype=torch.uint8, device=device), device)

    large, small, small_again = take(256), take(64), take(64)
    assert (large.allocated_bytes, small.allocated_bytes) == (256 << 20, 64 << 20)
    assert large.reserved_bytes > small.reserved_bytes > 0
    assert small_again == small


# The program that runs under the counting allocator


def main() -> None:
    """Print, as JSON by piece of work, what the count and `measure_peak` saw."""
    results = {
        "1000 bytes": both_ways(lambda: torch.empty(1000, dtype=torch.uint8)),
        "no tensor": both_ways(lambda: bytearray(1 << 20)),
        **runs(),
    }
    for samples, precision in CNNS:
        work = cnn(samples, precision)
        results[f"cnn {samples} {precision}"] = both_ways(work) | {"others": count(work, OTHERS)}
    for planted in (1, 1000):
        results[f"perceptron, {planted} held"] = both_ways(perceptron(held=planted))
    results["perceptron, 1000 dropped"] = both_ways(perceptron(dropped=1000))
    results["perceptron"] = both_ways(perceptron()) | {"by operator": peak_by_operator(perceptron())}
    print(json.dumps(results))


def both_ways(work: Callable[[], object]) -> dict[str, int | None]:
    """Do `work` under the count, then under `measure_peak`; `left` is what is still there after both."""
    counted = count(work, TORCH)
    measured = measure_peak(work, CPU).allocated_bytes
    return {"counted": counted, "measured": measured, "left": counting("left", TORCH)}


def peak_by_operator(work: Callable[[], object]) -> int:
    """Add up the profiler's events as it shows them, with allocations folded into the operators around them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    return max(itertools.accumulate(event.self_cpu_memory_usage for event in profiler.events()))


def count(work: Callable[[], object], who: int) -> int:
    """Peak bytes of `who` while `work` is done."""
    ctypes.CDLL(None).counting_reset()
    work()
    return counting("peak", who)


def counting(what: str, who: int) -> int:
    read = ctypes.CDLL(None)[f"counting_{what}"]
    read.restype = ctypes.c_longlong
    return read(who)


def runs() -> dict[str, Any]:
    """Do real runs, whose own measurement is made both ways."""
    watched: list[dict[str, Any]] = []

    def watch(work: Callable[[], object], _: torch.device) -> Peak:
        watched.append(both_ways(work))
        return Peak(watched[-1]["measured"])

    memory.measure_peak = watch  # before the module that runs is imported, and takes it from there
    results = {}
    for run in RUNS:
        record = accum_sweep.run([*run.split(), "steps=2", "device=cpu", "tracking=none"])
        assert record.status == "finished", (run, record.reason)
        results[run] = watched.pop() | {"recorded": record.metrics["peak_allocated_bytes"]}
    return results


if __name__ == "__main__":
    main()
