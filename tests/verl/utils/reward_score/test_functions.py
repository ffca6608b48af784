"""Rewards of others get what these pass: compared with recordings of TRL's, veRL's and verifiers' own calls."""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.support.tiny import MINI
from tests.verl.utils.reward_score.peers.tools import KINDS, WEIGHTS, Counter, facts, weather
from toolrl.envs.class_env.class_env import as_env_class, as_task_row
from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.data.tasks import to_task
from verl.envs.base import Observation, StepResult
from verl.envs.registry import ClassFactory
from verl.envs.tool_env import ToolEnvFactory
from verl.envs.tools.function import FunctionTool
from verl.envs.tools.runner import ToolLimits, ToolRunner
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.episodes.written import as_trajectory
from verl.errors import ConfigError, DataError
from verl.formats.base import build_tool_call_format
from verl.registry import resolve
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer, ScoringPool
from verl.tracking.transcripts import group_rows
from verl.trainer.metrics import score_means
from verl.types import Completion, FinishReason, Message, Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.functions import FunctionReward, check_function
from verl.utils.reward_score.weighted import Term, WeightedSum

PEERS = Path(__file__).parent / "peers"
GIVEN = json.loads((PEERS / "cases.json").read_text())
RECORDED_OF_TRL = json.loads((PEERS / "trl.json").read_text())
TRL, KINDS_OF_TRL = RECORDED_OF_TRL["given"], RECORDED_OF_TRL["kinds"]
RECORDED_OF_VERL = json.loads((PEERS / "verl.json").read_text())
VERL, FORMS_OF_VERL = RECORDED_OF_VERL["given"], RECORDED_OF_VERL["forms"]
ROWS_OF_VERL, RESULTS_OF_VERL = RECORDED_OF_VERL["rows"], RECORDED_OF_VERL["results"]
RECORDED = json.loads((PEERS / "verifiers.json").read_text())
VERIFIERS = RECORDED["given"]
CASES = {case["name"]: case for case in GIVEN["cases"]}


class Player:
    """An engine that writes one text after the other."""

    def __init__(self, chat: ChatTemplate, texts: Sequence[str], cut: bool) -> None:
        self.chat, self.texts, self.cut = chat, iter(texts), cut

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        ids = self.chat.response_ids(next(self.texts))[0]
        if self.cut:
            return (Completion(ids, (0.0,) * len(ids), FinishReason.LENGTH, 0),)
        return (Completion((*ids, self.chat.end_token_id), (0.0,) * (1 + len(ids)), FinishReason.STOP, 0),)


def played(case: dict[str, Any]) -> Trajectory:
    """Our episode of a case."""
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer")
    tokenizer.chat_template = GIVEN["template"]
    chat = ChatTemplate(tokenizer)
    envs: Any = ClassFactory(as_env_class(Counter)) if case.get("environment") else None
    if "env" in case:
        envs = ClassFactory(case["env"])
    if envs is None:
        tools = [FunctionTool(weather), FunctionTool(facts)] if case.get("tools") else []
        envs = ToolEnvFactory(tools, ToolRunner(ToolLimits()))
    observations = ObservationTokenizer(chat, build_tool_call_format("hermes"), 100)
    limits = EpisodeLimits(feedback_on_parse_error=not case.get("ends"))
    runner = EpisodeRunner(envs, observations, limits)
    task = to_task(as_task_row({"prompt": case["prompt"], **case["columns"]}), "row#0")
    done = asyncio.run(runner.run(Player(chat, case["responses"], "cut" in case), Sampling(1), task, 0, None))
    assert isinstance(done, Trajectory), done
    return done


def scored(function: Any, trajectory: Trajectory, step: int = 1) -> Score:
    reward = FunctionReward(function)
    reward.check_task(trajectory.task)
    return reward.score(trajectory, trajectory.task, step)


@pytest.mark.parametrize("name", CASES)
def test_a_reward_of_trls_form_gets_what_trl_passes(name: str) -> None:
    """All names, types and values: prompts, completions, tokens, columns, the trainer's state, the environment."""
    seen: dict[str, Any] = {}

    def reward(completions: list[Any], **given: Any) -> list[float]:
        given["completions"] = completions
        seen.update({key: "a function" if callable(value) else value for key, value in given.items()})
        return [1.0]

    scored(reward, played(CASES[name]))
    assert seen.pop("data_source") == ["environment"]  # the one column that all of our rows have
    state = seen.pop("trainer_state")
    environments = seen.pop("environments", None)
    ours = {key: value if isinstance(value, str) else value[0] for key, value in seen.items()}
    ours["trainer_state"] = {"global_step": state.global_step}
    if environments is not None:
        (environment,) = environments
        ours["environments"] = vars(environment)
    theirs = json.loads(json.dumps(TRL[name]))
    for given in (ours, theirs):
        given["prompts"] = given["prompts"] if isinstance(given["prompts"], str) else plain_messages(given["prompts"])
    if name in OTHER_TEXTS:  # the results of tools have other texts, and so other tokens
        results = [
            [each.pop("content") for each in messages(given) if each["role"] == "tool"] for given in (ours, theirs)
        ]
        assert all(OTHER_TEXTS[name](*pair) for pair in zip(*results, strict=True))
        assert [given.pop("completion_ids")[-1] for given in (ours, theirs)] == [2, 2]
    assert ours == theirs


def messages(given: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = given["completions"]
    return found


def plain_messages(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the None that a data set adds, and with the text of content parts as one."""
    found = [{key: value for key, value in message.items() if value is not None} for message in given]
    for message in found:
        if isinstance(message["content"], list):
            message["content"] = "".join(part["text"] for part in message["content"])
    return found


OTHER_TEXTS: dict[str, Callable[[str, str], bool]] = {
    "a tool that returns an object": lambda ours, theirs: json.loads(ours) == ast.literal_eval(theirs),
    "a method that fails": lambda ours, theirs: ours == f"Error: {ast.literal_eval(theirs)['error']}",
    "an unknown tool": lambda ours, theirs: "no tool 'fly'" in ours and "Tool fly not found" in theirs,
}


@pytest.fixture(scope="module")
def episode() -> Trajectory:
    """The case that veRL's recording has: a call, its result, an answer."""
    done = played(CASES["a call"])
    task = replace(done.task, data_source="weather", extra={"index": 7, "split": "train"})
    return replace(done, task=task)


@pytest.mark.parametrize("manager", ["loop naive", "loop dapo", "naive", "dapo"])
def test_a_reward_of_verls_form_gets_what_verl_passes(manager: str, episode: Trajectory) -> None:
    """The managers differ in what they add to extra_info; ours has what all of them add."""
    seen: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> Any:
        seen.update(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth)
        seen["extra_info"] = extra_info
        return {"score": 1.0, "acc": True, "pred": "Rain."}

    score = scored(compute_score, episode)
    theirs = VERL[manager]["named"]
    added = theirs["extra_info"]
    assert {**seen, "extra_info": {key: seen["extra_info"][key] for key in added}} == theirs
    assert (score.total, score.parts, score.details) == (1.0, {"acc": 1.0}, {"pred": "Rain."})


def test_verls_reward_kwargs_take_precedence(episode: Trajectory) -> None:
    def compute_score(**given: Any) -> float:
        assert {name: given[name] for name in ("data_source", "strict")} == own
        return float(given["solution_str"].count("<tool_call>"))

    theirs = VERL["reward_kwargs"]
    own = {name: theirs[name] for name in ("data_source", "strict")}
    takes_solution = lambda solution_str, **given: compute_score(solution_str=solution_str, **given)  # noqa: E731
    assert FunctionReward(takes_solution, own).score(episode, episode.task, 1).total == 1.0


def test_a_reward_of_verls_batch_manager_gets_lists(episode: Trajectory) -> None:
    seen: dict[str, Any] = {}

    def compute_score(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, strict: bool) -> Any:
        seen.update(data_sources=data_sources, solution_strs=solution_strs, ground_truths=ground_truths, strict=strict)
        seen["extra_infos"] = extra_infos
        return [{"score": 1.0, "pred": "Rain."}]

    score = FunctionReward(compute_score, {"strict": True}).score(episode, episode.task, 1)
    theirs = VERL["batch"]["named"]
    own = [{key: seen["extra_infos"][0][key] for key in theirs["extra_infos"][0]}]
    assert {**seen, "extra_infos": own} == theirs
    assert (score.total, score.details) == (1.0, {"pred": "Rain."})


def test_a_tuple_is_read_as_by_verls_manager_prime(episode: Trajectory) -> None:
    found = scored(lambda data_source, solution_str, ground_truth, extra_info: (0.5, 2, "why"), episode)
    assert (found.total, found.parts, found.details) == (0.5, {"item_1": 2.0}, {"item_2": "why"})
    assert VERL["prime"]["reward"] == 1.0 and VERL["prime"]["given"][1] == episode.decoded


def test_a_ground_truth_that_is_no_text_reaches_the_function_as_it_is() -> None:
    seen = []

    def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        seen.append(ground_truth)
        return 0.0

    for truth in ({"target": ["Rome"]}, [1, 2], 7, "7"):
        prompt = [{"role": "user", "content": "?"}]
        task = to_task({"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": truth}}, "r")
        FunctionReward(compute_score).score(as_trajectory(task, "Rome"), task, 1)
    assert seen == [{"target": ["Rome"]}, [1, 2], 7, "7"]


def test_a_plain_function_sees_the_whole_episode(episode: Trajectory) -> None:
    texts: list[str] = []
    scored(lambda response, answer: texts.append(response) or 1.0, episode)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert texts == [f"{call}\nrain\nRain."]


def has_tool(completions: list[Any], **_: Any) -> list[float]:
    return [float(any(message["role"] == "tool" for message in messages)) for messages in completions]


def num_calls(completions: list[Any], **_: Any) -> list[float]:
    return [float(sum(len(message.get("tool_calls", [])) for message in messages)) for messages in completions]


def length(completions: list[str], **_: Any) -> list[float]:
    return [-abs(20.0 - len(text)) for text in completions]


def called(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return solution_str.count("<tool_call>") + extra_info["num_turns"] / 10


def test_rewards_of_whole_episodes_are_no_constants() -> None:
    """Tool messages, calls, the length of a text, veRL's markup and number of turns, in episodes with and without."""
    none, one, three = (played(CASES[name]) for name in ("tools that are not called", "a call", "three turns"))
    assert [scored(has_tool, each).total for each in (none, one)] == [0.0, 1.0]
    assert [scored(num_calls, each).total for each in (none, one, three)] == [0.0, 1.0, 2.0]
    assert [scored(called, each).total for each in (none, one, three)] == [0.2, 1.4, 2.6]
    assert scored(length, played(CASES["a text"])).total == -19.0
    assert scored(length, played({**CASES["a text"], "responses": ["the sum is 2"]})).total == -8.0


def test_none_is_not_counted(episode: Trajectory) -> None:
    """As by TRL: alone, the response leaves its group; in a sum, the reward leaves the sum and its own mean."""

    def some(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if episode.task.answer == "Rain." else 1.0]

    assert not scored(some, episode).counted
    total = WeightedSum(["env"])
    total.terms = [Term("a.py:some", FunctionReward(some), 5.0), Term("a.py:calls", FunctionReward(num_calls), 2.0)]
    mixed = total.score(episode, episode.task, 1)
    assert (mixed.total, mixed.counted, mixed.parts) == (2.0, True, {"calls": 1.0})
    other = Score(7.0, {"some": 1.0, "calls": 1.0})
    assert score_means([mixed, other]) == {"total": 4.5, "calls": 1.0, "some": 1.0}  # not 0.5
    total.terms = total.terms[:1]
    assert not total.score(episode, episode.task, 1).counted


def test_a_response_that_is_not_counted_leaves_its_group_and_is_no_fault(episode: Trajectory) -> None:
    class Runner:
        limits = SimpleNamespace(max_turns=2)

        def for_group(self) -> Runner:
            return self

        async def run(self, engine: Any, sampling: Any, task: Task, index: int, seed: int | None) -> Trajectory:
            return replace(episode, index=index)

    class Odd:
        def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
            return Score(1.0, {}, counted=trajectory.index % 2 == 1)

    rollout = GroupRollout(None, DirectScorer(Odd()), Sampling(1), Runner())  # type: ignore[arg-type]
    group = asyncio.run(rollout.run(episode.task, 5, 1))
    assert [each.index for each in group.trajectories] == [1, 3] and group.faults == ()


def logging(completions: list[Any], log_metric: Any, log_extra: Any, **_: Any) -> list[float]:
    log_metric("length", 3)
    log_extra("last", [messages[-1]["content"] for messages in completions])
    return [1.0]


def by_step(completions: list[Any], trainer_state: Any, **_: Any) -> list[float]:
    return [float(trainer_state.global_step)]


def test_values_logged_by_a_reward_are_parts_and_transcript_details(episode: Trajectory) -> None:
    score = scored(logging, episode)
    assert (score.parts, score.details) == ({"length": 3.0}, {"last": "Rain."})
    group = TrajectoryGroup(episode.task, (episode,), (score,), (1.0,))
    (row,) = group_rows(1, group)
    assert row["score"] == {"total": 1.0, "parts": {"length": 3.0}, "details": {"last": "Rain."}}
    json.dumps(row)


def test_the_trainers_state_follows_the_steps(episode: Trajectory) -> None:
    reward = FunctionReward(by_step)
    assert reward.reads_step and not FunctionReward(num_calls).reads_step
    assert [reward.score(episode, episode.task, step).total for step in (1, 2, 9)] == [0.0, 1.0, 8.0]


def test_values_that_are_no_json_are_kept_as_text(episode: Trajectory) -> None:
    given = {"score": 1, "pred": None, "set": {1}, "list": [1, "a"], "nan": [float("nan")]}
    found = scored(lambda response, answer: given, episode)
    assert found.details == {"pred": None, "set": "{1}", "list": [1, "a"], "nan": "[nan]"}


FILE = """
class Counter:
    def reset(self, **row):
        self.value = 0
    def add(self, number: int) -> int:
        '''Add.'''
        self.value += number
        return self.value

def final(completions, environments, **_):
    return [float(environment.value) for environment in environments]
"""


def test_the_environments_object_reaches_a_reward_in_a_scoring_process(tmp_path: Path) -> None:
    """Its class is of a file, which the process does not import."""
    (tmp_path / "game.py").write_text(FILE.partition("def final")[0])
    (tmp_path / "rewards.py").write_text("def final" + FILE.partition("def final")[2])
    made_of = resolve("environment", f"{tmp_path / 'game.py'}:Counter", {})
    env = as_env_class(made_of)(Task("t", (Message("user", "?"),), "", "s"))

    async def end() -> bytes:
        await env.reset()
        env._object.value = 3
        return env.snapshot()

    done = replace(played(CASES["a call"]), environment=asyncio.run(end()))
    with ScoringPool(f"{tmp_path / 'rewards.py'}:final", {}, 1) as pool:
        assert asyncio.run(pool.score(done, done.task, 1)) == Score(3.0, {})


def test_a_reward_that_reads_an_unpicklable_environment_gets_an_error(episode: Trajectory) -> None:
    def final(completions: list[Any], environments: list[Any]) -> list[float]:
        return [0.0]

    with pytest.raises(TypeError, match="environments"):
        scored(final, episode)


class Asked:
    """An environment that plays the user."""

    def __init__(self, task: Task) -> None:
        self.task, self.steps = task, 0

    async def reset(self) -> Observation:
        return Observation(self.task.prompt)

    async def step(self, message: Message) -> StepResult:
        self.steps += 1
        return StepResult((Message("user", "And?"),)) if self.steps == 1 else StepResult(done=True)

    async def close(self) -> None:
        pass


class Stock(Counter):
    """As the environment of the recording, which writes nothing at first."""

    def reset(self, **row: object) -> None:  # type: ignore[override]
        self.value = 0


def without_defaults(value: Any) -> Any:
    """In JSON, without what another environment alone can know."""
    if isinstance(value, dict):
        left_out = ("example_id", "model", "usage", "stop_condition", "tool_defs", "data_source")
        return {key: without_defaults(each) for key, each in value.items() if key not in left_out}
    return [without_defaults(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", VERIFIERS)
def test_a_function_of_a_rubric_gets_what_verifiers_passes(name: str) -> None:
    """In single turns, with a user, with tools and with a tool over a state: items and attributes, async or not."""
    theirs = without_defaults(VERIFIERS[name]["given"])
    case = next((each for label, each in CASES.items() if name.endswith(f", {label}")), CASES["a conversation"])
    if name == "StatefulToolEnv":
        case = {**CASES["an environment"], "env": as_env_class(Stock)}
    columns = {key: value for key, value in theirs["task"].items() if key != "prompt"}
    case = {**case, "columns": columns}
    if name == "MultiTurnEnv":
        case = {**case, "env": Asked, "responses": ["<think>\none\n</think>\n\n1", "2"]}
    trajectory = played(case)
    seen: dict[str, Any] = {}

    async def everything(prompt: Any, completion: Any, **given: Any) -> float:
        access = {"item": completion[0]["role"], "attribute": completion[0].role}
        seen.update(prompt=prompt, completion=completion, access=access, **given)
        return 0.5

    def named(answer: Any, info: Any, completion: Any) -> bool:
        return {"answer": answer, "info": info} == VERIFIERS[name]["named"]

    assert scored(everything, trajectory).total == 0.5 and scored(named, trajectory).total == 1.0
    assert [each.role for each in seen["prompt"]] == [each["role"] for each in theirs["prompt"]]
    assert seen["state"]["prompt"] == seen["prompt"] and seen["state"].answer == theirs["answer"]
    ours = without_defaults(seen)
    ours["state"] = {key: value for key, value in ours["state"].items() if key in theirs["state"]}
    assert ours == {key: value for key, value in theirs.items() if key != "parser"}


def test_a_rubrics_none_and_exception_are_faults_here_where_verifiers_scores_0(episode: Trajectory) -> None:
    assert VERIFIERS["ToolEnv, a call"]["metrics"]["none"] == VERIFIERS["ToolEnv, a call"]["metrics"]["broken"] == 0.0
    with pytest.raises(TypeError, match="returned None; expected a finite number"):
        scored(lambda completion: None, episode)
    with pytest.raises(ZeroDivisionError):
        scored(lambda completion: 1 / 0, episode)


def test_parameters_that_only_a_rubric_has_are_refused(episode: Trajectory) -> None:
    """A parser, a column that rows lack, and all rollouts of a group, which verifiers hands to functions of plurals."""
    with pytest.raises(ConfigError, match="`parser` is the rubric's own"):
        check_function("f", lambda completion, answer, parser: 0.0, {})
    check_function("f", lambda completion, answer, parser=str: 0.0, {})
    with pytest.raises(DataError, match="example_id"):
        scored(lambda completion, example_id: 0.0, episode)
    assert set(RECORDED["group"]["given"]) >= {"answers", "infos"}
    with pytest.raises(DataError, match="answers"):
        scored(lambda completions, answers, infos: [0.0], episode)
    with pytest.raises(ConfigError, match="too many positional"):
        check_function("f", lambda states, *, tasks: [0.0], {})


def test_results_of_all_kinds_count_as_with_trl(episode: Trajectory) -> None:
    """Async, an object, a partial, NaN, None, booleans, a tensor and an array; names and the weighted sum."""
    trajectory = played(CASES["a conversation"])
    functions = [FunctionReward(each) for each in KINDS]
    scores = [each.score(trajectory, trajectory.task, 1) for each in functions]
    assert [each.total if each.counted else None for each in scores] == KINDS_OF_TRL["rewards"]
    total = WeightedSum(["env"])
    total.terms = [
        Term(name, function, weight)
        for name, function, weight in zip(KINDS_OF_TRL["names"], functions, WEIGHTS, strict=True)
    ]
    assert total.score(trajectory, trajectory.task, 1).total == pytest.approx(KINDS_OF_TRL["total"])


@pytest.mark.parametrize("name", ROWS_OF_VERL)
def test_rows_of_all_kinds_reach_verls_form_as_with_verl(name: str, episode: Trajectory) -> None:
    """No extra_info, nested values and None in it, a name that veRL sets itself; gold answers of all JSON types."""
    given = ROWS_OF_VERL[name]["row"]
    row = {
        "data_source": "weather",
        "prompt": CASES["a call"]["prompt"],
        "reward_model": {"style": "rule", "ground_truth": given["ground_truth"]},
        "extra_info": given.get("extra_info"),
    }
    seen: dict[str, Any] = {}

    def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, **others: Any) -> float:
        seen.update(data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, **others)
        return 1.0

    scored(compute_score, replace(episode, task=to_task(row, "row#0")))
    assert seen == ROWS_OF_VERL[name]["named"]
    assert type(seen["ground_truth"]) is type(given["ground_truth"])
    with pytest.raises(DataError, match="ground_truth"):  # which veRL passes on
        to_task({**row, "reward_model": {"ground_truth": ""}}, "row#0")


@pytest.mark.parametrize("name", RESULTS_OF_VERL)
def test_results_of_all_kinds_count_as_with_verl(name: str, episode: Trajectory) -> None:
    """What veRL cannot read is an error here, too; but NumPy's scalars are numbers."""
    results = {
        "an integer": 1,
        "a boolean": True,
        "a scalar": np.float32(0.5),
        "a tensor": torch.tensor(0.25),
        "None beside the score": {"score": 0.5, "pred": None, "acc": np.bool_(True), "parts": [1, 2]},
        "a score that is a scalar": {"score": np.int64(2), "format": np.float64(0.5)},
        "a dict without a score": {"acc": 1.0},
        "a text": "1.0",
        "none": None,
        "a list": [1.0],
    }
    theirs = 0.5 if name == "a scalar" else RESULTS_OF_VERL[name]

    def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any) -> Any:
        return results[name]

    if theirs is None:
        with pytest.raises(TypeError, match="compute_score returned"):
            scored(compute_score, episode)
    else:
        assert scored(compute_score, episode).total == theirs


def test_functions_of_other_signatures_are_called_as_by_verl_or_refused_at_the_start(episode: Trajectory) -> None:
    found, seen = FORMS_OF_VERL["found"], FORMS_OF_VERL["seen"]
    ours: dict[str, Any] = {}

    async def coroutine(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        ours["coroutine"] = [data_source, solution_str, ground_truth]
        return 0.75

    def more(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any, strict: bool = True) -> float:
        ours["more"] = strict
        return 0.25

    def takes_all(solution_str: Any, **given: Any) -> float:
        ours["takes all"] = sorted(["solution_str", *given])
        return 0.5

    for function in (coroutine, more, takes_all):
        check_function("f", function, {})
        assert scored(function, episode).total == found[function.__name__]
    assert ours == seen
    assert found["less"] == "TypeError"
    with pytest.raises(ConfigError, match="extra_info"):
        check_function("f", lambda data_source, solution_str, ground_truth: 0.0, {})
    with pytest.raises(ConfigError, match=r"other parameters than .*solution_str"):  # of which trainer?
        check_function("f", lambda **given: 0.0, {})


def test_a_function_of_a_rubric_works_in_a_scoring_process_and_on_a_gold_response(tmp_path: Path) -> None:
    (tmp_path / "rubric.py").write_text("""
async def mine(completion, state, info, level=0):
    calls = [call.name for step in state["trajectory"] for call in step["completion"][-1].tool_calls or ()]
    return len(calls) + len(completion) / 10 + level + info.get("extra", 0)
""")
    row = {"prompt": CASES["a call"]["prompt"], "answer": "Rain.", "level": 2, "info": '{"extra": 4}'}
    task = to_task(as_task_row(row), "row#0")
    done = replace(played(CASES["a call"]), task=task)
    with ScoringPool(f"{tmp_path / 'rubric.py'}:mine", {}, 1) as pool:
        assert asyncio.run(pool.score(done, task, 1)) == Score(1 + 0.3 + 2 + 4, {})
        assert asyncio.run(pool.score(as_trajectory(task, "Rain."), task, 1)) == Score(0.1 + 2 + 4, {})
