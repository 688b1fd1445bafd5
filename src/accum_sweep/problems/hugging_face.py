"""Decoders of Hugging Face transformers, from what is on this machine. Loads torch and transformers: import it late.

What transformers refuses becomes a ConfigError that names the key of `problem=causal_lm`.
"""

import importlib
import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from accum_sweep.errors import ConfigError, Fault, nearest
from accum_sweep.problems.corpus import END, VOCABULARY
from accum_sweep.problems.held_out import evaluating

transformers: Any = importlib.import_module("transformers")  # typed differently from version to version, or not there
transformers.utils.logging.disable_progress_bar()  # the run has its own; and -q means quiet

# A llama of 1.07 million weights; other architectures take what they know of it. Their own defaults are for billions.
SMALL = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}

REFUSALS = (ValueError, TypeError, KeyError, AttributeError, ImportError, OSError, IndexError)  # but no lack of memory


def small(model_type: str, settings: Mapping[str, Any], dtype: torch.dtype, context: int) -> nn.Module:
    """Build a model of an architecture by its keys; where none are given it is small and without dropout."""
    config_class = _config_class(model_type, "problem.model_type", model_type)
    try:
        standard = {name: value for name, value in vars(config_class()).items() if not name.startswith("_")}
    except REFUSALS as error:
        raise _refused("problem.model_type", model_type, error) from error
    names: dict[str, str] = config_class.attribute_map  # from the common names of keys to the architecture's own
    known = standard.keys() | names.keys()
    rule = f"is no key of {model_type} in transformers {transformers.__version__}"
    unknown = sorted(settings.keys() - known)
    if unknown:
        remedies = {key: nearest(key, known, "take it out") for key in unknown}
        raise ConfigError([Fault(f"problem.config.{key}", settings[key], rule, remedies[key]) for key in unknown])
    defaults: dict[str, Any] = dict(SMALL)
    defaults |= {"vocab_size": VOCABULARY, "max_position_embeddings": context}
    defaults |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END)
    defaults |= {name: 0.0 for name, value in standard.items() if "drop" in name and isinstance(value, float)}
    chosen: dict[str, Any] = {names.get(key, key): value for key, value in defaults.items() if key in known}
    chosen |= {names.get(key, key): value for key, value in settings.items()}
    if "num_key_value_heads" in standard:
        chosen.setdefault("num_key_value_heads", chosen["num_attention_heads"])
    try:
        config = config_class(**chosen)
    except Exception as error:  # of several families, from version to version
        raise _refused("problem.config", dict(settings), error) from error
    return _built(config, dtype, context, "problem.model_type", model_type)


def from_file(path: Path, dtype: torch.dtype, context: int) -> nn.Module:
    """Build the model that a config.json describes, with random weights."""
    return _built(_read(path, "problem.config_file", path), dtype, context, "problem.config_file", path)


def from_folder(folder: Path, weights: Literal["random", "local"], dtype: torch.dtype, context: int) -> nn.Module:
    """Build the model that a folder's config.json describes, with random weights or with those in the folder."""
    key = "problem.folder"
    config = _read(folder / "config.json", key, folder)
    if weights == "random":
        return _built(config, dtype, context, key, folder)
    config.use_cache = False
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "ignore_mismatched_sizes": True}
    try:
        model, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except REFUSALS as error:
        raise _refused(key, folder, error) from error
    if unfit := sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]])):
        rule = f"{len(unfit)} weights of its config.json are missing or of another shape, such as {unfit[0]}"
        raise ConfigError([Fault(key, folder, rule, "mend the folder, or set problem.weights=random")])
    return _checked(model, context, key, folder)


def blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of the decoder's layers: the entries of the list of modules that holds most weights."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    if not lists:
        return ()
    largest = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return tuple(f"{largest}.{number}" for number in range(len(lists[largest])))


def _config_class(model_type: str, key: str, value: object) -> Any:
    if model_type not in transformers.CONFIG_MAPPING:
        rule = f"{model_type} is no architecture that transformers {transformers.__version__} knows"
        remedy = nearest(model_type, transformers.CONFIG_MAPPING, "for example problem.model_type=gpt2")
        raise ConfigError([Fault(key, value, rule, remedy)])
    return transformers.CONFIG_MAPPING[model_type]


def _read(path: Path, key: str, value: object) -> Any:
    """Return the configuration in a config.json. Read here, because transformers' own reader may ask the network."""
    try:
        settings = json.loads(path.read_text())
        model_type = str(settings["model_type"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"{path} is no config.json of transformers ({type(error).__name__}: {error})"
        raise ConfigError([Fault(key, value, rule, "it must be JSON with a model_type")]) from error
    config_class = _config_class(model_type, key, value)
    try:
        return config_class.from_dict(settings)
    except Exception as error:  # as in `small`
        raise _refused(key, value, error) from error


def _built(config: Any, dtype: torch.dtype, context: int, key: str, value: object) -> nn.Module:
    config.use_cache = False  # of keys and values, for generating text
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except REFUSALS as error:
        raise _refused(key, value, error) from error
    return _checked(model, context, key, value)


def _checked(model: Any, context: int, key: str, value: object) -> nn.Module:
    """Return the model; raise ConfigError where it cannot be trained on the corpus."""
    config = model.config.get_text_config()
    if config.vocab_size < VOCABULARY:
        rule = f"its vocab_size={config.vocab_size} is less than the {VOCABULARY} tokens of the corpus"
        raise ConfigError([Fault(key, value, rule, "raise it or leave it out")])
    positions = getattr(config, "max_position_embeddings", None) or context
    if positions < context:
        rule = f"its max_position_embeddings={positions} is less than problem.context={context}"
        raise ConfigError([Fault(key, value, rule, "raise it or lower problem.context")])
    with evaluating(model):
        first, second = model(input_ids=torch.tensor([[2, 3, 4], [2, 3, 5]])).logits[:, :2]
    if not torch.allclose(first, second):  # differ in their last token only
        rule = f"{type(model).__name__} sees the tokens that it is to predict"
        raise ConfigError([Fault(key, value, rule, "choose a decoder, or add is_decoder: true where it knows that")])
    trained: nn.Module = model.train()  # from_pretrained returns it in eval mode
    return trained


def _refused(key: str, value: object, error: Exception) -> ConfigError:
    reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)  # some list all architectures there are
    return ConfigError([Fault(key, value, f"transformers {transformers.__version__} refuses it ({reason})", "mend it")])
