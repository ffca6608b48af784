"""Coding agents as they come from npm: Claude Code, Codex and OpenCode on a small repository.

A task has `extra: {files: {PATH: TEXT}, test: COMMAND}`, and perhaps `tests: {PATH: TEXT}`, files that the agent does
not see. The reward is 1.0 if the command's exit status is 0. The program is installed in .agents/NAME of the working
folder by scripts/agents/prepare.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

MODEL = "policy"


def claude_code(base_url: str, task: dict[str, Any]) -> float:
    flags = ["--bare", "--model", MODEL, "--allowedTools", "Bash,Edit,Read"]
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY"), "1")
    return _reward("claude_code", ["claude", "-p", _text(task), *flags], task, quiet)


def codex(base_url: str, task: dict[str, Any]) -> float:
    provider = f'{{name="gateway", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = (
        f"model_providers.gateway={provider}",
        'model_provider="gateway"',
        'web_search="disabled"',
        "features.multi_agent=false",
    )
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL]
    chosen = [part for each in settings for part in ("-c", each)]
    return _reward("codex", ["codex", "exec", *flags, *chosen, _text(task)], task, {})


def opencode(base_url: str, task: dict[str, Any]) -> float:
    options = {"baseURL": base_url, "apiKey": os.environ["OPENAI_API_KEY"]}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: {}}}
    config = {
        "provider": {"gateway": provider},
        "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny"},
        "autoupdate": False,
        "share": "disabled",
    }
    command = ["opencode", "run", "--title", "task", "-m", f"gateway/{MODEL}", _text(task)]
    quiet = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
    return _reward("opencode", command, task, quiet)


def _text(task: dict[str, Any]) -> str:
    """The task's messages as the one text that these programs take."""
    return "\n\n".join(message["content"] for message in task["prompt"])


def _reward(name: str, command: list[str], task: dict[str, Any], variables: dict[str, str]) -> float:
    """Run the program in a folder with the task's files, then the test."""
    installed = Path(".agents", name, "node_modules", ".bin", command[0]).resolve()
    folder = Path(os.environ["REWARD_FILE"]).parent
    work, home = folder / "work", folder / "home"
    home.mkdir()
    _write(work, task["extra"]["files"])
    own = {**os.environ, "HOME": str(home), "PWD": str(work), **variables}
    subprocess.run([installed, *command[1:]], cwd=work, env=own, stdin=subprocess.DEVNULL, check=True)
    _write(work, task["extra"].get("tests", {}))  # whatever the agent wrote there
    return float(subprocess.run(["sh", "-c", task["extra"]["test"]], cwd=work).returncode == 0)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
