"""The commands as functions. They make the same settings as the command line, and call the same code in a process of
its own (`child.py`).

Python objects take the place of names: functions and classes for rewards, tools and environments, rows for files
(`inputs.py`). All other settings are given by their keys, as `settings={"actor.optim.lr": 1e-5}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from inspect import isfunction, signature
from itertools import count
from pathlib import Path
from typing import Any

from toolrl.api.child import run_command
from toolrl.api.inputs import Objects, argument, check_type, data_files, model_path
from toolrl.api.run import Run
from toolrl.commands import EVAL, PROBE
from verl.config.commands import SFT, TRAIN, Command
from verl.config.load import load_config, read_recipe
from verl.embedded import EMBEDDED
from verl.envs.registry import is_plain, is_text_env
from verl.errors import ConfigError

_MAPS = "toolrl.envs.class_env.class_env"
_ROW_MAP = f"{_MAPS}:as_task_row"  # for plain classes and functions of TRL's form, which need no gold answer
_ANSWERED_MAP = f"{_MAPS}:as_answered_row"  # for other functions
_ARGUMENTS = {"trainer.total_training_steps": "steps", "eval.limit": "limit", "trainer.experiment_name": "name"}
_FORMAT = "auto"  # with tools or an environment, unless settings or the recipe have another


def train(
    model: str | Path | None = None,
    data: Any = None,
    *,
    val_data: Any = None,
    reward: Any = None,
    tools: Any = (),
    env: Any = None,
    recipe: str | None = None,
    steps: int | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Train with reinforcement learning, as `toolrl train`. Raises VerlError.

    model: a folder, a hub name or "embedded"; default: the recipe's
    data, val_data: a file or data set name or several, rows (dicts), a datasets.Dataset, a DataFrame; default: the
        recipe's
    reward: a function, class or name (`toolrl.rewards.NAME`), or a list of these and {"name": .., "weight": ..};
        default: the environment's own, or the recipe's
    tools: functions with type hints and docstrings, names, or {"name": .., option: ..}; one or a list
    env: a class or name of an environment
    recipe: default: grpo, for the embedded model embedded
    name: of the run's folder in trainer.default_local_dir; a name that has a run resumes it. Default: run-1, run-2 ..
    settings: any other setting by its key
    """
    job = _Job(TRAIN, recipe or _default_recipe(model), settings)
    job.put_model(model)
    job.put("trainer.total_training_steps", steps)
    with job.folder("trainer.default_local_dir", name, "run") as folder:
        job.put("trainer.experiment_name", folder.name if name is None else name)
        job.put_episodes(reward, tools, env)
        job.put_data("data.train_files", data)
        job.put_data("data.val_files", val_data)
        if val_data is None and data is not None:  # the recipe's are for its own data
            job.put("data.val_files", [])
        job.run("train")
    return Run(folder)


def sft(
    model: str | Path,
    data: Any,
    *,
    val_data: Any = None,
    steps: int | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Run:
    """Supervised fine-tuning, as `toolrl sft`. Arguments and errors as of `train`."""
    job = _Job(SFT, None, settings)
    job.put_model(model)
    job.put("trainer.total_training_steps", steps)
    with job.folder("trainer.default_local_dir", name, "sft") as folder:
        job.put("trainer.experiment_name", folder.name if name is None else name)
        job.put_data("data.train_files", data)
        job.put_data("data.val_files", val_data)
        job.run("sft")
    return Run(folder)


def probe(
    model: str | Path | None = None,
    data: Any = None,
    *,
    reward: Any = None,
    tools: Any = (),
    env: Any = None,
    recipe: str | None = None,
    limit: int | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Would training learn? As `toolrl probe`; returns its statistics and `advice`. Arguments as of `train`.

    limit: number of rows
    """
    job = _Job(PROBE, recipe or _default_recipe(model), settings)
    job.put_model(model)
    job.put("eval.limit", limit)
    with job.folder("eval.output", name, "probe") as folder:
        job.put("eval.output", folder)
        job.put_episodes(reward, tools, env)
        job.put_data("data.train_files", data)
        result: dict[str, Any] = job.run("probe")
    return result


def evaluate(
    model: str | Path,
    benchmarks: Any,
    *,
    compare: str | Path | None = None,
    reward: Any = None,
    limit: int | None = None,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Benchmarks, as `toolrl eval`. Returns a result per benchmark and model, and per comparison.

    benchmarks: names or data files; one or a list
    compare: another model
    limit: number of rows per category
    """
    job = _Job(EVAL, None, settings)
    job.put_model(model)
    job.put("eval.compare", None if compare is None else model_path(compare))
    job.put("eval.limit", limit)
    with job.folder("eval.output", name, "eval") as folder:
        job.put("eval.output", folder)
        job.put("eval.benchmarks", _as_list(benchmarks))
        job.put_reward(reward)
        results: list[dict[str, Any]] = job.run("evaluate")
    return results


def _default_recipe(model: str | Path | None) -> str:
    return EMBEDDED if model == EMBEDDED else "grpo"


class _Job:
    """A command with its settings. Objects and rows are written into the folder of its output."""

    def __init__(self, command: Command, recipe: str | None, settings: Mapping[str, Any] | None) -> None:
        check_type("recipe", recipe, str | None, "a name")
        check_type("settings", settings, Mapping | None, 'a dict of keys as {"actor.optim.lr": 1e-5}')
        self._command, self._recipe = command, recipe
        self._preset = {} if recipe is None else read_recipe(recipe, command)
        self._settings = dict(settings or {})
        self._folder = Path()
        self._writes: list[Callable[[], None]] = []  # of rows, deferred until the settings are valid

    def put(self, key: str, value: Any) -> None:
        """Set a key, unless the value is None. Raises ConfigError if `settings` has it, too."""
        if value is None:
            return
        if key in self._settings:
            raise ConfigError(f"{key} is given twice: as an argument, and in settings")
        self._settings[key] = value

    def put_model(self, model: str | Path | None) -> None:
        self.put("model.path", None if model is None else model_path(model))

    def put_data(self, key: str, data: Any) -> None:
        if data is not None:
            argument = "data" if key == "data.train_files" else "val_data"
            files, write = data_files(argument, data, self._folder / "inputs" / key.partition(".")[2])
            self.put(key, files)
            self._writes.append(write)

    def put_reward(self, reward: Any) -> None:
        """One reward, or a list of several; a single one with a weight is a list, too."""
        several = isinstance(reward, list | tuple | Mapping)
        self.put("reward" if several else "reward.name", _as_list(reward) if several else reward)

    def put_episodes(self, reward: Any, tools: Any, env: Any) -> None:
        """The environment with its format and reward."""
        if tools and env is not None:
            raise ConfigError("tools and env are both given: an environment has its own tools")
        if tools:
            env = "tool"
            self.put("env.tools", _as_list(tools))
        self.put("env.name", env)
        if env is not None and not self._has("env.tool_call_format"):
            self.put("env.tool_call_format", _FORMAT)
        if not self._has("data.map"):
            of_own = is_text_env(env) or (isinstance(env, type) and is_plain(env))
            self.put("data.map", _ROW_MAP if of_own else _map_for(reward))
        if reward is None and (is_text_env(env) or hasattr(env, "get_reward") or hasattr(env, "judge")):
            reward = "env"
        self.put_reward(reward)

    @contextmanager
    def folder(self, key: str, name: str | None, stem: str) -> Iterator[Path]:
        """The folder of the output, absolute: that of this name, or a new one, removed if nothing is written into it.

        key: of the folder that holds it
        """
        known = {key: self._command.default_of(key), **self._preset, **self._settings}
        check_type("name", name, str | None, "a folder name, or several such as a/b")
        root = Path(known[key] if key.startswith("trainer.") else "outputs").resolve()
        self._folder = root / name if name is not None else _new_folder(root, stem)
        try:
            yield self._folder
        finally:
            with suppress(OSError):
                self._folder.rmdir()

    def run(self, name: str) -> Any:
        """The result of the command. Raises ConfigError before anything is started, and what `run_command` raises."""
        objects = Objects(self._folder / "inputs" / "objects.pkl")
        named = objects.name(self._settings)
        recipe = [] if self._recipe is None else [f"recipe={self._recipe}"]
        arguments = [*recipe, *(argument(key, value) for key, value in named.items())]
        with _name_arguments():
            load_config(arguments, self._command)
        for write in (objects.write, *self._writes):
            write()
        return run_command(name, arguments)

    def _has(self, key: str) -> bool:
        return key in self._settings or key in self._preset


@contextmanager
def _name_arguments() -> Iterator[None]:
    """Names the argument in a ConfigError that begins with its key."""
    try:
        yield
    except ConfigError as error:
        name = next((name for key, name in _ARGUMENTS.items() if str(error).startswith(key)), None)
        if name is None:
            raise
        raise ConfigError(f"{name}: {error}") from error


def _map_for(reward: Any) -> str | None:
    """Row map for rows of a prompt and further columns, if the reward is or contains a function."""
    named = [each.get("name") if isinstance(each, Mapping) else each for each in _as_list(reward)]
    functions = [each for each in named if isfunction(each)]
    if all("completions" in signature(each).parameters for each in functions):
        return _ROW_MAP if functions else None
    return _ANSWERED_MAP


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _new_folder(root: Path, stem: str) -> Path:
    for number in count(1):
        with suppress(FileExistsError):
            (root / f"{stem}-{number}").mkdir(parents=True)
            return root / f"{stem}-{number}"
    raise AssertionError("unreachable")
