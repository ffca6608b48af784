"""An MCP server that breaks the protocol, over stdio, in a manner: one of those in `main`."""

from __future__ import annotations

import json
import sys
from typing import Any

HALF = "\\ud83d"  # of a character, as JSON spells it; no UTF-8 can hold it


def tools(manner: str, page: int) -> dict[str, Any]:
    schema: Any = "none" if manner == "schema" else {"type": "object"}
    listed = {"tools": [{"name": f"tool{page}", "inputSchema": schema}]}
    return {**listed, "nextCursor": str(page + 1)} if manner == "endless" else listed


def answer(manner: str, method: str, page: int) -> Any:
    if method == "initialize":
        info = {"name": "odd", "version": "1"}
        return {
            "protocolVersion": "1999-01-01" if manner == "version" else "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": info,
        }
    if method == "tools/list":
        return tools(manner, page)
    if method == "tools/call":
        return {"content": [{"type": "text", "text": "HALF"}]}
    return None


def main(manner: str) -> None:
    """manner: endless, schema, answers, version, id (unsolicited answers), stderr or stdout (much of it)"""
    page = 0
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        print("a line of a log")  # many servers write some to stdout
        if manner in ("stderr", "stdout"):
            for _ in range(100):
                print("noise " * 50_000, file=getattr(sys, manner), flush=True)
        if manner == "id":
            request["id"] += 1000
        result = answer(manner, request["method"], page)
        page += request["method"] == "tools/list"
        if result is None:
            error = {"code": -32601, "message": "no such method"}
            print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}), flush=True)
            continue
        text = json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result})
        print(text.replace("HALF", HALF) if manner == "answers" else text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
