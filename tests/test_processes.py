"""Two real processes that train one model over gloo give what one process gives, and nothing is written twice."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.errors import ConfigError
from conftest import Cli

pytestmark = pytest.mark.slow
DIGITS = ("problem=digits_mlp", "precision=fp64", "effective_batch_size=64", "epochs=1", "save_weights=true")


def torchrun(folder: Path, *words: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"torchrun hung: {err[-3000:]}")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def records(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "runs").rglob("record.json"), key=lambda path: (len(path.parts), path))
    return [json.loads(path.read_text()) | {"folder": path.parent} for path in paths]


# The engine, by itself


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found: see processes_worker.py."""
    folder = tmp_path_factory.mktemp("ranks")
    done = torchrun(folder, str(Path(__file__).with_name("processes_worker.py")), "out.json")
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"out.json.{rank}").read_text()) for rank in (0, 1)]


def test_the_gradient_is_that_of_one_process_in_every_split(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(found["gradients"]) == 2 * (2 * 4 * 2 + 2)
        for case, error in found["gradients"].items():
            assert error <= (1e-6 if "fp32" in case else 1e-14), case


def test_the_control_dividing_by_a_rank_s_own_items_is_far_off(ranks: list[dict[str, Any]]) -> None:
    assert all(found["by own items"] > 1e-3 for found in ranks)


def test_gradients_are_averaged_once_a_window_or_in_every_backward(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["once"] >= 1
        assert found["once after one that was left"] == found["once"]
        assert found["once after one that was cut off"] > found["once"], "the control: DDP takes the next for that one"
        assert found["every"] == 4 * found["once"]
        assert found["without no_sync"] == 4 * found["once"], "the control: the fault is seen"


def test_ranks_with_different_numbers_of_micro_batches_are_refused_and_do_not_hang(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "different numbers of micro-batches, from 3 to 4" in found["different numbers"]


def test_a_model_that_is_wrapped_in_part_is_refused(ranks: list[dict[str, Any]]) -> None:
    """It would be taken for one rank's, and its gradient scaled wrongly."""
    for found in ranks:
        assert all("the model around it is not; wrap the whole model" in said for said in found["in part"])


def test_an_accumulator_which_no_rank_would_synchronize_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("cannot be used on several ranks" in found["accumulator"] for found in ranks)


def test_a_parameter_that_ddp_waits_for_in_vain_is_told(ranks: list[dict[str, Any]]) -> None:
    """Nothing was averaged then, and each rank would go its own way."""
    for found in ranks:
        assert "parameter mix.weight has no gradient" in found["unused"]


def test_the_boundary_is_the_same_on_all_ranks_and_alone(ranks: list[dict[str, Any]]) -> None:
    alone = ranks[0]["boundaries"]["alone"]
    assert alone[0] == pytest.approx(alone[1])
    assert alone[1] > alone[2] == 0.01, "it is clipped"
    for found in ranks:
        for kind in ("ddp", "fsdp"):
            assert found["boundaries"][kind] == pytest.approx(alone, rel=1e-12)


# The command line


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("swept")
    words = ("accum_steps=2,3", "parallel=ddp,fsdp", "sync_every_micro_batch=false,true", "equivalence=every_step")
    return folder, torchrun(folder, "-m", "accum_sweep", "-m", *DIGITS, *words)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same training in one process."""
    folder = tmp_path_factory.mktemp("alone")
    words = [sys.executable, "-m", "accum_sweep", *DIGITS, "tracking=none"]
    subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=120)
    return records(folder)[0]


def far(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Relative distance of two runs' final weights."""
    one, other = (load_file(record["folder"] / "final.safetensors") for record in (a, b))
    squares = [((one[name] - other[name]).square().sum(), other[name].square().sum()) for name in other]
    return float(torch.stack([s[0] for s in squares]).sum().sqrt() / torch.stack([s[1] for s in squares]).sum().sqrt())


def test_two_processes_end_with_the_weights_of_one(
    swept: tuple[Path, subprocess.CompletedProcess[str]], alone: dict[str, Any]
) -> None:
    folder, done = swept
    assert done.returncode == 0, done.stderr
    found = records(folder)
    assert len(found) == 8
    for record in found:
        assert far(record, alone) < 1e-12, record["name"]
        assert record["series"]["train/loss"] == pytest.approx(alone["series"]["train/loss"], rel=1e-12)
        assert record["equivalence"]["data"] == alone["equivalence"]["data"]
        assert record["equivalence"]["verdict"] == "equivalent"
        assert record["metrics"]["steps_judged"] == 23
        assert record["metrics"]["samples_seen"] == alone["metrics"]["samples_seen"] == 1437
        assert record["metrics"]["test/accuracy"] == alone["metrics"]["test/accuracy"]


def test_one_process_writes(swept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = swept
    assert done.stdout.count("8 runs, 8 finished") == 1
    assert [path.name for path in (folder / "runs").iterdir()] == [records(folder)[0]["sweep_id"]]
    assert sorted(path.name for path in folder.iterdir()) == ["mlflow.db", "mlruns", "runs"]
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    assert len(client.search_runs([experiment.experiment_id])) == 1 + 8


def test_the_textbook_is_the_textbook(tmp_path: Path, cli: Cli) -> None:
    expected = json.loads(cli("tracking=none", cwd=tmp_path).stdout)
    done = torchrun(tmp_path, "-m", "accum_sweep", "tracking=none")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["initial_weight"] == expected["initial_weight"]
    assert found["final_weight"] == pytest.approx(expected["final_weight"], rel=1e-6)


UNLUCKY = """
import os
import torch
from accum_sweep.problems import Problem

def make(dtype, fails):
    def loss(model, batch):
        if os.environ["RANK"] == "1" and fails == "loss":
            raise RuntimeError("no luck on this one")
        if os.environ["RANK"] == "1" and fails == "exit":
            raise SystemExit(3)
        return model(batch[0]).square().sum(), len(batch[0])

    if os.environ["RANK"] == "1" and fails == "build":
        raise MemoryError("not enough memory on this one")
    return Problem(torch.nn.Linear(2, 1).to(dtype), (torch.ones(8, 2, dtype=dtype),), loss)
"""
IMPATIENT = """
from datetime import timedelta
from accum_sweep import process_group
from accum_sweep.__main__ import command

process_group.PATIENCE = timedelta(seconds=6)  # under FSDP one that failed is waited for
command()
"""


def test_a_process_that_fails_ends_the_run_and_not_the_sweep(tmp_path: Path) -> None:
    (tmp_path / "unlucky.py").write_text(UNLUCKY)
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    words = ("problem=custom", "problem.factory=unlucky:make", "problem.samples=8", "micro_batch_size=2")
    fails = ("loss", "exit", "build", "never")
    swept = "problem.arguments=" + ",".join(f"{{fails:{how}}}" for how in fails)
    done = torchrun(tmp_path, "impatient.py", "-m", *words, swept, "parallel=ddp,fsdp", "tracking=none")
    assert done.returncode != 0
    found = records(tmp_path)
    assert [(r["config"]["problem"]["arguments"]["fails"], r["config"]["parallel"]) for r in found] == [
        (how, parallel) for how in fails for parallel in ("ddp", "fsdp")
    ]
    assert [r["status"] for r in found] == [*["failed"] * 4, *["oom"] * 2, *["finished"] * 2], done.stderr[-3000:]
    reasons = ("RuntimeError: no luck on this one", "SystemExit: 3", "MemoryError: not enough memory on this one")
    for record in found[:6]:
        expected = reasons[fails.index(record["config"]["problem"]["arguments"]["fails"])]
        assert f"another process failed: {expected}" in record["reason"]


def test_one_process_answers_a_question(tmp_path: Path, cli: Cli) -> None:
    assert cli("tracking=none").returncode == 0
    done = torchrun(tmp_path, "-m", "accum_sweep", "summary", "all", "--csv", "-")
    assert done.returncode == 0, done.stderr
    assert done.stdout == cli("summary", "all", "--csv", "-").stdout


@pytest.mark.parametrize(
    ("processes", "words", "key"),
    [
        ("2", ["parallel=fsdp", "precision=fp16"], "precision"),
        ("2", ["parallel=fsdp", "clip_value=1"], "clip_value"),
        ("2", ["precision=bf16-params", "accumulator=fp32"], "accumulator"),
        ("2", ["compile=true"], "compile"),
        ("1", ["parallel=fsdp"], "parallel"),
        ("1", ["sync_every_micro_batch=true"], "sync_every_micro_batch"),
        ("2", ["parallel=fsdp", "sync_every_micro_batch=true"], None),
        ("1", ["precision=bf16-params", "accumulator=fp32", "compile=true"], None),
    ],
)
def test_settings_that_need_or_exclude_several_processes(
    monkeypatch: pytest.MonkeyPatch, processes: str, words: Sequence[str], key: str | None
) -> None:
    for name, value in {"WORLD_SIZE": processes, "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    if key is None:
        assert check(compose(words)).processes == int(processes)
        return
    with pytest.raises(ConfigError) as caught:
        check(compose(words))
    assert [fault.key for fault in caught.value.faults] == [key]


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "two"}, ["WORLD_SIZE=two", "whole number", "torchrun"]),
        ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "RANK and MASTER_ADDR and MASTER_PORT", "torchrun"]),
        ({"WORLD_SIZE": "2", "RANK": "5", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, ["RANK=5", "from 0 to 1"]),
    ],
)
def test_variables_that_torchrun_would_not_set_are_told(
    cli: Cli, tmp_path: Path, variables: dict[str, str], told: list[str]
) -> None:
    done = cli("tracking=none", **variables)
    assert done.returncode == 2, done.stderr
    assert all(part in done.stderr for part in told), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_that_was_cut_short_goes_on(tmp_path: Path) -> None:
    words = ("-m", "accum_sweep", "-m", *DIGITS, "tracking=none")
    done = torchrun(tmp_path, *words, "accum_steps=1,2")
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = records(tmp_path)
    shutil.rmtree(second["folder"])
    done = torchrun(tmp_path, *words, "accum_steps=1,2,4", "sweep.resume=latest", "sweep.extend=true")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 of 3 runs have their result, 2 to go" in done.stderr
    found = {record["config"]["accum_steps"]: record for record in records(tmp_path)}
    assert {record["status"] for record in found.values()} == {"finished"}
    assert {steps: record["job_num"] for steps, record in found.items()} == {1: 0, 2: 2, 4: 3}
    assert found[1] == first, "it was not run again"
    assert found[2]["series"] == second["series"]
    done = torchrun(tmp_path, *words, "accum_steps=1,2,4", "sweep.resume=latest")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 of 3 runs have their result, 0 to go" in done.stderr


SCARCE = """
import os
import torch
from accum_sweep.problems import Problem

def make(dtype, most, unlucky):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(dtype)

    def loss(model, batch):
        if len(batch[0]) > most and (not unlucky or os.environ["RANK"] == "1"):
            raise torch.OutOfMemoryError("out of memory, for a test")
        return model(batch[0]).square().sum(), len(batch[0])

    return Problem(model, (torch.rand(64, 8, dtype=dtype),), loss)
"""


@pytest.mark.parametrize("unlucky", ["false", "true"])
def test_all_processes_choose_the_same_be_it_that_memory_runs_out_on_one(tmp_path: Path, unlucky: str) -> None:
    (tmp_path / "scarce.py").write_text(SCARCE)
    words = ("problem=custom", "problem.factory=scarce:make", "problem.samples=64", "effective_batch_size=50")
    words = (*words, "epochs=2", "memory_budget=1GiB", "tracking=none", "precision=fp64")
    swept = ("accum_steps=auto,4", f"problem.arguments={{most:7,unlucky:{unlucky}}}")
    done = torchrun(tmp_path, "-m", "accum_sweep", "-m", *words, *swept)
    assert done.returncode == 0, done.stderr[-3000:]
    chosen, by_hand = records(tmp_path)
    assert (chosen["config"]["accum_steps"], chosen["config"]["micro_batch_size"]) == (4, 7)
    assert chosen["run_key"] == by_hand["run_key"]
    assert chosen["series"] == by_hand["series"]
    assert chosen["equivalence"] == by_hand["equivalence"]
    probes = {probe["accum_steps"]: probe["peak_bytes"] for probe in chosen["auto"]["probes"]}
    assert probes[4] is not None
    assert probes[3] is None


RUNS_OUT = """
import itertools
import os
import torch
from accum_sweep.problems import Problem

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        raise torch.OutOfMemoryError("out of memory, for a test")

def make(dtype, ranks, since, stage):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(dtype)
    model.register_buffer("told", torch.zeros(1, dtype=dtype))  # DDP sends buffers around in its forward pass
    seen = itertools.count()

    def loss(net, batch):
        trained = getattr(net, "module", None) is model
        if not trained and len(batch[0]) > 8 and isinstance(net, torch.nn.parallel.DistributedDataParallel):
            raise torch.OutOfMemoryError("too much for a probe")
        fails = trained and next(seen) == since and os.environ["RANK"] in str(ranks)
        if fails and stage == "before":
            raise torch.OutOfMemoryError("out of memory, for a test")
        output = net(batch[0])
        if fails and stage == "forward":
            raise torch.OutOfMemoryError("out of memory, for a test")
        if fails:
            output = Fails.apply(output)
        return output.square().sum(), len(batch[0])

    return Problem(model, (torch.rand(64, 8, dtype=dtype),), loss)
"""
CASES = [  # ranks, micro-batch, stage; two micro-batches a rank in each step
    ("none", 0, "before"),
    ("1", 4, "before"),  # the first micro-batch of the third step, in which DDP sends buffers
    ("0", 4, "forward"),
    ("1", 4, "backward"),
    ("1", 5, "before"),  # the last, in which gradients are averaged
    ("0", 5, "forward"),
    ("0", 5, "backward"),
    ("1_0", 5, "forward"),
    ("1_0", 4, "backward"),
    ("1", 2, "backward"),  # in the second step DDP sends its buckets around
]


@pytest.mark.parametrize("every", [False, True])
def test_all_processes_repeat_a_window_that_memory_runs_out_in(tmp_path: Path, every: bool) -> None:
    (tmp_path / "runs_out.py").write_text(RUNS_OUT)
    arguments = ",".join(f"{{ranks:{ranks},since:{since},stage:{stage}}}" for ranks, since, stage in CASES)
    problem = (
        "problem=custom",
        "problem.factory=runs_out:make",
        "problem.samples=64",
        f"problem.arguments={arguments}",
    )
    sizes = ("effective_batch_size=32", "accum_steps=auto", "memory_budget=1GiB", "steps=6", "precision=fp64")
    words = ("equivalence=every_step", "save_weights=true", "tracking=none", f"sync_every_micro_batch={every}")
    done = torchrun(tmp_path, "-m", "accum_sweep", "-m", *problem, *sizes, *words)
    found = records(tmp_path)
    assert len(found) == len(CASES), done.stderr
    whole: dict[str, Any] = {}
    for record in found:
        config = record["config"]
        ranks, since, stage = config["problem"]["arguments"].values()
        assert (config["accum_steps"], config["micro_batch_size"]) == (2, 8)
        # Inside of what all take part in, the others cannot be told.
        if ranks != "none" and (stage == "before" or (stage == "backward" and (every or since % 2 == 1))):
            assert record["status"] == "oom", (ranks, since, stage, record["reason"])
            continue
        assert record["status"] == "finished", (ranks, since, stage, record["reason"])
        repeated = [f"memory ran out in step {since // 2 + 1} at micro-batches of 8; repeated with 4"]
        assert record["notes"][1:] == ([] if ranks == "none" else repeated)
        weights = load_file(record["folder"] / "final.safetensors")
        whole = whole or weights
        for name, value in weights.items():
            assert float((value - whole[name]).norm()) <= 1e-12 * float(whole[name].norm()), (ranks, since, stage)
        assert record["equivalence"]["verdict"] == "equivalent"
        assert record["equivalence"]["data"] == found[0]["equivalence"]["data"]
