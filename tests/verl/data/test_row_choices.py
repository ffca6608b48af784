"""Rows that name their own environment, reward and tools: they act, or are refused before anything starts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny import MINI, save_tiny_model
from tests.verl.chat.test_chat import TEMPLATES, with_template
from toolrl.benchmarks.bfcl.tasks import bfcl_tasks
from toolrl.check.lab import __main__ as lab
from toolrl.check.lab.__main__ import as_trajectory
from toolrl.check.preflight.preflight import check_reward
from toolrl.check.preflight.scripted_engine import ScriptedEngine
from toolrl.envs.shop.shop import ShopEnv, shop_tasks
from verl.build.env import build_episode_runner, prompt_fn, single_turn_runner
from verl.build.run import load_inputs
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import DataConfig
from verl.data.lengths import fitting, read_tasks
from verl.data.row_names import RowNames
from verl.data.tasks import TaskSet, to_task, to_tasks
from verl.envs.single_turn import SingleTurnEnv
from verl.envs.task_envs import TaskEnvs
from verl.envs.tool_env import ToolEnv
from verl.episodes.episode import EpisodeRunner
from verl.episodes.group import GroupRollout
from verl.errors import ConfigError, DataError, ServiceDownError
from verl.rollout.engine import Sampling
from verl.scoring.pool import DirectScorer, ScoringPool
from verl.scoring.rewards import build_rewards
from verl.tracking.jsonl import read_jsonl
from verl.trainer import main_generation
from verl.trainer.validate import Validator
from verl.types import Task
from verl.utils.reward_score.base import GroupReward

BOXED = "\\boxed{4}"
OWN = RowNames(user_code=True)  # rows of the user's
USER_CODE = "data.user_code=true"
NO_TOOLS = (
    "{% for m in messages %}{{ m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
CALCULATOR = {"name": "calculator", "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}}}


def row(**more: Any) -> dict[str, Any]:
    asked = {"data_source": "sums", "prompt": [{"role": "user", "content": "2 + 2?"}]}
    return {**asked, "reward_model": {"ground_truth": "4"}, **more}


def task(**more: Any) -> Task:
    return to_task(row(**more), "rows.jsonl#0", OWN)


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text("def seven(response, answer):\n    return 7.0\n")
    return f"{path}:seven"


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return with_template((TEMPLATES / "qwen2.5.jinja").read_text())


def episode_runner(chat: ChatTemplate, *overrides: str) -> EpisodeRunner:
    config = load_config([f"model.path={MINI / 'model'}", f"data.train_files=[{MINI / 'train.parquet'}]", *overrides])
    data = replace(config.data, max_prompt_length=10_000, max_response_length=10_000)
    return build_episode_runner(replace(config, data=data), chat)


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return str(path)


# --- rewards


def test_each_row_is_scored_by_the_reward_that_it_names(mine: str) -> None:
    tasks = [task(), task(reward="math"), task(reward="torl"), task(reward=mine)]
    rewards = build_rewards("math")
    assert [rewards.score(as_trajectory(each, BOXED), each, 0).total for each in tasks] == [1.0, 1.0, 1.0, 7.0]
    assert [rewards.score(as_trajectory(each, "5"), each, 0).total for each in tasks] == [0.0, 0.0, -1.0, 7.0]

    async def pooled() -> list[Any]:
        with ScoringPool("math", {}, num_workers=1) as pool:
            return [await pool.score(as_trajectory(each, "5"), each, 0) for each in tasks]

    assert [score.total for score in asyncio.run(pooled())] == [0.0, 0.0, -1.0, 7.0]


def test_the_runs_own_reward_keeps_its_options_where_a_row_names_it() -> None:
    rewards = build_rewards("otc_grpo", {"answers": "math", "scale": 3.0})
    own, plain = task(reward="otc_grpo"), task()
    totals = [rewards.score(as_trajectory(each, BOXED), each, 0).total for each in (own, plain)]
    assert totals == [3.0, 3.0] and rewards.of(own) is rewards.of(plain)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "did you mean 'math'?"),
        ("nowhere.py:f", "there is no file 'nowhere.py'"),
        ("rlla_", "did you mean 'rlla'?"),
    ],
)
def test_an_unknown_reward_is_an_error_with_its_row(name: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", row(), row(reward=name))
    with pytest.raises(DataError, match="row 1, field 'reward': ") as caught:
        TaskSet(path, names=OWN)
    assert message in str(caught.value)


def test_rewards_within_a_group_are_shaped_by_the_rows_own(chat: ChatTemplate) -> None:
    """OTC's reward remembers the fewest calls of a question; each reward has a memory of its own."""
    engine = ScriptedEngine(lambda _, number: chat.response_ids(BOXED)[0])
    rewards = build_rewards("otc_grpo", {"answers": "math"})
    rollout = GroupRollout(engine, DirectScorer(rewards), Sampling(64), single_turn_runner(chat, 64))
    lone, own = (asyncio.run(rollout.run(each, 2, 0)) for each in (task(reward="math"), task()))
    same, states = rewards.shaped(lone, {})
    assert same is lone and states == {}
    shaped, states = rewards.shaped(own, {"other": {"kept": 1}})
    assert isinstance(rewards.default, GroupReward)
    expected, state = rewards.default.shape(own, {})
    assert (shaped.rewards, states) == (expected, {"other": {"kept": 1}, "otc_grpo": state}) and state


def test_validation_counts_the_highest_rewards_of_those_that_know_them(mine: str, chat: ChatTemplate) -> None:
    engine = ScriptedEngine(lambda _, number: chat.response_ids(BOXED)[0])
    rewards = build_rewards("math")
    tasks = [task(), task(reward="torl", reward_model={"ground_truth": "5"}), task(reward=mine, data_source="mine")]
    rollout = GroupRollout(engine, DirectScorer(rewards), Sampling(64), single_turn_runner(chat, 64))
    validator = Validator({"v": tasks}, rollout, rewards)
    found = validator.metrics(asyncio.run(validator.rollouts(0)), 0)
    assert (found["val/v/sums/total"], found["val/v/mine/total"]) == (0.0, 7.0)
    assert [rewards.maximum(each, 0) is None for each in tasks] == [False, False, True]
    assert found["val/v/exact"] == found["val/v/sums/exact"] == 0.5  # of the two that know theirs
    assert found["val/v/sums/total_stderr"] == found["val/v/sums/exact_stderr"] * 2  # rewards are -1 and 1
    assert "val/v/mine/exact" not in found


def test_the_lab_tries_the_reward_of_each_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mine: str, chat: ChatTemplate
) -> None:
    path = write(tmp_path / "rows.jsonl", row(), row(reward="zerotir"))
    assert lab.main([f"data={path}", "reward.name=zerotir"]) in (0, 1)
    assert "2 rows tried" in capsys.readouterr().out
    path = write(tmp_path / "rows.jsonl", row(reward="zerotir"), row(reward=mine))
    assert lab.main([f"data={path}", "reward.name=zerotir", USER_CODE]) == 2
    assert f"rows.jsonl#1: reward {mine!r} does not define maximum()" in capsys.readouterr().out.replace("\n", "")
    tasks = [task(reward=mine)]
    runner = single_turn_runner(chat, 99)
    assert check_reward(runner, build_rewards("zerotir"), tasks) == "has no golden responses to try"


def test_generation_scores_a_mixed_file_by_each_rows_reward(tmp_path: Path, mine: str) -> None:
    model = save_tiny_model(tmp_path / "model")
    path = write(tmp_path / "rows.jsonl", row(), row(reward=mine))
    out = tmp_path / "out.jsonl"
    overrides = [
        f"model.path={model}",
        f"data.val_files=[{path}]",
        USER_CODE,
        f"eval.output={out}",
        "rollout.name=hf",
        "model.compute_dtype=float32",
        "trainer.device=cpu",
    ]
    assert (
        main_generation.main(
            [*overrides, "data.max_response_length=4", "reward.name=math", "data.max_prompt_length=64"]
        )
        == 0
    )
    assert [each["score"]["total"] for each in read_jsonl(out)] == [0.0, 7.0]


# --- environments


def test_a_row_of_an_environment_needs_a_format(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", row(), row(env="shop"))
    overrides = [f"model.path={MINI / 'model'}", f"data.train_files=[{path}]", "trainer.device=cpu", "reward.name=math"]
    overrides.append("data.train_batch_size=1")
    with pytest.raises(DataError, match=r"row 1, field 'env': 'shop' needs env.tool_call_format"):
        load_inputs(load_config(overrides))
    path = write(tmp_path / "rows.jsonl", row(env="single_turn"))
    assert len(load_inputs(load_config(overrides)).train[0]) == 1


def test_the_agent_loop_that_verl_takes_from_a_row_is_its_environment(chat: ChatTemplate, tmp_path: Path) -> None:
    """Rows that veRL plays with tools are not trained without them."""
    assert [task(agent_name=name).env for name in ("tool_agent", "single_turn_agent", None)] == [
        *("tool", "single_turn", None)
    ]
    assert task(agent_name="tool_agent", env="shop").env == "shop"  # our own column decides
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (spoken,) = to_tasks({"messages": talk, "agent_name": "Ann"}, "rows.jsonl#0", data_source="talks")
    assert spoken.env is None  # a column of other data
    with pytest.raises(DataError, match="'agent_name': is 'swe_agent', an agent loop of veRL; expected single_turn_ag"):
        task(agent_name="swe_agent")
    source = write(tmp_path / "rows.jsonl", row(agent_name="tool_agent"))
    tools = ("env.name=tool", "env.tools=[python]", "env.tool_call_format=hermes")
    tasks, _ = read_tasks(source, prompt_fn(episode_runner(chat, *tools)), DataConfig(max_prompt_length=10_000))
    assert len(tasks) == 1
    with pytest.raises(DataError, match=r"'tool' needs env\.tool_call_format"):
        read_tasks(source, prompt_fn(episode_runner(chat)), DataConfig(max_prompt_length=10_000))


def test_rows_play_in_the_environment_that_they_name(chat: ChatTemplate) -> None:
    """One file: a tool's episode, one response, and a shop that judges itself."""
    setting = episode_runner(chat, "env.name=tool", "env.tools=[calculator]", "env.tool_call_format=hermes")
    assert setting is not None and isinstance(setting.envs, TaskEnvs)
    shop = shop_tasks()[0]
    envs = [type(setting.envs(each)) for each in (task(), task(env="tool"), task(env="single_turn"), shop)]
    assert envs == [ToolEnv, ToolEnv, SingleTurnEnv, ShopEnv]
    prompt_ids = prompt_fn(setting)
    shown = [chat.tokenizer.decode(prompt_ids(each)) for each in (task(), task(env="single_turn"))]
    assert ["calculator" in text for text in shown] == [True, False]
    engine = ScriptedEngine(lambda _, number: (*chat.response_ids("I am done.")[0], chat.end_token_id))
    rollout = GroupRollout(engine, DirectScorer(build_rewards("math")), Sampling(64), setting)

    async def play() -> list[Any]:
        found = [await rollout.run(each, 1, 0) for each in (task(env="single_turn"), shop)]
        await rollout.close()
        return found

    one, bought = asyncio.run(play())
    assert not one.faults and not bought.faults and bought.trajectories[0].turns[0].context_ids != prompt_ids(task())


@pytest.mark.parametrize(
    ("more", "field", "message"),
    [
        ({"env": "shpo"}, "env", "did you mean 'shop'?"),
        ({"env": "nowhere.py:Env"}, "env", "there is no file 'nowhere.py'"),
        ({"env": "tool"}, "env", "Set env.name=tool with env.tools"),
        ({"env": "single_turn", "reward": "env"}, "reward", "the environment single_turn does not judge"),
        ({"env": "shop"}, "extra_info.products", "is not a task of env.name=shop"),
        ({"tools": [CALCULATOR], "extra_info": {"tools": [CALCULATOR]}}, "tools", "are given in extra_info.tools, too"),
    ],
)
def test_unusable_environments_are_errors_with_their_row(
    more: dict[str, Any], field: str, message: str, chat: ChatTemplate, tmp_path: Path
) -> None:
    tasks = TaskSet(write(tmp_path / "rows.jsonl", row(), row(**more)), names=OWN)
    config = DataConfig(max_prompt_length=10_000, max_bad_share=0.0)
    with pytest.raises(DataError, match=r"rows.jsonl, row 1, field ") as caught:
        fitting(
            tasks,
            prompt_fn(episode_runner(chat, "env.tool_call_format=hermes")),
            config,
            tasks.report,
        )
    assert caught.value.field == field and message in str(caught.value)


def test_a_run_judged_by_its_environment_refuses_rows_of_one_that_does_not_judge(tmp_path: Path) -> None:
    (shop,) = shop_tasks(count=1)
    rows = [
        {**row(**more), "prompt": [{"role": each.role, "content": each.content} for each in shop.prompt]}
        for more in ({"env": "single_turn"}, {"env": "single_turn", "reward": "math"})
    ]
    for each, refused in zip(rows, (True, False), strict=True):
        overrides = [
            f"data.train_files=[{write(tmp_path / 'rows.jsonl', each)}]",
            "env.name=shop",
            "env.tool_call_format=hermes",
        ]
        config = load_config([f"model.path={tmp_path}", "reward.name=env", *overrides])
        chat = with_template((TEMPLATES / "qwen2.5.jinja").read_text())
        prompt_ids = prompt_fn(build_episode_runner(config, chat), build_rewards(config.reward.name))
        if refused:
            with pytest.raises(DataError, match="'env': the environment single_turn does not judge"):
                prompt_ids(to_task(each, "x#0"))
        else:
            assert prompt_ids(to_task(each, "x#0"))


def test_an_environment_of_ones_own_that_does_not_judge_cannot_be_the_reward(
    chat: ChatTemplate, tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "class Plain:\n    def __init__(self, task):\n        pass\n\n"
        "    async def step(self, message):\n        pass\n\n"
        "class Judging(Plain):\n    async def judge(self):\n        return None\n"
    )
    for name, refused in (("Plain", True), ("Judging", False)):
        prompt_ids = prompt_fn(
            episode_runner(chat, f"env.name={mine}:{name}", "env.tool_call_format=toolrl"), build_rewards("env")
        )
        if refused:
            with pytest.raises(DataError, match="Plain does not judge; expected an environment that does"):
                prompt_ids(task())
        else:
            assert prompt_ids(task())


@pytest.mark.parametrize("more", [{"reward": "no_such"}, {"env": "no_such"}])
def test_a_wrong_name_is_an_error_whatever_share_of_rows_may_be_bad(
    more: dict[str, Any], chat: ChatTemplate, tmp_path: Path
) -> None:
    source = write(tmp_path / "rows.jsonl", *[row()] * 99, row(**more))
    with pytest.raises(DataError, match=r"rows.jsonl, row 99, field '(reward|env)'.*no_such"):
        read_tasks(
            source,
            prompt_fn(episode_runner(chat, "env.tool_call_format=toolrl")),
            DataConfig(max_prompt_length=10_000, max_bad_share=1.0),
        )


# --- tools


def test_a_rows_tools_choose_among_those_of_the_environment(chat: ChatTemplate) -> None:
    setting = episode_runner(chat, "env.name=tool", "env.tools=[calculator]", "env.tool_call_format=hermes")
    prompt_ids = prompt_fn(setting)
    tool = {**CALCULATOR, "description": "Adds up."}
    text = chat.tokenizer.decode(prompt_ids(task(tools=[tool])))
    assert "Adds up." in text and text.count('"name": "calculator"') == 1  # the row's text
    with pytest.raises(DataError, match=r"'tools': lists 'clock', which env.tools does not offer; expected one of"):
        prompt_ids(task(tools=[{"name": "clock"}]))
    with pytest.raises(DataError, match=r"lists 'calculator' with the parameters sum; expected .*: expression"):
        prompt_ids(task(tools=[{"name": "calculator", "parameters": {"properties": {"sum": {}}}}]))


def test_an_environment_that_brings_its_tools_takes_no_others(chat: ChatTemplate) -> None:
    scenario = bfcl_tasks()[0]
    prompt_ids = prompt_fn(episode_runner(chat, "env.name=bfcl", "env.tool_call_format=hermes"))
    assert len(prompt_ids(scenario)) > 100
    with pytest.raises(DataError, match=r"'tools': lists 'clock', which env.name=bfcl does not offer"):
        prompt_ids(replace(scenario, tools=task(tools=[{"name": "clock"}]).tools))
    setting = episode_runner(chat, "env.name=bfcl", "env.tool_call_format=hermes")
    assert setting is not None and isinstance(setting.envs, TaskEnvs)
    opening = setting.envs.known_initial_observation(scenario)
    assert opening is not None and prompt_ids(replace(scenario, tools=opening.tools)) == prompt_ids(scenario)
    with pytest.raises(
        DataError, match=rf"'tools': leaves out {opening.tools[0].name}; expected no others than .*always"
    ):
        prompt_ids(replace(scenario, tools=opening.tools[1:]))


def test_an_environment_whose_opening_is_known_late_drops_no_tools(chat: ChatTemplate, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(
        "from verl.envs.base import Observation, StepResult\n"
        "class Late:\n"
        "    def __init__(self, task):\n        self.task = task\n"
        "    async def reset(self):\n        return Observation(self.task.prompt)\n"
        "    async def step(self, message):\n        return StepResult(done=True)\n"
        "    async def close(self):\n        pass\n"
    )
    setting = episode_runner(chat, f"env.name={tmp_path / 'late.py'}:Late", "env.tool_call_format=hermes")
    engine = ScriptedEngine(lambda *_: (*chat.response_ids(BOXED)[0], chat.end_token_id))
    rollout = GroupRollout(engine, DirectScorer(build_rewards("math")), Sampling(64), setting)
    assert asyncio.run(rollout.run(task(), 1, 0)).rewards == (1.0,)
    refused = asyncio.run(rollout.run(task(tools=[CALCULATOR]), 1, 0))
    assert not refused.scores and "'tools': lists 'calculator', which" in refused.faults[0]


def test_a_format_of_one_tool_has_no_place_for_a_rows_tools(chat: ChatTemplate) -> None:
    setting = episode_runner(chat, "recipe=torl", "sandbox.isolation=none")
    with pytest.raises(DataError, match=r"'tools': cannot be listed: env.tool_call_format supports one tool only"):
        prompt_fn(setting)(task(tools=[CALCULATOR]))


@pytest.mark.parametrize("overrides", [("env.tool_call_format=hermes",), ()])
def test_a_run_whose_template_lists_no_tools_does_not_start(overrides: tuple[str, ...], tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", row(tools=[CALCULATOR]))
    config = load_config([f"model.path={MINI / 'model'}", f"data.train_files=[{path}]", "reward.name=math", *overrides])
    with pytest.raises(ConfigError, match=r"' does not list tools, so .* calculator, calculator\(expression\); "):
        load_inputs(config)
    tool = [*("env.name=tool", "env.tools=[calculator]"), *(overrides or ("env.tool_call_format=xml",))]
    with pytest.raises(ConfigError, match="does not list tools, so the policy would not know calculator"):
        episode_runner(with_template(NO_TOOLS), *tool)
    assert (
        episode_runner(with_template(NO_TOOLS), *tool[:2], "env.tool_call_format=toolrl") is not None
    )  # lists them itself


def test_generation_without_listed_tools_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "rows.jsonl", row(tools=[CALCULATOR]))
    overrides = [
        f"model.path={MINI / 'model'}",
        f"data.val_files=[{path}]",
        "rollout.name=hf",
        "trainer.device=cpu",
        "reward.name=math",
    ]
    assert main_generation.main(overrides) == 2
    assert "does not list tools" in capsys.readouterr().out


def test_the_services_of_what_rows_name_are_asked_before_the_run(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from toolrl.envs.shop.shop import ShopEnv\nfrom verl.errors import ServiceDownError\n\n\n"
        "class Shop:\n    def __call__(self, task):\n        return ShopEnv(task)\n\n"
        "    async def check_services(self):\n        raise ServiceDownError('the shop', 'is closed')\n\n"
        "    async def close(self):\n        pass\n"
    )
    path = write(tmp_path / "rows.jsonl", row(), row(env=f"{mine}:Shop"))
    overrides = [f"model.path={MINI / 'model'}", f"data.train_files=[{path}]", "trainer.device=cpu", "reward.name=math"]
    overrides.append("data.train_batch_size=1")
    with pytest.raises(ServiceDownError, match="the shop: is closed"):
        load_inputs(load_config([*overrides, USER_CODE, "env.tool_call_format=toolrl"]))
