"""Per-task environments: the run's default, or the one named in the row."""

from collections.abc import Collection, Mapping
from typing import Any

from verl.envs.base import Env, EnvFactory, HasInitialObservation, Judge, Observation, TaskChecker
from verl.envs.registry import ClassFactory, build_env_factory
from verl.errors import ConfigError, DataError
from verl.host.services import check_services
from verl.types import Task


def check_offered(task: Task, initial: Observation, env: str) -> None:
    """Raises DataError if a row lists other tools than its environment offers."""
    listed, offered = {tool.name for tool in task.tools}, {tool.name for tool in initial.tools}
    if listed and listed != offered:
        unknown, more = sorted(listed - offered), ", ".join(sorted(offered - listed))
        problem = f"lists {unknown[0]!r}, which env.name={env} does not offer" if unknown else f"leaves out {more}"
        own = f"no others than {', '.join(sorted(offered))}, which env.name={env} always offers"
        raise DataError(problem, own if offered else "no tools", field="tools")


class TaskEnvs:
    """Dispatches each task to the factory of its environment: the run's, or that of its row, with default options.

    options: of environments that rows name, where the run's settings decide them
    """

    def __init__(self, name: str, default: EnvFactory, options: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._name, self._options = name, options or {}
        self._factories = {name: default}

    def name_of(self, task: Task) -> str:
        return task.env or self._name

    def factory_of(self, task: Task) -> EnvFactory:
        """Its factory, created on first use. Raises DataError for an invalid name."""
        name = self.name_of(task)
        if name not in self._factories:
            try:
                self._factories[name] = build_env_factory(name, self._options.get(name))
            except ConfigError as error:
                hint = "Set env.name=tool with env.tools, and name the others in their rows" if name == "tool" else ""
                raise DataError(str(error), "an environment of docs/environments.md", hint, field="env") from error
        return self._factories[name]

    def check_judged(self, task: Task, rewards: Collection[str]) -> None:
        """Raises DataError if one of the task's rewards is an absent verdict of its environment."""
        name, factory = self.name_of(task), self.factory_of(task)
        judges = isinstance(factory.env_class, Judge) if isinstance(factory, ClassFactory) else name != "tool"
        if "env" in rewards and not judges:
            field = "env" if task.reward is None else "reward"
            raise DataError(f"the environment {name} does not judge", "an environment that does", field=field)

    @property
    def named(self) -> list[EnvFactory]:
        """Without the run's own."""
        return [factory for name, factory in self._factories.items() if name != self._name]

    def known_initial_observation(self, task: Task) -> Observation | None:
        """The initial observation, if known before an episode starts. Raises DataError for an invalid task."""
        factory = self.factory_of(task)
        source = factory.env_class if isinstance(factory, ClassFactory) else factory
        if isinstance(source, TaskChecker):
            source.check_task(task)
        if not isinstance(source, HasInitialObservation):
            return None
        initial = source.initial_observation(task)
        check_offered(task, initial, self.name_of(task))
        return initial

    def __call__(self, task: Task) -> Env:
        return self.factory_of(task)(task)

    async def check_services(self) -> None:
        await check_services(self._factories.values())

    async def close(self) -> None:
        for factory in self._factories.values():
            await factory.close()
