"""Tools of an agent that a file describes, as published agents have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolrl.envs.swe.env import SweFactory
from verl.errors import ConfigError

SCHEMAS = [{"name": name, "description": f"Use {name}."} for name in ("finish", "execute_bash", "str_replace_editor")]


def test_a_file_of_schemas_describes_the_tools_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    path.write_text(json.dumps([*SCHEMAS, {"name": "web"}]))
    specs = SweFactory(style="skyrl", tools=str(path)).shown_tools
    assert [spec.description for spec in specs] == ["Use execute_bash.", "Use finish.", "Use str_replace_editor."]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (json.dumps(SCHEMAS[:2]), "has finish, execute_bash, and no str_replace_editor"),
        (
            json.dumps([*SCHEMAS[1:], {"name": "finish", "parameters": {"properties": {"status": {}}}}]),
            "finish takes message, task_completed, and no status",
        ),
        ("[{}", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_describes_other_tools_is_refused(content: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "tools.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=problem):
        SweFactory(style="skyrl", tools=str(path))
