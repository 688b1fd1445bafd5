"""The combinations of a multirun: each composed and checked once, each with a key that tells it from the others."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import HydraContext
from omegaconf import DictConfig

from accum_sweep.check import check
from accum_sweep.compose import COMPOSITION_ERRORS, as_dict, explain
from accum_sweep.config import Config, run_key
from accum_sweep.errors import ConfigError, Fault, UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One combination: what Hydra is told, what differs from the others, and the run key."""

    overrides: list[str]
    name: str
    config: Config
    key: str  # the run key; of several with one, which differ in what cannot change a result, the later are numbered


def combine(texts: Sequence[str], config: DictConfig, context: HydraContext) -> list[Job]:
    """Return every combination of `texts`, each once; raise one ConfigError for all faults."""
    overrides = OverridesParser.create(config_loader=context.config_loader).parse_overrides(list(texts))
    combinations = _combinations(overrides)
    if not combinations:
        raise UserError(f"{' '.join(texts)}: the sweep is empty; give every key at least one value")
    varies = {text for combination in combinations for text in combination if any(text not in c for c in combinations)}
    checked: list[tuple[list[str], str, Config]] = []
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
    keys = _numbered([_key(found) for _, _, found in checked])
    return [Job(*parts, key) for parts, key in zip(checked, keys, strict=True)]


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
