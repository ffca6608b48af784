"""A run's folder as an object, and commands that end early in the process of their own."""

from __future__ import annotations

import html
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

import toolrl
from tests.conftest import ROOT
from toolrl.api import child
from toolrl.api.api import _Job
from toolrl.api.child import RunProcessError, run_command
from toolrl.api.run import Rollout, Run, load_run
from toolrl.api.server import Server, _responds
from verl.config.commands import TRAIN
from verl.errors import ConfigError, DataError, VerlError

ROW = {
    "step": 2,
    "task_id": "a.jsonl#0",
    "prompt": [{"role": "user", "content": "Is it <b>raining</b>?"}],
    "responses": [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"name": "rain", "arguments": {"city": "Łódź"}, "id": "1"}],
        },
        {"role": "tool", "content": "true"},
        {"role": "assistant", "content": "[red]Yes.[/red]"},
    ],
    "answer": "yes",
    "score": {"total": 0.5, "parts": {"right": 0.5}},
    "reward": 0.25,
    "stop_reason": "stop",
    "num_tokens": 7,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    metrics: list[dict[str, Any]] = [
        {"step": 0, "time": 1.0, "val/a/total": 0.1},
        {"step": 1, "time": 2.0, "reward/total": 0.2, "actor/loss": None},
        {"step": 2, "time": 3.0, "reward/total": 0.4, "actor/loss": 1.0, "val/a/total": 0.3, "eval/c/score": 0.9},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics) + '{"step": 3, "un')
    for step in (1, 2):
        path = tmp_path / "transcripts" / f"step-{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(ROW | {"step": step}) + "\n")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest.json").write_text('{"step": 2, "folder": "step-000002", "score": null}')
    return tmp_path


def test_a_folder_is_opened(folder: Path, tmp_path: Path) -> None:
    run = load_run(folder)
    assert [row["step"] for row in run.metrics] == [0, 1, 2]
    assert run.model_path == folder / "checkpoints" / "step-000002" / "hf"
    assert [rollout.row["step"] for rollout in (*run.rollouts(), *run.rollouts(1))] == [2, 1]
    with pytest.raises(ConfigError, match="no rollouts of step 7; there are 1 to 2"):
        run.rollouts(7)
    with pytest.raises(ConfigError, match="holds no run"):
        load_run(folder / "transcripts")
    with pytest.raises(DataError, match="has no checkpoint yet"):
        _ = Run(folder / "transcripts").model_path


def test_an_unfinished_checkpoint_of_a_running_run_is_left_alone(folder: Path) -> None:
    unfinished = folder / "checkpoints" / ".step-000004.unfinished-1"
    unfinished.mkdir()
    _ = load_run(folder).model_path
    assert unfinished.is_dir()


def test_the_table_compares_the_first_and_the_last_validation(folder: Path) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(load_run(folder).table)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["│", "a", "│", "total", "│", "0.100", "│", "0.300", "│", "+0.200", "│"] in lines
    assert any("benchmarks" in line and "0.900" in line for line in lines)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert load_run(folder).table == f"{folder} has no validation: give val_data."


def test_a_plot_has_a_curve_per_metric(folder: Path) -> None:
    from matplotlib.figure import Figure  # takes a second, which every collection would

    run = load_run(folder)
    figure = run.plot()
    assert isinstance(figure, Figure)
    curves = {axes.get_title(): axes.lines[0].get_xydata().tolist() for axes in figure.axes}
    assert curves == {"reward/total": [[1, 0.2], [2, 0.4]], "val/a/total": [[0, 0.1], [2, 0.3]]}
    (loss,) = run.plot("actor/loss").axes
    assert loss.lines[0].get_xydata().tolist() == [[2, 1]]
    assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no step has the metric 'actor/los'; did you mean 'actor/loss'"):
        run.plot("actor/los")


def test_without_matplotlib_a_plot_is_a_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "toolrl.api.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match="plots need the package matplotlib; pip install matplotlib"):
        load_run(folder).plot()


def test_a_rollout_is_displayed(capsys: pytest.CaptureFixture[str]) -> None:
    rollout = Rollout(ROW)
    assert (rollout.reward, rollout.parts) == (0.25, {"right": 0.5})
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    rollout.show()
    printed = capsys.readouterr().out
    for text in ("reward 0.25 (right 0.5), stop, 7 tokens", 'call: rain({"city": "Łódź"})', "tool: true"):
        assert text in printed
    assert "assistant: [red]Yes.[/red]" in printed and "gold answer: yes" in printed  # no markup
    page = rollout._repr_html_()
    assert html.escape("Is it <b>raining</b>?") in page and "<b>" not in page


def test_an_error_of_the_run_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its message and class; nothing was printed for it, and nothing remains of the folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.path: there is no folder '\./nope'"):
        run_command("train", ["model.path=./nope", "data.train_files=[a.jsonl]"])
    with pytest.raises(ConfigError, match="unknown recipe 'gpro'; did you mean 'grpo'"):
        toolrl.train("embedded", recipe="gpro")
    with pytest.raises(ConfigError, match=r"unknown key 'actor\.optim\.rl'"):
        toolrl.train("embedded", settings={"actor.optim.rl": 1})
    assert list((tmp_path / "outputs").iterdir()) == []


def test_duplicate_or_contradictory_settings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"trainer\.total_training_steps is given twice"):
        toolrl.train("embedded", steps=1, settings={"trainer.total_training_steps": 2})
    with pytest.raises(ConfigError, match="tools and env are both given"):
        toolrl.train("embedded", tools=["calculator"], env="shop")


class Judging:
    def reset(self) -> None: ...

    def get_reward(self) -> float:
        return 1.0


def settings_of(tmp_path: Path, recipe: str, **more: Any) -> dict[str, Any]:
    job = _Job(TRAIN, recipe, {"trainer.default_local_dir": str(tmp_path)})
    with job.folder("trainer.default_local_dir", None, "run") as folder:
        assert folder == tmp_path / "run-1"
        job.put_episodes(**{"reward": None, "tools": (), "env": None} | more)
        return {key: value for key, value in job._settings.items() if not key.startswith("trainer.")}


def test_tools_and_environments_set_what_they_need(tmp_path: Path) -> None:
    assert settings_of(tmp_path, "grpo") == {}
    assert settings_of(tmp_path, "grpo", tools=("calculator",), reward="qa") == {
        "env.tools": ["calculator"],
        "env.name": "tool",
        "reward.name": "qa",
    }
    assert settings_of(tmp_path, "toolrl_grpo", env="shop", reward=["env", {"name": "qa", "weight": 0.2}]) == {
        "env.name": "shop",
        "env.tool_call_format": "auto",
        "reward": ["env", {"name": "qa", "weight": 0.2}],
    }
    assert settings_of(tmp_path, "torl", env=Judging) == {
        "env.name": Judging,
        "data.map": "toolrl.envs.class_env.class_env:as_task_row",
        "reward.name": "env",
    }  # the recipe has a format
    assert settings_of(tmp_path, "grpo", tools=len, reward={"name": max, "weight": 2}) == {
        "env.tools": [len],
        "env.name": "tool",
        "reward": [{"name": max, "weight": 2}],
    }


def trls(completions: list[Any], level: list[int]) -> list[float]:
    return [1.0]


def test_rows_of_a_prompt_are_tasks_for_a_reward_of_your_own(tmp_path: Path) -> None:
    def map_of(reward: Any, **more: Any) -> Any:
        return settings_of(tmp_path, "grpo", reward=reward, **more).get("data.map")

    assert map_of(trls) == map_of([{"name": trls, "weight": 2.0}]) == "toolrl.envs.class_env.class_env:as_task_row"
    answered = "toolrl.envs.class_env.class_env:as_answered_row"
    assert map_of(lambda response, answer: 1.0) == map_of([trls, lambda response, answer: 1.0]) == answered
    assert map_of("math") == map_of(None) == map_of(["math", "qa"]) is None


def started(name: str, arguments: list[str]) -> None:
    raise AssertionError("a process was started")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"steps": 0}, r"steps: trainer\.total_training_steps must be at least 1, got 0"),
        ({"steps": 1.5}, "steps: trainer.total_training_steps=1.5"),
        ({"steps": 2, "settings": {"trainer.total_training_steps": 3}}, "is given twice: as an argument"),
        ({"recipe": "grpoo"}, "unknown recipe 'grpoo'; did you mean 'grpo'"),
        ({"recipe": 5}, "recipe: a name, not an object of type int"),
        ({"name": 5}, "name: a folder name, or several such as a/b, not an object of type int"),
        ({"name": "../x"}, "name: trainer.experiment_name must be a folder name"),
        ({"model": object()}, 'model: a folder, a hub name or "embedded", not an object of type object'),
        ({"settings": ["rollout.n=2"]}, "settings: a dict of keys as .*, not an object of type list"),
        ({"settings": {"rollout.nn": 2}}, "unknown key 'rollout.nn'; did you mean 'rollout.n'"),
        ({"data": []}, "data: is empty"),
        ({"val_data": []}, "val_data: is empty"),
        ({"reward": threading.Lock()}, "reward.name: an object of type lock is neither .*, a function nor a class"),
        ({"env": object(), "reward": "env"}, "env.name: an object of type object is neither"),
        ({"env": Judging, "tools": [len]}, "tools and env are both given"),
    ],
)
def test_a_wrong_argument_is_named_and_leaves_no_folder(
    arguments: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toolrl.api.api.run_command", started)
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    with pytest.raises(ConfigError, match=problem):
        toolrl.train(**{"model": "embedded", "data": rows, "steps": 1} | arguments)
    assert [path for path in tmp_path.rglob("*") if path.name != "outputs"] == []


def test_every_run_without_a_name_has_a_folder_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "run-1").mkdir()
    (tmp_path / "run-1" / "kept").touch()
    job = _Job(TRAIN, "grpo", {"trainer.default_local_dir": str(tmp_path)})
    with job.folder("trainer.default_local_dir", None, "run") as folder:
        assert folder == tmp_path / "run-2" and folder.is_dir()
    assert not folder.exists()  # nothing was written into it
    with job.folder("trainer.default_local_dir", "a/b", "run") as folder:
        assert folder == tmp_path / "a" / "b"


def test_a_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import os, signal; print('the last line', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(child, "_CODE", code)
    with pytest.raises(RunProcessError, match="was killed by SIGKILL without a result") as caught:
        run_command("train", [])
    assert isinstance(caught.value, VerlError)
    assert "the last line" in capsys.readouterr().out


def test_an_interrupt_is_passed_on_and_raised_after_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    began, ended = tmp_path / "began", tmp_path / "ended"
    code = f"""
import time
from pathlib import Path
try:
    Path({str(began)!r}).touch()
    time.sleep(600)
except KeyboardInterrupt:
    time.sleep(0.3)
    Path({str(ended)!r}).touch()
"""
    monkeypatch.setattr(child, "_CODE", code)

    def interrupt() -> None:
        while not began.exists():
            time.sleep(0.01)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_command("train", [])
    assert ended.exists()
    assert not [each for each in psutil.Process().children() if str(began) in " ".join(each.cmdline())]


def test_a_child_that_holds_the_output_open_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(120)']).pid)"
    monkeypatch.setattr(child, "_CODE", code)
    start = time.monotonic()
    with pytest.raises(RunProcessError, match="ended with exit code 0 without a result"):
        run_command("train", [])
    assert time.monotonic() - start < 60


def test_a_run_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """A kernel that is restarted is killed."""
    code = """
from toolrl.api import child
child._CODE = '''
import sys, time, types, toolrl.api.child as child
sys.modules["sleeper"] = sleeper = types.ModuleType("sleeper")
sleeper.run = lambda args, console: console.print("up") or time.sleep(60)
child.COMMANDS["train"] = ("verl.config.commands:TRAIN", "sleeper:run")
child.main()
'''
child.run_command("train", [])
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert parent.stdout is not None and parent.stdout.readline() == "up\n"
    (started,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    started.wait(60)


def test_importing_toolrl_is_light(tmp_path: Path) -> None:
    code = "import sys, toolrl; dir(toolrl); print([name for name in sys.modules if '.' not in name])"
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, cwd=ROOT)
    heavy = ("torch", "ray", "hydra", "rich", "numpy", "cloudpickle", "pyarrow")
    assert done.returncode == 0 and not [name for name in heavy if f"'{name}'" in done.stdout]


class Guarded(BaseHTTPRequestHandler):
    """A server with a token, as vLLM's: only its health is open to all."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 401)
        self.end_headers()


def test_a_server_with_a_token_is_found_ready() -> None:
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        threading.Thread(target=server.handle_request).start()
        assert _responds(f"http://127.0.0.1:{server.server_port}/v1")
    assert not _responds("http://127.0.0.1:1/v1")


def test_a_server_is_stopped(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    with Server("http://127.0.0.1:1/v1", "run-1", process) as server:
        assert server.process.poll() is None
    assert process.poll() == -signal.SIGTERM


def test_a_server_left_running_ends_with_the_process(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    code = f"""
import pathlib, sys
from toolrl.api import server
sys.executable, server._responds = {str(program)!r}, lambda url: True
print(server.serve(pathlib.Path("run-1"), None).process.pid)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert not psutil.pid_exists(int(done.stdout))
