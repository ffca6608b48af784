"""What is wrong with `env.*` and `sandbox.*` is reported in one line that names the key, before anything is started."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from scripts.make_env_tasks import to_row
from tests.conftest import ROOT
from tests.support.tiny import MINI
from tests.toolrl.benchmarks.runner.eval_play import chat as chat_that_lists_tools
from tests.toolrl.benchmarks.tau2.test_env_tau2 import small_domain, small_task
from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from tests.verl.chat.test_chat import TEMPLATES, with_template
from tests.verl.episodes.test_episode import Speaker
from toolrl.benchmarks.bfcl.tasks import bfcl_tasks
from toolrl.benchmarks.tau2.env import Tau2Factory
from toolrl.envs.shop.shop import shop_tasks
from verl.build.env import build_episode_runner, check_names, prompt_fn, prompt_record, turn_limit
from verl.build.run import load_inputs
from verl.chat.observations import Cut
from verl.chat.template import ChatTemplate
from verl.config.load import load_config
from verl.config.schema import Config, DataConfig
from verl.data.lengths import fitting
from verl.data.tasks import TaskSet
from verl.envs.task_envs import TaskEnvs
from verl.episodes.episode import EpisodeRunner
from verl.errors import ConfigError, DataError
from verl.formats.base import build_tool_call_format
from verl.formats.prompt import load_template
from verl.rollout.engine import Sampling
from verl.trainer import main_generation, main_ppo
from verl.types import Message, Task, Trajectory

CHAT = ("env.name=tool", "env.tool_call_format=hermes")
FENCE = ("recipe=torl", "sandbox.isolation=none")
OTHER = ("env.name=shop", "env.tool_call_format=hermes")
SWE = ("env.name=swe", "env.tool_call_format=xml")


def built(chat: ChatTemplate, overrides: tuple[str, ...]) -> EpisodeRunner | None:
    config = load_config(overrides)
    return build_episode_runner(config, chat)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("recipe=search_r1",), r"write env.tools=\[\{name: search, retriever: bm25, corpus: ..\}\]"),
        (("recipe=search_r1", "env.tools=[{name: search, corpuss: x}]"), "unexpected keyword argument 'corpuss'"),
        (("recipe=search_r1", "env.tools=[{name: search, corpus: x, topk: three}]"), "'topk' must be of type int"),
        ((*CHAT, "env.tools=[pytthon]"), "did you mean 'python'"),
        ((*CHAT, "env.tools=[{search: {corpus: x}}]"), "use a name, or {name: NAME, option: value}"),
        ((*CHAT, "env.tools=[5]"), "env.tools: 5 is not a tool"),
        ((*CHAT, "env.tools=[null]"), "env.tools: None is not a tool"),
        ((*CHAT, "env.tools=[{name: 5}]"), "env.tools: {'name': 5} is not a tool"),
        (CHAT, "env.tools is empty"),
        ((*CHAT, "env.tools=[{name: search, retriever: http, urls: host}]"), "names no retriever"),
        ((*FENCE, "env.tools=[{name: python, print_last: maybe}]"), "'print_last' must be of type bool"),
        ((*FENCE, "env.tools=[{name: python, limits: {wall_s: abc}}]"), "wall_s must be a positive number, not 'abc'"),
        ((*FENCE, "env.tools=[{name: python, limits: 5}]"), "limits of code must be"),
        (("recipe=torl", "env.tools=[calculator]"), r"calls only python\(code\), but env.tools offers calculator"),
        ((*FENCE, "env.tools=[shell]"), r"but env.tools offers shell\(command\)"),
        ((*FENCE, "env.tool_call_format=hermess"), "did you mean 'hermes'"),
        ((*FENCE, "env.tool_call_format_options={emptty: x}"), "did you mean 'empty'"),
        ((*OTHER, "env.tools=[calculator]"), "env.name=shop has its own tools"),
        ((*OTHER, "env.tool_timeout_s=3"), "env.tool_timeout_s=3 has no effect"),
        ((*OTHER, "env.max_concurrent_calls=3"), "env.max_concurrent_calls=3 has no effect"),
        ((*OTHER, "sandbox.timeout_s=3"), "sandbox.* has no effect: none of env.tools runs code"),
        ((*CHAT, "env.tools=[calculator]", "sandbox.num_workers=3"), "none of env.tools runs code"),
        ((*SWE, "sandbox.isolation=none"), "env.name=swe uses sandbox.isolation=strict alone"),
        ((*SWE, "sandbox.isolation=strict", "sandbox.memory_mib=99"), "env.name=swe uses sandbox.isolation=strict"),
        ((*SWE, "sandbox.isolation=strict", "env.options={urls: ['http://x']}"), "needs runtimes on this machine"),
        (("recipe=torl", "sandbox.urls=['http://x']", "sandbox.num_workers=3"), "sandbox.num_workers=3 has no effect"),
        (("recipe=torl", "sandbox.urls=['http://x']", "sandbox.isolation=none"), "sandbox.isolation=none has no eff"),
        (("recipe=torl", "sandbox.urls=['x:1']"), "sandbox.urls must be such as"),
        (
            ("env.name=remote", "env.tool_call_format=hermes", "env.options={urls: ['x:1']}"),
            "names no environment server",
        ),
        (
            ("env.name=tau2", "env.tool_call_format=hermes", "env.options={data: /nowhere}"),
            "data='/nowhere' has no folder retail",
        ),
        (("env.name=shop", "env.tool_call_format=json:JSONDecoder"), "JSONDecoder has no render_prompt"),
        (("env.options={a: 1}",), "env.options=.* has no effect: env.tool_call_format is not set"),
        (("env.tool_call_format_options.empty=5",), "env.tool_call_format_options.empty=5 has no effect"),
        (("reward.name=env",), "reward.name=env needs an environment that judges"),
        (("recipe=torl", "reward.name=env"), "env.name=tool does not"),
        ((*FENCE, "env.observation_cut=heads"), "env.observation_cut must be one of head, tail, middle, refuse, or"),
        ((*FENCE, "env.observation_cut=[middle,0]"), "a limit in characters or null, a text], got"),
        ((*FENCE, "env.observation_cut=[]"), "env.observation_cut must be"),
        ((*FENCE, "env.observation_cut=[head,9,x,y]"), "env.observation_cut must be"),
        ((*FENCE, "env.observation_cut=[head,9,7]"), "env.observation_cut must be"),
        (
            (*FENCE, "env.observation_cut=[head,1.5]"),
            "env.observation_cut=.*Value '1.5' of type 'float' is incompatible",
        ),
        ((*FENCE, "env.observation_cut={head: 9}"), "env.observation_cut=.*Cannot merge DictConfig with ListConfig"),
        ((*FENCE, "data.prompt_template=/nowhere.txt"), "no prompt template with the name or path '/nowhere.txt'"),
    ],
)
def test_impossible_settings_are_a_one_line_error(chat: ChatTemplate, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        built(chat, overrides)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "name", "place"),
    [
        (FENCE, "torl", "{question}"),
        (("env.name=tool", "env.tool_call_format=toolrl", "env.tools=[calculator]"), "toolrl", "{tools}"),
        (("env.name=tool", "env.tool_call_format=tool_n1", "env.tools=[calculator]"), "tool_n1", "{tools}"),
    ],
)
def test_the_prompt_template_is_in_the_record_of_a_run(
    chat: ChatTemplate, overrides: tuple[str, ...], name: str, place: str
) -> None:
    setting = built(chat, overrides)
    assert setting is not None
    assert prompt_record(setting.observations.tool_call_format) == {"prompt_sha256": load_template(name, place).sha256}


@pytest.mark.parametrize(
    ("overrides", "cut"),
    [
        (FENCE, (Cut.MIDDLE, 256, "...")),
        ((*FENCE, "env.observation_cut=tail"), (Cut.TAIL, None, "\n[...]\n")),
        (("recipe=retool", "sandbox.isolation=none"), (Cut.MIDDLE, 400, "...")),
        (("recipe=retool_dapo", "sandbox.isolation=none"), (Cut.MIDDLE, 256, "...(truncated)...")),
        (("recipe=otc_grpo", "env.tools=[calculator]", "env.tool_call_format=hermes"), (Cut.HEAD, None, "")),
    ],
)
def test_observations_are_truncated_according_to_the_settings(
    overrides: tuple[str, ...], cut: tuple[Cut, int | None, str]
) -> None:
    runner = built(chat_that_lists_tools(), overrides)
    assert runner is not None
    assert (runner.observations.cut, runner.observations.max_chars, runner.observations.gap) == cut


def test_a_format_can_be_given_another_tool(chat: ChatTemplate) -> None:
    overrides = (
        "recipe=torl",
        "env.tools=[calculator]",
        "env.tool_call_format_options={tool: calculator, argument: expression}",
    )
    assert built(chat, overrides) is not None


def test_a_chat_template_without_tool_turns_is_reported(chat: ChatTemplate) -> None:
    template = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained(MINI / "tokenizer", chat_template=template)
    with pytest.raises(ConfigError, match="drops messages with the roles tool; choose another tool-call format"):
        built(ChatTemplate(tokenizer), OTHER)
    assert built(ChatTemplate(tokenizer), ("recipe=torl", "sandbox.isolation=none")) is not None  # needs no turns


def test_sandboxing_needs_its_program(chat: ChatTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"sandbox\.isolation=bubblewrap: `bwrap` not found"):
        built(chat, ("recipe=torl",))


BAD = ("env.name=tool", "env.tool_call_format=hermes", "env.tools=[{name: search, topk: three}]")


@pytest.mark.parametrize("options", [[], ["--preflight"]])
def test_a_training_looks_at_its_environment_before_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"prompt": 5}) + "\n")
    overrides = [f"model.path={MINI / 'model'}", f"data.train_files=[{data}]", "trainer.device=cpu", *BAD, *options]
    assert main_ppo.main([*overrides, f"trainer.default_local_dir={tmp_path}"]) == 2
    assert "'topk' must be of type int" in capsys.readouterr().out


def test_generation_looks_at_its_environment_before_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weightless = tmp_path / "model"
    AutoTokenizer.from_pretrained(MINI / "tokenizer").save_pretrained(weightless)
    (weightless / "config.json").write_text((MINI / "model" / "config.json").read_text())
    files = f"data.val_files=[{MINI / 'test.parquet'}]"
    assert main_generation.main([f"model.path={weightless}", "rollout.name=hf", "trainer.device=cpu", files, *BAD]) == 2
    assert "'topk' must be of type int" in capsys.readouterr().out


def test_prompts_are_measured_as_the_policy_will_see_them(tmp_path: Path) -> None:
    """A recipe's prompt adds text of its own; without a chat template, a system message does not count."""
    data, question = tmp_path / "rows.jsonl", "Three terms here."
    prompt = [{"role": "system", "content": "Be brief. " * 60}, {"role": "user", "content": question}]
    data.write_text(json.dumps({"data_source": "x", "prompt": prompt, "reward_model": {"ground_truth": "3"}}) + "\n")

    def config(length: int) -> Config:
        overrides = [
            *FENCE,
            f"model.path={MINI / 'model'}",
            f"data.train_files=[{data}]",
            "data.max_response_length=64",
        ]
        overrides += ["data.truncation=error", "data.train_batch_size=1"]
        return load_config([*overrides, f"data.max_prompt_length={length}"])

    inputs = load_inputs(config(400))
    (task,) = inputs.train[0]
    seen = len(prompt_fn(inputs.episode_runner)(task))
    own = inputs.episode_runner.chat
    assert len(own.tokenizer(question)["input_ids"]) < seen < len(own.task_prompt_ids(task))
    assert len(load_inputs(config(seen)).train[0]) == 1
    with pytest.raises(DataError, match=f"rows.jsonl, row 0: the prompt has {seen} tokens, more than"):
        load_inputs(config(seen - 1))


@pytest.mark.parametrize(
    "bad", ["env.tools=[pytthon]", "env.tool_call_format=hermess", "env.name=shpo", "reward.name=rlal"]
)
def test_wrong_names_are_reported_before_heavy_imports(tmp_path: Path, bad: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    overrides = [
        f"model.path={MINI / 'model'}",
        f"data.train_files=[{data}]",
        "env.name=tool",
        "env.tool_call_format=hermes",
        bad,
    ]
    code = (
        "import sys; from verl.trainer import main_ppo; "
        f"assert main_ppo.main({overrides!r}) == 2; assert not {{'torch', 'transformers', 'ray'}} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0 and "did you mean" in done.stdout, done.stdout + done.stderr


TOOLRL = MINI / "test.parquet"


@pytest.mark.parametrize("name", ["shop", "bfcl", "tau2"])
def test_rows_of_another_environment_are_refused_at_the_start(name: str, tmp_path: Path) -> None:
    """With file, row and what was expected; left out where bad rows are."""
    (tmp_path / "retail").mkdir()
    options = f"env.options={{data: {tmp_path}}}" if name == "tau2" else "env.options={}"
    own = tmp_path / "own.jsonl"
    task = {"shop": shop_tasks, "bfcl": bfcl_tasks, "tau2": lambda: [small_task([], [])]}[name]()[0]
    other = TaskSet(str(TOOLRL))[0]
    own.write_text("".join(json.dumps(to_row(each)) + "\n" for each in (task, other)))
    chat = with_template((TEMPLATES / "qwen2.5.jinja").read_text())
    setting = built(chat, (f"env.name={name}", "env.tool_call_format=hermes", options))
    tasks, prompt_ids = TaskSet(str(own)), prompt_fn(setting)
    assert setting is not None and isinstance(setting.envs, TaskEnvs)
    factory = setting.envs.factory_of(tasks[0])
    if isinstance(factory, Tau2Factory):
        factory._domains["retail"] = small_domain()
    with pytest.raises(DataError, match=rf"row 1, field '.*': is not a task of env.name={name}: .*; expected"):
        fitting(tasks, prompt_ids, DataConfig(max_prompt_length=100_000, max_bad_share=0.0), tasks.report)
    assert len(fitting(tasks, prompt_ids, DataConfig(max_prompt_length=100_000, max_bad_share=0.5), tasks.report)) == 1
    assert [error.row for error in tasks.report.bad] == [1]
    spoiled = replace(tasks[0], answer='{"half": ')
    with pytest.raises(DataError, match=r"reward_model\.ground_truth"):
        prompt_ids(spoiled)


PYTHON = """
from verl.envs.tools.function import tool


@tool
def python(code: str) -> str:
    \"\"\"Runs Python code.\"\"\"
    return "4"
"""
ZEROTIR, TORL = ("So\n```python", "\nprint(4)\n```"), ("```python\nprint(4)\n```\n```output",)


@pytest.mark.parametrize("calls", [0, 2, 4, 20])
@pytest.mark.parametrize(("recipe", "call"), [("zerotir", ZEROTIR), ("zerotir_ppo", ZEROTIR), ("torl", TORL)])
def test_as_many_calls_can_be_made_as_are_allowed(
    recipe: str, call: tuple[str, ...], calls: int, chat: ChatTemplate, tmp_path: Path
) -> None:
    """A policy that calls whenever it can; in ZeroTIR's format each call takes two turns."""
    (tmp_path / "tools.py").write_text(PYTHON)
    config = load_config(
        [f"recipe={recipe}", f"env.max_tool_calls={calls}", f"env.tools=['{tmp_path}/tools.py:python']"]
    )
    data = replace(config.data, max_prompt_length=1000, max_response_length=100_000)
    setting = build_episode_runner(replace(config, data=data), chat)
    assert setting is not None and setting.limits.max_turns == calls * len(call) + 1
    task = Task("t", (Message("user", "2+2?"),), "4", "sums")
    played = asyncio.run(setting.run(Speaker(chat, *call * (calls + 1)), Sampling(1), task, 0, None))
    assert isinstance(played, Trajectory) and played.num_tool_calls == calls


@pytest.mark.parametrize(
    ("overrides", "turns"),
    [
        (("recipe=torl",), 2),
        (("recipe=retool",), 9),
        (("recipe=search_r1",), 5),
        (("recipe=otc_grpo",), 5),
        (("recipe=otc_ppo",), 5),
        (("recipe=artist_math",), 9),
        (("recipe=artist_tools",), 30),
        (("recipe=zerotir",), 5),
        (("recipe=zerotir_ppo",), 5),
        (("recipe=tool_loop",), 3),
        (("recipe=skyrl_swe_8b",), 26),
        (("recipe=torl", "env.max_turns=7"), 7),
        (CHAT, 9),
        (OTHER, 16),  # turns without a call, too
        ((*OTHER, "env.max_turns=2"), 2),  # all calls in one turn
        ((*CHAT, "env.max_tool_calls=0", "env.max_turns=1"), 1),
    ],
)
def test_turns_are_those_that_the_calls_take(overrides: tuple[str, ...], turns: int) -> None:
    env = load_config(overrides).env
    assert turn_limit(env, build_tool_call_format(env.tool_call_format or "", env.tool_call_format_options)) == turns


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (("recipe=zerotir", "env.max_turns=4"), 5),
        (("recipe=zerotir", "env.max_tool_calls=20", "env.max_turns=5"), 41),
        (("recipe=torl", "env.max_tool_calls=2", "env.max_turns=2"), 3),
        ((*CHAT, "env.max_turns=1"), 2),
    ],
)
def test_turns_in_which_the_calls_cannot_be_made_are_refused(overrides: tuple[str, ...], needed: int) -> None:
    env = load_config(overrides).env
    turns, calls = env.max_turns, env.call_limit
    message = rf"env.max_turns={turns} is too small for env.max_tool_calls={calls}: .* need {needed} assistant turns"
    with pytest.raises(ConfigError, match=message):
        check_names(env, None)


@pytest.mark.parametrize("isolation", ["strict", "bubblewrap"])
def test_strict_isolation_holds_for_runtimes(
    chat: ChatTemplate, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no cgroup can be made, strict isolation refuses to start them; rows may name the environment, too."""
    need_bubblewrap()
    monkeypatch.setattr("toolrl.swe.local.find_cgroups", lambda: None)
    monkeypatch.setattr("verl.build.env.build_sandbox", lambda *_: object())  # of the tool
    of_row = Task("0", (Message("user", "x"),), "", "swe", env="swe")
    override = f"sandbox.isolation={isolation}"
    tools = built(chat, ("env.name=tool", "env.tool_call_format=toolrl", "env.tools=[python]", override))
    assert tools is not None and isinstance(tools.envs, TaskEnvs)
    if isolation == "strict":
        with pytest.raises(ConfigError, match="no cgroup can be created for runtimes"):
            built(chat, (*SWE, override))
        with pytest.raises(DataError, match="no cgroup can be created for runtimes"):
            tools.envs.factory_of(of_row)
    else:
        assert built(chat, (*SWE, override)) is not None and tools.envs.factory_of(of_row) is not None
