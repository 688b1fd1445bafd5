"""`python -m accum_sweep plan`: the table, the recommendation, files, and what it refuses."""

import csv
import io
import json
from pathlib import Path

import pytest

from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.config import Config
from accum_sweep.ledger import Trace
from accum_sweep.plan import Plan, Row, make
from accum_sweep.predict import Prediction, outline, predict, trace
from accum_sweep.problems import Problem
from conftest import Cli

MLP = ("problem=digits_mlp", "effective_batch_size=64")
MIB = 1 << 20


def planned(*settings: str) -> Plan:
    return make(check(compose([*MLP, *settings])))


def test_every_split_is_there_down_to_one_sample() -> None:
    plan = planned()
    assert [(row.accum_steps, row.micro_batch_size) for row in plan.rows] == [
        (1, 64), (2, 32), (4, 16), (8, 8), (16, 4), (32, 2), (64, 1)
    ]  # fmt: skip


def test_under_mean_only_what_divides() -> None:
    plan = planned("effective_batch_size=48", "normalization=mean")
    assert [row.accum_steps for row in plan.rows] == [1, 2, 4, 8, 16, 48]


def test_a_size_that_does_not_divide_is_split_unevenly() -> None:
    rows = planned("effective_batch_size=50").rows
    assert [(row.accum_steps, row.micro_batch_size) for row in rows][-3:] == [(16, 4), (32, 2), (50, 1)]


def test_an_effective_batch_larger_than_the_data_is_split(cli: Cli) -> None:
    done = cli("plan", "problem=linear", "effective_batch_size=16", "--csv", "-")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [row["accum_steps"] for row in rows] == ["2", "4", "8", "16"], "a micro-batch has at most the 8 samples"


@pytest.mark.parametrize("accum_steps", [1, 4, 64])
def test_a_row_is_what_the_run_measures(cli: Cli, tmp_path: Path, accum_steps: int) -> None:
    row = next(row for row in planned().rows if row.accum_steps == accum_steps)
    cli(*MLP, f"accum_steps={accum_steps}", "steps=2", "tracking=none", "device=cpu", "hydra.run.dir=here")
    metrics = json.loads((tmp_path / "here/record.json").read_text())["metrics"]
    assert metrics["peak_allocated_bytes"] == row.prediction.peak_allocated_bytes


TEXT = "problem.context=16 problem.width=16 problem.heads=2 problem.layers=1"


@pytest.mark.parametrize("more", ["", "checkpointing=true", "precision=bf16", "precision=bf16 checkpointing=true"])
def test_of_many_splits_few_are_followed(monkeypatch: pytest.MonkeyPatch, more: str) -> None:
    followed = []

    def watched(config: Config, problem: Problem, device_type: str) -> Trace:
        followed.append(config.accum_steps)
        return trace(config, problem, device_type)

    monkeypatch.setattr("accum_sweep.plan.trace", watched)
    words = f"problem=char_gpt {TEXT} effective_batch_size=256 optimizer=adamw device=cuda {more}"
    plan = make(check(compose(words.split())))
    assert len(plan.rows) == 9
    assert len(followed) <= 5
    one = next(row for row in plan.rows if row.accum_steps not in followed)
    config = plan.config.chosen(one.accum_steps)
    assert one.prediction == predict(config, outline(config), "cuda"), "as if it had been followed"


def a_plan(budget: int | None, *peaks: int) -> Plan:
    parts = dict.fromkeys(("parameters", "gradients", "optimizer", "activations", "data", "temporaries"), 1)
    rows = [
        Row(2**number, 64 >> number, Prediction(peak, None, "backward", parts))  # type: ignore[arg-type]
        for number, peak in enumerate(peaks)
    ]
    return Plan(check(compose(MLP)), "cpu", budget, rows)


@pytest.mark.parametrize(
    ("budget", "recommended"),
    [(1000, None), (1111, None), (1112, 4), (2222, 4), (2223, 2), (3333, 2), (3334, 1), (10**6, 1)],
)
def test_the_fewest_that_fit_with_a_tenth_left_free(budget: int, recommended: int | None) -> None:
    row = a_plan(budget, 3000, 2000, 1000).recommended
    assert (row.accum_steps if row else None) == recommended


def test_a_first_row_that_needs_less_than_the_second_is_taken_when_it_fits() -> None:
    """A single micro-batch has no gradients in its forward pass: its peak may be the lower one."""
    row = a_plan(2000, 1500, 1900, 1000).recommended
    assert row is not None
    assert row.accum_steps == 1


def test_the_table_says_what_fits_and_which_to_take(cli: Cli) -> None:
    done = cli("plan", *MLP, "memory_budget=140KiB", "device=cpu")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("predicted for cpu, not run: problem=digits_mlp effective_batch_size=64")
    fits = {line.split()[0]: line.split()[4] for line in lines[4:11]}
    assert set(fits.values()) == {"yes", "no"}
    first = next(accum_steps for accum_steps, word in fits.items() if word == "yes")
    assert f"accum_steps={first} is the fewest listed that fits 140 KiB with 10% left free" in done.stdout
    assert "not seen" in done.stdout


def test_a_budget_below_every_split_names_the_least(cli: Cli) -> None:
    done = cli("plan", *MLP, "memory_budget=10KiB", "device=cpu")
    assert done.returncode == 2
    assert "memory_budget=10 KiB: is too small for every split" in done.stderr
    assert "37.54 KiB parameters" in done.stdout  # 9610 weights of 4 bytes
    said = done.stdout.split("that takes a budget of ")[1].splitlines()[0]
    assert f"give {said} or more" in done.stderr
    number, unit = float(said.split()[0]), said.split()[1]
    assert cli("plan", *MLP, f"memory_budget={number * 1.001}{unit}", "device=cpu").returncode == 0


def test_a_gpu_may_be_elsewhere_and_a_model_larger_than_this_machine(cli: Cli) -> None:
    pytest.importorskip("transformers")
    layers = "problem.config={hidden_size:8192,num_hidden_layers:2,num_attention_heads:64,intermediate_size:65536}"
    done = cli(
        "plan", "problem=causal_lm", layers, "problem.context=2048", "effective_batch_size=1024", "device=cuda",
        "precision=bf16", "memory_budget=80GiB", "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["device"] == "cuda"
    assert plan["rows"][0]["predicted_allocated_bytes"] > 2**40
    weights = 4 * (2 * (4 * 8192**2 + 3 * 8192 * 65536 + 2 * 8192) + 8192 + 2 * 8192 * 98)
    assert plan["rows"][0]["peak_parameters_bytes"] == pytest.approx(weights, rel=1e-3)
    for row in plan["rows"]:
        assert row["predicted_reserved_bytes"] >= row["predicted_allocated_bytes"]
    assert plan["recommended_accum_steps"] in [row["accum_steps"] for row in plan["rows"]]


def test_without_a_budget_and_a_device_no_row_is_said_to_fit(cli: Cli) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("needs a machine without a CUDA device")
    done = cli("plan", *MLP, "device=cuda")
    assert done.returncode == 0
    assert "no budget is known: give memory_budget" in done.stdout
    assert "yes" not in done.stdout.split()


def test_csv_and_json_hold_the_rows_and_a_plot_is_drawn(cli: Cli, tmp_path: Path) -> None:
    done = cli("plan", *MLP, "memory_budget=1MiB", "--csv", "-", "--json", "plan.json", "--plot", "plan.png")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert [int(row["predicted_allocated_bytes"]) for row in rows] == [
        row["predicted_allocated_bytes"] for row in plan["rows"]
    ]
    for row in plan["rows"]:
        kinds = ("parameters", "gradients", "optimizer", "activations", "data", "temporaries")
        assert sum(row[f"peak_{kind}_bytes"] for kind in kinds) == row["predicted_allocated_bytes"]
    assert (plan["budget_bytes"], plan["recommended_accum_steps"]) == (MIB, 1)
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("memory_budget=80",), "memory_budget=80: must be a size with its unit"),
        (("memory_budget=80GX",), "memory_budget=80GX: must be a size with its unit"),
        (("compile=true",), "compile=true: what torch.compile makes of a model is not predicted"),
        (("accum_steps=1,2",), "accum_steps=1,2: plan takes one value a key"),
        (("problem=nowhere",), "problem=nowhere: there is no such problem"),
        (("--csv", "-", "--json", "-"), "--csv and --json cannot share standard output"),
        (("--plot", "plan.xyz"), "--plot plan.xyz"),
        (("--plot", "nowhere/plan.png"), "--plot nowhere/plan.png"),
        (("--plot", "plan"), "--plot plan: the suffix says what is drawn"),
        (("--plot", "."), "--plot .: a folder"),
        (("--csv", "nowhere/plan.csv"), "--csv nowhere/plan.csv: cannot be written"),
        (("--json", ""), "--json '': no file's name"),
        (("--csv", "plan", "--json", "./plan"), "--csv and --json cannot share ./plan"),
    ],
)
def test_bad_input_is_one_clear_error(cli: Cli, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = cli("plan", *MLP, "device=cpu", *words)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_and_bad_settings_load_no_torch(cli: Cli) -> None:
    import time

    started = time.monotonic()
    assert "memory_budget" in cli("plan", "--help").stdout
    assert time.monotonic() - started < 5


def test_the_budget_it_asks_for_is_enough(cli: Cli) -> None:
    words = ("plan", "problem=char_gpt", f"{TEXT}", "effective_batch_size=64", "optimizer=adamw", "device=cuda")
    words = tuple(word for text in words for word in text.split())
    refused = cli(*words, "memory_budget=1KiB")
    assert refused.returncode == 2
    asked = refused.stderr.rpartition("give ")[2].split()
    assert cli(*words, f"memory_budget={''.join(asked[:2])}").returncode == 0


def test_a_step_in_backward_has_one_split(cli: Cli) -> None:
    done = cli("plan", *MLP, "step_in_backward=true", "--csv", "-")
    assert done.returncode == 0, done.stderr
    assert [row["accum_steps"] for row in csv.DictReader(io.StringIO(done.stdout))] == ["1"]


def test_a_limit_is_a_budget(cli: Cli) -> None:
    said = cli("plan", *MLP, "device=cpu", "memory_limit=100KiB").stdout
    assert "fits 100 KiB with 10% left free" in said
    assert "under memory_limit also copies of the weights" in said


def test_what_cannot_go_without_content_is_told(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "picky.py").write_text(
        "import torch\n"
        "from accum_sweep.problems import Problem\n"
        "def make(dtype):\n"
        "    loss = lambda model, batch: (batch[0][batch[0] > 0].sum() * model(batch[0]).sum(), len(batch[0]))\n"
        "    return Problem(torch.nn.Linear(2, 1).to(dtype), (torch.ones(8, 2, dtype=dtype),), loss)\n"
    )
    words = ("problem=custom", "problem.factory=picky:make", "problem.samples=8", "effective_batch_size=4")
    done = cli("plan", *words, PYTHONPATH=".")
    assert done.returncode == 2
    assert "problem=custom: cannot be followed without content" in done.stderr
    assert "Traceback" not in done.stderr


def test_several_processes_are_not_planned(cli: Cli) -> None:
    several = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = cli("plan", *MLP, **several)
    assert (done.returncode, "plan: several processes are not predicted" in done.stderr) == (2, True)
