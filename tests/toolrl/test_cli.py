"""The command `toolrl` and the module of that name: every command is reachable, and what is missing is one line."""

from __future__ import annotations

import importlib.util
import io
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

import toolrl
import verl
from tests.conftest import ROOT
from tests.support.every import every
from toolrl.cli import COMMANDS, main
from verl.config.commands import TRAIN
from verl.host import packages
from verl.tracking.console import Display
from verl.trainer import cli as command
from verl.trainer.cli import CliArgs, run_cli

MINI = "model.path=embedded:model"
NEED_TORCH = {
    "train": ["recipe=mini_grpo", "rollout.name=hf"],
    "preflight": ["recipe=mini_grpo", "rollout.name=hf"],
    "sft": [MINI, "data.train_files=[embedded:sft.parquet]"],
    "generate": [MINI, "data.val_files=[embedded:test.parquet]", "rollout.name=hf"],
    "chat": [MINI, "rollout.name=hf"],
    "eval": [MINI, "eval.benchmarks=[embedded:test.parquet]", "rollout.name=hf"],
    "probe": [MINI, "data.train_files=[embedded:test.parquet]", "rollout.name=hf"],
    "plan": ["recipe=mini_grpo"],
    "replay": [".", "--step", "1"],
    "algorithms": [],
}


def run_python(code: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_every_runnable_module_has_a_command() -> None:
    files = [file for package in packages.OURS for file in package.rglob("*.py")]
    runnable = {each for each in files if '\nif __name__ == "__main__":' in each.read_text(encoding="utf-8")}
    modules = {".".join(each.relative_to(ROOT).with_suffix("").parts) for each in runnable}
    inner = {
        "toolrl.envs.agent.inside.forward",
        "toolrl.envs.agent.inside.programs",
        "toolrl.envs.agent.inside.puller",
        "toolrl.serve.openai_server.supervise",
        "toolrl.swe.inside.run_tests",
        "toolrl.envs.verifiers.inside.worker",
        "verl.host.unpacking",
        "toolrl.swe.inside.deploy",
        "verl.host.watcher",
    }
    not_for_users = {"toolrl", "toolrl.cli", *inner, "verl.trainer.main_eval", "verl.trainer.main_generation"}
    assert {each.removesuffix(".__main__") for each in modules} - not_for_users == {
        command.module for command in COMMANDS.values()
    }


def test_help_lists_every_command_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, toolrl; from toolrl.cli import main; main(['--help']); print([*sys.modules])"
    shown = run_python(code, tmp_path)
    assert every(f"\n  {name} " in shown.stdout for name in COMMANDS)
    loaded = shown.stdout.splitlines()[-1]
    assert not [name for name in ("torch", "ray", "hydra", "rich", "asyncio", "numpy") if f"'{name}'" in loaded]


def test_a_command_runs_its_module_with_the_same_arguments(tmp_path: Path) -> None:
    argv = ["lab", "data=embedded:test.parquet", "eval.limit=2"]
    shown = run_python(f"from toolrl.cli import main; main({argv!r})", tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "2 rows tried, 0 with violations" in shown.stdout


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trai"]) == 2
    assert capsys.readouterr().err == "toolrl: unknown command 'trai'; did you mean 'train'?\n"


def test_the_recipes_of_the_embedded_data_work_from_any_folder(tmp_path: Path) -> None:
    shown = run_python("from toolrl.cli import main; main(['train', 'recipe=mini_ppo', '--cfg', 'job'])", tmp_path)
    assert shown.returncode == 0
    for file in ("train.parquet", "test.parquet", "test_new_tools.parquet", "model"):
        assert str(ROOT / "dataset" / "mini" / file) in shown.stdout


def test_commands_without_torch_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # as if it were not installed
from toolrl.cli import main
for name, argv in {NEED_TORCH!r}.items():
    try:
        print(name, main([name, *argv]))
    except SystemExit as end:
        print(name, end.code)
"""
    tried = run_python(code, tmp_path, COLUMNS="500")
    line = f"ConfigError: the package torch is not installed; {packages.SET_UP}"
    assert tried.stdout.count(line) + tried.stderr.count(line) == len(NEED_TORCH)
    codes = [each for each in tried.stdout.splitlines() if not re.search("^ConfigError| start: packages$", each)]
    assert codes == [f"{name} 2" for name in NEED_TORCH]
    assert "Traceback" not in tried.stderr + tried.stdout


@pytest.mark.long
@pytest.mark.parametrize("argv", [["train", "recipe=mini_grpo"], ["chat", MINI]])
def test_a_run_without_vllm_is_one_line_and_exit_code_2(tmp_path: Path, argv: list[str]) -> None:
    code = f"import sys; sys.modules['vllm'] = None; from toolrl.cli import main; main({argv!r})"
    tried = run_python(code, tmp_path, COLUMNS="500")
    assert tried.returncode == 2
    assert len(tried.stdout.splitlines()) == 1
    assert f"=vllm: the package vllm is not installed; {packages.SET_UP}" in tried.stdout


@pytest.mark.parametrize("argv", [["serve", "embedded:model"], ["lab", "data=embedded:test.parquet"]])
def test_ctrl_c_while_a_command_starts_is_one_line(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint()\n")
    (tmp_path / "torch.py").symlink_to(tmp_path / "rich.py")
    done = subprocess.run(
        [sys.executable, "-m", "toolrl.cli", *argv],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_import_that_fails_for_another_reason_stays_an_error() -> None:
    assert packages.missing_package(ModuleNotFoundError(name="verl.gone")) is None
    assert packages.missing_package(ModuleNotFoundError(name="yaml")) is not None

    def run(argv: CliArgs, console: Console) -> int:
        raise ModuleNotFoundError("no module named 'users_own'", name="users_own")

    with pytest.raises(ModuleNotFoundError):
        run_cli([], "", TRAIN, run)


def test_a_message_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def run(argv: CliArgs, console: Console) -> int:
        console.print("saved to runs:fire:, [a:train:]", markup=False)
        raise command.ConfigError("me/data:train: is no file")

    assert run_cli([], "", TRAIN, run) == 2
    assert capsys.readouterr().out == "saved to runs:fire:, [a:train:]\nConfigError: me/data:train: is no file\n"


def test_forced_colors_do_not_make_a_pipe_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook sets FORCE_COLOR: it shows a line per step, not the codes of a live display."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    def run(args: CliArgs, console: Console) -> None:
        display = Display(2, console)
        display.phase("data")
        display.log(1, {"reward/total": 0.5})
        display.close()

    assert run_cli([], "", TRAIN, run) == 0
    lines = [line[20:] for line in capsys.readouterr().out.splitlines()]  # without the date
    assert lines[0] == "start: data" and lines[1].startswith("step 1/2, reward 0.500, left ")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_log_line_has_its_date_and_level_once(terminal: bool) -> None:
    console = Console(
        file=io.StringIO(), width=100, force_interactive=terminal, force_terminal=terminal, color_system=None
    )
    record = logging.LogRecord("verl.x", logging.WARNING, "x.py", 1, "one %s", ("line",), None)
    command._log_handler(console).handle(record)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:]+ WARNING +one line *\n", shown), shown


def test_the_alias_has_the_api_of_verl() -> None:
    assert toolrl.__version__ == verl.__version__
    for name in toolrl.__all__:
        assert getattr(toolrl, name) is not None
    from verl.config.load import load_config

    assert toolrl.load_config is load_config
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = toolrl.nothing


def test_messages_of_an_installed_package_name_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `scripts/` in the folder above; the pinned versions are those of the lock file."""
    place = tmp_path / "site-packages" / "verl" / "host" / "packages.py"
    place.parent.mkdir(parents=True)
    shutil.copy(str(packages.__file__), place)
    spec = importlib.util.spec_from_file_location("installed_packages", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look their types up
    spec.loader.exec_module(module)
    assert "scripts/" not in module.SET_UP
    locked = (ROOT / "scripts" / "requirements" / "cpu-nodeps.txt").read_text().splitlines()
    assert every(line in module.SET_UP for line in locked if not line.startswith("#"))
    assert module.script("scripts/x.py") == "scripts/x.py of toolrl's repository"
    assert packages.script("scripts/x.py") == "scripts/x.py"


def test_upstreams_verl_package_is_reported(tmp_path: Path) -> None:
    """As where PyPI's `verl` comes first on the path: it is not even imported."""
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": os.environ["PATH"]}
    for arguments in (["-m", "toolrl", "--version"], ["-c", "import toolrl"]):
        command = [sys.executable, *arguments]
        run = subprocess.run(command, env=path, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 1 and run.stderr.count("Traceback") == 1
        assert f"finds another package than toolrl's, in {tmp_path / 'verl'}: veRL, from PyPI" in run.stderr
