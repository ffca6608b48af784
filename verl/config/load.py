"""From `key=value` words to a checked Config. Hydra and OmegaConf end here; nothing heavy is imported."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.idle import Rule, refuse_idle
from verl.config.legacy import our_key, translate
from verl.config.schema import Config, ProbeConfig
from verl.embedded import with_embedded_paths
from verl.errors import ConfigError
from verl.registry import nearest

_log = logging.getLogger(__name__)
RECIPES = Path(__file__).with_name("recipe")
# Of a recipe, what an episode is made of, in the words of a command that does not train.
_EPISODE_GROUPS = ("env.", "reward.", "sandbox.", "model.path", "model.tokenizer_path")
_EPISODE_KEYS = {
    "data.max_prompt_length": "max_prompt_length",
    "data.max_response_length": "max_response_length",
    "data.truncation": "truncation",
    "data.max_bad_share": "max_bad_share",
    "data.prompt_template": "prompt_template",
    "model.compute_dtype": "dtype",
    "rollout.n": "n",
    "rollout.name": "engine",
    "rollout.temperature": "temperature",
}

Kind = TypeVar("Kind")


def load_config(words: Sequence[str]) -> Config:
    """The configuration of a reinforcement learning run that `key=value` words choose, a `recipe=name` beneath them.

    veRL's keys are accepted: aliases silently, moot ones with one warning each that says why. Raises ConfigError that
    names the nearest key for an unknown one, and the key for a value of the wrong type.
    """
    written = _parse(words)
    recipe = written.pop("recipe", None)
    settings, moot = translate(written)
    for key, why in moot.items():
        _log.warning("%s has no effect here: %s", key, why)
    config = _build(Config, {**(_read_recipe(str(recipe)) if recipe is not None else {}), **settings})
    spelled = {our_key(key): key for key in written}
    refuse_idle({key: (spelled[key], value) for key, value in settings.items() if key in spelled}, config)
    return config


def load_plain(words: Sequence[str], kind: type[Kind], idle: tuple[Rule, ...] = ()) -> Kind:
    """A configuration of another kind, which has neither recipes nor veRL's spellings. Raises ConfigError likewise.

    idle: what has no effect in this run, beside the rules of the kind
    """
    written = _parse(words)
    config = _build(kind, written)
    refuse_idle({key: (key, value) for key, value in written.items()}, config, idle)
    return config


def restored_config(settings: Mapping[str, Any]) -> Config:
    """The configuration that `flattened` made `settings` of. Raises ConfigError where this version has other keys."""
    return _build(Config, settings)


def load_probe(words: Sequence[str]) -> ProbeConfig:
    """The configuration of a probe that `key=value` words choose, over what a `recipe=name` says of episodes.

    What the recipe says of the update is left out: nothing is trained. Raises ConfigError like `load_config`.
    """
    written = _parse(words)
    recipe = written.pop("recipe", None)
    told = _read_recipe(str(recipe)) if recipe is not None else {}
    beneath = {key: value for key, value in told.items() if key.startswith(_EPISODE_GROUPS)}
    beneath |= {ours: told[key] for key, ours in _EPISODE_KEYS.items() if key in told}
    if beneath.get("n") == 1:  # a recipe with a critic compares nothing, but a probe does
        del beneath["n"]
    config = _build(ProbeConfig, {**beneath, **written})
    refuse_idle({key: (key, value) for key, value in written.items()}, config)
    return config


def _parse(words: Sequence[str]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    for word in words:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ConfigError(f"{word!r} is not key=value ({' '.join(str(error).split())})") from error
        if override.is_delete() or override.is_sweep_override():
            raise ConfigError(f"{word!r}: only key=value is understood, neither deletions nor sweeps")
        written[override.key_or_group] = override.value()
    return written


def _read_recipe(name: str) -> dict[str, Any]:
    path = RECIPES / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"unknown recipe {name!r}; {nearest(name, [each.stem for each in RECIPES.glob('*.yaml')])}")
    return flattened(OmegaConf.to_container(OmegaConf.load(path)))


def flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"group.key": value} of nested mappings."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix.rstrip("."): tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{prefix}{key}.")
    return flat


def known_keys(kind: type = Config, prefix: str = "") -> list[str]:
    """Every key of the tree; one that ends in a dot takes any key below it."""
    types = get_type_hints(kind)
    keys = []
    for item in fields(kind):
        inner, key = types[item.name], f"{prefix}{item.name}"
        if is_dataclass(inner) and isinstance(inner, type):
            keys += known_keys(inner, f"{key}.")
        else:
            keys.append(f"{key}." if getattr(inner, "__origin__", None) is dict else key)
    return keys


def _instead(key: str, known: Sequence[str]) -> str:
    """A clause on an unknown key: where else its name is known, or the nearest of its group, or what there is."""
    group, _, name = key.rpartition(".")
    inside = [each.removeprefix(f"{group}.") for each in known if group and each.startswith(f"{group}.")]
    if not inside:
        groups = dict.fromkeys(each.partition(".")[0] for each in known)
        return nearest(key, list(known), f"there are {', '.join(groups)}; --help lists every key")
    elsewhere = [each for each in known if each.endswith(f".{name}")]
    close = [f"{group}.{each}" for each in get_close_matches(name, inside, n=1)]
    return f"did you mean {(elsewhere + close)[0]!r}?" if elsewhere or close else f"{group} has {', '.join(inside)}"


def _make_writable(tree: DictConfig) -> None:
    """Nodes of frozen dataclasses are read-only one by one; the objects made of them are frozen again."""
    OmegaConf.set_readonly(tree, None)
    for key in tree:
        if isinstance(tree[key], DictConfig):
            _make_writable(tree[key])


def _build(kind: type[Kind], settings: Mapping[str, Any]) -> Kind:
    known = known_keys(kind)
    open_keys = tuple(key for key in known if key.endswith("."))
    tree = OmegaConf.structured(kind)
    _make_writable(tree)
    for key, value in settings.items():
        if key not in known and f"{key}." not in open_keys and not key.startswith(open_keys):
            names = [each.rstrip(".") for each in known]
            raise ConfigError(f"unknown key {key!r}; {_instead(key, names)}")
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{key} must be a finite number, got {value}")
        try:
            OmegaConf.update(tree, key, with_embedded_paths(value), force_add=key.startswith(open_keys))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value!r}: {str(error).splitlines()[0]}") from error
    config = OmegaConf.to_object(tree)
    assert isinstance(config, kind)
    return config
