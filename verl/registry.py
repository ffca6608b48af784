"""Resolves names in the configuration to objects.

A registry is an explicit table of `name -> "module:attribute"`; modules are imported on first use. User-defined objects
need no registration: `package.module:attribute`, `path/to/file.py:attribute`, or `file.pkl:name` of a pickled mapping.
"""

import argparse
import difflib
import importlib
import importlib.util
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.errors import ConfigError
from verl.json_values import JsonError, read_json
from verl.moved import new_name

USER_MODULE = "verl_user_"  # prefix of the modules made of the user's files
_CODE = re.compile(r"(.+\.(?:py|pkl)|[\w-]+(?:\.[\w-]+)*):([^\s/\d]\S*)", re.DOTALL)  # no URL, no host:port
_FITTING = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "None": (type(None),)}


def nearest(name: str, known: list[str], otherwise: str = "") -> str:
    """A clause with the closest known name; if none is close, `otherwise` or, by default, all known names."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise or f"known: {', '.join(sorted(known))}"


def names_code(text: str) -> bool:
    """Whether `resolve` would import or read something for this text, if no table has it. Runs nothing."""
    return _CODE.fullmatch(text) is not None


def resolve(kind: str, name: str, table: Mapping[str, str]) -> Any:
    """The object for a key of `table`, `module:attribute` or `file.py:attribute`. Raises ConfigError for others.

    It runs code: names of others' files go through `verl.data.row_names` or `verl.config.foreign_code` first.
    """
    found = _CODE.fullmatch(table.get(name, name))
    if found is None:
        problem = f"unknown {kind} {name!r}" + (f"; {nearest(name, list(table))}" if table else "")
        own = "For your own, use package.module:attribute or path/to/file.py:attribute"
        raise ConfigError(f"{problem}{'' if problem.endswith('?') else '.'} {own}")
    module_name, attribute = found.groups()
    module = _load(kind, module_name)
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{kind} {name!r}: {module_name} has no {attribute!r}; {nearest(attribute, public)}")
    return getattr(module, attribute)


def check_options(
    kind: str, name: str, make: Callable[..., Any], options: Mapping[str, Any], *given: Any, **shared: Any
) -> None:
    """Raises ConfigError for options that `make` does not take. given, shared: the program's own arguments"""
    parameters = signature(make).parameters
    known = [key for key in list(parameters)[len(given) :] if key not in shared]
    open_end = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    listing = f"its options are {', '.join(known) or 'none'}"
    for key, value in options.items():
        if key in known:
            wanted = _wanted(parameters[key])
            if type(value) not in [each for one in wanted for each in _FITTING.get(one, (type(value),))]:
                expected = " or ".join(wanted)
                raise ConfigError(f"{kind} {name!r}: option {key!r} must be of type {expected}, not {value!r}")
        elif not open_end:
            raise ConfigError(f"{kind} {name!r} has no option {key!r}; {nearest(key, known, listing)}")
    try:
        signature(make).bind(*given, **shared, **options)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r}: {error}; {listing}") from error


def _wanted(parameter: Parameter) -> list[str]:
    """Names of the types that a parameter accepts, from its annotation, or else from its default."""
    annotation = parameter.annotation
    names = (annotation.__name__ if isinstance(annotation, type) else str(annotation)).split(" | ")
    if all(each in _FITTING for each in names):
        return names
    return [type(parameter.default).__name__, *(["None"] if "None" in names else [])]


def option(text: str) -> tuple[str, Any]:
    """argparse type for `key=value`; the value is parsed as JSON if possible, else it is a text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not key=value")
    try:
        return key, read_json(value)  # numbers, true, false, null, lists
    except JsonError as error:
        raise argparse.ArgumentTypeError(f"{key}: {error}") from error
    except ValueError:
        return key, value


def _load(kind: str, source: str) -> ModuleType:
    """A module, or a file that ends in .py or .pkl."""
    is_file = source.endswith((".py", ".pkl"))
    if is_file and not Path(source).is_file():
        raise ConfigError(f"{kind}: there is no file {source!r}")
    if not is_file and (new := new_name(source)) is not None:
        raise ConfigError(f"{kind}: {source} has moved to {new}")
    try:
        if source.endswith(".pkl"):
            return _unpickle(source)
        return _run_file(source) if is_file else importlib.import_module(source)
    except Exception as error:
        what = "file" if is_file else "module"
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        hint = f"; {missing} has moved to {new}" if missing and (new := new_name(missing)) else ""
        raise ConfigError(f"{kind}: cannot import {what} {source!r} ({type(error).__name__}: {error}){hint}") from error


def _run_file(path: str) -> ModuleType:
    name = f"{USER_MODULE}{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up a class's module here
    spec.loader.exec_module(module)
    return module


def _unpickle(path: str) -> ModuleType:
    """The objects of a Python session, by name. The file is the user's own, and is trusted as a .py file is."""
    module = ModuleType(Path(path).stem)
    vars(module).update(pickle.loads(Path(path).read_bytes()))  # noqa: S301  see above
    return module
