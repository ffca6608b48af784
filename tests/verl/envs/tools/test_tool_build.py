"""What a configuration lists becomes tools: known names, and users' functions and classes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from verl.envs.tools.base import EpisodeTool
from verl.envs.tools.build import build_tools
from verl.errors import ConfigError
from verl.plugins import TOOLS
from verl.registry import resolve

MINE = '''
from verl.envs.tools.function import tool
from verl.types import ToolSpec

def plain(x: int) -> int:
    """Doubles."""
    return 2 * x

@tool(name="thrice")
def decorated(x: int) -> int:
    """Triples."""
    return 3 * x

class Times:
    def __init__(self, factor: int, name: str = "times"):
        self.factor = factor
        self.spec = ToolSpec(name, "Multiplies.", {"type": "object"})
    async def call(self, arguments):
        return str(self.factor * arguments["x"])
    async def close(self):
        pass

class Many:
    def __init__(self):
        self.tools = [Times(1, "once"), Times(2, "twice")]

class Cart:
    def __init__(self):
        self.spec = ToolSpec("cart", "Holds.", {"type": "object"})
    async def open(self, task):
        return Times(len(task.id))
    async def close(self):
        pass

class Nothing:
    pass

class Store:
    """Its bound methods are tools, too."""
    def __init__(self, items):
        self.items = items
    def take(self, x: int) -> int:
        """Takes one."""
        return self.items[x]

take = Store(range(10, 20)).take
constant = 7
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "mine.py"
    path.write_text(MINE)
    return path


def test_users_functions_and_classes_become_tools(file: Path) -> None:
    wanted = [
        f"{file}:plain",
        f"{file}:decorated",
        {"name": f"{file}:Times", "factor": 7},
        f"{file}:Many",
        f"{file}:take",
        f"{file}:Cart",
    ]
    *shared, cart = build_tools(wanted)
    assert [tool.spec.name for tool in shared] == ["plain", "thrice", "times", "once", "twice", "take"]
    assert isinstance(cart, EpisodeTool) and cart.spec.name == "cart"
    answers = [asyncio.run(tool.call({"x": 5})) for tool in shared if not isinstance(tool, EpisodeTool)]
    assert answers == ["10", "15", "35", "5", "10", "15"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"name": "calculato"}, "unknown tool 'calculato'; did you mean 'calculator'"),
        ({"topk": 3}, "is not a tool; use a name"),
        ({"name": "calculator", "digits": 3}, "tool 'calculator' is not a class and takes no options, but got"),
        ({"name": "FILE:Times"}, "missing a required argument: 'factor'; its options are factor, name"),
        ({"name": "FILE:plain", "x": 1}, "takes no options"),
        ({"name": "FILE:constant"}, "constant' is not a tool, but an object of int"),
        ({"name": "FILE:Nothing"}, "Nothing' is not a tool, but an object of Nothing"),
    ],
)
def test_an_object_that_cannot_be_a_tool_is_refused(file: Path, wanted: dict[str, Any], message: str) -> None:
    if "name" in wanted:
        wanted = {**wanted, "name": wanted["name"].replace("FILE", str(file))}
    with pytest.raises(ConfigError, match=message):
        build_tools([wanted])


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    monkeypatch.delitem(sys.modules, "toolrl.tools.mcp.mcp", raising=False)
    with pytest.raises(ConfigError, match=r"cannot import module 'toolrl\.tools\.mcp\.mcp' .*import of mcp"):
        build_tools([{"name": "mcp", "url": "http://x"}])


@pytest.mark.parametrize("name", TOOLS)
def test_every_name_in_the_table_stands_for_something(name: str) -> None:
    assert resolve("tool", name, TOOLS)
