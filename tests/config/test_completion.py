"""Completion, as the shells themselves do it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from verl.cli import COMMANDS
from verl.config.completion import completion, values_of
from verl.config.load import load_config

BASH = """
source {script}
COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}
read -ra COMP_WORDS <<< "${{COMP_LINE//=/ = }}"
[[ "$COMP_LINE" == *' ' || "$COMP_LINE" == *= ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_toolrl 2> /dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of a line, whose words it splits at blanks and =."""
    script = folder / "completion"
    script.write_text(completion("bash", " ".join(COMMANDS)))
    code = BASH.format(script=script, line=line)
    done = subprocess.run(["bash", "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("toolrl tr", ["train"]),
        ("toolrl re", ["report", "replay", "retrieval-server"]),
        ("toolrl train actor.off", ["actor.offload="]),
        ("toolrl train actor.offload=", ["none", "params", "optimizer", "all"]),
        ("toolrl train rollout.n=4 actor.offload=p", ["params"]),
        ("toolrl train trainer.save_on_signal=", ["true", "false"]),
        ("toolrl train recipe=mini_", ["mini_grpo", "mini_ppo"]),
        ("toolrl lab model=", ["embedded", "smollm2"]),
        ("toolrl lab rollout.", []),
        ("toolrl sft rec", []),
        ("toolrl train --c", ["--config=", "--cfg"]),
        ("toolrl train data=ro", ["rows.jsonl"]),
    ],
)
def test_bash_offers_commands_keys_values_and_files(line: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert completed(line, tmp_path) == offered


def test_offered_values_are_accepted() -> None:
    for key in ("data.truncation", "rollout.on_weight_sync", "algorithm.adv_estimator", "algorithm.aggregation"):
        assert values_of(key)
        for value in values_of(key):
            words = [f"{key}={value}", "rollout.n=2", *(["rollout.max_staleness=1"] if "sync" in key else [])]
            load_config([*words, "model.path=any", "data.train_files=[x]"])
    assert values_of("trainer.logger")[-1] == "swanlab" and values_of("model.path") == []


def test_the_command_writes_the_script_for_a_shell() -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "toolrl", "completion", *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert "bashcompinit" in run("zsh").stdout and "bashcompinit" not in run("bash").stdout
    assert run().returncode == run("fish").returncode == 2 and run("--help").returncode == 0


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_the_script(tmp_path: Path) -> None:
    (tmp_path / "completion").write_text(completion("zsh", " ".join(COMMANDS)))
    code = "autoload -U compinit; compinit -u -D; source ./completion; whence -w _toolrl"
    done = subprocess.run(["zsh", "-fc", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "_toolrl: function" in done.stdout, done.stderr
