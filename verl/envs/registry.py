"""The environments by name, and how a name or a user's class becomes a factory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from verl.envs.base import Env, EnvFactory, TaskChecker
from verl.errors import ConfigError
from verl.registry import resolve
from verl.types import Task

ENVS: Mapping[str, str] = {
    "single_turn": "verl.envs.single_turn:SingleTurnEnv",
    "shop": "verl.envs.shop:ShopEnv",
    "bfcl": "verl.envs.bfcl:BfclFactory",
    "tau2": "verl.envs.tau2.env:Tau2Factory",
    "remote": "verl.envs.remote:RemoteFactory",
}

TASKS: Mapping[str, str] = {  # functions that give tasks; those of single_turn are the rows of any data file
    "shop": "verl.envs.shop:shop_tasks",
    "bfcl": "verl.envs.bfcl_tasks:bfcl_tasks",
    "tau2": "verl.envs.tau2.tasks:tau2_tasks",
}


@dataclass(frozen=True, slots=True)
class ClassFactory:
    """An environment class as a factory: every episode is `env_class(task, **options)`, and nothing is shared."""

    env_class: Callable[..., Env]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, task: Task) -> Env:
        return self.env_class(task, **self.options)

    def check_task(self, task: Task) -> None:
        """Where the class itself can tell (a static method of this name)."""
        if isinstance(self.env_class, TaskChecker):
            self.env_class.check_task(task)

    async def close(self) -> None:
        """Nothing is shared."""


def build_env_factory(name: str, options: Mapping[str, Any] | None = None) -> EnvFactory:
    """The factory of the environment called `name`: one of ENVS, `package.module:Class` or `path/to/file.py:Class`.

    The class is an environment (made with a task and the options) or a factory (made with the options).
    Raises ConfigError for an unknown name or options that do not fit.
    """
    found = resolve("environment", name, ENVS)
    options = dict(options or {})
    if not isinstance(found, type) or not (hasattr(found, "step") or "__call__" in dir(found)):
        raise ConfigError(
            f"environment {name!r} must be a class with `reset`, `step` and `close`, or a class of factories: called "
            "with a task, they make such an environment"
        )
    if hasattr(found, "step"):
        _check_options(name, found, (None,), options)
        return ClassFactory(found, options)
    factory: EnvFactory = _made(name, found, options)
    return factory


def build_tasks(name: str, options: Mapping[str, Any] | None = None) -> list[Task]:
    """Tasks of an environment that brings its own. Raises ConfigError for a name or options that do not fit."""
    if name in ENVS and name not in TASKS:
        raise ConfigError(f"environment {name!r} brings no tasks of its own: name a data file")
    tasks: Iterable[Task] = _made(name, resolve("tasks", name, TASKS), dict(options or {}))
    return list(tasks)


def _made(name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    _check_options(name, make, (), options)
    return make(**options)


def _check_options(name: str, make: Callable[..., Any], given: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that do not fit, now and not when the first episode starts."""
    try:
        signature(make).bind(*given, **options)
    except TypeError as error:
        raise ConfigError(f"environment {name!r} does not take the options {options} ({error})") from error
