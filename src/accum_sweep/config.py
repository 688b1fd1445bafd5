"""The configuration of a run: its types, its rules, and the sizes that follow from the ones given.

`check` takes what Hydra composed, as a plain dictionary, and returns a `Config` or one error that tells all faults. It
neither reads nor writes anything.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError

from accum_sweep.errors import ConfigError, Fault, UserError, nearest, without_secrets
from accum_sweep.problems import ProblemParams, params_class
from accum_sweep.sizes import SIZES, Sizes, check_last_window, derive_length, derive_sizes

LARGEST = 10**12  # of what is counted: beyond it, somebody slipped on a key


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


Whole = Annotated[int, BeforeValidator(_no_bool)]  # also takes 1e3, which YAML reads as a float
Real = Annotated[float, BeforeValidator(_no_bool)]


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


class Config(BaseModel):
    """One run's settings. After `check` the three sizes agree, exactly one of steps and epochs is set.

    `micro_batch_size` and `effective_batch_size` stay None where the problem's own mini-batches are taken as written
    and differ in size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    accum_steps: Whole | None = _setting("must be a whole number, 1 or more", 4, ge=1, le=LARGEST)
    micro_batch_size: Whole | None = _setting("must be a whole number, 1 or more", 16, ge=1, le=LARGEST)
    effective_batch_size: Whole | None = _setting("must be a whole number, 1 or more", 64, ge=1, le=LARGEST)
    lr: Real = _setting("must be a finite number, 0 or more", 0.1, ge=0, allow_inf_nan=False)
    seed: Whole = _setting("must be a whole number from 0 to 2**64 - 1", 0, ge=0, lt=2**64)
    normalization: Literal["sum", "mean", "items"] = _setting("must be sum, mean or items", "items")
    steps: Whole | None = _setting("must be a whole number, 1 or more", 100, ge=1, le=LARGEST)
    epochs: Whole | None = _setting("must be a whole number, 1 or more", 5, ge=1, le=LARGEST)
    last_window: Literal["flush", "drop"] = _setting("must be flush or drop", "flush")
    device: str = _setting(
        "must be auto, cpu, cuda, cuda:N or mps", "auto", pattern=r"^(auto|cpu|mps|cuda(:\d{1,3})?)$"
    )
    precision: Literal["fp32", "fp64"] = _setting("must be fp32 or fp64", "fp32")
    save_weights: bool = _setting("must be true or false", "true")
    problem: SerializeAsAny[ProblemParams]
    optimizer: dict[str, Any] = _setting(
        "must hold the name of a class in torch.optim and its arguments", "{name: SGD}"
    )
    tracking: Tracking = _setting("must hold backend, uri and experiment", "{backend: none, uri: null, experiment: x}")
    sweep: SweepOptions = _setting("must hold on_failure", "{on_failure: continue}")

    @property
    def micro_batch_sizes(self) -> tuple[int, ...]:
        """Sizes of the micro-batches, to be repeated in this order: one size, or those the problem is written in."""
        sizes = (self.micro_batch_size,) if self.micro_batch_size else self.problem.written_micro_batch_sizes
        assert sizes, "check() leaves no size open that the problem does not give"
        return sizes


# What is checked in the place of a setting that is wrong in itself.
STAND_INS: dict[str, Any] = {
    **dict.fromkeys((*SIZES, "steps", "epochs")),
    "optimizer": {"name": "SGD"},
    "lr": 0.0,
    "normalization": "items",
    "last_window": "flush",
    "seed": 0,
    "device": "auto",
    "precision": "fp32",
    "save_weights": False,
    "tracking": {"backend": "none", "uri": None, "experiment": "none"},
    "sweep": {"on_failure": "continue"},
}


def run_key(config: Config, device: str) -> str:
    """Return the identity of a run: a hash of all that can change its result, and of nothing else.

    `device` is the device that `config.device` stands for, so that auto and cpu are one run where they are one device.
    """
    settings = config.model_dump(mode="json", exclude={"tracking", "sweep", "save_weights"})
    settings["device"] = device
    settings["problem"] = {key: value for key, value in settings["problem"].items() if not key.startswith("default_")}
    if config.steps is not None:
        del settings["last_window"]  # every window is full
    if config.micro_batch_size is not None:
        del settings["effective_batch_size"]  # says nothing that the other two do not
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def check(composed: Mapping[str, Any], with_torch: bool = True) -> Config:
    """Return the checked configuration with its sizes derived; raise ConfigError with every fault found.

    torch, which takes a second to load, is asked for its opinion last, and only where there is no other fault.
    """
    raw = dict(composed)
    faults: list[Fault] = []
    bad: set[str] = set()
    try:
        raw["problem"] = _problem(raw.get("problem"))
    except ConfigError as error:
        faults += error.faults
        bad.add("problem")
        raw["problem"] = ProblemParams(name="unknown")
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        faults += list(_field_faults(error, Config))
        bad |= {str(fault["loc"][0]) for fault in error.errors()}
        # The rules between settings are checked on what is sound, so that all faults are told at once.
        config = Config.model_validate(STAND_INS | {key: value for key, value in raw.items() if key not in bad})
    if "problem" not in bad:
        config, more = _with_derived(config, bad)
        faults += more
    if config.device == "mps" and config.precision == "fp64":
        faults.append(Fault("precision", "fp64", "device=mps has no float64", "use precision=fp32 or device=cpu"))
    if "tracking" not in bad:
        faults += _secret_faults(config.tracking)
    if not bad & {"optimizer", "lr"}:
        faults += _optimizer_faults(config, with_torch and not faults)
    if faults:
        raise ConfigError(faults)
    return config


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested settings into {"problem.hidden": 128, ...}; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def _problem(raw: object) -> ProblemParams:
    """Return the parameters of the problem that `raw["name"]` names."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("name"), str):
        raise ConfigError([Fault("problem", raw, "must be a problem with a name", "for example problem=linear")])
    cls = params_class(raw["name"])
    try:
        return cls(**raw)
    except ValidationError as error:
        raise ConfigError(list(_field_faults(error, cls, "problem."))) from error


def _field_faults(error: ValidationError, model: type[BaseModel], prefix: str = "") -> Iterator[Fault]:
    """Put pydantic's findings into words: the key, the rule, the value and what to do."""
    for finding in error.errors():
        where = [str(part) for part in finding["loc"]]
        key = prefix + ".".join(where)
        if finding["type"] == "extra_forbidden":
            yield Fault(key, finding["input"], "is no known key", nearest(where[-1], model.model_fields, "take it out"))
            continue
        field = _field(model, where)
        if finding["type"] == "missing":
            yield Fault(key, "(missing)", str(field.description) if field else "must be there", "leave it in")
            continue
        value = finding["input"] if where else "..."
        if field is not None and field.examples:
            yield Fault(key, value, str(field.description), f"for example {key}={field.examples[0]}")
        else:
            rule = finding["msg"].removeprefix("Value error, ")
            remedy = f"{key} is {field.description}" if field is not None and field.description else "see --cfg job"
            yield Fault(key.rstrip("."), value, rule, remedy)


def _field(model: type[BaseModel], where: list[str]) -> Any:
    """Return the declaration of the setting at `where`, or None where it is deeper than a declaration goes."""
    field = model.model_fields.get(where[0]) if where else None
    for part in where[1:]:
        inner = getattr(field, "annotation", None)
        field = inner.model_fields.get(part) if isinstance(inner, type) and issubclass(inner, BaseModel) else None
    return field


def _with_derived(config: Config, bad: set[str]) -> tuple[Config, list[Fault]]:
    """Fill in sizes and length where what they follow from is sound; return the faults found on the way."""
    problem, faults = config.problem, list[Fault]()
    sizes: Sizes | None = None
    if not bad & set(SIZES):
        try:
            sizes = derive_sizes(config.accum_steps, config.micro_batch_size, config.effective_batch_size, problem)
            config = config.model_copy(update=dict(zip(SIZES, sizes, strict=True)))
        except ConfigError as error:
            faults += error.faults
    if not bad & {"steps", "epochs"}:
        try:
            steps, epochs = derive_length(config.steps, config.epochs, problem)
            config = config.model_copy(update={"steps": steps, "epochs": epochs})
            if sizes is not None:
                check_last_window(config.last_window, epochs, sizes, problem)
        except ConfigError as error:
            faults += error.faults
    return config, faults


def _secret_faults(tracking: Tracking) -> list[Fault]:
    """A password in the config would end up in files, parameters and logs; the environment is the place for it."""
    if tracking.uri and without_secrets(tracking.uri) != tracking.uri:
        rule, remedy = "must not hold a password", "export MLFLOW_TRACKING_URI and leave tracking.uri out"
        return [Fault("tracking.uri", tracking.uri, rule, remedy)]
    return []


def _optimizer_faults(config: Config, with_torch: bool) -> list[Fault]:
    """Let torch.optim judge its own arguments, on one throw-away weight."""
    if not isinstance(config.optimizer.get("name"), str):
        return [Fault("optimizer.name", config.optimizer.get("name"), "must name a class in torch.optim", "e.g. SGD")]
    if not with_torch:
        return []
    from accum_sweep.optimizers import probe

    try:
        probe(config.optimizer, config.lr)
    except UserError as error:
        settings = " ".join(f"{key}={value}" for key, value in config.optimizer.items() if key != "name")
        return [Fault("optimizer", f"{config.optimizer['name']} {settings}".strip(), str(error), "see torch.optim")]
    return []
