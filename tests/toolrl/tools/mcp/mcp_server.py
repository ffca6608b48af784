"""An MCP server for tests: stdio, or with a port as its argument streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("demo", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int = 1) -> str:
    """Adds."""
    return str(a + b)


@server.tool()
def refuse(why: Literal["cold", "warm"]) -> str:
    """Refuses."""
    raise ToolError(f"too {why}")


@server.tool()
async def meet(name: str) -> str:
    """Ends when two are here."""
    here.append(name)
    while len(here) < 2:
        await asyncio.sleep(0.01)
    return name


@server.tool()
async def hang() -> str:
    """Hangs."""
    await asyncio.sleep(600)
    return ""


@server.tool()
def die() -> str:
    """Dies, the first time that it is called in this folder."""
    if not os.path.exists("died"):  # noqa: PTH110
        with open("died", "w"):  # noqa: PTH123
            os._exit(3)
    return f"alive in {os.environ.get('PLACE')}"


here: list[str] = []

if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
