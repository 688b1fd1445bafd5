"""The configuration of a run: the type and the rule of each setting, and the windows that follow from them.

Defaults stand in `conf/`, rules between settings in `pairs.py`.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from itertools import count, cycle, islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny

from accum_sweep.problems import ProblemParams
from accum_sweep.sizes import split
from accum_sweep.units import UNITS, parse_bytes

LARGEST = 10**12  # of what is counted: beyond it, somebody slipped on a key


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool)]  # also takes 1e3, which YAML reads as a float
Real = Annotated[float, BeforeValidator(_no_bool)]


def _bytes(value: object) -> object:
    return None if value is None else parse_bytes(value)


Bytes = Annotated[int, BeforeValidator(_bytes)]
Name = Annotated[str, BeforeValidator(lambda value: str(_no_bool(value)) if isinstance(value, int) else value)]
SIZE_RULE = f"must be a size with its unit ({', '.join(UNITS)}), or null"


def _in_order(value: object) -> object:
    """Turn {0: 1, 100: 4} into ((0, 1), (100, 4)): a schedule is one value, not a group of settings."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise ValueError("a schedule maps steps to numbers of micro-batches")
    if not all(isinstance(first, int) and not isinstance(first, bool) for first, _ in pairs):
        raise ValueError("steps are whole numbers")
    if not pairs or min(first for first, _ in pairs) != 0:
        raise ValueError("a schedule begins with step 0")
    return sorted(map(tuple, pairs))


Schedule = Annotated[tuple[tuple[Whole, Annotated[Whole, Field(ge=1, le=LARGEST)]], ...], BeforeValidator(_in_order)]


def _setting(rule: str, example: object, **limits: Any) -> Any:
    """Declare a setting with its rule and an example in words, for the error message. Defaults stand in `conf/`."""
    return Field(description=rule, examples=[example], **limits)


class Tracking(BaseModel):
    """Keys under `tracking`: where runs are kept beside their own folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["mlflow", "none"] = _setting("must be mlflow or none", "mlflow")
    uri: str | None = _setting("must be a tracking URI, or null for $MLFLOW_TRACKING_URI or ./mlflow.db", "null")
    experiment: str = _setting(
        "must be the name of an MLflow experiment, up to 200 characters", "accum-sweep", min_length=1, max_length=200
    )


class SweepOptions(BaseModel):
    """Keys under `sweep`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    on_failure: Literal["continue", "stop"] = _setting("must be continue or stop", "continue")
    retries: Whole = _setting("must be a whole number, 0 or more", 2, ge=0, le=100)
    max_failures: Whole | None = _setting("must be a whole number, 1 or more, or null", 10, ge=1, le=LARGEST)
    prune: bool = _setting("must be true or false", "false")
    resume: Name | None = _setting("must be latest or the id of a sweep", "latest")
    extend: bool = _setting("must be true or false", "true")
    dry_run: bool = _setting("must be true or false", "true")
    pairs: list[dict[str, Any]] | None = _setting(
        "must be a list of settings that go together", "[{lr:0.1,accum_steps:1},{lr:0.2,accum_steps:4}]", min_length=1
    )
    where: str | None = _setting("must be a condition on settings", "'lr * accum_steps < 1'")
    subset: Whole | None = _setting("must be a whole number, 1 or more, or null", 20, ge=1, le=LARGEST)
    subset_seed: Whole = _setting("must be a whole number, 0 or more", 0, ge=0, le=LARGEST)


class Auto(BaseModel):
    """Keys under `auto`: what accum_steps=auto looks for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective: Literal["fit", "fastest"] = _setting("must be fit or fastest", "fastest")


class Config(BaseModel):
    """One run's settings. After `check` the three sizes agree, exactly one of steps and epochs is set.

    Where `automatic` is true only the effective batch is known, until `chosen` says how it is split.

    `micro_batch_size` and `effective_batch_size` stay None where the problem's own mini-batches are taken as written
    and differ in size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    accum_steps: Whole | None = _setting("must be a whole number, 1 or more, or auto", 4, ge=1, le=LARGEST)
    micro_batch_size: Whole | None = _setting("must be a whole number, 1 or more", 16, ge=1, le=LARGEST)
    effective_batch_size: Whole | None = _setting("must be a whole number, 1 or more", 64, ge=1, le=LARGEST)
    automatic: bool = Field(description="is whether accum_steps=auto was asked for and is not chosen yet")
    auto: Auto = _setting("must hold objective", "{objective: fit}")
    accum_schedule: Schedule | None = _setting(
        "must map steps, from 0 on, to whole numbers of micro-batches, 1 or more", "{0:1,100:4}"
    )
    lr: Real = _setting("must be a finite number, 0 or more", 0.1, ge=0, allow_inf_nan=False)
    seed: Whole = _setting("must be a whole number from 0 to 2**64 - 1", 0, ge=0, lt=2**64)
    normalization: Literal["sum", "mean", "items"] = _setting("must be sum, mean or items", "items")
    steps: Whole | None = _setting("must be a whole number, 1 or more", 100, ge=1, le=LARGEST)
    epochs: Whole | None = _setting("must be a whole number, 1 or more", 5, ge=1, le=LARGEST)
    last_window: Literal["flush", "drop", "carry"] = _setting("must be flush, drop or carry", "flush")
    clip_norm: Real | None = _setting("must be a number above 0, or null", 1.0, gt=0, allow_inf_nan=False)
    clip_value: Real | None = _setting("must be a number above 0, or null", 0.5, gt=0, allow_inf_nan=False)
    lr_schedule: Literal["constant", "cosine"] = _setting("must be constant or cosine", "cosine")
    warmup_steps: Whole = _setting("must be a whole number, 0 or more", 10, ge=0, le=LARGEST)
    on_nonfinite: Literal["stop", "skip"] = _setting("must be stop or skip", "stop")
    batchnorm: Literal["train", "eval", "corrected_momentum"] = _setting(
        "must be train, eval or corrected_momentum", "train"
    )
    memory_budget: Bytes | None = _setting(SIZE_RULE, "8GiB")
    memory_limit: Bytes | None = _setting(SIZE_RULE, "2GiB")
    device: str = _setting(
        "must be auto, cpu, cuda, cuda:N or mps", "auto", pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$"
    )
    precision: Literal["fp64", "fp32", "tf32", "bf16", "fp16", "bf16-params"] = _setting(
        "must be fp64, fp32, tf32, bf16, fp16 or bf16-params", "bf16"
    )
    accumulator: Literal["fp32"] | None = _setting("must be fp32 or null", "fp32")
    checkpointing: bool = _setting("must be true or false", "true")
    compile: bool = _setting("must be true or false", "true")
    fused_linear: bool = _setting("must be true or false", "true")
    step_in_backward: bool = _setting("must be true or false", "true")
    parallel: Literal["ddp", "fsdp"] = _setting("must be ddp or fsdp", "ddp")
    sync_every_micro_batch: bool = _setting("must be true or false", "true")
    processes: int = Field(description="is how many processes torchrun has started", ge=1)
    equivalence: Literal["first_step", "every_step", "off"] = _setting(
        "must be first_step, every_step or off", "every_step"
    )
    save_weights: bool = _setting("must be true or false", "true")
    problem: SerializeAsAny[ProblemParams]
    optimizer: dict[str, Any] = _setting(
        "must hold the name of a class in torch.optim and its arguments", "{name: SGD}"
    )
    tracking: Tracking = _setting("must hold backend, uri and experiment", "{backend: none, uri: null, experiment: x}")
    sweep: SweepOptions = _setting("must hold on_failure and prune", "{on_failure: continue, prune: true}")

    def chosen(self, accum_steps: int) -> "Config":
        """Return this configuration with its effective batch split into so many micro-batches on each process."""
        assert self.effective_batch_size is not None, "check() lets nothing be chosen without it"
        micro = math.ceil(self.effective_batch_size / (accum_steps * self.processes))
        return self.model_copy(update={"automatic": False, "accum_steps": accum_steps, "micro_batch_size": micro})

    def accum_steps_at(self, step: int) -> int:
        """Return how many micro-batches the window of a step, counted from 0, has on each process."""
        if self.accum_schedule is None:
            assert self.accum_steps is not None, "check() derives accum_steps"
            return self.accum_steps
        return [accum_steps for first, accum_steps in self.accum_schedule if first <= step][-1]

    def plan(self, first_step: int) -> Iterator[tuple[int, ...]]:
        """Yield for each step from this one on the sizes of its micro-batches, those of all processes together.

        The mini-batches a problem is written in are taken in their order, beginning with the first.
        """
        sizes = (self.micro_batch_size,) if self.micro_batch_size else self.problem.written_micro_batch_sizes
        assert sizes, "check() leaves no size open that the problem does not give"
        if self.accum_steps is not None and self.micro_batch_size and self.effective_batch_size:
            sizes = split(self.effective_batch_size, self.micro_batch_size, self.accum_steps * self.processes)
        stream = cycle(sizes)
        for step in count(first_step):
            yield tuple(islice(stream, self.accum_steps_at(step) * self.processes))


# What cannot change a result: where it is kept, what is checked on the way, how its sizes were chosen.
NO_MATTER = {
    "tracking",
    "sweep",
    "save_weights",
    "equivalence",
    "automatic",
    "auto",
    "memory_budget",
    "memory_limit",
}


def run_key(config: Config, device: str) -> str:
    """Return the identity of a run: a hash of all that can change its result, and of nothing else.

    `device` is the device that `config.device` stands for, so that auto and cpu are one run where they are one device.
    """
    settings = config.model_dump(mode="json", exclude=NO_MATTER)
    settings["device"] = device
    settings["problem"] = {key: value for key, value in settings["problem"].items() if not key.startswith("default_")}
    if config.steps is not None:
        del settings["last_window"]  # every window is full
    if (config.accum_steps or 0) * (config.micro_batch_size or 0) * config.processes == config.effective_batch_size:
        del settings["effective_batch_size"]  # says nothing that the others do not
    if config.processes == 1:
        del settings["parallel"]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested settings into {"problem.hidden": 128, ...}; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
