"""From what Hydra composed, as a plain dictionary, to a checked `Config`, or to one error that tells all faults.

Reads and writes nothing. Rules of one setting stand beside it in `config.py`, rules between settings in `pairs.py`;
here stand those of sizes and lengths, and those that ask the machine.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from accum_sweep import launch, limit
from accum_sweep.config import Config, Tracking
from accum_sweep.errors import ConfigError, Fault, UserError, nearest, without_secrets
from accum_sweep.pairs import pair_faults
from accum_sweep.problems import ProblemParams, params_class
from accum_sweep.sizes import SIZES, derive_length, derive_sizes
from accum_sweep.units import show_bytes

# What is checked in the place of a setting that is wrong in itself.
STAND_INS: dict[str, Any] = {
    **dict.fromkeys((*SIZES, "steps", "epochs")),
    "optimizer": {"name": "SGD"},
    "lr": 0.0,
    "normalization": "items",
    "automatic": False,
    "auto": {"objective": "fit"},
    "accum_schedule": None,
    "last_window": "flush",
    "seed": 0,
    "clip_norm": None,
    "clip_value": None,
    "lr_schedule": "constant",
    "warmup_steps": 0,
    "on_nonfinite": "stop",
    "batchnorm": "train",
    "memory_budget": None,
    "memory_limit": None,
    "device": "auto",
    "precision": "fp32",
    "accumulator": None,
    "checkpointing": False,
    "compile": False,
    "fused_linear": False,
    "step_in_backward": False,
    "parallel": "ddp",
    "sync_every_micro_batch": False,
    "equivalence": "off",
    "save_weights": False,
    "tracking": {"backend": "none", "uri": None, "experiment": "none"},
    "sweep": {
        **dict.fromkeys(("prune", "extend", "dry_run"), False),
        **dict.fromkeys(("resume", "max_failures", "pairs", "where", "subset")),
        **dict.fromkeys(("subset_seed", "retries"), 0),
        "on_failure": "continue",
    },
}


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
    for key, remedy in (("processes", "start with torchrun --nproc-per-node=2"), ("automatic", "use accum_steps=auto")):
        if key in raw:
            faults.append(Fault(key, raw[key], "is no setting", remedy))
    raw["processes"] = launch.world_size()
    raw["automatic"] = raw.get("accum_steps") == "auto"
    if raw["automatic"]:
        raw["accum_steps"] = None
    try:
        config = Config.model_validate(raw)
    except ValidationError as error:
        faults += list(_field_faults(error, Config))
        bad |= {str(fault["loc"][0]) for fault in error.errors()}
        # The rules between settings are checked on what is sound, so that all faults are told at once.
        sound = {key: value for key, value in raw.items() if key not in bad or key == "problem"}
        config = Config.model_validate(STAND_INS | sound)
    if "problem" not in bad:
        config, more = _with_derived(config, bad)
        faults += more
    faults += [fault for fault in (*pair_faults(config), *_limit_faults(config)) if fault.key not in bad]
    if "tracking" not in bad:
        faults += _secret_faults(config.tracking)
    if not bad & {"optimizer", "lr"}:
        faults += _optimizer_faults(config, with_torch and not faults)
    if with_torch and not faults:
        faults += _automatic_device_faults(config)
    if faults:
        raise ConfigError(faults)
    return config


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
        root = model.model_fields.get(where[0]) if where else None
        if field is None and root is not None and root.examples:  # inside a setting that is one value to the user
            key, field = prefix + where[0], root
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
    sizes = None
    if not bad & set(SIZES):
        try:
            sizes = _sizes(config)
            config = config.model_copy(update=dict(zip(SIZES, sizes, strict=True)))
        except ConfigError as error:
            faults += error.faults
    if not bad & {"steps", "epochs"}:
        try:
            steps, epochs = derive_length(config.steps, config.epochs, problem)
            config = config.model_copy(update={"steps": steps, "epochs": epochs})
            if sizes is not None:
                _check_length(config.chosen(1) if config.automatic else config)
        except ConfigError as error:
            faults += error.faults
    return config, faults


def _sizes(config: Config) -> tuple[int | None, int | None, int | None]:
    """Return the three sizes; under a schedule only the micro-batch's is the same in every window."""
    accum, exact = config.accum_steps, config.normalization == "items"
    if config.automatic:
        return _open_sizes(config)
    if config.accum_schedule is not None:
        for key in ("accum_steps", "effective_batch_size"):
            if (value := getattr(config, key)) is not None:
                rule = "excludes accum_schedule, which says how many micro-batches each window has"
                raise ConfigError([Fault(key, value, rule, "give one of them, and micro_batch_size")])
        accum = config.accum_schedule[0][1]
    sizes = derive_sizes(
        accum, config.micro_batch_size, config.effective_batch_size, config.problem, config.processes, exact
    )
    return (None, sizes[1], None) if config.accum_schedule is not None else sizes


def _open_sizes(config: Config) -> tuple[None, None, int]:
    """Return the sizes of accum_steps=auto: the effective batch is given, the rest is chosen in the run."""
    faults = []
    if config.effective_batch_size is None:
        faults.append(Fault("accum_steps", "auto", "needs an effective batch to split", "give effective_batch_size"))
    elif config.effective_batch_size < config.processes:
        rule = f"is less than one sample for each of {config.processes} processes"
        faults.append(Fault("effective_batch_size", config.effective_batch_size, rule, "raise it"))
    if config.micro_batch_size is not None:
        rule = "excludes accum_steps=auto, which chooses it"
        faults.append(Fault("micro_batch_size", config.micro_batch_size, rule, "leave one of them out"))
    if config.accum_schedule is not None:
        faults.append(Fault("accum_schedule", "...", "excludes accum_steps=auto", "leave one of them out"))
    if config.normalization != "items":
        rule = "makes the training depend on how a batch is split, which accum_steps=auto chooses"
        faults.append(Fault("normalization", config.normalization, rule, "use normalization=items"))
    if faults:
        raise ConfigError(faults)
    assert config.effective_batch_size is not None, "a fault otherwise"
    return None, None, config.effective_batch_size


def _check_length(config: Config) -> None:
    """Raise ConfigError where no window would be full, or the training ends before it has warmed up."""
    problem = config.problem
    firsts = [first for first, _ in config.accum_schedule or ((0, 0),)]
    too_short = any(sum(next(config.plan(first))) > problem.train_samples for first in firsts)
    if config.epochs is not None and config.last_window == "drop" and too_short:
        rule = f"an epoch of {problem.train_samples} samples holds no full window, so there would be no step"
        remedy = "use last_window=flush or carry, or a smaller window"
        raise ConfigError([Fault("last_window", "drop", rule, remedy)])
    windows = math.ceil(problem.train_samples / sum(next(config.plan(0))))
    steps = config.steps or (config.epochs or 0) * windows
    if config.accum_schedule is None and config.warmup_steps > steps:
        rule = f"is more than the {steps} steps there are"
        raise ConfigError([Fault("warmup_steps", config.warmup_steps, rule, "lower it, or train longer")])


def _limit_faults(config: Config) -> Iterator[Fault]:
    """Find where memory_limit could not be kept."""
    if config.memory_limit is None:
        return
    shown = show_bytes(config.memory_limit)
    if not limit.supported():
        yield Fault("memory_limit", shown, f"needs Linux, {sys.platform} keeps no such limit", "leave it out")
    if config.device not in ("auto", "cpu"):
        yield _no_limit_there(shown, config.device)
    if config.processes > 1:
        rule = f"needs a process for each run alone, but torchrun's {config.processes} stay for all"
        yield Fault("memory_limit", shown, rule, "leave it out, or start without torchrun")


def _automatic_device_faults(config: Config) -> list[Fault]:
    """Find, which takes torch, where device=auto is no CPU and yet memory_limit is set."""
    if config.memory_limit is None or config.device != "auto":
        return []
    from accum_sweep.device import resolve

    device = resolve(config.device, config.precision)
    return [] if device.type == "cpu" else [_no_limit_there(show_bytes(config.memory_limit), f"auto, here {device}")]


def _no_limit_there(shown: str, device: str) -> Fault:
    rule = f"limits the CPU's memory, not that of device={device}, whose own size is its limit"
    return Fault("memory_limit", shown, rule, "leave it out, or use device=cpu")


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
