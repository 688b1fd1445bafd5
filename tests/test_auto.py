"""accum_steps=auto on real models: the choice, that it leaves no trace in the run, and windows that are repeated."""

import csv
import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from accum_sweep import auto, short_pass
from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.execute import execute
from accum_sweep.problems import Problem, digits_mlp
from accum_sweep.record import Identity, Record
from conftest import Cli

CPU = torch.device("cpu")
DIGITS = ("problem=digits_mlp", "problem.hidden=64", "effective_batch_size=50")
GPT = ("problem=char_gpt", "problem.width=16", "problem.context=16", "problem.train_sequences=64")


def settings(*words: str) -> Any:
    return check(compose([*words, "tracking=none", "device=cpu"]))


def run_here(folder: Path, *words: str) -> Record:
    return execute(settings(*words), folder, Identity("r", "r", []))


def peak(number: int, *words: str) -> int:
    config = settings(*words, f"accum_steps={number}")
    torch.manual_seed(config.seed)
    found = short_pass.measure(config, config.problem.build(torch.float32), CPU).peak.allocated_bytes
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("words", "effective"), [(DIGITS, 50), ((*GPT, "effective_batch_size=16", "problem.test_sequences=8"), 16)]
)
@pytest.mark.parametrize("foreseen", ["nothing", "half", "all"])
def test_the_choice_is_that_of_all_peaks_measured(words: tuple[str, ...], effective: int, foreseen: str) -> None:
    peaks = {number: peak(number, *words) for number in range(1, effective + 1)}
    heights = sorted(set(peaks.values()))
    half = {"half": 2, "nothing": 0}.get(foreseen)
    prediction = None if half is None else lambda config, _: peaks[config.accum_steps] // half if half else None
    for budget in {heights[0], (heights[1] + heights[2]) // 2, heights[-2], heights[-1]}:
        config = settings(*words, "accum_steps=auto", f"memory_budget={budget}B")
        decision = auto.decide(config, CPU, prediction)
        assert decision.config.accum_steps == next(number for number in peaks if peaks[number] <= budget)
        assert len(decision.found["probes"]) <= 8
        assert all(p["peak_bytes"] == peaks[p["accum_steps"]] for p in decision.found["probes"])


@pytest.mark.parametrize("dropout", ["0.0", "0.2"])
def test_the_run_is_to_the_bit_that_with_the_number_given_by_hand(tmp_path: Path, dropout: str) -> None:
    words = (*GPT, f"problem.dropout={dropout}", "effective_batch_size=10", "steps=4", "optimizer=adamw")
    budget = peak(3, *words)
    chosen = run_here(tmp_path / "auto", *words, "accum_steps=auto", f"memory_budget={budget}B", "save_weights=true")
    by_hand = run_here(tmp_path / "hand", *words, "accum_steps=3", "save_weights=true")
    assert (chosen.config["accum_steps"], chosen.config["micro_batch_size"]) == (3, 4)
    assert chosen.run_key == by_hand.run_key
    assert chosen.series == by_hand.series
    assert chosen.equivalence == by_hand.equivalence
    for name in ("initial", "final"):
        files = [(tmp_path / way / f"{name}.safetensors").read_bytes() for way in ("auto", "hand")]
        assert files[0] == files[1]
    assert chosen.auto["why"] == chosen.notes[0]
    assert not by_hand.auto


def test_a_budget_that_is_too_small_is_told_with_the_least(tmp_path: Path) -> None:
    words = (*DIGITS, "accum_steps=auto", "epochs=1")
    record = run_here(tmp_path / "small", *words, "memory_budget=1KiB")
    assert record.status == "oom"
    reason = record.reason or ""
    assert reason.startswith("memory_budget=1 KiB: no split of effective_batch_size=50 fits: the least is")
    assert "weights, gradients and optimizer state 37.58 KiB, activations and the micro-batch" in reason
    least = reason.partition("give ")[2].partition(" or more")[0]
    assert run_here(tmp_path / "least", *words, least).status == "finished"
    one_less = f"memory_budget={int(least.partition('=')[2].rstrip('B')) - 1}B"
    assert run_here(tmp_path / "less", *words, one_less).status == "oom"


def test_without_a_budget_free_memory_is_it_and_some_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = peak(2, *DIGITS)
    assert budget < peak(1, *DIGITS)
    monkeypatch.setattr(auto, "free_bytes", lambda _: int(budget / 0.9) + 2)
    record = run_here(tmp_path / "free", *DIGITS, "accum_steps=auto", "epochs=1")
    assert record.config["accum_steps"] == 2
    assert "10% left as head-room" in record.notes[0]


def test_a_probe_that_is_sure_to_exceed_what_is_free_is_not_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On the CPU it would not raise but end the process, or others."""
    free = peak(2, *DIGITS)
    monkeypatch.setattr(auto, "free_bytes", lambda _: free)
    tried = []

    def measure(config: Any, *rest: Any) -> Any:
        tried.append(config.accum_steps)
        return short_pass.measure(config, *rest)

    monkeypatch.setattr(auto, "measure", measure)
    caplog.set_level(logging.INFO, "accum_sweep")
    config = settings(*DIGITS, "accum_steps=auto", f"memory_budget={free}B")
    decision = auto.decide(config, CPU, lambda config, _: peak(config.accum_steps, *DIGITS))
    assert decision.config.accum_steps == 2
    assert 1 not in tried
    assert "more than there is" in decision.found["why"]
    assert sum("probe: " in message for message in caplog.messages) == len(decision.found["probes"])


def test_where_not_even_single_samples_can_be_tried_it_says_what_is_left_and_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "free_bytes", lambda _: 1024)
    record = run_here(tmp_path, *DIGITS, "accum_steps=auto", "epochs=1")
    assert record.status == "oom"
    reason = record.reason or ""
    assert "no split of effective_batch_size=50 fits: micro-batches of 1 need more than is left, 1 KiB" in reason
    assert "their tensors alone take " in reason
    assert "free some memory" in reason


def test_fastest_takes_the_least_memory_near_the_best_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {2: 960.0, 4: 1000.0, 8: 951.0, 16: 500.0}
    monkeypatch.setattr(auto, "samples_per_second", lambda config, *_: speeds[config.accum_steps])
    budget = peak(2, *DIGITS)
    config = settings(*DIGITS, "accum_steps=auto", "auto.objective=fastest", f"memory_budget={budget}B")
    decision = auto.decide(config, CPU)
    assert decision.config.accum_steps == 8
    assert [speed["accum_steps"] for speed in decision.found["speeds"]] == [2, 4, 8, 16]
    assert "fewest that fit is accum_steps=2" in decision.found["why"]


def test_fastest_for_real(tmp_path: Path) -> None:
    record = run_here(tmp_path, *DIGITS, "accum_steps=auto", "auto.objective=fastest", "epochs=1", "memory_budget=1MiB")
    speeds = record.auto["speeds"]
    assert [speed["accum_steps"] for speed in speeds] == [1, 2, 4, 8]
    best = max(speed["samples_per_second"] for speed in speeds)
    chosen = next(speed for speed in speeds if speed["accum_steps"] == record.config["accum_steps"])
    assert chosen["samples_per_second"] >= 0.95 * best


def test_a_sweep_over_auto_and_numbers(cli: Cli, tmp_path: Path) -> None:
    budget = peak(2, *DIGITS)
    done = cli("-m", *DIGITS, "accum_steps=auto,1,2", f"memory_budget={budget}B", "epochs=1")
    assert done.returncode == 0, done.stderr
    assert "3 runs, 3 finished" in done.stdout
    assert "note: accum_steps=2: 2 micro-batches of 25 need" in done.stdout
    assert "probe: 2 micro-batches of 25" in done.stderr
    (table,) = (tmp_path / "runs").glob("*/summary.csv")
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [row["accum_steps"] for row in rows] == ["2", "1", "2"]
    assert rows[0]["run_key"] == rows[2]["run_key"] != rows[1]["run_key"]
    assert json.loads((table.parent / "0/record.json").read_text())["auto"]["budget_bytes"] == budget
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("accum-sweep")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "tags.accum_sweep.auto LIKE 'accum_steps=2%'")
    assert [run.data.params["accum_steps"] for run in runs] == ["2"]
    failing = cli("-m", *DIGITS, "accum_steps=auto,1", "memory_budget=1KiB", "tracking=none")
    assert failing.returncode == 1
    assert "as written" not in failing.stdout
    assert failing.stdout.count("oom: memory_budget=1 KiB: no split") == 1


# Memory that runs out on the way

LIMIT = {"size": 10**9, "from": 10**9}


class Scarce(digits_mlp.Params):
    """Memory suffices for micro-batches of `LIMIT["size"]` only, from a window on."""

    def build(self, dtype: torch.dtype) -> Problem:
        problem = super().build(dtype)
        model = nn.Sequential(*list(problem.model.children())[:2], nn.Dropout(LIMIT["dropout"]), problem.model[2])  # type: ignore[index]
        seen = itertools.count()

        def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[Tensor, int]:
            if model is kept and next(seen) >= LIMIT["from"] and len(batch[0]) > LIMIT["size"]:
                model(batch[0])  # it may have drawn already
                raise torch.OutOfMemoryError("out of memory, for a test")
            return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[0])

        kept = model
        return Problem(model, problem.train, loss)


def scarce(folder: Path, size: int, since: int, *words: str, dropout: float = 0.0) -> Record:
    """50 samples a window in two micro-batches; `since` counts micro-batches."""
    LIMIT.update({"size": size, "from": since, "dropout": dropout})  # type: ignore[dict-item]
    budget = 2 * 10**6
    config = settings(*DIGITS, "accum_steps=auto", f"memory_budget={budget}B", "save_weights=true", *words)
    config = config.model_copy(update={"problem": Scarce(**config.problem.model_dump())})
    return execute(config, folder, Identity("r", "r", []))


def weights(folder: Path) -> Tensor:
    from safetensors.torch import load_file

    return torch.cat([value.double().flatten() for value in load_file(folder / "final.safetensors").values()])


@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-12), ("fp32", 1e-6)])
def test_a_window_whose_memory_runs_out_is_repeated(tmp_path: Path, precision: str, tolerance: float) -> None:
    words = (f"precision={precision}", "epochs=1", "equivalence=every_step", "optimizer=momentum")
    whole = scarce(tmp_path / "whole", 10**9, 0, *words)
    cut = scarce(tmp_path / "cut", 15, 5, *words)
    assert whole.config["accum_steps"] == cut.config["accum_steps"] == 1
    assert cut.status == "finished"
    assert cut.notes[1:] == [
        "memory ran out in step 6 at micro-batches of 50; repeated with 25",
        "memory ran out in step 6 at micro-batches of 25; repeated with 13",
    ]
    assert whole.notes[1:] == []
    assert float((weights(tmp_path / "cut") - weights(tmp_path / "whole")).norm()) < tolerance * float(
        weights(tmp_path / "whole").norm()
    )
    assert cut.equivalence["verdict"] == "equivalent"
    assert cut.equivalence["data"] == whole.equivalence["data"]
    assert cut.metrics["steps_judged"] == whole.metrics["steps_judged"]
    assert cut.metrics["samples_seen"] == whole.metrics["samples_seen"]
    assert cut.metrics["micro_steps_done"] == 5 + 23 * 4 + 3  # of 29 windows the last has 37 samples


def test_the_first_window_of_the_new_form_is_judged(tmp_path: Path) -> None:
    whole = scarce(tmp_path / "whole", 10**9, 0, "steps=4")
    cut = scarce(tmp_path / "cut", 25, 3, "steps=4")  # in the last step
    assert (whole.metrics["steps_judged"], cut.metrics["steps_judged"]) == (1, 2)
    assert cut.equivalence["verdict"] == "equivalent"


def test_nothing_is_drawn_twice(tmp_path: Path) -> None:
    """Cut from the first window on, dropout draws what it draws where micro-batches of that size were planned."""
    cut = scarce(tmp_path / "cut", 25, 0, "steps=3", dropout=0.5)
    planned = peak(2, *DIGITS)
    small = scarce(tmp_path / "planned", 10**9, 0, "steps=3", f"memory_budget={int(1.15 * planned)}B", dropout=0.5)
    assert small.config["accum_steps"] == 2
    assert cut.series["train/loss"] == small.series["train/loss"]
    assert torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "planned"))


def test_single_samples_that_do_not_fit_end_the_run(tmp_path: Path) -> None:
    record = scarce(tmp_path, 0, 2, "steps=4")
    assert record.status == "oom"
    assert "out of memory, for a test" in (record.reason or "")
    assert record.notes[-1] == "memory ran out in step 3 at micro-batches of 2; repeated with 1"
    assert record.metrics["steps_done"] == 2


def test_without_auto_nothing_is_repeated(tmp_path: Path) -> None:
    LIMIT.update({"size": 25, "from": 2, "dropout": 0.0})  # type: ignore[dict-item]
    config = settings(*DIGITS, "accum_steps=1", "steps=4")
    config = config.model_copy(update={"problem": Scarce(**config.problem.model_dump())})
    record = execute(config, tmp_path, Identity("r", "r", []))
    assert record.status == "oom"
    assert not record.notes
