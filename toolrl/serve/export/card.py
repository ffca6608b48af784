"""The model card, from the record of the run. What is not in the record is marked as missing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from toolrl.serve.openai_server.parsing import PARSER_NAME
from toolrl.serve.openai_server.serving_files import CHAT_TEMPLATE, TOOL_PARSER
from verl import __version__
from verl.data.overlap import TRAIN_TASKS
from verl.tracking.names import STDERR
from verl.verl_compat.published import AUTO

CARD = "README.md"
_MISSING = "not recorded"
_Z = 1.96  # 95 % interval
_SETTINGS = {  # label -> key of the configuration
    "Initial model": "model.path",
    "Algorithm": "algorithm.name",
    "Reward": "reward.name",
    "Environment": "env.name",
    "Training data": "data.train_files",
    "Prompts per step": "data.train_batch_size",
    "Rollouts per prompt": "rollout.n",
    "Learning rate": "actor.optim.lr",
}
_OF_MODEL = ["library_name: transformers"]
_TAGS = ["pipeline_tag: text-generation", "tags: [tool-calling, toolrl]"]
_SERVING = [
    "Requests with `tools` are rendered as in training, and answers have `tool_calls`:",
    "",
    "```bash",
    "toolrl serve FOLDER",
    "```",
    "",
    "Or with vLLM itself, in this folder. The tool parser needs `pip install --no-deps toolrl-*.whl`:",
    "",
    "```bash",
    f"vllm serve . --chat-template {CHAT_TEMPLATE} --chat-template-content-format string \\",
    f"    --enable-auto-tool-choice --tool-parser-plugin {TOOL_PARSER} --tool-call-parser {PARSER_NAME}",
    "```",
]


def model_card(
    folder: Path,
    state: Mapping[str, Any],
    tool_call_format: str | None,
    problem: str = "",
    results: Sequence[str] = (),
    base: str | None = None,
) -> str:
    """The text of the card.

    folder: of the model; state: of its checkpoint
    problem: why there are no files for servers, if so
    results: tables of `toolrl eval`, in Markdown
    base: of an adapter
    """
    settings = state.get("resume_config", {})
    facts = {label: settings.get(key) for label, key in _SETTINGS.items()}
    if facts["Reward"] == AUTO:  # earlier versions did not record what it chose
        facts["Reward"] = list(state.get("rewards", ())) or "calls for rows with a gold turn, else by data_source"
    facts["Tool-call format"] = tool_call_format
    facts["Steps"] = state.get("trainer", state).get("step")
    facts["Digest of the training tasks"] = _digest(folder / TRAIN_TASKS)
    rows = [f"| {label} | {_shorten(value)} |" for label, value in facts.items()]
    serving = [f"There is no chat template for servers: {problem}"] if problem else _SERVING
    kind = _OF_MODEL if base is None else ["library_name: peft", f"base_model: {base}"]
    title = "A model that calls tools" if base is None else "An adapter that calls tools"
    if base is not None and not problem:
        serving = ["Load it with peft beside its base; `tool_chat_template.jinja` renders requests as in training."]
    head = ["---", *kind, *_TAGS, "---", "", f"# {title}", "", f"Trained with toolrl {__version__}.", ""]
    lines = [*head, "| | |", "|---|---|", *rows]
    lines += ["", "## Results", "", *_results(state), *results, "", "## Serving", "", *serving]
    return "\n".join(lines) + "\n"


def _shorten(value: Any) -> str:
    """The name alone of a path on this machine: cards are published."""
    if value is None or value == []:
        return _MISSING
    if isinstance(value, list):
        return ", ".join(map(_shorten, value))
    text = Path(value).name if isinstance(value, str) and Path(value).is_absolute() else str(value)
    return f"`{text.replace('|', chr(92) + '|')}`"


def _digest(tasks: Path) -> str | None:
    """Digest of the list of training tasks in this folder."""
    return f"sha256:{hashlib.sha256(tasks.read_bytes()).hexdigest()}" if tasks.is_file() else None


def _results(state: Mapping[str, Any]) -> list[str]:
    """Validation before and after the training, with normal intervals over the tasks where errors are recorded."""
    before, after = state.get("before") or {}, state.get("after") or {}
    names = [name for name in {**before, **after} if name.endswith(("/total", "/exact", "/score"))]
    if not names:
        return ["No validation is recorded in this checkpoint."]
    rows = [f"| {name} | {_estimate(before, name)} | {_estimate(after, name)} |" for name in sorted(names)]
    note = "In brackets: 95 % intervals over the tasks. A paired comparison: `toolrl eval .. eval.compare=BASE`."
    return ["| metric | before | after |", "|---|---:|---:|", *rows, "", note]


def _estimate(metrics: Mapping[str, float], name: str) -> str:
    """Formats `0.5 [0.41, 0.59]`; checkpoints of earlier versions have no standard errors."""
    if name not in metrics:
        return _MISSING
    mean, error = metrics[name], metrics.get(name + STDERR)
    interval = "" if error is None else f" [{mean - _Z * error:.4g}, {mean + _Z * error:.4g}]"
    return f"{mean:.4g}{interval}"
