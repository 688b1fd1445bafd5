"""Rules and derived sizes, the errors that tell them, and what makes two runs the same."""

from itertools import combinations, islice

import pytest

from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.config import Config, flatten, run_key
from accum_sweep.errors import ConfigError, nearest

DIGITS = "problem=digits_mlp"
FUSED, IN_BACKWARD = "fused_linear=true", "step_in_backward=true"


MEAN = "normalization=mean"


def checked(*overrides: str) -> Config:
    return check(compose(overrides))


def sizes(*overrides: str) -> tuple[int | None, int | None, int | None]:
    config = checked(*overrides)
    return config.accum_steps, config.micro_batch_size, config.effective_batch_size


@pytest.mark.parametrize(
    ("given", "derived"),
    [
        (["accum_steps=4", "micro_batch_size=16"], (4, 16, 64)),
        (["accum_steps=4", "effective_batch_size=64"], (4, 16, 64)),
        (["micro_batch_size=16", "effective_batch_size=64"], (4, 16, 64)),
        (["accum_steps=4", "micro_batch_size=16", "effective_batch_size=64"], (4, 16, 64)),
        (["accum_steps=8"], (8, 16, 128)),
        (["micro_batch_size=3"], (1, 3, 3)),
        (["effective_batch_size=48"], (1, 48, 48)),
        ([], (1, 16, 16)),
    ],
)
def test_two_sizes_give_the_third(given: list[str], derived: tuple[int, ...]) -> None:
    assert sizes(DIGITS, *given) == derived


def test_the_textbook_takes_its_mini_batches_as_written() -> None:
    assert sizes() == (4, 2, 8)
    uneven = "problem.batches=[{x:[[1,1]],y:[1]},{x:[[1,2],[2,1]],y:[1,2]}]"
    assert sizes(uneven, "accum_steps=2") == (2, None, None)
    assert next(checked(uneven).plan(0)) == (1, 2)
    assert next(checked(uneven, "accum_steps=3").plan(5)) == (1, 2, 1), "they begin anew"
    assert sizes(uneven) == (2, None, None), "as many as there are mini-batches"
    assert sizes(uneven, "micro_batch_size=1") == (2, 1, 2)


@pytest.mark.parametrize(
    ("words", "steps", "epochs"),
    [([], 1, None), (["steps=7"], 7, None), (["epochs=2"], None, 2), (["steps=1e3"], 1000, None)],
)
def test_length_is_steps_or_epochs(words: list[str], steps: int | None, epochs: int | None) -> None:
    config = checked(*words)
    assert (config.steps, config.epochs) == (steps, epochs)


def test_digits_are_trained_for_epochs_unless_steps_are_given() -> None:
    assert (checked(DIGITS).steps, checked(DIGITS).epochs) == (None, 5)
    assert (checked(DIGITS, "steps=3").steps, checked(DIGITS, "steps=3").epochs) == (3, None)


@pytest.mark.parametrize("word", ["seed=0", "lr=0", "lr=0.0", "seed=18446744073709551615", "accum_steps=1e1"])
def test_edges_that_are_valid(word: str) -> None:
    assert checked(word)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["accum_steps=0"], ["accum_steps"]),
        (["accum_steps=true"], ["accum_steps"]),
        (["lr=null"], ["lr"]),
        (["lr=inf"], ["lr"]),
        (["lr=true"], ["lr"]),
        (["seed=-1"], ["seed"]),
        (["seed=18446744073709551616"], ["seed"]),
        (["steps=0"], ["steps"]),
        (["steps=2", "epochs=2"], ["steps"]),
        (["device=gpu"], ["device"]),
        (["device=cuda:x"], ["device"]),
        (["normalization=items "], []),
        (["normalization=average"], ["normalization"]),
        (["save_weights=7"], ["save_weights"]),
        (["tracking.backend=wandb"], ["tracking.backend"]),
        (["sweep.on_failure=panic"], ["sweep.on_failure"]),
        (["tracking.uri=postgresql://me:secret@host/db"], ["tracking.uri"]),
        (["optimizer.name=SDG"], ["optimizer"]),
        (["+optimizer.speed=3"], ["optimizer"]),
        (["optimizer=momentum", "optimizer.momentum=-1"], ["optimizer"]),
        (["optimizer.name=null"], ["optimizer.name"]),
        (["problem.name=nothing"], ["problem.name"]),
        (["problem.batches=[]"], ["problem.batches"]),
        (["problem.batches=[{x:[[1,2]],y:[1,2]}]"], ["problem"]),
        (["problem.batches=[{x:[[1,2],[3]],y:[1,2]}]"], ["problem"]),
        (["problem.batches=[{x:[[1,2]],y:[a]}]"], ["problem.batches.0.y.0"]),
        (["problem.initial_weight=[1]"], ["problem"]),
        (["problem.bias=false", "problem.initial_bias=1"], ["problem"]),
        ([DIGITS, "problem.hidden=0"], ["problem.hidden"]),
        ([DIGITS, "problem.test_samples=1797"], ["problem.test_samples"]),
        ([DIGITS, "micro_batch_size=1438"], ["micro_batch_size"]),
        ([DIGITS, "effective_batch_size=2000"], ["micro_batch_size"]),
        ([DIGITS, "effective_batch_size=64", "accum_steps=3", MEAN], ["effective_batch_size"]),
        ([DIGITS, "effective_batch_size=64", "micro_batch_size=24", MEAN], ["effective_batch_size"]),
        ([DIGITS, "effective_batch_size=2", "accum_steps=4"], ["effective_batch_size"]),
        ([DIGITS, "accum_steps=4", "micro_batch_size=8", "effective_batch_size=64"], ["accum_steps"]),
        ([DIGITS, "epochs=1", "last_window=drop", "accum_steps=100"], ["last_window"]),
        (["device=mps", "precision=fp64"], ["precision"]),
        (["optimizer.name=LBFGS", "~optimizer.weight_decay"], ["optimizer"]),
        (["tracking.uri='postgresql://host/db?user=me&password=secret'"], ["tracking.uri"]),
        (["epochs=1", "last_window=drop", "accum_steps=5"], ["last_window"]),
        (["lr=-1", "accum_steps=0", "seed=x", "steps=1", "epochs=1"], ["lr", "accum_steps", "seed", "steps"]),
        ([DIGITS, "lr=-1", "effective_batch_size=64", "accum_steps=3", MEAN], ["lr", "effective_batch_size"]),
        ([DIGITS, "effective_batch_size=5", "micro_batch_size=8"], ["micro_batch_size"]),
        (["accum_schedule={0:1,2:99}", "epochs=3", "last_window=drop"], ["last_window"]),
        (["epochs=1", "warmup_steps=2"], ["warmup_steps"]),
        (["accum_schedule={1:2}"], ["accum_schedule"]),
        (["accum_schedule={0:0}"], ["accum_schedule"]),
        (["accum_schedule={}"], ["accum_schedule"]),
        (["accum_schedule=[1,2]"], ["accum_schedule"]),
        (["accum_schedule={0:a}"], ["accum_schedule"]),
        (["accum_schedule={a:1}"], ["accum_schedule"]),
        (["accum_schedule=4"], ["accum_schedule"]),
        (["accum_schedule={0:1}", "accum_steps=2"], ["accum_steps"]),
        (["accum_schedule={0:1}", "effective_batch_size=2"], ["effective_batch_size"]),
        (["accum_schedule={0:1}", "batchnorm=corrected_momentum"], ["batchnorm"]),
        (["clip_norm=0"], ["clip_norm"]),
        (["clip_norm=inf"], ["clip_norm"]),
        (["clip_value=-1"], ["clip_value"]),
        (["clip_norm=1", "clip_value=1"], ["clip_norm"]),
        (["lr_schedule=linear"], ["lr_schedule"]),
        (["warmup_steps=-1"], ["warmup_steps"]),
        (["warmup_steps=2", "steps=1"], ["warmup_steps"]),
        (["on_nonfinite=ignore"], ["on_nonfinite"]),
        (["batchnorm=off"], ["batchnorm"]),
        (["precision=fp8"], ["precision"]),
        (["device=cpu", "precision=tf32"], ["precision"]),
        (["accumulator=fp64"], ["accumulator"]),
        (["accumulator=fp32"], ["accumulator"]),
        (["checkpointing=1"], []),
        (["checkpointing=maybe"], ["checkpointing"]),
        (["compile=maybe"], ["compile"]),
        (["parallel=pipeline"], ["parallel"]),
        (["parallel=fsdp"], ["parallel"]),
        (["sync_every_micro_batch=true"], ["sync_every_micro_batch"]),
        (["equivalence=always"], ["equivalence"]),
        (["fused_linear=1"], []),
        (["fused_linear=true", "precision=bf16-params", "checkpointing=true", "clip_norm=1"], []),
        (["fused_linear=maybe"], ["fused_linear"]),
        *[([FUSED, word], ["fused_linear"]) for word in ("precision=bf16", "precision=fp16", "compile=true")],
        ([FUSED, "precision=bf16-params", "accumulator=fp32"], ["fused_linear"]),
        ([FUSED, IN_BACKWARD, "accum_steps=1"], ["fused_linear"]),
        ([IN_BACKWARD, "accum_steps=1", "precision=bf16", "checkpointing=true", "lr_schedule=cosine"], []),
        ([IN_BACKWARD, "accum_schedule={0:1}", "micro_batch_size=2"], []),
        (["step_in_backward=maybe"], ["step_in_backward"]),
        ([IN_BACKWARD], ["step_in_backward"]),
        ([IN_BACKWARD, "accum_schedule={0:1,5:2}", "micro_batch_size=2"], ["step_in_backward"]),
        ([DIGITS, IN_BACKWARD, "accum_steps=auto", "effective_batch_size=64"], ["step_in_backward"]),
        ([IN_BACKWARD, "accum_steps=1", "compile=true"], ["step_in_backward"]),
        ([IN_BACKWARD, "accum_steps=1", "clip_norm=1"], ["clip_norm"]),
        ([IN_BACKWARD, "accum_steps=1", "clip_value=1"], ["clip_value"]),
        ([IN_BACKWARD, "accum_steps=1", "on_nonfinite=skip"], ["on_nonfinite"]),
        ([IN_BACKWARD, "accum_steps=1", "precision=fp16"], ["precision"]),
        ([IN_BACKWARD, "accum_steps=1", "precision=bf16-params", "accumulator=fp32"], ["accumulator"]),
        (["last_window=keep"], ["last_window"]),
        (["+processes=2"], ["processes"]),
        (["+spede=3"], ["spede"]),
        (["acum_steps=3", "lrr=2", "lr=-1"], ["acum_steps", "lrr", "lr"]),
    ],
)
def test_every_fault_is_told_by_its_key(words: list[str], keys: list[str]) -> None:
    if not keys:  # the control: a sound configuration has none
        assert checked(*words)
        return
    with pytest.raises(ConfigError) as caught:
        checked(*words)
    assert sorted(fault.key for fault in caught.value.faults) == sorted(keys)
    assert all(fault.rule and fault.remedy for fault in caught.value.faults)


def test_any_two_faults_are_told_together() -> None:
    good = compose([])
    keys = sorted(set(good) & set(Config.model_fields))
    assert {"problem", "optimizer", "tracking", "sweep", "accum_steps", "lr"} <= set(keys)
    for one, other in combinations(keys, 2):
        with pytest.raises(ConfigError) as refused:
            check(good | {one: ["wrong"], other: ["wrong"]})
        assert {fault.key.partition(".")[0] for fault in refused.value.faults} >= {one, other}


@pytest.mark.parametrize("key", ["tracking.uri", "traking.uri", "tracking.url", "device"])
@pytest.mark.parametrize("uri", ["postgresql://me:s3cret@host/db", "'postgresql://host/db?password=s3cret'"])
def test_a_password_is_not_repeated_in_an_error(key: str, uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(f"{key}={uri}")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["effective_batch_size=64", "micro_batch_size=10"], (10, 10, 10, 10, 10, 10, 4)),
        (["effective_batch_size=64", "accum_steps=3"], (22, 22, 20)),
        (["effective_batch_size=9", "accum_steps=6"], (2, 2, 2, 1, 1, 1)),
        (["effective_batch_size=64", "accum_steps=4"], (16, 16, 16, 16)),
        (["effective_batch_size=5", "micro_batch_size=5"], (5,)),
    ],
)
def test_an_effective_batch_need_not_divide_where_items_are_weighed(words: list[str], sizes: tuple[int, ...]) -> None:
    config = checked(DIGITS, *words)
    assert next(config.plan(0)) == next(config.plan(7)) == sizes
    assert config.accum_steps == len(sizes)
    assert config.micro_batch_size is not None
    assert max(sizes) <= config.micro_batch_size


def test_a_schedule_says_how_long_a_window_is() -> None:
    config = checked(DIGITS, "accum_schedule={100:4,0:1}", "micro_batch_size=8")
    assert [config.accum_steps_at(step) for step in (0, 99, 100, 5000)] == [1, 1, 4, 4]
    assert list(islice(config.plan(99), 2)) == [(8,), (8, 8, 8, 8)]
    assert (config.accum_steps, config.micro_batch_size, config.effective_batch_size) == (None, 8, None)


def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def test_several_processes_share_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    two_processes(monkeypatch)
    assert sizes(DIGITS, "effective_batch_size=64", "accum_steps=2") == (2, 16, 64)
    assert sizes(DIGITS, "accum_steps=2", "micro_batch_size=8") == (2, 8, 32)
    assert next(checked(DIGITS, "effective_batch_size=64", "accum_steps=3").plan(0)) == (11,) * 5 + (9,)
    assert sizes() == (2, 2, 8), "the four mini-batches of the textbook are two for each"


@pytest.mark.parametrize("word", ["fused_linear=true", "step_in_backward=true"])
def test_several_processes_are_refused_what_one_can_do(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    words, key = (DIGITS, "accum_steps=1", word), word.partition("=")[0]
    assert checked(*words)
    two_processes(monkeypatch)
    with pytest.raises(ConfigError) as caught:
        checked(*words)
    assert [fault.key for fault in caught.value.faults] == [key]


@pytest.mark.parametrize(
    "words",
    [
        ["tracking=none"],
        ["save_weights=true"],
        ["sweep.on_failure=stop"],
        ["accum_steps=4", "micro_batch_size=2"],
        ["effective_batch_size=8"],
        ["steps=1"],
        ["steps=1.0"],
        ["problem.default_accum_steps=4"],
        ["steps=1", "last_window=drop"],
        ["equivalence=every_step"],
    ],
)
def test_the_run_key_does_not_move_with_what_cannot_change_the_result(words: list[str]) -> None:
    assert run_key(checked(*words), "cpu") == run_key(checked(), "cpu")


@pytest.mark.parametrize(
    "words",
    [
        ["lr=0.2"],
        ["seed=1"],
        ["accum_steps=3"],
        ["steps=2"],
        ["epochs=1"],
        ["normalization=items"],
        ["precision=fp64"],
        ["optimizer=momentum"],
        ["optimizer.weight_decay=0.1"],
        ["problem.bias=false"],
        ["micro_batch_size=1"],
        [DIGITS],
        ["clip_norm=1"],
        ["clip_value=1"],
        ["lr_schedule=cosine"],
        ["warmup_steps=1"],
        ["on_nonfinite=skip"],
        ["batchnorm=eval"],
        ["checkpointing=true"],
        ["compile=true"],
        ["fused_linear=true"],
        ["accum_schedule={0:4}"],
    ],
)
def test_the_run_key_moves_with_what_can(words: list[str]) -> None:
    assert run_key(checked(*words), "cpu") != run_key(checked(), "cpu")
    assert run_key(checked(), "cpu") != run_key(checked(), "cuda:0")


def test_nearest_looks_at_the_end_of_a_key() -> None:
    assert nearest("problem.hiden", ["problem.name", "problem.hidden"], "") == "did you mean problem.hidden?"
    assert nearest("problem.width", ["problem.name", "problem.hidden"], "look") == "look"


def test_flatten_keeps_lists_whole() -> None:
    assert flatten({"a": {"b": [1, {"c": 2}], "d": {}}, "e": None}) == {"a.b": [1, {"c": 2}], "e": None}
