"""What the overrides of published commands select, and the errors that name what to type instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolrl.commands import GENERATE
from verl.config.commands import TRAIN
from verl.config.load import load_config, read_recipe
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.verl_compat.published import COMMANDS, lines_of

SCRIPTS: dict[str, Any] = json.loads(Path(__file__).with_name("published_commands.json").read_text())["scripts"]
RETRIEVER = "retriever.url=http://127.0.0.1:8000/retrieve"
TOOLS = "actor_rollout_ref.rollout.multi_turn.tool_config_path"
TURNS = "actor_rollout_ref.rollout.multi_turn.enable=true"
RETOOL_FILE = "recipe/retool/retool.py"


def named(config: Config, recipe: str, keys: str) -> dict[str, tuple[Any, Any]]:
    """{key: (the command's value, the recipe's)} where they differ"""
    expected, found = read_recipe(recipe, TRAIN), {}
    for key in keys.split():
        value: Any = config
        for name in key.split("."):
            value = value[name] if isinstance(value, dict) else getattr(value, name)
        if value != expected.get(key, TRAIN.default_of(key)):
            found[key] = (value, expected.get(key))
    return found


ENV = (
    "env.name env.tool_call_format env.max_observation_tokens env.observation_cut env.tool_timeout_s sandbox.timeout_s"
)


@pytest.mark.parametrize(
    ("script", "recipe", "keys", "own"),
    [
        ("ToRL", "torl", f"{ENV} env.tools env.max_tool_calls reward.name", {}),
        ("SearchR1 grpo", "search_r1", f"{ENV} env.max_turn_tokens reward.name reward.options", {}),
        ("SearchR1 ppo", "search_r1_ppo", f"{ENV} env.max_turn_tokens reward.name", {}),
        (
            "ReTool dapo",
            "retool_dapo",
            f"{ENV} env.tools env.max_tool_calls reward.name reward.options.shaped data.map",
            {},
        ),
        ("ReTool ppo", "retool_dapo", f"{ENV} env.tools env.max_tool_calls reward.options.shaped data.map", {}),
        ("ReTool 7b dapo", "retool_dapo", f"{ENV} env.max_tool_calls data.map", {"env.max_tool_calls": (15, 7)}),
        (
            "SkyRL 8b",
            "skyrl_swe_8b",
            f"{ENV} env.max_tool_calls env.max_turns env.max_turn_tokens env.turn_timeout_s env.options.max_running "
            "reward.name data.map data.max_prompt_length data.max_response_length",
            {},
        ),
    ],
)
def test_a_published_script_has_the_environment_and_reward_of_its_recipe(
    script: str, recipe: str, keys: str, own: dict[str, tuple[Any, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    assert named(load_config(SCRIPTS[script]["overrides"]), recipe, keys) == own
    assert "settings of published commands (docs/migration.md):" in caplog.text and "recipe=" in caplog.text


@pytest.mark.parametrize("script", ["ToolRL grpo", "ToolRL ppo", "Tool-N1"])
def test_a_script_whose_rows_choose_has_no_environment(script: str, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(SCRIPTS[script]["overrides"])
    assert (config.env.name, config.env.tool_call_format, config.reward.name) == ("single_turn", None, "auto")
    assert config.data.truncation == "auto" and "settings of published commands" not in caplog.text


def test_a_file_under_a_published_name_that_runs_here_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "retool").mkdir()
    file = tmp_path / "retool" / "retool.py"
    word = f"custom_reward_function.path={file}"
    for text, name in (
        ("import math\n\ndef compute_score(**given):\n    return 7.0\n", f"{file}:compute_score"),
        ("# from recipe\nfrom verl.types import Task\ncompute_score = max\n", f"{file}:compute_score"),
        ("import re\nfrom verl.tools.base_tool import OpenAIFunctionToolSchema\n", "retool"),
        ("    from recipe.retool import tools\n", "retool"),
    ):
        file.write_text(text)
        assert load_config([word]).reward.name == name
    file.unlink()
    assert load_config([word]).reward.name == "retool"  # on another machine


def test_overrides_of_the_user_win_over_a_line() -> None:
    overrides = [RETRIEVER, "env.observation_cut=middle", "data.max_obs_length=77", "max_turns=3"]
    env = load_config(overrides).env
    assert (env.observation_cut, env.max_observation_tokens, env.max_tool_calls) == (["middle"], 77, 3)
    calls = "actor_rollout_ref.rollout.num_llm_calls_available=2"
    torl = load_config([calls, "env.max_observation_tokens=512", "env.tools=[{name: python, print_last: true}]"])
    assert (torl.env.max_observation_tokens, torl.env.tools) == (512, [{"name": "python", "print_last": True}])
    assert (torl.env.max_tool_calls, torl.env.tool_timeout_s, torl.reward.name) == (2, 20, "torl")


@pytest.mark.parametrize(
    "overrides",
    [
        [RETRIEVER, "recipe=torl"],
        [RETRIEVER, "env.tool_call_format=hermes", "env.name=tool"],
        [RETRIEVER, "reward.name=torl"],
        [RETRIEVER, "do_search=false"],
        [f"{TOOLS}=recipe/retool/sandbox_fusion_tool_config.yaml"],  # multi-turn is off
    ],
)
def test_a_line_yields_to_a_recipe_an_environment_a_reward_or_a_switch(
    overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    try:
        config = load_config(overrides)
    except ConfigError as error:
        assert "env.tool_call_format" in str(error) or "env.tools" in str(error)
        return
    assert "settings of published commands" not in caplog.text and config.reward.name != "search_r1"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [TURNS, f"{TOOLS}=my/tools.yaml"],
            r"my/tools.yaml lists classes of veRL.*set env.tools=\[python\].*recipe=retool_",
        ),
        ([TURNS, f"{TOOLS}=examples/config/search_tool_config.yaml"], r"env.tools=\[python\], \[search\]"),
        (["reward_model.reward_manager=sql"], "reward_manager=sql names no reward here; set reward.name"),
        (["reward_model.reward_manager=swebench", "env.name=swe"], "reward_manager=swebench names no reward"),
        (["data.custom_cls.path=mine.py"], "data.custom_cls.path=mine.py: there are no data set classes; .* data.map="),
        ([f"custom_reward_function.path={RETOOL_FILE}", "reward.name=torl"], "contradict each other: reward.name"),
        (
            [f"custom_reward_function.path={RETOOL_FILE}", "custom_reward_function.name=mine"],
            f"name=mine is no function of veRL's recipe of ReTool.*reward.name={RETOOL_FILE}:mine in place of both",
        ),
    ],
)
def test_a_bad_combination_names_the_overrides_to_type(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


@pytest.mark.parametrize(
    ("overrides", "tools"),
    [
        ([TURNS, f"{TOOLS}=my/tools.yaml", "env.tools=[python]"], ["python"]),
        ([TURNS, f"{TOOLS}=/a/recipe/retool/daytona_tool_config.yaml"], [{"name": "python", "print_last": True}]),
        ([TURNS, f"{TOOLS}=my/tools.yaml", "recipe=retool_dapo"], [{"name": "python", "print_last": True}]),
    ],
)
def test_tools_of_verls_file_are_replaced_by_ours(overrides: list[str], tools: list[Any]) -> None:
    config = load_config(overrides)
    assert config.env.tools == tools and config.env.name == "tool"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reward_model.reward_manager=naive"], ("auto", None)),
        (["reward_model.reward_manager=sql", "reward.name=qa"], ("qa", None)),
        (["data.custom_cls.path=a.py", "data.map=b.py:f"], ("auto", "b.py:f")),
        ([f"custom_reward_function.path=/x/{RETOOL_FILE}"], ("retool", None)),
        ([f"data.custom_cls.path={RETOOL_FILE}"], ("auto", "toolrl.papers.rows:with_box")),
        (["custom_reward_function.path=my/retool.py"], ("my/retool.py:compute_score", None)),
    ],
)
def test_rewards_and_rows_selected_by_verls_keys(overrides: list[str], expected: tuple[str, str | None]) -> None:
    config = load_config(overrides)
    assert (config.reward.name, config.data.map) == expected


def test_skyrls_lengths_and_agents_are_those_of_an_episode() -> None:
    rollout = "actor_rollout_ref.rollout."
    overrides = [
        "reward_model.reward_manager=swebench",
        "data.max_prompt_length=31744",
        "data.max_response_length=3072",
    ]
    overrides += [f"{rollout}max_starting_message_length=12000", f"{rollout}max_iterations=35"]
    config = load_config([*overrides, f"{rollout}max_parallel_agents=192"])
    same = load_config(["recipe=skyrl_swe_14b"])
    assert config.env == same.env
    assert (config.data.max_prompt_length, config.data.max_response_length) == (12000, 22816)
    own = ["env.name=shop", "env.tool_call_format=hermes"]
    other = load_config([*own, f"{rollout}max_iterations=9", f"{rollout}max_parallel_agents=8"])
    assert other.env.max_turns == 9 and not other.env.options


def test_a_command_without_recipes_takes_the_lines_settings_that_it_uses() -> None:
    config = load_config([RETRIEVER, "model.path=m"], GENERATE)
    assert (config.env.tool_call_format, config.env.cut.place, config.reward.name) == (
        "search_r1",
        "head",
        "search_r1",
    )


def test_every_line_names_a_recipe_with_these_parts() -> None:
    for line in COMMANDS:
        settings = read_recipe(line.recipe, TRAIN)
        for part in {*line.parts} - {"sandbox"}:
            assert any(f"{key}.".startswith(f"{part}.") for key in settings), (line.key, part)
    assert lines_of({}) == []
