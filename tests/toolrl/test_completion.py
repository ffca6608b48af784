"""Completion, as the shells themselves do it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from toolrl.cli import COMMANDS
from toolrl.completion import completion, values_of
from verl.config.load import load_config

BASH = """
source {script}
COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}
read -ra COMP_WORDS <<< "${{COMP_LINE//=/ = }}"  # words: allowed
[[ "$COMP_LINE" == *' ' || "$COMP_LINE" == *= ]] && COMP_WORDS+=("")  # words: allowed
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))  # words: allowed
_toolrl 2> /dev/null
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def completed(line: str, folder: Path) -> list[str]:
    """What bash offers at the end of a line, which it splits at blanks and =."""
    script = folder / "completion"
    script.write_text(completion("bash", COMMANDS["completion"].arguments))
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
        ("toolrl serve po", ["port="]),
        ("toolrl report --", ["--serve", "--no-token", "--user-code"]),
        ("toolrl algorithms x", []),
    ],
)
def test_bash_offers_commands_keys_values_and_files(line: str, offered: list[str], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert completed(line, tmp_path) == offered


def test_offered_values_are_accepted() -> None:
    for key in ("data.truncation", "rollout.on_weight_sync", "algorithm.adv_estimator", "algorithm.aggregation"):
        assert values_of(key)
        for value in values_of(key):
            overrides = [f"{key}={value}", "rollout.n=2", *(["rollout.max_staleness=1"] if "sync" in key else [])]
            load_config([*overrides, "model.path=any", "data.train_files=[x]"])
    assert values_of("trainer.logger")[-1] == "swanlab" and values_of("model.path") == []


def test_the_command_writes_the_script_for_a_shell() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "toolrl", "completion", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert "bashcompinit" in run("zsh").stdout and "bashcompinit" not in run("bash").stdout
    assert run().returncode == run("fish").returncode == 2 and run("--help").returncode == 0


ZSHRC = """
[[ -n "$ZSH_MODULES" ]] && module_path=("$ZSH_MODULES")
autoload -U compinit; compinit -u -D
source ./completion
toolrl() { print -r -- "entered: $*" }
print -r -- "ready"
"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed (tests/support/zsh.sh needs no root)")
@pytest.mark.parametrize(
    ("line", "entered"),
    [
        ("tr", "train"),
        ("train actor.off", "train actor.offload="),
        ("train actor.offload=p", "train actor.offload=params"),
        ("train rollout.n=4 recipe=mini_g", "train rollout.n=4 recipe=mini_grpo"),
        ("lab model=em", "lab model=embedded"),
        ("train data=ro", "train data=rows.jsonl"),
        ("report ro", "report rows.jsonl"),
        ("serve ro", "serve rows.jsonl"),
        ("serve rows.jsonl prompt_t", "serve rows.jsonl prompt_template="),
        ("sft reci", "sft reci"),
    ],
)
def test_zsh_completes_what_is_typed(line: str, entered: str, tmp_path: Path) -> None:
    """In a terminal: the text, a Tab, Enter."""
    (tmp_path / "completion").write_text(completion("zsh", COMMANDS["completion"].arguments))
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / ".zshrc").write_text(ZSHRC)
    shell, terminal = pty.fork()
    if shell == 0:
        os.chdir(tmp_path)
        os.execvpe("zsh", ["zsh", "-d", "-i"], {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb"})
    try:
        read_until(terminal, "ready")
        os.write(terminal, f"toolrl {line}\t".encode())
        read_until(terminal, entered.split()[-1])
        os.write(terminal, b"\n")
        assert f"entered: {entered}\r\n" in re.sub(r" +\r\n", "\r\n", read_until(terminal, "entered: ", "\n"))
    finally:
        os.kill(shell, signal.SIGKILL)
        os.waitpid(shell, 0)
        os.close(terminal)


def read_until(terminal: int, *texts: str) -> str:
    """What the terminal shows, up to the last of these texts, one after the other."""
    shown, deadline = "", time.monotonic() + 200.0
    while True:
        place = 0
        for text in texts:
            place = shown.find(text, place) + len(text) if place >= 0 and text in shown[place:] else -1
        if place >= 0:
            return shown
        ready = select.select([terminal], [], [], max(deadline - time.monotonic(), 0.0))[0]
        assert ready, f"{texts} not in {shown!r}"
        shown += os.read(terminal, 65536).decode(errors="replace")
