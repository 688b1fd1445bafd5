"""Composing configurations with Hydra, and putting what Hydra refuses into the words of our own errors."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from accum_sweep.check import check
from accum_sweep.config import flatten
from accum_sweep.errors import ConfigError, Fault, UserError, nearest, without_secrets

PACKAGE = Path(__file__).parent
# Inside the package in a wheel, beside `src` in a checkout.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parents[1] / "conf"
HYDRA_VERSION_BASE = "1.3"
COMPOSITION_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError)


def compose(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the configuration for `overrides`, unchecked; raise ConfigError where Hydra refuses them."""
    try:
        return _compose(overrides)
    except COMPOSITION_ERRORS as error:
        raise explain(error, overrides) from error


def as_dict(composed: DictConfig) -> dict[str, Any]:
    """Turn Hydra's config into plain data; it travels no further."""
    ours = OmegaConf.masked_copy(composed, [str(key) for key in composed if key != "hydra"])
    content = OmegaConf.to_container(ours, resolve=True, throw_on_missing=True)
    assert isinstance(content, dict), "config.yaml is a mapping"
    return {str(key): value for key, value in content.items()}


def explain(error: Exception, overrides: Sequence[str], config_dir: str | None = None) -> UserError:
    """Say all that is wrong with `overrides`: what Hydra refuses, one by one, and what `check` finds in the rest.

    Overrides that take several values are left to the sweeper, which explains its combinations. `config_dir` is the
    user's own, as in --config-dir.
    """
    faults: list[Fault] = []
    swept = [text for text, parsed in _parsed(overrides) if parsed.is_sweep_override()]
    if swept and "--multirun" in str(error):
        return UserError(f"{' '.join(swept)}: several values are a sweep; add -m")
    remaining = [text for text in overrides if text not in swept]
    if config_dir:
        remaining.insert(0, f"hydra.searchpath=['{Path(config_dir).absolute()}']")
    while True:
        fault, culprit = _fault(error, remaining)
        if culprit is None:
            return UserError("\n".join([*map(str, faults), _words(error) if fault is None else str(fault)]))
        assert fault is not None, "a culprit has a fault"
        faults.append(fault)
        remaining.remove(culprit)
        try:
            check(_compose(remaining), with_torch=False)
        except ConfigError as more:
            return ConfigError([*faults, *more.faults])
        except COMPOSITION_ERRORS as next_error:
            error = next_error
        else:
            return ConfigError(faults)


def _compose(overrides: Sequence[str]) -> dict[str, Any]:
    hydra, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # of a Hydra application around us
    try:
        with initialize_config_dir(str(CONF), version_base=HYDRA_VERSION_BASE):
            return as_dict(hydra_compose("config", list(overrides)))
    finally:
        GlobalHydra.instance().hydra = hydra


def _fault(error: Exception, overrides: Sequence[str]) -> tuple[Fault | None, str | None]:
    """Return the fault Hydra stumbled over, and the override that holds it; None for what cannot be told."""
    if isinstance(error, OverrideParseException):
        culprit = next((text for text in overrides if text == error.override), None)
        rule, remedy = "is no key=value that Hydra can read", f"quote it, or see {HYDRA_GRAMMAR}"
        return Fault(*_key_and_value(error.override), rule, remedy), culprit
    message = str(error)
    there = re.search(r"An item is already at '([^']+)'", message)
    if there:
        fault = Fault(f"+{there[1]}", "...", "is there already", f"to set it, drop the +: {there[1]}=...")
        return fault, next((text for text in overrides if text.startswith(f"+{there[1]}=")), None)
    unknown = re.search(r"Could not (?:override|append to config|delete from config)[^']*'([^']+)'", message)
    missing = re.search(r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':((?:\n\t\S+)*)", message)
    group = re.search(r"Could not override '([^']+)'\. No match in the defaults list", message)
    key = missing[1] if missing else group[1] if group else unknown[1] if unknown else None
    if key is None:
        return None, None
    for text, parsed in _parsed(overrides):
        if parsed.key_or_group != key:
            continue
        value = text.partition("=")[2] or None
        if missing:
            options = missing[3].split()
            remedy = nearest(missing[2], options, f"choose from {', '.join(options)}")
            return Fault(key, value, f"there is no such {key}", remedy), text
        if text.startswith("~"):
            return Fault(text, value, "cannot be taken out", "leave it in"), text
        others = [other for other in overrides if other != text]
        return Fault(key, value, "is no known key", nearest(key, _siblings(key, others), "see --cfg job")), text
    return None, None


HYDRA_GRAMMAR = "hydra.cc/docs/advanced/override_grammar/basic"


def _siblings(key: str, overrides: Sequence[str]) -> list[str]:
    """Return the known keys and groups that stand where `key` would."""
    try:
        composed = _compose(overrides)
    except COMPOSITION_ERRORS:  # another override is wrong too
        composed = _compose([])
    groups = [path.name for path in CONF.iterdir() if path.is_dir() and path.name != "hydra"]
    parent = key.rpartition(".")[0]
    return [known for known in [*flatten(composed), *groups] if known.rpartition(".")[0] == parent]


def _parsed(overrides: Sequence[str]) -> Iterator[tuple[str, Override]]:
    """Yield each override and what Hydra reads in it; what cannot be parsed is skipped."""
    parser = OverridesParser.create()
    for text in overrides:
        try:
            parsed = parser.parse_override(text)
        except HydraException:
            continue
        yield text, parsed


def _key_and_value(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


def _words(error: Exception) -> str:
    """Return what Hydra says, with the cause below it that it would print too."""
    cause = f"\n{error.__cause__}" if isinstance(error.__cause__, OmegaConfBaseException) else ""
    return without_secrets(f"{error}{cause}".strip())
