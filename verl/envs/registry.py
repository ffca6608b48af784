"""The registry of environments: resolves a name or a user's class to a factory."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import iscoroutinefunction, isfunction, signature
from typing import Any

from verl import plugins
from verl.envs.base import Env, EnvFactory
from verl.errors import ConfigError
from verl.registry import check_options, resolve
from verl.types import Task, ToolSpec

ENVS: Mapping[str, str] = {"single_turn": "verl.envs.single_turn:SingleTurnEnv", **plugins.ENVS}
_OF_TOOLS = [each for kind in (str, int, float, bool) for each in (kind, kind.__name__)]  # annotations of a result


@dataclass(frozen=True, slots=True)
class ClassFactory(EnvFactory):
    """An environment class as a factory: every episode is `env_class(task, **options)`, with no shared resources."""

    env_class: Callable[..., Env]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, task: Task) -> Env:
        return self.env_class(task, **self.options)

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tools of all episodes, if the class lists them as `specs`."""
        specs: Sequence[ToolSpec] = getattr(self.env_class, "specs", ())
        return specs


def build_env_factory(name: str, options: Mapping[str, Any] | None = None) -> EnvFactory:
    """Builds the factory of a name in ENVS, `package.module:Class` or `file.py:Class`.

    The class is an environment, a factory, a plain class whose methods are the tools, or an environment of texts.
    Raises ConfigError.
    """
    found = resolve("environment", name, ENVS)
    options = dict(options or {})
    if is_text_env(found):
        if not hasattr(found, "from_dict"):
            row = {"extras"} & signature(found).parameters.keys()  # what SkyRL-gym passes of the row
            check_options("environment", name, found, options, **dict.fromkeys(row))
        return ClassFactory(resolve("adapter", "text environment", plugins.ENV_ADAPTERS)(found), options)
    if isinstance(found, type) and is_plain(found):
        check_options("environment", name, found, options)
        return ClassFactory(resolve("adapter", "plain class", plugins.ENV_ADAPTERS)(found), options)
    if not isinstance(found, type) or not (hasattr(found, "step") or "__call__" in dir(found)):
        plain = "a plain class with `reset`, whose other public methods are the tools"
        texts = "one whose `step(action)` takes the policy's text, a function that makes one"
        factories = "a class of factories: called with a task, they make such an environment"
        kinds = f"a class with `reset`, `step` and `close`, {plain}, {texts}, or {factories}"
        raise ConfigError(f"environment {name!r} must be {kinds}")
    if hasattr(found, "step"):
        check_options("environment", name, found, options, None)
        return ClassFactory(found, options)
    check_options("environment", name, found, options)
    factory: EnvFactory = found(**options)
    return factory


def is_plain(found: type) -> bool:
    """Whether it is a class whose methods are the tools; `step` may be one, but is a coroutine in an `Env`."""
    return hasattr(found, "reset") and not iscoroutinefunction(getattr(found, "step", None))


def is_text_env(found: Any) -> bool:
    """Whether it is an environment of texts of another library: a class with `step(action)`, or a function that makes
    one. A plain class may have a tool `step(action)`, which is annotated to return a text or a number."""
    if isfunction(found):
        return True
    step = getattr(found, "step", None)
    if not isfunction(step) or iscoroutinefunction(step) or list(signature(step).parameters) != ["self", "action"]:
        return False
    return signature(step).return_annotation not in _OF_TOOLS


def build_tasks(name: str, options: Mapping[str, Any] | None = None) -> list[Task]:
    """The tasks bundled with an environment. Raises ConfigError for an unknown name or invalid options."""
    if name in ENVS and name not in plugins.ENV_TASKS:
        raise ConfigError(f"environment {name!r} has no bundled tasks: pass a data file")
    make: Callable[..., Iterable[Task]] = resolve("tasks", name, plugins.ENV_TASKS)
    check_options("tasks of environment", name, make, options or {})
    return list(make(**options or {}))
