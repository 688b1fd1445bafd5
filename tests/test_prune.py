"""Which runs cannot fit where another did not: both sides of the rule."""

import pytest

from accum_sweep.check import check
from accum_sweep.compose import compose
from accum_sweep.config import Config
from accum_sweep.problems import custom
from accum_sweep.prune import needs_as_much

DATA = 1437  # training samples of digits_mlp


def config(words: str) -> Config:
    return check(compose(["problem=digits_mlp", "tracking=none", *words.split()]), with_torch=False)


FIXED = "steps=3 "
EPOCHS = "epochs=1 "

MUST = [
    ("the same", "accum_steps=2 micro_batch_size=16", "accum_steps=2 micro_batch_size=16"),
    ("larger micro-batches", "accum_steps=1 micro_batch_size=16", "accum_steps=1 micro_batch_size=17"),
    ("the first of more", "accum_steps=1 micro_batch_size=16", "accum_steps=8 micro_batch_size=16"),
    ("more of them", "accum_steps=2 micro_batch_size=16", "accum_steps=4 micro_batch_size=16"),
    ("fewer and larger, several still", "accum_steps=8 micro_batch_size=16", "accum_steps=2 micro_batch_size=64"),
    (
        "an effective batch in larger pieces",
        "effective_batch_size=64 accum_steps=4",
        "effective_batch_size=64 accum_steps=2",
    ),
    (
        "ragged, but larger",
        "effective_batch_size=30 micro_batch_size=16",
        "effective_batch_size=40 micro_batch_size=20",
    ),
    ("another seed", "accum_steps=1 micro_batch_size=16 seed=1", "accum_steps=1 micro_batch_size=16 seed=2"),
    ("another learning rate", "accum_steps=1 micro_batch_size=16 lr=1", "accum_steps=1 micro_batch_size=16 lr=0.1"),
]

MAY_FIT = [
    ("smaller micro-batches", "accum_steps=1 micro_batch_size=16", "accum_steps=1 micro_batch_size=15"),
    ("one, which meets no gradients", "accum_steps=2 micro_batch_size=16", "accum_steps=1 micro_batch_size=32"),
    ("one, of the same size", "accum_steps=2 micro_batch_size=16", "accum_steps=1 micro_batch_size=16"),
    ("a window of fewer samples", "accum_steps=8 micro_batch_size=16", "accum_steps=2 micro_batch_size=16"),
    ("smaller pieces of one batch", "effective_batch_size=64 accum_steps=1", "effective_batch_size=64 accum_steps=2"),
    ("a small second one", "accum_steps=2 micro_batch_size=16", "effective_batch_size=40 micro_batch_size=32"),
    ("another precision", "accum_steps=1 micro_batch_size=16", "accum_steps=1 micro_batch_size=16 precision=bf16"),
    ("more precise", "accum_steps=1 micro_batch_size=16", "accum_steps=1 micro_batch_size=16 precision=fp64"),
    ("another optimizer", "accum_steps=1 micro_batch_size=16 optimizer=adamw", "accum_steps=1 micro_batch_size=16"),
    ("its argument", "accum_steps=1 micro_batch_size=8", "accum_steps=1 micro_batch_size=8 +optimizer.foreach=false"),
    ("checkpointing", "accum_steps=1 micro_batch_size=16", "accum_steps=1 micro_batch_size=16 checkpointing=true"),
    ("another model", "accum_steps=1 micro_batch_size=16", "accum_steps=1 micro_batch_size=16 problem.hidden=8"),
    ("other data", "accum_steps=1 micro_batch_size=16", "accum_steps=1 micro_batch_size=16 problem.test_samples=9"),
    ("another device", "accum_steps=1 micro_batch_size=16 device=cuda", "accum_steps=1 micro_batch_size=16 device=cpu"),
    ("another limit", "accum_steps=1 micro_batch_size=8", "accum_steps=1 micro_batch_size=8 memory_limit=2GiB"),
    ("no check", "accum_steps=1 micro_batch_size=16", "accum_steps=1 micro_batch_size=16 equivalence=off"),
    ("no clipping", "accum_steps=1 micro_batch_size=16 clip_norm=1", "accum_steps=1 micro_batch_size=16"),
    ("a schedule", "accum_schedule={0:2} micro_batch_size=16", "accum_schedule={0:4} micro_batch_size=16"),
    ("automatic", "accum_steps=auto effective_batch_size=16", "accum_steps=auto effective_batch_size=16"),
    ("automatic after that", "accum_steps=1 effective_batch_size=16", "accum_steps=auto effective_batch_size=16"),
]


@pytest.mark.parametrize("length", [FIXED, EPOCHS])
@pytest.mark.parametrize(("why", "failed", "other"), MUST, ids=[why for why, _, _ in MUST])
def test_what_must_need_as_much(why: str, failed: str, other: str, length: str) -> None:
    assert needs_as_much(config(length + other), config(length + failed))


@pytest.mark.parametrize("length", [FIXED, EPOCHS])
@pytest.mark.parametrize(("why", "failed", "other"), MAY_FIT, ids=[why for why, _, _ in MAY_FIT])
def test_what_may_fit(why: str, failed: str, other: str, length: str) -> None:
    assert not needs_as_much(config(length + other), config(length + failed))


def test_an_epoch_too_short_for_two_full_windows_never_meets_the_optimizers_state() -> None:
    half = DATA // 2
    failed = config("epochs=1 accum_steps=1 micro_batch_size=16")
    assert needs_as_much(config(f"epochs=1 accum_steps=1 micro_batch_size={half}"), failed)
    assert not needs_as_much(config(f"epochs=1 accum_steps=1 micro_batch_size={half + 1}"), failed)
    by_steps = config("steps=3 accum_steps=1 micro_batch_size=16")
    assert needs_as_much(config(f"steps=3 accum_steps=1 micro_batch_size={half + 1}"), by_steps)


def test_mini_batches_as_written_are_not_compared() -> None:
    written = check(compose(["problem.batches=[{x:[[1,1]],y:[1]},{x:[[1,1],[1,2]],y:[1,2]}]"]), with_torch=False)
    assert written.micro_batch_size is None
    assert not needs_as_much(written, written)


def test_a_problem_of_ones_own_may_draw_its_sizes_by_the_seed() -> None:
    own = custom.Params(name="custom", factory="json:loads", samples=100)
    one, two = (
        config(f"accum_steps=1 micro_batch_size=8 seed={seed}").model_copy(update={"problem": own}) for seed in (1, 2)
    )
    assert needs_as_much(one, one)
    assert not needs_as_much(two, one)


def test_several_processes_are_not_added_up() -> None:
    several = config("accum_steps=1 micro_batch_size=8").model_copy(update={"processes": 2})
    assert not needs_as_much(several, several)
