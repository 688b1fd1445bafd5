"""The combinations of a multirun: each composed and checked once, each with a key that tells it from the others."""

import json
import logging
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import HydraContext
from omegaconf import DictConfig
from pydantic import ValidationError

from accum_sweep import where
from accum_sweep.check import check
from accum_sweep.compose import COMPOSITION_ERRORS, as_dict, explain
from accum_sweep.config import Config, SweepOptions, flatten, run_key
from accum_sweep.errors import ConfigError, Fault, UserError

log = logging.getLogger(__name__)

T = TypeVar("T")
Checked = tuple[list[str], str, Config]  # overrides, what differs, the configuration


@dataclass(frozen=True)
class Job:
    """One combination: what Hydra is told, what differs from the others, and the run key."""

    overrides: list[str]
    name: str
    config: Config
    key: str  # the run key; of several with one, which differ in what cannot change a result, the later are numbered


def combine(texts: Sequence[str], config: DictConfig, context: HydraContext) -> list[Job]:
    """Return the combinations of `texts` and `sweep.pairs`, each once, less what `where` and `subset` leave out.

    Raises one ConfigError for all faults.
    """
    overrides = OverridesParser.create(config_loader=context.config_loader).parse_overrides(list(texts))
    combinations = _combinations(overrides)
    if not combinations:
        raise UserError(f"{' '.join(texts)}: the sweep is empty; give every key at least one value")
    options = _options(config, combinations[0], context)
    combinations = [[*pair, *combination] for pair in _pairs(options, overrides) for combination in combinations]
    if options is not None and options.where is None:
        combinations = _subset(combinations, options)  # here: to look at each takes time
    varies = {text for combination in combinations for text in combination if any(text not in c for c in combinations)}
    checked: list[Checked] = []
    seen: set[str] = set()
    faults: list[Fault] = []
    for combination in combinations:
        name = " ".join(text for text in combination if text in varies) or " ".join(combination)
        try:
            found = check(as_dict(context.config_loader.load_sweep_config(config, combination)))
        except COMPOSITION_ERRORS as error:
            own = [source.path for source in config.hydra.runtime.config_sources if source.provider == "command-line"]
            raise explain(error, combination, *own) from error
        except ConfigError as error:
            faults += error.faults
        else:
            if (whole := found.model_dump_json()) not in seen:
                seen.add(whole)
                checked.append((combination, name or found.problem.name, found))
    if faults:
        raise ConfigError(faults)
    if len(checked) < len(combinations):
        log.warning("%s combinations, of which %s are different; each is run once", len(combinations), len(checked))
    chosen = checked
    if options is not None and options.where is not None:
        chosen = _subset([parts for parts in checked if _holds(options.where, parts[-1])], options)
    keys = _numbered([_key(found) for _, _, found in chosen])
    return [Job(*parts, key) for parts, key in zip(chosen, keys, strict=True)]


def _options(config: DictConfig, combination: list[str], context: HydraContext) -> SweepOptions | None:
    """Return what says which combinations there are; None where that is wrong, which each of them will tell."""
    try:
        composed = as_dict(context.config_loader.load_sweep_config(config, combination))
        return SweepOptions.model_validate(composed.get("sweep"))
    except (*COMPOSITION_ERRORS, ValidationError):
        return None


def _pairs(options: SweepOptions | None, overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of each set of values that go together; one empty set where there are none."""
    if options is None or options.pairs is None:
        return [[]]
    keys = {override.key_or_group for override in overrides}
    for key in {key for pair in options.pairs for key in pair}:
        if key in keys:
            raise ConfigError([Fault("sweep.pairs", key, "is given beside it too", "leave it out in one place")])
        missing = next((pair for pair in options.pairs if key not in pair), None)
        if missing is not None:
            raise ConfigError([Fault("sweep.pairs", missing, f"has no {key}, which others have", "give it a value")])
    return [[f"{key}={word(value)}" for key, value in pair.items()] for pair in options.pairs]


def word(value: object) -> str:
    """Return a value as Hydra reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{word(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(word, value)) + "]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    text = str(value)
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.+-]*", text):
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return text


def _holds(condition: str, config: Config) -> bool:
    settings = flatten(config.model_dump(mode="json"))
    settings |= {"problem": config.problem.name, "optimizer": config.optimizer["name"]}
    try:
        return where.holds(condition, settings)
    except UserError as error:
        raise ConfigError([Fault("sweep.where", condition, *str(error).split("; ", 1))]) from error


def _subset(found: list[T], options: SweepOptions) -> list[T]:
    """Return those that `sweep.subset` draws, in their order; raise ConfigError where `sweep.where` has left none."""
    if not found:
        rule = "holds for no combination, so there is nothing to run"
        raise ConfigError([Fault("sweep.where", options.where, rule, "widen it")])
    if options.subset is None or options.subset >= len(found):
        return found
    drawn = random.Random(options.subset_seed).sample(range(len(found)), options.subset)
    return [found[number] for number in sorted(drawn)]


def _combinations(overrides: list[Override]) -> list[list[str]]:
    """Return the overrides of each job, in Hydra's own order: the last key turns fastest."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    for override in overrides:
        if override.is_sweep_override() and not override.is_discrete_sweep():
            rule = "has no single values to sweep over"
            raise ConfigError([Fault(override.key_or_group, override.input_line, rule, "list them: a,b,c")])
    return BasicSweeper.split_arguments(overrides, None)[0]


def _key(config: Config) -> str:
    from accum_sweep.device import resolve  # torch, which check() has loaded

    try:
        return run_key(config, str(resolve(config.device, config.precision)))
    except UserError:  # the device is not there; the run will say so
        return run_key(config, config.device)


def _numbered(keys: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    numbered = []
    for key in keys:
        numbered.append(f"{key}.{seen[key]}" if seen[key] else key)
        seen[key] += 1
    return numbered
