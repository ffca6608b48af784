"""BFCL's multi-turn simulators as an environment: eight stateful APIs (files, trading, travel ..), a scripted user.

The user turns come from the data: a message without calls advances to the next one, and the last one ends the episode.
As in BFCL's checker, a turn is correct if the policy made at least one call, the public state of every API equals that
of a reference set on which the gold calls were run, and all results of the gold calls occur among the results that the
policy has received so far. Turns with an empty gold are not judged.

BFCL's own executor is not used: it evaluates strings and keeps every instance in module globals. Here a call consists
of the name of a documented function and arguments that satisfy its schema.
"""

import copy
import importlib
import inspect
import json
from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from toolrl.benchmarks.bfcl.tasks import BfclExtra, GoldCall, data_folder, json_schema
from verl.envs.base import Env, EnvFactory, Observation, StepResult
from verl.envs.rows import check_row
from verl.envs.tools.base import ToolError
from verl.envs.tools.functions import Toolbox, answer_calls
from verl.errors import ConfigError
from verl.types import Message, Score, Task, ToolCall, ToolSpec

_SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
_MODULES = {  # class -> module, also the name of its documentation file
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
_STATELESS = ("MathAPI",)
MAX_STEPS = 20  # messages with calls per user turn; as in BFCL, exceeding it fails the scenario
_BOUNDS = {  # larger arguments would take hours of CPU time
    ("logarithm", "precision"): (1, 1000),
    ("square_root", "precision"): (1, 1000),
    ("round_number", "decimal_places"): (-300, 300),
    ("power", "base"): (-1e9, 1e9),
    ("power", "exponent"): (-1000, 1000),
}


class Api:
    """The APIs of one scenario, with their state and the results so far."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        self.objects = {name: _load(name, extra) for name in extra["classes"]}
        self._owners = {name: self.objects[cls] for cls in extra["classes"] for name in _documented(cls)}
        self.answers: list[str] = []  # in the form that BFCL compares

    def call(self, call: ToolCall) -> str:
        try:
            answer = _text(getattr(self._owners[call.name], call.name)(**copy.deepcopy(dict(call.arguments))))
        except Exception as error:  # noqa: BLE001  third-party simulators raise anything for odd arguments
            answer = f"Error during execution: {error}"
        self.answers.append(answer)
        return answer

    def bound(self, call: ToolCall) -> str:
        """The call with the defaults of its function filled in, as a string: equal for equal calls."""
        arguments = inspect.signature(getattr(self._owners[call.name], call.name)).bind(**call.arguments)
        arguments.apply_defaults()
        return json.dumps([call.name, arguments.arguments], sort_keys=True)

    def gold_call(self, gold: Mapping[str, Any]) -> ToolCall:
        signature = inspect.signature(getattr(self._owners[gold["name"]], gold["name"]))
        return ToolCall(gold["name"], dict(zip(signature.parameters, gold["positional"], strict=False)) | gold["named"])

    def state(self) -> dict[tuple[str, str], Any]:
        return {
            (name, key): value
            for name, instance in self.objects.items()
            for key, value in vars(instance).items()
            if not key.startswith("_")
        }


class BfclEnv(Env):
    """One scenario. Score.parts: success (1/0), turns, state, functions (shares), artist (their mean)."""

    def __init__(self, task: Task, total: str) -> None:
        self._task, self._total = task, total
        self._policy, self._gold = Api(task.extra), Api(task.extra)
        self._gold_turns = [[self._gold.gold_call(call) for call in turn] for turn in json.loads(task.answer)]
        self._turns_right: list[bool] = []
        self._calls: list[list[ToolCall]] = [[]]  # [turn][call], valid arguments only
        self._steps = 0  # in this turn
        self._withheld = _withheld(task)

    async def reset(self) -> Observation:
        return Observation(self._task.prompt, _tools_of_turn(self._task, 0))

    async def step(self, message: Message) -> StepResult:
        """Answers calls; a message without calls ends the user turn."""
        if message.tool_calls:
            self._steps += 1
            if self._steps > MAX_STEPS:
                return StepResult(done=True)
            return answer_calls(message.tool_calls, self._call)
        self._turns_right.append(self._turn_is_right())
        turn = len(self._turns_right)
        if turn == len(self._gold_turns):
            return StepResult(done=True)
        self._calls.append([])
        self._steps = 0
        added = tuple(spec for spec in _tools_of_turn(self._task, turn) if self._withheld.get(spec.name) == turn)
        messages = tuple(Message(row["role"], row["content"]) for row in self._task.extra["turns"][turn - 1])
        if not messages:  # the turn consists of functions that are no longer withheld
            prompts = importlib.import_module("bfcl_eval.constants.default_prompts")
            messages = (Message("user", str(prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC)),)
        return StepResult(messages, tools=added)

    def _call(self, call: ToolCall) -> str:
        offered = {spec.name for spec in _tools_of_turn(self._task, len(self._turns_right))}
        if call.name not in offered:
            raise ToolError(f"there is no function {call.name!r}; there are {', '.join(sorted(offered))}")
        _toolbox().check(call)
        self._calls[-1].append(call)
        return self._policy.call(call)

    def _turn_is_right(self) -> bool:
        gold = self._gold_turns[len(self._turns_right)]
        answers = [self._gold.call(call) for call in gold]
        if not gold:
            return True
        all_answered = not Counter(answers) - Counter(self._policy.answers)
        return bool(self._calls[-1]) and self._policy.state() == self._gold.state() and all_answered

    async def judge(self) -> Score:
        """ARTIST (arXiv 2505.01441): 0.5 * share of matching state variables + 0.5 * share of matching calls.

        If a limit truncated the scenario, the turn in progress counts as ended, provided it has calls, and later turns
        are wrong: BFCL's checker fails an incomplete scenario.
        """
        in_progress = len(self._turns_right)
        for turn in range(in_progress, len(self._gold_turns)):
            right = self._turn_is_right()  # runs the gold, for the state comparison below
            self._turns_right.append(right and turn == in_progress and 0 < self._steps <= MAX_STEPS)
        actual, expected = self._policy.state(), self._gold.state()
        equal = [key in actual and actual[key] == value for key, value in expected.items()]
        calls = Counter(self._policy.bound(call) for turn in self._calls for call in turn)
        gold_calls = Counter(self._gold.bound(call) for turn in self._gold_turns for call in turn)
        parts = {
            "success": float(all(self._turns_right)),
            "turns": sum(self._turns_right) / len(self._turns_right),
            "state": sum(equal) / len(equal) if equal else 1.0,
            "functions": (calls & gold_calls).total() / gold_calls.total(),
        }
        parts["artist"] = 0.5 * parts["state"] + 0.5 * parts["functions"]
        return Score(parts[self._total], parts)


class BfclFactory(EnvFactory):
    """Creates scenarios. `score` selects the total: success (binary) or artist (graded)."""

    def __init__(self, score: Literal["success", "artist"] = "success") -> None:
        data_folder()
        if score not in ("success", "artist"):
            raise ConfigError(f"environment 'bfcl': score must be success or artist, not {score!r}")
        self._score = score

    def __call__(self, task: Task) -> BfclEnv:
        return BfclEnv(task, self._score)

    def check_task(self, task: Task) -> None:
        check_row("bfcl", task, BfclExtra, list[list[GoldCall]])

    def initial_observation(self, task: Task) -> Observation:
        return Observation(task.prompt, _tools_of_turn(task, 0))


def _tools_of_turn(task: Task, turn: int) -> tuple[ToolSpec, ...]:
    specs = [spec for name in task.extra["classes"] for spec in _documented(name).values()]
    excluded, withheld = task.extra["excluded"], _withheld(task)
    return tuple(spec for spec in specs if spec.name not in excluded and withheld.get(spec.name, 0) <= turn)


def _withheld(task: Task) -> dict[str, int]:
    """Function -> the turn at which it becomes available, for functions withheld at the start."""
    return {name: int(turn) for turn, names in task.extra["withheld"].items() for name in names}


def _load(name: str, extra: Mapping[str, Any]) -> Any:
    instance = getattr(importlib.import_module(f"{_SOURCES}.{_MODULES[name]}"), name)()
    if name not in _STATELESS:
        config = copy.deepcopy(extra["initial_config"].get(name, {}))
        instance._load_scenario(config, long_context=extra["long_context"])
    return instance


@cache
def _documented(name: str) -> dict[str, ToolSpec]:
    lines = (data_folder() / "multi_turn_func_doc" / f"{_MODULES[name]}.json").read_text(encoding="utf-8").splitlines()
    return {spec.name: spec for spec in map(_spec, map(json.loads, lines))}


@cache
def _toolbox() -> Toolbox:
    return Toolbox(spec for name in _MODULES for spec in _documented(name).values())


def _spec(row: Mapping[str, Any]) -> ToolSpec:
    schema = json_schema(row["parameters"], closed=True)
    for name, parameter in schema["properties"].items():
        if bounds := _BOUNDS.get((row["name"], name)):
            parameter["minimum"], parameter["maximum"] = bounds
    return ToolSpec(row["name"], row["description"], schema)


def _text(result: Any) -> str:
    """BFCL's formatting: JSON for a dict, if possible."""
    if not isinstance(result, dict):
        return str(result)
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)
