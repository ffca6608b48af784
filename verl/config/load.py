"""From `key=value` arguments to a validated Config. Only this module uses Hydra."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, get_origin

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.bounded_yaml import load_yaml
from verl.config.commands import TRAIN, Command, groups_of, within
from verl.config.foreign_code import named_code
from verl.config.schema import Config
from verl.config.show import leaves
from verl.config.unused_keys import unused_reasons
from verl.embedded import EMBEDDED, PREFIX, with_embedded_paths
from verl.errors import ConfigError
from verl.host.packages import script
from verl.registry import nearest
from verl.verl_compat.legacy import our_key, take_defaults, translate
from verl.verl_compat.published import Line, lines_of
from verl.verl_compat.verl_keys import GROUPS, short, spelled, vocabulary

_log = logging.getLogger(__name__)
RECIPES = Path(__file__).with_name("recipe")
SHORTHANDS = ("data", "model", "agent", "recipe", "reward")  # keys without a group
_MODELS = ("model.path", "critic.path", "teacher.path", "eval.compare")
_SMOLLM2 = Path(__file__).parents[2] / "models" / "smollm2"  # where scripts/prepare_smollm2.py writes it
_FILES = ("data.train_files", "data.val_files", "eval.benchmarks")  # data= is the first that a command has
_RENAMED: Mapping[str, str] = {  # keys of earlier versions
    "algorithm.correction.rejection_lower": "algorithm.correction.rejection_bounds=[lower, upper]",
    "algorithm.correction.rejection_upper": "algorithm.correction.rejection_bounds=[lower, upper]",
    "data.on_bad_row": "data.max_bad_share",
    "env.on_sampling": "env.options.on_sampling",
    "env.python": "env.options.python",
    "trainer.call_timeout_s": "trainer.stall_timeout_s",
    "sandbox.require_cgroup": "sandbox.isolation=strict",
}
_LRS, _LORA_LR = ("actor.optim.lr", "critic.optim.lr"), 10  # https://thinkingmachines.ai/blog/lora/
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")


def load_config(
    argv: Sequence[str], command: Command = TRAIN, file: str | None = None, user_code: bool = False
) -> Config:
    """The configuration of a command from `key=value` arguments, which override a YAML file and a `recipe=name`.

    Obsolete keys of veRL's, and keys of the file that have no effect, are listed in one warning. Raises ConfigError for
    unknown keys (with the nearest one), wrong values, arguments that have no effect, and for code that the file names,
    before any of it runs.

    user_code: whether the file may name code; it may be another author's
    """
    arguments = _parse(argv)
    settings = {} if file is None else read_settings(file)
    written = {**settings, **arguments}
    recipe = written.pop("recipe", _default_recipe(written, command))
    written = _with_reward_list(_without_shorthands(written, command))
    preset = {} if recipe is None else _with_reward_list(read_recipe(str(recipe), command))
    if "reward.name" in written and "sum" in (written["reward.name"], preset.get("reward.name")):
        preset = {key: value for key, value in preset.items() if not key.startswith("reward.options")}

    lines = lines_of({short(key): value for key, value in written.items()}) if recipe is None else []
    for line in lines:
        recipe_settings = _settings_of(line.recipe).items()
        preset |= {key: value for key, value in recipe_settings if within(key, line.parts) and command.has(key)}

    def base(key: str) -> Any:
        return preset[key] if key in preset else command.default_of(key)

    resolved = _resolved(written, base, command)
    if file is not None and not user_code:
        given = _with_reward_list(_without_shorthands({**arguments, "recipe": recipe}, command))
        _refuse_code(file, {key: value for key, value in resolved.items() if key not in given}, lines)
    result = translate(resolved, base, lines)
    defaults = take_defaults(result, command) if recipe is None else []
    rates = _take_adapter_lrs(result.settings, preset, base, command)
    config = _build({**command.defaults, **preset, **result.settings}, command, result.spelled)
    command.check(config)
    unused = unused_reasons(rates, result.settings, config, command)
    for key in (key for key in rates if key not in unused):
        message = "%s=%s, which is %d times that of training all weights, as adapters need (docs/lora.md)"
        _log.warning(message, key, rates[key], _LORA_LR)
    written_keys = [key for key in result.settings if key in result.spelled]
    for key, why in unused_reasons(written_keys, result.settings, config, command).items():
        as_written = result.spelled[key]
        ours = as_written == key or as_written.startswith(GROUPS)  # without veRL's prefix
        if ours and (as_written in arguments or as_written not in settings):
            raise ConfigError(f"{as_written}={result.settings[key]} has no effect: {why}")
        result.obsolete[as_written] = why
    _report(result.obsolete, defaults, lines)
    return config


def read_settings(file: str) -> dict[str, Any]:
    """The settings of a YAML file: nested or with dots, shorthands and `recipe`, or the config.yaml of a run.

    Raises ConfigError.
    """
    try:
        tree = load_yaml(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config: {file} cannot be read ({' '.join(str(error).split())})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"--config: {file} must have settings, such as `rollout: {{n: 8}}`, not {tree!r:.40}")
    return dict(_settings_below(tree, ""))


def _settings_below(tree: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """(key, value) of nested mappings; a mapping that is itself a value is not taken apart."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and f"{our_key(key)}." not in known_keys():
            yield from _settings_below(value, f"{key}.")
        else:
            yield key, value


def _take_adapter_lrs(
    settings: dict[str, Any], preset: Mapping[str, Any], base: Callable[[str], Any], command: Command
) -> dict[str, float]:
    """Add the learning rates of adapters, where none are set: ten times those of training all weights. Returns them.

    preset: a recipe's settings; the learning rates of a recipe for adapters are theirs already
    """
    chosen = settings.get("lora.rank"), settings.get("lora.path")
    if not any(chosen) or "lora.rank" in preset:
        return {}
    rates = {key: float(f"{_LORA_LR * base(key):.6g}") for key in _LRS if command.has(key) and key not in settings}
    settings.update(rates)
    return rates


def _refuse_code(file: str, settings: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Raises ConfigError for code that these settings of a file name, other than that of recipes.

    lines: of published commands, whose keys stand for recipes
    """
    read = {key: value for key, value in settings.items() if not any(line.has(short(key)) for line in lines)}
    found = _code_in(read)
    if found:  # otherwise the recipes need not be read
        ours = {each for recipe in _recipes() for each in _code_in(_settings_of(recipe))}
        found = [each for each in found if each not in ours]
    if found:
        raise ConfigError(
            f"--config: {file} names code, which is not run without --user-code: {', '.join(found)}. Add it, or give "
            "these settings as arguments"
        )


def _code_in(settings: Mapping[str, Any]) -> list[str]:
    return [each for key, value in settings.items() for each in named_code(key, value)]


def _default_recipe(written: Mapping[str, Any], command: Command) -> str | None:
    """The recipe of a command with `data=FILE` and without `recipe=`, `embedded` with `model=embedded`."""
    if "data" not in written or "recipe" in written or not command.from_recipe:
        return None
    recipe = EMBEDDED if EMBEDDED in (written.get("model"), written.get("model.path")) else "grpo"
    _log.warning("recipe=%s, the default with data=..; --cfg job prints its settings", recipe)
    return recipe


def _without_shorthands(written: Mapping[str, Any], command: Command) -> dict[str, Any]:
    """`data=FILE`, `model=PATH` and `agent=FILE:FUNCTION` replaced by the settings that they abbreviate, and a run by
    its newest model."""
    if "agent" in written and command.has("env.agent"):
        others = {key: value for key, value in written.items() if key != "agent"}
        agent = {"env.name": "agent", "env.agent": written["agent"], "reward.name": "env"}
        if "env.agent" in others:
            raise ConfigError("env.agent is given twice, once by its shorthand agent=")
        written = {**agent, **others}
    full: dict[str, Any] = {}
    for key, value in written.items():
        if key == "data" and (files := [each for each in _FILES if command.has(each)]):
            key, value = files[0], value if isinstance(value, list) else [value]
        elif key == "model":
            key = "model.path"
        if key in full:
            raise ConfigError(f"{key} is given twice, once by its shorthand {key.partition('.')[0]}=")
        full[key] = _of_run(named_model(value)) if our_key(key) in _MODELS else value
    return full


def shorthand_help(command: Command) -> str:
    """A line per shorthand that a command takes."""
    files = [each for each in _FILES if command.has(each)]
    found = {
        "data=FILE": files and f"{files[0]}=[FILE]",
        "model=NAME": "model.path=NAME: a folder, the output folder of a run, a hub name, embedded or smollm2",
        "agent=FILE:FUNCTION": command.has("env.agent") and "a program of yours as environment (docs/agents.md)",
        "recipe=NAME": command.from_recipe and f"settings by name: {', '.join(_recipes())}",
    }
    return "\n".join(f"{name:21}{meaning}" for name, meaning in found.items() if meaning)


def _recipes() -> list[str]:
    return sorted(each.stem for each in RECIPES.glob("*.yaml"))


def named_model(name: Any) -> Any:
    """The path of a model that a short name stands for; anything else unchanged.

    Raises ConfigError for a name whose model is not there.
    """
    if name == EMBEDDED:
        return f"{PREFIX}model"
    if name == _SMOLLM2.name and not Path(name).exists():
        if not (_SMOLLM2 / "config.json").is_file():
            raise ConfigError(f"model {name}: {_SMOLLM2} is not there; run {script('scripts/prepare_smollm2.py')}")
        return str(_SMOLLM2)
    return name


def _of_run(model: Any) -> Any:
    """The newest model of a run's output folder; anything else unchanged."""
    pointer = Path(str(model), "checkpoints", "latest.json")
    return str(pointer.parent / json.loads(pointer.read_text())["folder"] / "hf") if pointer.is_file() else model


def _with_reward_list(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with `reward=[..]` as the reward that sums up several."""
    if "reward" not in settings:
        return settings
    given = settings.pop("reward")
    if not isinstance(given, list):
        expected = "a list of {name: .., weight: .., options: ..}; for one reward, use reward.name"
        raise ConfigError(f"reward={given}: must be {expected}")
    for key in settings:
        if key == "reward.name" or key.startswith("reward.options"):
            raise ConfigError(f"{key} contradicts reward=[..], which has the names and options of all rewards")
    return settings | {"reward.name": "sum", "reward.options": {"terms": given}}


def _report(obsolete: Mapping[str, str], defaults: Sequence[str], published: Sequence[Line]) -> None:
    """One warning with all obsolete keys, by reason, one with other defaults, one with the lines that apply."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for key, why in obsolete.items():
        by_reason[why].append(key)
    if obsolete:
        lines = [f"{', '.join(keys)}: {why}" for why, keys in by_reason.items()]
        _log.warning("%s", "\n  ".join(["keys that have no effect here:", *lines]))
    if defaults:
        _log.warning("%s", "\n  ".join(["defaults of the veRL version that this command is written for:", *defaults]))
    if published:
        lines = [f"{', '.join(line.parts)} of recipe={line.recipe}, by {spelled(line.key)}" for line in published]
        _log.warning("%s", "\n  ".join(["settings of published commands (docs/migration.md):", *lines]))


def restored_config(settings: Mapping[str, Any]) -> Config:
    """Inverse of `flattened`. Raises ConfigError if this version has other keys."""
    return _build(settings, TRAIN)


def _parse(argv: Sequence[str]) -> dict[str, Any]:
    written: dict[str, Any] = {}
    parser = OverridesParser.create()
    for argument in argv:
        key, _, path = argument.partition("=")
        if path.startswith("~/"):  # not expanded by shells after such a key, nor supported by Hydra's grammar
            argument = f"{key}='{Path(path).expanduser()}'"
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            raise ConfigError(f"{argument!r} is not key=value ({' '.join(str(error).split())})") from error
        if override.is_delete() or override.is_sweep_override():
            raise ConfigError(f"{argument!r}: only key=value is supported, neither deletions nor sweeps")
        written.pop(override.key_or_group, None)  # a repeated key takes the position of its last occurrence
        written[override.key_or_group] = override.value()
    return written


def _resolved(written: Mapping[str, Any], base: Callable[[str], Any], command: Command) -> dict[str, Any]:
    """The settings with `${key}` in their values replaced by the key's value; veRL's keys are allowed, too.

    Other interpolations, such as ${oc.env:HOME}, are OmegaConf's. Raises ConfigError for an unresolvable one.
    """
    known = known_keys()
    given = {our_key(key): value for key, value in written.items()}

    def value_of(key: str, path: tuple[str, ...]) -> Any:
        ours = our_key(key)
        if ours in path:
            raise ConfigError(f"{' -> '.join((*path, ours))}: circular references")
        if ours in given:
            return filled(given[ours], (*path, ours))
        if ours in known:
            return base(ours)
        if key in vocabulary():
            return None  # obsolete here, so without a value
        raise ConfigError(f"{path[0]}: ${{{key}}} names no key; {_instead(key, command)}")

    def filled(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [filled(each, path) for each in value]
        if isinstance(value, dict):
            return {key: filled(each, path) for key, each in value.items()}
        if not isinstance(value, str) or "${" not in value:
            return value
        if whole := _REFERENCE.fullmatch(value):
            return value_of(whole[1], path)
        text = _REFERENCE.sub(lambda found: str(value_of(found[1], path)), value)
        try:
            return OmegaConf.create({"value": text})["value"]
        except OmegaConfBaseException as error:
            raise ConfigError(f"{path[0]}={value}: {str(error).splitlines()[0]}") from error

    return {key: filled(value, (our_key(key),)) for key, value in written.items()}


def read_recipe(name: str, command: Command) -> dict[str, Any]:
    """The settings of a recipe that the command uses. Raises ConfigError for an unknown one, with the nearest."""
    if not command.from_recipe:
        raise ConfigError(f"recipe={name} has no effect: `{command.name}` takes no recipe")
    settings = _settings_of(name)
    if command.needs_groups and settings["rollout.n"] == 1:
        del settings["rollout.n"]
    return {key: value for key, value in settings.items() if within(key, command.from_recipe)}


def _settings_of(recipe: str) -> dict[str, Any]:
    if recipe not in _recipes():  # a path to another file is none
        raise ConfigError(f"unknown recipe {recipe!r}; {nearest(recipe, _recipes())}")
    return flattened(OmegaConf.to_container(OmegaConf.load(RECIPES / f"{recipe}.yaml")))


def flattened(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"group.key": value} of nested mappings."""
    if not isinstance(tree, Mapping) or not tree:
        return {prefix.rstrip("."): tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flattened(value, f"{prefix}{key}.")
    return flat


def known_keys() -> list[str]:
    """All keys of the tree; one that ends in a dot accepts any key below it."""
    return [f"{key}." if get_origin(kind) is dict else key for key, kind, _ in leaves(Config())]


def _instead(key: str, command: Command) -> str:
    """Its new name, the same name elsewhere, the nearest in its group, or the group's keys."""
    if key in _RENAMED:
        return f"it is now {_RENAMED[key]}"
    known = [each.rstrip(".") for each in known_keys() if command.has(each.rstrip("."))]
    theirs = vocabulary()
    if short(key) != key:
        ours = [f"actor_rollout_ref.{each}" for each in known if each.startswith(GROUPS)]
        return nearest(key, [*ours, *theirs], "docs/verl_keys.md lists veRL's keys")
    group, _, name = key.rpartition(".")
    inside = [each.removeprefix(f"{group}.") for each in known if group and each.startswith(f"{group}.")]
    if not inside:
        return nearest(key, known, f"there are {', '.join(groups_of(command.uses))}; --help lists every key")
    elsewhere = [each for each in known if each.endswith(f".{name}")]
    close = [f"{group}.{each}" for each in get_close_matches(name, inside, n=1)]
    close = close or get_close_matches(key, theirs, n=1, cutoff=0.8)
    return f"did you mean {(elsewhere + close)[0]!r}?" if elsewhere or close else f"{group} has {', '.join(inside)}"


def _make_writable(tree: DictConfig) -> None:
    """Clear the read-only flag of all nodes; the objects built from them are frozen again."""
    OmegaConf.set_readonly(tree, None)
    for key in tree:
        if isinstance(tree[key], DictConfig):
            _make_writable(tree[key])


@cache
def _defaults() -> DictConfig:
    tree: DictConfig = OmegaConf.structured(Config)  # takes five times as long as a copy
    _make_writable(tree)
    return tree


def _build(settings: Mapping[str, Any], command: Command, spelled: Mapping[str, str] = {}) -> Config:
    """spelled: keys as written by the user, where they differ"""
    known = known_keys()
    open_keys = tuple(key for key in known if key.endswith("."))
    lists = {key for key, kind, _ in leaves(Config()) if get_origin(kind) is list}
    # A copy of all groups takes most of the time; a reference may name any of them.
    whole = any("${" in str(value) for value in settings.values())
    groups = _defaults() if whole else {key.partition(".")[0] for key in settings} & _defaults().keys()
    tree = OmegaConf.masked_copy(_defaults(), list(groups))
    for key, value in settings.items():
        if key not in known and f"{key}." not in open_keys and not key.startswith(open_keys):
            written = spelled.get(key, key)
            raise ConfigError(f"unknown key {written!r}; {_instead(written, command)}")
        if isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{key} must be a finite number, got {value}")
        if key in lists and isinstance(value, str):
            value = [value]  # a list of one
        try:
            OmegaConf.update(tree, key, with_embedded_paths(value), force_add=key.startswith(open_keys))
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}={value!r}: {str(error).splitlines()[0]}") from error
    made: Any = OmegaConf.to_object(tree)
    return Config(**made)
