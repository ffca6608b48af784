"""Names in rows are names, not code: every reader refuses code that the command does not name, and runs none of it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.play import main as play
from toolrl.api.child import run_command
from toolrl.benchmarks.runner.benchmark import BenchmarkContext
from toolrl.benchmarks.runner.online import build_online_eval
from toolrl.benchmarks.runner.registry import build_benchmarks
from toolrl.check.lab.__main__ import main as lab
from toolrl.check.plan.__main__ import main as plan
from toolrl.envs.openenv import server as env_server
from toolrl.envs.openenv.session import TaskDraw
from toolrl.envs.openenv.wire import ProtocolError, ResetData
from verl.build.run import load_chat_template, load_inputs
from verl.config.load import load_config
from verl.config.schema import Config
from verl.data.row_names import RowNames
from verl.data.tasks import TaskSet, to_task
from verl.envs.registry import build_env_factory
from verl.errors import DataError, VerlError
from verl.scoring.rewards import build_rewards
from verl.sft.demonstrations import read_demonstrations
from verl.trainer.main_eval import main as evaluate
from verl.trainer.main_generation import main as generate
from verl.trainer.main_ppo import main as train
from verl.trainer.row_choices import row_choices
from verl.utils.reward_score.functions import FunctionReward

CODE = "from pathlib import Path\nPath({ran!r}).write_text('ran')\n\n\ndef f(response, answer):\n    return 1.0\n"
TOOL = {"type": "function", "function": {"name": "x.py:f", "parameters": {"type": "object", "properties": {}}}}


class Pickled:
    def __init__(self, ran: Path) -> None:
        self.ran = ran

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.ran, "ran")


ROWS: dict[str, dict[str, Any]] = {
    "a shell": {"reward": "os:popen"},
    "the answer": {"reward": "timeit:timeit", "reward_model": {"ground_truth": "open('ran', 'w')"}},
    "the response": {"reward": "cProfile:run"},
    "a pickle": {"reward": "x.pkl:f"},
    "a file": {"reward": "x.py:f"},
    "an environment": {"env": "x.py:f"},
    "an environment's module": {"env": "antigravity:geohash"},
    "a path": {"reward": "../here/x.py:f"},
    "blanks": {"reward": " x.py:f"},
    "our own code": {"reward": "verl.registry:importlib"},
    "code before a known name": {"reward": "x.py:math"},
    "as known names are stored": {"reward": "toolrl.reward_score.math:MathReward"},
    "an alternative colon": {"reward": "os\uff1apopen"},
    "letters of another alphabet": {"reward": "o\u0455:popen"},
    "of a module in another alphabet": {"reward": "m\u0430th"},
}
NEVER_RUN: dict[str, dict[str, Any]] = {  # used or refused for other reasons, and without their names
    "tools": {"tools": [TOOL]},
    "names of tools": {"tools": ["x.py:f"]},
    "options of an environment": {"env": "verifiers", "extra_info": {"id": "x", "python": "x.py:f"}},
    "options in other columns": {
        "env_options": {"agent": "x.py:f"},
        "tool_call_format": "x.py:f",
        "data.map": "x.py:f",
    },
    "settings in extra_info": {"extra_info": {"reward": "x.py:f", "env": {"name": "x.py:f"}, "user_code": True}},
}


def row(**more: Any) -> dict[str, Any]:
    asked = {"data_source": "sums", "prompt": [{"role": "user", "content": "2 + 2?"}]}
    return {**asked, "reward_model": {"ground_truth": "4"}, **more}


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the code leaves if it runs. The files that rows name are in the working directory."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for each in ("x.py", " x.py"):
        (here / each).write_text(CODE.format(ran=str(here / "ran")))
    (here / "x.pkl").write_bytes(pickle.dumps({"f": Pickled(here / "ran")}))
    return here / "ran"


def written(*rows: dict[str, Any]) -> str:
    Path("rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return "rows.jsonl"


def config_of(model: Path, *overrides: str, key: str = "data.train_files") -> Config:
    own = ["trainer.device=cpu", "rollout.name=hf", "data.train_batch_size=1", "reward.name=math"]
    return load_config([f"model.path={model}", f"{key}=[rows.jsonl]", *own, *overrides])


def _by_training(model: Path) -> None:
    load_inputs(config_of(model, "env.tool_call_format=hermes"))


def _by_validation(model: Path) -> None:
    Path("good.jsonl").write_text(json.dumps(row()) + "\n")
    load_inputs(config_of(model, "data.train_files=[good.jsonl]", key="data.val_files"))


def _by_online_benchmarks(model: Path) -> None:
    config = config_of(model, key="eval.benchmarks")
    build_online_eval(config, load_chat_template(config.model))


def _by_benchmarks(model: Path) -> None:
    (benchmark,) = build_benchmarks(["rows.jsonl"], BenchmarkContext(Path(), reward="math"))
    list(benchmark.categories[0].tasks())


def _by_env_server(model: Path) -> None:
    env_server.read_tasks("rows.jsonl", RowNames(envs=("single_turn",)), build_env_factory("single_turn"))


def _by_env_client(model: Path) -> None:
    draw = TaskDraw([], build_env_factory("single_turn"))
    bad = json.loads(Path("rows.jsonl").read_text().splitlines()[1])
    try:
        draw.draw(ResetData(row=bad))
    except ProtocolError as error:
        raise DataError(str(error), file="rows.jsonl", row=1, field="env" if "env" in bad else "reward") from error


def _by_scripts(model: Path) -> None:
    TaskSet("rows.jsonl")


READERS: tuple[Callable[[Path], None], ...] = (
    _by_training,
    _by_validation,
    _by_online_benchmarks,
    _by_benchmarks,
    _by_env_server,
    _by_env_client,
    _by_scripts,
)


def _name(reader: Callable[..., Any]) -> str:
    return reader.__name__


@pytest.mark.parametrize("reader", READERS, ids=_name)
def test_every_reader_refuses_code_in_rows(reader: Callable[[Path], None], model: Path, ran: Path) -> None:
    for what, more in ROWS.items():
        (field,) = more.keys() & {"reward", "env"}
        written(row(), row(**more))
        with pytest.raises(DataError) as caught:
            reader(model)
        error, text = caught.value, str(caught.value)
        assert (Path(error.file).name, error.row, error.field) == ("rows.jsonl", 1, field), (what, text)
        if ":" in more[field]:
            assert f"{more[field]!a} names code, which a row may not" in text, what
            assert "data.user_code=true" in text and f"set {field}.name=" in text, what
        else:
            assert "unknown reward" in text or "names code" in text, what
        assert not ran.exists(), what


@pytest.mark.parametrize("reader", READERS, ids=_name)
def test_no_reader_runs_what_other_columns_name(reader: Callable[[Path], None], model: Path, ran: Path) -> None:
    for what, more in NEVER_RUN.items():
        written(row(), row(**more))
        try:
            reader(model)
        except VerlError as error:
            assert "x.py" not in str(error) or "there is no" not in str(error), what
        assert not ran.exists(), what


@pytest.mark.parametrize("command", [lab, plan, train, evaluate, generate, lambda argv: evaluate(["--probe", *argv])])
def test_every_command_ends_with_the_row_and_the_setting(
    command: Callable[[list[str]], int], model: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "eval.benchmarks" if command is evaluate else "data.val_files" if command is generate else "data.train_files"
    own = ["trainer.device=cpu", "rollout.name=hf"] if command not in (lab,) else []
    batch = ["data.train_batch_size=1"] if command in (plan, train) else []
    written(row(), row(reward="x.py:f"))
    overrides = [f"model.path={model}", f"{key}=[rows.jsonl]", "reward.name=math", *own, *batch]
    assert command(overrides) == 2
    output = " ".join(capsys.readouterr().out.split())
    assert "rows.jsonl, row 1, field 'reward': 'x.py:f' names code, which a row may not" in output
    assert "or data.user_code=true" in output and not ran.exists()


def test_inspecting_rows_and_playing_the_policy_by_hand(
    model: Path, ran: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(row(reward="x.py:f"))
    (line,) = row_choices(config_of(model, "reward.name=auto"))
    assert "names code" in line and not ran.exists()
    assert play(["shop", "--data", "rows.jsonl"]) == 1 and "names code" in capsys.readouterr().out
    assert env_server.main(["--env", "shop", "--data", "rows.jsonl"]) == 2 and "--user-code" in capsys.readouterr().err
    assert not ran.exists()
    play(["shop", "--data", "rows.jsonl", "--user-code"])
    assert ran.exists()


def test_demonstrations_are_read_without_their_rewards_and_environments(ran: Path) -> None:
    dialogue = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    for more in (*ROWS.values(), {"tools": [TOOL]}):
        assert len(read_demonstrations(written({"messages": dialogue, **more}))) == 1 and not ran.exists()


@pytest.mark.long
def test_rows_of_the_python_api_obey_the_rule(model: Path, ran: Path) -> None:
    written(row(), row(reward="x.py:f"))
    overrides = [f"model.path={model}", "data.train_files=[rows.jsonl]", "eval.output=out", "rollout.name=hf"]
    with pytest.raises(DataError, match=r"row 1, field .reward.: .x\.py:f. names code"):
        run_command("probe", [*overrides, "reward.name=math", "trainer.device=cpu"])
    assert not ran.exists()


# --- what a row may name


def test_the_setting_lets_rows_name_code(ran: Path) -> None:
    Path("trusted.py").write_text(Path("x.py").read_text())
    made = to_task(row(reward="trusted.py:f", env="x.py:f"), "rows.jsonl#0", RowNames(user_code=True))
    assert (made.reward, made.env) == ("trusted.py:f", "x.py:f") and ran.exists()


def test_a_name_of_the_command_is_a_name_for_rows(ran: Path) -> None:
    Path("mine.py").write_text(
        "def score(response, answer, points=1.0):\n    return points\n\n\ndef math(response, answer):\n    return 5.0\n"
    )
    overrides = ["reward=[{name: 'mine.py:score', options: {points: 3.0}}, {name: 'mine.py:math'}, {name: zerotir}]"]
    config = load_config(
        ["model.path=any", "data.train_files=[x]", *overrides, "env.name='x.py:f'", "env.tool_call_format=xml"]
    )
    names, rewards = RowNames.of(config), build_rewards(config.reward.name, config.reward.options)
    given = {"mine.py:score": "mine.py:score", "score": "mine.py:score", "mine.py:math": "mine.py:math", "math": "math"}
    tasks = {name: to_task(row(reward=name), "rows.jsonl#0", names) for name in given}
    assert {name: task.reward for name, task in tasks.items()} == given  # a known name stays that
    chosen = rewards.of(tasks["score"])
    assert isinstance(chosen, FunctionReward) and chosen.options == {"points": 3.0}
    assert rewards.of(tasks["math"]) is not rewards.of(tasks["mine.py:math"])
    assert to_task(row(env="x.py:f"), "rows.jsonl#0", names).env == "x.py:f"
    python = RowNames(rewards=("/runs/1/inputs/objects.pkl:score",))  # what the Python API makes of a function
    assert python.reward("score") == "/runs/1/inputs/objects.pkl:score"
    for name in ("./mine.py:score", "mine.py:scores", "mine:score", "other.py:score"):
        with pytest.raises(DataError, match=r"one that the command names \(mine.py:score, mine.py:math\)"):
            to_task(row(reward=name), "rows.jsonl#0", names)
    assert not ran.exists()
