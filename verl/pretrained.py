"""Loads models from folders or hub names; incomplete or invalid ones are an error.

transformers fills missing weights with random numbers and only logs it where workers do not show it, accepts NaN
weights, and creates a tokenizer without a vocabulary if there is none. All other exceptions of its many file formats
become one error type, too. Code shipped with a model is never run: without trust_remote_code=False transformers would
prompt on the terminal.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import logging as hub_logging
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME
from transformers.utils import logging as transformers_logging

from verl.errors import ConfigError, DataError
from verl.host import untrusted_files
from verl.host.hub import HubDownError, ask_hub
from verl.text import in_short

log = logging.getLogger(__name__)
hub_logging.disable_propagation()  # it has a handler of its own: the program's would print every line again
_SHOWN = 3  # names listed in an error
_LACKS = "lacks weights"


def check_hub(name: str, key: str) -> None:
    """Raises ConfigError if a name is to be looked up on the hub, and the hub does not answer.

    A folder and a model that was loaded before need no hub, and what the hub answers is the libraries' to report.
    """
    if Path(name).exists():
        check_files(name, key)
        return
    try:
        if revision_of(name) is None:
            ask_hub("model", name)
    except HubDownError as error:
        raise ConfigError(f"{key}: {name!r} {error}") from error
    except (HfHubHTTPError, HFValidationError):
        return


def check_files(path: str, key: str) -> None:
    """Raises ConfigError for a file in a model's folder that may never end, or that leads out of it."""
    try:
        if Path(path).is_dir():
            untrusted_files.check_files(Path(path))
    except DataError as error:
        raise ConfigError(f"{key}: {error}. Copy the model's files into one folder") from error


def read_model_config(path: str, key: str = "model.path") -> PretrainedConfig:
    """The configuration of a model. Raises ConfigError, naming the configuration key of `path`, if there is none."""
    check_hub(path, key)
    with readable(path, key):
        config: PretrainedConfig = _of_texts(lambda at: AutoConfig.from_pretrained(at, trust_remote_code=False), path)
    config.name_or_path = path
    return config


def read_tokenizer(path: str, key: str = "model.path") -> Any:
    """The tokenizer of a model. Raises ConfigError, naming the configuration key of `path`, if there is none."""
    check_hub(path, key)
    try:
        tokenizer = _of_texts(lambda at: AutoTokenizer.from_pretrained(at, trust_remote_code=False), path)
    except Exception as error:  # as in `readable`
        raise ConfigError(f"{key}: no tokenizer can be loaded from {path!r} ({in_short(error)})") from error
    tokenizer.name_or_path = path
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise ConfigError(f"{key}: the tokenizer in {path!r} has no vocabulary; add its tokenizer.json")
    return tokenizer


def revision_of(name: str) -> str | None:
    """The commit of a model on the hub that has been loaded here, by its hub name; None if it has not been."""
    for file in (CONFIG_NAME, "tokenizer_config.json"):
        path = try_to_load_from_cache(name, file)
        if isinstance(path, str):
            return Path(path).parent.name  # snapshots/<commit>/<file>
    return None


def end_tokens(model: str) -> tuple[int, ...]:
    """The eos_token_id entries of a model's generation config, or of its config.json without one, as in transformers.

    Raises ConfigError if a file is unreadable.
    """
    try:
        found = _of_texts(GenerationConfig.from_pretrained, model).eos_token_id
    except Exception as error:  # a damaged file may raise anything
        if isinstance(error, OSError) and not (Path(model) / GENERATION_CONFIG_NAME).exists():
            if not (Path(model) / CONFIG_NAME).exists():
                return ()  # the folder of a tokenizer
            return _as_tuple(GenerationConfig.from_model_config(read_model_config(model)).eos_token_id)
        raise ConfigError(f"model.path: {GENERATION_CONFIG_NAME} in {model!r} cannot be read ({error})") from error
    return _as_tuple(found)


def _of_texts(load: Callable[[str], Any], path: str) -> Any:
    """What is loaded from a model's texts: of a folder, from a copy that no other process changes meanwhile."""
    if not Path(path).is_dir():
        return load(path)
    with TemporaryDirectory(prefix="toolrl-") as copy:
        untrusted_files.copy_texts(Path(path), Path(copy))
        try:
            return load(copy)
        except Exception as error:  # whose message names the folder
            error.args = tuple(each.replace(copy, path) if isinstance(each, str) else each for each in error.args)
            raise


def _as_tuple(found: int | Sequence[int] | None) -> tuple[int, ...]:
    return (found,) if isinstance(found, int) else tuple(found or ())


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether it is the configuration of a language model with towers for pictures and the like."""
    return config.get_text_config() is not config


def has_attention_alone(config: PretrainedConfig) -> bool:
    """Whether no layer of it has a state; by the kinds of its layers, which other models do not list."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    return all(each.endswith("attention") and not each.startswith("linear") for each in kinds)


def class_of(config: PretrainedConfig) -> Any:
    """transformers' class to load or build a model by: of a multimodal model the whole, whose names are its files'.

    As a causal language model some of them would lose their towers without a word.
    """
    whole = is_multimodal(config) and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if whole else AutoModelForCausalLM


def language_weights(
    model: PreTrainedModel, named: Iterable[tuple[str, nn.Parameter]]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Those of the named parameters that text passes: the decoder's and the output head's, not a tower's."""
    parts = (model.get_decoder(), model.get_output_embeddings())
    own = {id(each) for part in parts for each in part.parameters()}
    yield from ((name, each) for name, each in named if id(each) in own)


def read_causal_lm(
    path: str, dtype: torch.dtype, key: str = "model.path", attention: str | None = None, empty: bool = False
) -> PreTrainedModel:
    """A decoder-only model with all of its weights, on the CPU.

    key: of `path` in the configuration; attention: transformers' attn_implementation
    empty: on the meta device; names and shapes of weights are checked then, their values are not read
    Raises ConfigError if there is no model, weights are missing, surplus, of other shapes or not finite, and for a
    pickle that would run code. Weights of a part that the model does not have, as a reward model's head, are a warning.
    """
    quiet, shows_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # replaces its table of missing weights with the one-line error below
    transformers_logging.disable_progress_bar()
    try:
        with readable(path, key):
            config = read_model_config(path, key)
            loaded: Any = class_of(config).from_pretrained(
                path,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                device_map="meta" if empty else None,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=False,
            )
    finally:
        transformers_logging.set_verbosity(quiet)
        if shows_bars:
            transformers_logging.enable_progress_bar()
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    shapes = [f"{name} {tuple(there)} instead of {tuple(needed)}" for name, there, needed in info["mismatched_keys"]]
    odd = [] if empty else [name for name, weight in model.named_parameters() if not is_finite(weight)]
    _refuse(path, key, _LACKS, sorted(info["missing_keys"]))
    children = {name for name, _ in model.named_children()}
    within = {name for name in info["unexpected_keys"] if name.partition(".")[0] in children}
    _refuse(path, key, "has weights that its config.json has no place for", sorted(within))
    if beside := sorted(info["unexpected_keys"] - within):  # a reward model's score, or what predicts further tokens
        log.warning("%s: weights of %r that are not used: %s", key, path, _shown(beside))
    _refuse(path, key, "has weights whose shapes differ from its config.json", sorted(shapes))
    refuse_odd(path, key, odd)
    return model


def check_weights(path: str, key: str = "model.path") -> None:
    """Raises ConfigError if the safetensors of a folder lack weights or have some that are not finite.

    For engines that load weights in their own processes without such checks. Reads the files once, one weight at a
    time. If a folder's names are not those of transformers' model (e.g. experts stored one by one), missing weights
    cannot be detected.
    """
    check_files(path, key)
    files = sorted(Path(path).glob("*.safetensors"))
    there: set[str] = set()
    for file in files:
        with readable(path, key), safe_open(file, "pt") as shard:
            names = [*shard.keys()]
            odd = [name for name in names if not is_finite(shard.get_tensor(name))]
        refuse_odd(path, key, odd)
        there |= {*names}
    config = read_model_config(path, key)
    with readable(path, key), torch.device("meta"):
        model = class_of(config).from_config(config, trust_remote_code=False)
    needed = {name for name, _ in model.named_parameters()}  # only the first of tied weights
    if files and there <= {name for name, _ in model.named_parameters(remove_duplicate=False)}:
        _refuse(path, key, _LACKS, sorted(needed - there))


def refuse_odd(path: str, key: str, names: Sequence[str]) -> None:
    """Raises ConfigError if there are weights that are not finite."""
    _refuse(path, key, "has weights that are NaN or infinite", names)


def _refuse(path: str, key: str, problem: str, names: Sequence[str]) -> None:
    if names:
        raise ConfigError(f"{key}: the model in {path!r} {problem}: {_shown(names)}. Copy or export it again")


def _shown(names: Sequence[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


def is_finite(weight: Tensor) -> bool:
    return not weight.is_floating_point() or bool(torch.isfinite(weight.sum(dtype=torch.float32)))


@contextmanager
def readable(path: str, key: str) -> Iterator[None]:
    """Converts whatever is raised by reading a model's files into a ConfigError."""
    check_files(path, key)
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # safetensors, pickle, json, huggingface_hub and torch have their own exceptions
        source = f"the {'folder' if Path(path).exists() else 'name'} {path!r} ({in_short(error)})"
        raise ConfigError(f"{key}: no causal language model can be loaded from {source}") from error
