"""The registry of environments: resolves a name or a user's class to a factory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.envs.base import Env, EnvFactory
from verl.errors import ConfigError
from verl.registry import check_options, resolve
from verl.types import Task

ENVS: Mapping[str, str] = {
    "single_turn": "verl.envs.single_turn:SingleTurnEnv",
    "shop": "verl.kit.shop.shop:ShopEnv",
    "bfcl": "verl.kit.bfcl.env:BfclFactory",
    "tau2": "verl.kit.tau2.env:Tau2Factory",
    "remote": "verl.kit.env_server.client:RemoteFactory",
}

TASKS: Mapping[str, str] = {  # functions that return tasks; those of single_turn are the rows of any data file
    "shop": "verl.kit.shop.shop:shop_tasks",
    "bfcl": "verl.kit.bfcl.tasks:bfcl_tasks",
    "tau2": "verl.kit.tau2.tasks:tau2_tasks",
}


@dataclass(frozen=True, slots=True)
class ClassFactory(EnvFactory):
    """An environment class as a factory: every episode is `env_class(task, **options)`, with no shared resources."""

    env_class: Callable[..., Env]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, task: Task) -> Env:
        return self.env_class(task, **self.options)


def build_env_factory(name: str, options: Mapping[str, Any] | None = None) -> EnvFactory:
    """Of ENVS, `package.module:Class` or `file.py:Class`: an environment or a factory. Raises ConfigError."""
    found = resolve("environment", name, ENVS)
    options = dict(options or {})
    if not isinstance(found, type) or not (hasattr(found, "step") or "__call__" in dir(found)):
        factories = "a class of factories: called with a task, they make such an environment"
        raise ConfigError(f"environment {name!r} must be a class with `reset`, `step` and `close`, or {factories}")
    if hasattr(found, "step"):
        check_options("environment", name, found, options, None)
        return ClassFactory(found, options)
    check_options("environment", name, found, options)
    factory: EnvFactory = found(**options)
    return factory


def build_tasks(name: str, options: Mapping[str, Any] | None = None) -> list[Task]:
    """The tasks bundled with an environment. Raises ConfigError for an unknown name or invalid options."""
    if name in ENVS and name not in TASKS:
        raise ConfigError(f"environment {name!r} has no bundled tasks: pass a data file")
    make: Callable[..., Iterable[Task]] = resolve("tasks", name, TASKS)
    check_options("tasks of environment", name, make, options or {})
    return list(make(**options or {}))
