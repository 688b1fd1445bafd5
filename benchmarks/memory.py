"""The predicted peak of memory against the measured one, and against what `accelerate estimate-memory` says.

    python -m benchmarks.memory > benchmarks/memory.md

CPU, one thread. Prints Markdown: by group the worst of its configurations, then three models beside the peer, whose
estimate knows the weights and Adam, and neither batch nor context (Accelerate's own function, on the same model); and
at last what measuring and predicting cost.
"""

import gc
import itertools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator

import accelerate
import torch
from accelerate.commands.estimate import estimate_training_usage

from accum_sweep import precision
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.predict import predict
from accum_sweep.short_pass import measure
from accum_sweep.units import show_bytes
from benchmarks.peers import processor

CPU = torch.device("cpu")
TEXT = "problem.context=64 problem.train_sequences=64 problem.test_sequences=8 micro_batch_size=4"
GPT, LM = f"problem=char_gpt {TEXT}", f"problem=causal_lm {TEXT}"
OPTIMIZERS = ("optimizer=sgd", "optimizer=momentum", "optimizer=adamw")


def product(*parts: Iterable[str]) -> list[str]:
    """Return every combination of settings."""
    return [" ".join(words) for words in itertools.product(*parts)]


# By group: its configurations, and how far off the worst may be.
GROUPS: dict[str, tuple[list[str], float]] = {
    "perceptron, fp32": (
        product(["problem=digits_mlp"], OPTIMIZERS, ["accum_steps=1", "accum_steps=2", "accum_steps=8"]),
        0.001,
    ),
    "GPT, fp32": (product([GPT], OPTIMIZERS, ["accum_steps=1", "accum_steps=2", "accum_steps=8"]), 0.001),
    "GPT, fp32, checkpointing": (
        product([GPT], ["checkpointing=true"], OPTIMIZERS, ["accum_steps=1", "accum_steps=2", "accum_steps=8"]),
        0.001,
    ),
    "convolutions": (
        product(
            ["problem=digits_cnn"],
            ["problem.norm=group", "problem.norm=batch"],
            ["micro_batch_size=16", "micro_batch_size=128 problem.channels=32"],
            ["precision=fp32", "precision=bf16"],
            ["accum_steps=1", "accum_steps=2"],
        ),
        0.03,
    ),
    "bf16": (
        product(
            ["problem=digits_mlp", GPT],
            ["precision=bf16", "precision=bf16-params"],
            ["optimizer=sgd", "optimizer=adamw"],
            ["accum_steps=1", "accum_steps=2"],
        ),
        0.03,
    ),
    "transformers": (
        product(
            [LM],
            ["problem.model_type=llama", "problem.model_type=gpt2"],
            ["precision=fp32", "precision=bf16"],
            ["accum_steps=1", "accum_steps=2"],
        ),
        0.03,
    ),
}
LLAMA_7B = (
    "problem.config={hidden_size:4096,intermediate_size:11008,num_hidden_layers:32,num_attention_heads:32,"
    "num_key_value_heads:32,vocab_size:32000,max_position_embeddings:4096}"
)
SEVEN_B = (
    f"problem=causal_lm problem.context=2048 {LLAMA_7B} effective_batch_size=256 optimizer=adamw precision=bf16 "
    "device=cuda memory_budget=200GiB"
).split()
MEASURED_PLAN = """
import sys
from pathlib import Path
from accum_sweep.__main__ import main
code = main(["plan", *sys.argv[1:]])
print(*Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[:1], file=sys.stderr)  # resident at most
sys.exit(code)
"""
ADAMW = "optimizer=adamw accum_steps=2"
MODELS = {
    "Llama": f"{LM} {ADAMW}",
    "GPT-2": f"{LM} problem.model_type=gpt2 {ADAMW}",
    "perceptron, 3 layers of 1024": f"problem=digits_mlp problem.hidden=1024 problem.layers=3 {ADAMW}",
}


def peaks(text: str) -> tuple[int, int, int]:
    """Return the peak predicted, the one measured, and the bytes of the weights."""
    config = check(compose(text.split()))
    torch.manual_seed(config.seed)
    problem = config.problem.build(precision.weights_dtype(config.precision))
    predicted = predict(config, problem, "cpu").peak_allocated_bytes
    gc.collect()
    measured = measure(config, problem, CPU).peak.allocated_bytes
    assert measured is not None, "the CPU can tell"
    return predicted, measured, sum(weight.nbytes for weight in problem.model.parameters())


def cost_of(work: Callable[[], object]) -> str:
    """Return the median and the range of twenty, in milliseconds."""
    work()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        work()
        times.append(1000 * (time.perf_counter() - start))
    return f"{statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})"


def costs() -> Iterator[tuple[str, str]]:
    """Yield what measuring and predicting take, of the smallest model and of one that no laptop holds."""
    config = check(compose(["problem=linear"]))
    problem = config.problem.build(torch.float32)
    yield "measuring, `problem=linear`", cost_of(lambda: measure(config, problem, CPU))
    yield "predicting, `problem=linear`", cost_of(lambda: predict(config, problem, "cpu"))
    for more in ([], ["checkpointing=true"]):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", MEASURED_PLAN, *SEVEN_B, *more], capture_output=True, check=True)
        took, most = time.monotonic() - start, int(done.stderr.split()[-1]) * 1024
        yield f"`plan {' '.join([*SEVEN_B, *more])}`", f"{took:.0f} s, {show_bytes(most)} resident at most"


def main() -> None:
    """Print the tables; fail where a group is further off than it may be."""
    torch.set_num_threads(1)
    print("# Predicted and measured peaks\n")
    print(f"`python -m benchmarks.memory`; torch {torch.__version__}, accelerate {accelerate.__version__},")
    print(f"Python {platform.python_version()}, {processor()}, one thread.\n")
    print("| group | configurations | to the byte | worst | it is |\n|---|---:|---:|---:|---|")
    worst_of_all, count = 0.0, 0
    for group, (texts, allowed) in GROUPS.items():
        errors = {}
        for text in texts:
            predicted, measured, _ = peaks(text)
            errors[text] = predicted / measured - 1
        worst = max(errors, key=lambda text: abs(errors[text]))
        exact = sum(error == 0 for error in errors.values())
        print(f"| {group} | {len(texts)} | {exact} | {errors[worst]:+.4%} | `{worst}` |", flush=True)
        assert abs(errors[worst]) <= allowed, f"{group}: {worst} is off by {errors[worst]:.2%}"
        worst_of_all, count = max(worst_of_all, abs(errors[worst])), count + len(texts)
    print(f"\n{count} configurations, the worst off by {worst_of_all:.4%}.\n")
    print("| model, AdamW, fp32 | measured | predicted | `accelerate estimate-memory` |\n|---|---:|---:|---:|")
    for name, text in MODELS.items():
        predicted, measured, weights = peaks(text)
        peer = max(estimate_training_usage(weights, "float32").values())
        shown = f"{show_bytes(predicted)} ({predicted / measured - 1:+.2%})"
        name = f"{name}, {weights / 4e6:.2f} M weights"
        print(f"| {name} | {show_bytes(measured)} | {shown} | {show_bytes(peer)} ({peer / measured - 1:+.1%}) |")
    print("\n| what it takes | |\n|---|---:|")
    for what, cost in costs():
        print(f"| {what} | {cost} |", flush=True)


if __name__ == "__main__":
    main()
