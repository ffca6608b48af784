"""Environments of texts of other libraries: `reset` or `init` gives a text, `step` takes that of the policy.

    gymnasium  reset(seed, options) -> (observation, info)  step(action) -> (observation, reward, ended, cut, info)
    rLLM       reset() -> (observation, info)               step(action) -> (observation, reward, done, info)
    SkyRL-gym  init(prompt) -> (messages, metadata)         step(action) -> {observations, reward, done, metadata}
    TextArena  reset(num_players, seed), get_observation()  step(action) -> (done, info), and close() -> rewards

It is a class, or a function that makes such an object (`gymnasium:make`, `textarena:make`). The episode's score is the
sum of the rewards; rLLM's `compute_final_reward` replaces the last one. Every episode has an object of its own; its
methods run in threads, one at a time. The policy's thought is no part of an action. Where actions are numbers
(gymnasium's Discrete), the last number of the text is taken. Of an observation with a `question` the policy sees that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from inspect import Parameter, signature
from threading import Lock
from typing import Any, ClassVar
from zlib import crc32

from toolrl.envs.class_env.class_env import row_of
from verl.data.messages import read_messages
from verl.envs.base import Env, Observation, StepResult
from verl.formats.openai import as_openai
from verl.formats.response import spoken
from verl.host.daemon import run_in_daemon_thread
from verl.text import as_text
from verl.types import Message, Score, Task

_INTEGER = re.compile(r"-?\d+")
_STARTING = Lock()  # some libraries seed Python's one generator and draw from it


@dataclass(frozen=True, slots=True)
class _Step:
    """One step in any library's form. observed: text, messages, or any other value; reward: None: known in the end"""

    observed: Any
    reward: float | None
    done: bool


class TextEnv(Env):
    """One episode: an object of `made_of`."""

    made_of: ClassVar[Callable[..., Any]]

    def __init__(self, task: Task, **options: Any) -> None:
        self._task, self._options = task, options
        self._object: Any = None
        self._turn = Lock()
        self._rewards: list[float] = []
        self._closed = False

    async def reset(self) -> Observation:
        return Observation(await run_in_daemon_thread(self._start))

    async def step(self, message: Message) -> StepResult:
        action = self._action(spoken(message.content).strip())
        if action is None:
            space = self._space
            first = int(getattr(space, "start", 0))
            return StepResult((Message("user", f"Answer with a number from {first} to {first + int(space.n) - 1}."),))
        transition = await run_in_daemon_thread(self._alone, self._step, action)
        self._rewards.append(transition.reward or 0.0)
        return StepResult(() if transition.done else _messages(transition.observed), done=transition.done)

    async def judge(self) -> Score:
        rewards = list(self._rewards)
        if hasattr(self._object, "compute_final_reward"):  # rLLM's, in place of the last step's
            rewards[-1:] = [float(await run_in_daemon_thread(self._alone, self._object.compute_final_reward))]
        at_the_end = await self._close()
        return Score(sum(rewards) + at_the_end, {"steps": float(len(self._rewards))})

    async def close(self) -> None:
        await self._close()

    async def _close(self) -> float:
        """Closes the object, once. Returns the reward of the one player, which TextArena reports then."""
        if self._closed or self._object is None:
            return 0.0
        self._closed = True
        result = await run_in_daemon_thread(self._alone, getattr(self._object, "close", lambda: None))
        is_textarena = isinstance(result, tuple) and isinstance(result[0], Mapping)
        return float(result[0].get(0) or 0.0) if is_textarena else 0.0

    def _alone(self, run: Callable[..., Any], *arguments: Any) -> Any:
        with self._turn:
            return run(*arguments)

    def _start(self) -> tuple[Message, ...]:
        """The object made and reset: the messages to which the policy responds."""
        row = deepcopy(row_of(self._task))  # an environment may change what it gets
        with _STARTING:
            self._object = self._create(row)
            if not getattr(self._object, "is_multithread_safe", lambda: True)():  # rLLM's
                self._turn = _STARTING
            if hasattr(self._object, "init"):
                prompt, _ = self._object.init([as_openai(message) for message in self._task.prompt])
                return read_messages(prompt, "init")
            initial = self._object.reset(**self._arguments(row))
            has_info = isinstance(initial, tuple) and len(initial) == 2 and isinstance(initial[1], Mapping)
            observed = self._observation() if initial is None else self._show(initial[0] if has_info else initial)
        *before, last = self._task.prompt
        text = "" if _is_row(observed, row) else _text_of(observed)
        if text in ("", last.content):
            return self._task.prompt
        return (*before, replace(last, content=f"{last.content}\n\n{text}"))

    def _create(self, row: Mapping[str, Any]) -> Any:
        make, options = type(self).made_of, self._options
        if hasattr(make, "from_dict"):  # rLLM
            return make.from_dict({**row, **options})
        return make(**({"extras": row} if "extras" in signature(make).parameters else {}), **options)  # SkyRL-gym

    def _arguments(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `reset`: the columns that it names, and the libraries' own. Equal rows have equal seeds."""
        parameters = signature(self._object.reset).parameters
        columns = {"seed": crc32(self._task.id.encode()), **row}
        if any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            return columns
        known = {"options": row, "num_players": 1, **columns}
        return {name: value for name, value in known.items() if name in parameters}

    @property
    def _space(self) -> Any:
        """The space of actions that are numbers. In rLLM it has another name, beside gymnasium's, which it extends."""
        spaces = (getattr(self._object, name, None) for name in ("ACTION_SPACE", "action_space"))
        return next((space for space in spaces if hasattr(space, "n")), None)

    def _action(self, text: str) -> Any:
        """None: the text has no number where one is asked for."""
        if self._space is None:
            return text
        numbers = _INTEGER.findall(text)
        return int(numbers[-1]) if numbers and self._space.contains(int(numbers[-1])) else None

    def _step(self, action: Any) -> _Step:
        match self._object.step(action):
            case {"observations": observed, "reward": reward, "done": done}:
                return _Step(observed, float(reward), bool(done))
            case (observed, reward, terminated, truncated, _):
                return _Step(self._show(observed), float(reward), bool(terminated or truncated))
            case (observed, reward, done, _):
                return _Step(self._show(observed), float(reward), bool(done))
            case (bool() as done, Mapping()):
                return _Step("" if done else self._observation(), None, done)
            case found:
                forms = "gymnasium's five values, rLLM's four, SkyRL-gym's mapping, or TextArena's (done, info)"
                raise TypeError(f"step returned {found!r:.80}, not {forms}")

    def _show(self, observed: Any) -> Any:
        """Text of an observation for the policy: where the environment draws it as text, the drawing."""
        return self._object.render() if getattr(self._object, "render_mode", None) == "ansi" else observed

    def _observation(self) -> Any:
        _, observed = self._object.get_observation()
        return observed if isinstance(observed, str) else "\n".join(str(entry[1]) for entry in observed)


def as_text_env(made_of: Callable[..., Any]) -> type[TextEnv]:
    """The environment class of a library's class, or of a function that makes its objects."""
    return type(getattr(made_of, "__name__", "TextEnv"), (TextEnv,), {"made_of": staticmethod(made_of)})


def _messages(observed: Any) -> tuple[Message, ...]:
    listed = observed if isinstance(observed, list | tuple) else []
    if listed and all(isinstance(each, Mapping) and "role" in each for each in listed):
        return read_messages(listed, "observations")
    return (Message("user", _text_of(observed)),)


def _text_of(observed: Any) -> str:
    """As rLLM's agents read it: the question of a mapping, and nothing of an empty one."""
    if isinstance(observed, Mapping) and isinstance(question := observed.get("question"), str):
        return question
    return "" if observed is None or observed == {} else as_text(observed)


def _is_row(observed: Any, row: Mapping[str, Any]) -> bool:
    """Whether rLLM's environment returns its task, gold answer included, of which its agents choose the question."""
    if not isinstance(observed, Mapping) or "question" in observed:
        return False
    return observed == row.get("task") or all(observed.get(name) == row[name] for name in ("prompt", "answer"))
