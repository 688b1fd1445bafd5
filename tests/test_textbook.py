"""The textbook run, end to end by the command line, against gradients worked out by hand."""

import json
import math
from pathlib import Path

import pytest
import torch
import yaml

import accum_sweep
from conftest import Cli

CONF = Path(__file__).parents[1] / "conf"

# x = 1..8, y = 2x, one weight from 0: the gradient of the mean squared error over samples S is -4 * mean(x^2 over S).
ONE_WEIGHT = ["problem.bias=false", "problem.initial_weight=[0]", "lr=0.02", "tracking=none", "device=cpu"]


def batches(*sizes: int) -> str:
    """The samples x = 1, 2, 3, ... with y = 2x, cut into mini-batches of these sizes, as one types them."""
    text, first = [], 1
    for size in sizes:
        xs = range(first, first + size)
        text.append(f"{{x:[{','.join(f'[{x}]' for x in xs)}],y:[{','.join(str(2 * x) for x in xs)}]}}")
        first += size
    return f"problem.batches=[{','.join(text)}]"


def last_line(output: str) -> dict[str, object]:
    return json.loads(output.splitlines()[-1])


def by_hand(initial: list[float], bias: float, normalization: str, accum_steps: int, lr: float = 0.1) -> list[float]:
    """One SGD step on the shipped mini-batches, in float64, from d/dw (w.x + b - y)^2 = 2 (w.x + b - y) x."""
    written = yaml.safe_load((CONF / "problem/linear.yaml").read_text())["problem"]["batches"]
    window = [written[number % len(written)] for number in range(accum_steps)]
    samples = sum(len(batch["y"]) for batch in window)
    gradient = [0.0, 0.0]
    for batch in window:
        share = {"sum": 1.0, "mean": 1 / accum_steps, "items": len(batch["y"]) / samples}[normalization]
        for x, y in zip(batch["x"], batch["y"], strict=True):
            error = sum(w * value for w, value in zip(initial, x, strict=True)) + bias - y
            for feature in range(2):
                gradient[feature] += share * 2 * error * x[feature] / len(batch["y"])
    return [w - lr * g for w, g in zip(initial, gradient, strict=True)]


def seeded() -> tuple[list[float], float]:
    """Weight and bias of the textbook's own first two lines."""
    torch.manual_seed(42)
    layer = torch.nn.Linear(2, 1)
    return layer.weight.flatten().tolist(), layer.bias.item()


def test_the_textbook_run_prints_what_the_gradient_says(cli: Cli) -> None:
    done = cli("tracking=none")
    assert done.returncode == 0, done.stderr
    result = last_line(done.stdout)
    weight, bias = seeded()
    assert list(result) == ["initial_weight", "final_weight", "weight_changed"]
    assert result["initial_weight"] == weight
    assert result["weight_changed"] is True
    assert result["final_weight"] == pytest.approx(by_hand(weight, bias, "sum", 4), rel=1e-6)
    # The check can fail: a divided sum is another answer.
    assert result["final_weight"] != pytest.approx(by_hand(weight, bias, "mean", 4), rel=1e-2)


def test_the_textbook_loop_written_out_gives_the_same_weights_to_the_bit(workdir: Path) -> None:
    torch.manual_seed(42)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in yaml.safe_load((CONF / "problem/linear.yaml").read_text())["problem"]["batches"]:
        loss = torch.nn.MSELoss()(model(torch.tensor(batch["x"])), torch.tensor(batch["y"]).unsqueeze(1))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    assert accum_sweep.run(["tracking=none"]).result["final_weight"] == model.weight.flatten().tolist()


@pytest.mark.parametrize("normalization", ["sum", "mean", "items"])
@pytest.mark.parametrize("accum_steps", [1, 2, 4, 6])
def test_any_number_of_micro_batches_cycles_through_the_data(
    workdir: Path, normalization: str, accum_steps: int
) -> None:
    overrides = ["problem.initial_weight=[0.7645,-0.8049]", "problem.initial_bias=0.25", "precision=fp64"]
    settings = [f"accum_steps={accum_steps}", f"normalization={normalization}", "tracking=none"]
    result = accum_sweep.run(overrides + settings).result
    assert result["initial_weight"] == [0.7645, -0.8049]
    expected = by_hand([0.7645, -0.8049], 0.25, normalization, accum_steps)
    assert result["final_weight"] == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("words", "weight"),
    [
        ([batches(2, 2, 2, 2), "normalization=items"], 0.02 * 4 * 25.5),  # 2.04: the mean of x^2 over 1..8 is 25.5
        ([batches(2, 2, 2, 2), "normalization=sum"], 4 * 0.02 * 4 * 25.5),  # 8.16: undivided
        ([batches(2, 2, 2, 1), "normalization=items"], 0.02 * 4 * 20),  # 1.60: seven samples, each weighs the same
        ([batches(2, 2, 2, 1), "normalization=mean"], 0.02 * (2.5 + 12.5 + 30.5 + 49)),  # 1.89: a mean of means
        ([batches(1, 1), "normalization=mean", "epochs=1"], 0.02 * 4 * 2.5),  # 0.20: divided by 2, not by 4
    ],
)
def test_golden_values_by_the_command_line(cli: Cli, words: list[str], weight: float) -> None:
    done = cli(*ONE_WEIGHT, *words)
    assert done.returncode == 0, done.stderr
    assert last_line(done.stdout)["final_weight"] == pytest.approx([weight], rel=1e-6)


def test_a_window_of_two_where_four_were_asked_divides_by_two(cli: Cli) -> None:
    done = cli(*ONE_WEIGHT, batches(2, 2), "normalization=mean", "accum_steps=4", "epochs=1")
    assert done.returncode == 0, done.stderr
    assert last_line(done.stdout)["final_weight"] == pytest.approx([0.60], rel=1e-6)  # by the nominal four: 0.30


def test_python_returns_the_dictionary_that_the_command_prints(cli: Cli, workdir: Path) -> None:
    printed = last_line(cli("tracking=none", "accum_steps=2", "seed=7").stdout)
    assert accum_sweep.run(overrides=["tracking=none", "accum_steps=2", "seed=7"]).result == printed


def test_seed_zero_is_a_seed_and_lr_zero_a_learning_rate(workdir: Path) -> None:
    zero = accum_sweep.run(["tracking=none", "seed=0"]).result
    torch.manual_seed(0)
    assert zero["initial_weight"] == torch.nn.Linear(2, 1).weight.flatten().tolist()
    still = accum_sweep.run(["tracking=none", "lr=0"]).result
    assert still["weight_changed"] is False
    assert still["final_weight"] == still["initial_weight"]


def test_the_same_seed_twice_is_the_same_to_the_bit(workdir: Path) -> None:
    words = ["tracking=none", "problem=digits_mlp", "epochs=1", "accum_steps=3", "micro_batch_size=7", "device=cpu"]
    first, second, other = (accum_sweep.run([*words, f"seed={seed}"]) for seed in (3, 3, 4))
    assert first.series == second.series
    assert first.metrics["final_weight_norm"] == second.metrics["final_weight_norm"]
    assert first.run_key == second.run_key
    assert first.series != other.series
    assert first.run_key != other.run_key


def test_a_run_leaves_the_callers_random_numbers_alone(workdir: Path) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    accum_sweep.run(["tracking=none"])
    assert torch.equal(torch.rand(3), expected)


def test_the_losses_are_those_of_the_window_and_of_each_micro_batch(workdir: Path) -> None:
    record = accum_sweep.run([*ONE_WEIGHT, batches(2, 2, 2, 1), "steps=2", "normalization=items"])
    squares = [4 * x * x for x in range(1, 8)]  # (0 - 2x)^2
    means = [math.fsum(squares[i : i + 2]) / len(squares[i : i + 2]) for i in (0, 2, 4, 6)]
    assert record.series["train/micro_loss"][:4] == pytest.approx(means)
    assert record.series["train/loss"][0] == pytest.approx(sum(squares) / 7)
    assert record.series["train/loss"][0] != pytest.approx(means[-1])
    assert record.series["train/grad_norm"][0] == pytest.approx(4 * 20)
    # Second step: from w = 1.6, errors are 0.4 x.
    assert record.series["train/loss"][1] == pytest.approx(0.16 * 20, rel=1e-5)


def test_a_run_with_weights_that_overflow_at_the_end_is_diverged_and_its_json_is_json(cli: Cli) -> None:
    done = cli("-m", "lr=0.1,1e38", "tracking=none")
    assert done.returncode == 1
    assert "diverged: the weights are not finite after step 1" in done.stdout
    again = cli("summary")
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
