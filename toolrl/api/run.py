"""A run's folder as an object: metrics, a plot, rollouts, the trained model."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from toolrl.api.server import Server, serve
from verl.checkpoint.manifest import read_json
from verl.errors import ConfigError, DataError
from verl.host.files import step_files
from verl.tracking.console import before_after_table, metrics_by_set
from verl.tracking.jsonl import read_jsonl

_SHOWN = ("reward/total", "response_length/mean", "actor/entropy", "tools/usage_rate")


@dataclass(frozen=True)
class Rollout:
    """One episode. row: its line in `transcripts/step-*.jsonl`"""

    row: Mapping[str, Any]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt, the responses and the observations, in order."""
        return [*self.row["prompt"], *self.row["responses"]]

    @property
    def reward(self) -> float:
        """The one trained on."""
        return float(self.row["reward"])

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the reward function's score."""
        return dict(self.row["score"]["parts"])

    @property
    def title(self) -> str:
        parts = ", ".join(f"{name} {value:.3g}" for name, value in self.parts.items())
        ended = f"{self.row['stop_reason']}, {self.row['num_tokens']} tokens"
        return f"step {self.row['step']}, {self.row['task_id']}: reward {self.reward:.3g} ({parts}), {ended}"

    def show(self) -> None:
        """Display it: as HTML in a notebook, as text elsewhere."""
        display = getattr(sys.modules.get("IPython.display"), "display", None)
        if display is not None and "ipykernel" in sys.modules:
            display(self)
        else:
            Console(highlight=False, emoji=False).print(self)

    def __rich__(self) -> Group:
        texts = [Text.assemble((f"{role}: ", "bold"), text) for role, text in self._lines()]
        return Group(Rule(Text(self.title)), *texts)

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th style='text-align:left;vertical-align:top'>{html.escape(role)}</th>"
            f"<td style='text-align:left;white-space:pre-wrap'>{html.escape(text)}</td></tr>"
            for role, text in self._lines()
        )
        return f"<table><caption>{html.escape(self.title)}</caption>{cells}</table>"

    def _lines(self) -> list[tuple[str, str]]:
        """(role, text) of every message, tool call, and of the gold answer; tool results follow the calls in order."""
        lines = []
        for message in self.messages:
            lines.append((message["role"], message["content"] or ""))
            lines += [("call", _as_call(call)) for call in message.get("tool_calls", ())]
        return [*lines, ("gold answer", self.row["answer"])]


def _as_call(call: Mapping[str, Any]) -> str:
    return f"{call['name']}({json.dumps(call['arguments'], ensure_ascii=False)})"


@dataclass(frozen=True)
class Run:
    """A run of `train` or `sft`. folder: of the run"""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dict per step; step 0 is the validation before training."""
        return read_jsonl(self.folder / "metrics.jsonl")

    @property
    def model_path(self) -> Path:
        """The model of the last checkpoint. Raises DataError if there is none."""
        checkpoints = self.folder / "checkpoints"
        if not (checkpoints / "latest.json").is_file():
            raise DataError("has no checkpoint yet", file=str(self.folder))
        return checkpoints / str(read_json(checkpoints / "latest.json")["folder"]) / "hf"

    @property
    def table(self) -> Table | str:
        """The first and the last validation, or a sentence if there is none; `rich.print` displays both."""
        validated = [row for row in self.metrics if any(name.startswith(("val/", "eval/")) for name in row)]
        if not validated:
            return f"{self.folder} has no validation: give val_data."
        first, last = (metrics_by_set(row) for row in (validated[0], validated[-1]))
        return before_after_table(first, last)

    def rollouts(self, step: int | None = None) -> list[Rollout]:
        """The rollouts of a training step; default: the last. Raises ConfigError for a step without any."""
        files = step_files(self.folder / "transcripts", ".jsonl")
        chosen = max(files, default=None) if step is None else step
        if chosen not in files:
            known = f"there are {min(files)} to {max(files)}" if files else "there are none"
            raise ConfigError(f"{self.folder} has no rollouts of step {chosen}; {known}")
        return [Rollout(row) for row in read_jsonl(files[chosen])]

    def plot(self, *names: str) -> Any:
        """A matplotlib figure of these metrics; default: reward, response length, validation and the like."""
        from toolrl.api.plot import plot  # matplotlib is optional

        rows = self.metrics
        known = {name: None for row in rows for name in row}
        validation = [name for name in known if re.fullmatch("val/[^/]+/total", name)]
        return plot(rows, names or [name for name in (*_SHOWN, *validation) if name in known])

    def serve(self, port: int | None = None) -> Server:
        """An OpenAI-compatible server of the model (`toolrl serve`), once it is ready. Also a context manager."""
        return serve(self.folder, port)

    def _repr_html_(self) -> str:
        return f"<code>{html.escape(repr(self))}</code>"


def load_run(folder: str | Path) -> Run:
    """The run in an existing folder. Raises ConfigError if it holds none."""
    path = Path(folder).resolve()
    if not (path / "metrics.jsonl").is_file():
        raise ConfigError(f"{path} holds no run: there is no metrics.jsonl")
    return Run(path)
