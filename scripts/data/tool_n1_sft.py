"""Tool-N1's mixes of SFT and RL data, from traces of a reasoning model.

    python scripts/data/tool_n1_sft.py --input tool_sft.json --output sft.parquet --form reason --part 0:0.5
    python scripts/data/tool_n1_sft.py --input tool_sft.json --output rl.parquet --form rl --part 0.5:1

Supply your own traces as rows {system_prompt, query, output}, the published format: tools as lines of JSON in <tools>,
a thought in <think>, calls in <tool_call>. The paper used 5,518 traces of a DeepSeek model with correct calls
(rejection sampling); the published file is only a Git LFS pointer. Verify your traces yourself. Forms:

    reason     demonstrations for main_sft: the thought and the calls
    no-reason  the same without thoughts, in the prompt and in the response
    rl         rows for main_ppo (reward tool_n1): the trace's calls are the gold answer

--part selects the rows between two quantiles of a hash of query and --seed, so that 0:0.5 and 0.5:1 share no query.
Prompts are those of scripts/data/tool_n1.py, so that both stages use the same prompt; --keep-system keeps the rows' own
(not with no-reason, whose prompt must not ask for a thought).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.common import DEMONSTRATIONS, TASKS, Row, parser, run, task, text
from scripts.data.tool_n1 import instruction
from toolrl.papers.rewards.tool_n1 import json_value, read_calls
from toolrl.reward_score.answers import last_block
from verl.errors import DataError
from verl.formats.toolrl_text import THINK, THINK_END, TOOL_CALL, TOOL_CALL_END

_TOOLS, _TOOLS_END = "<tools>", "</tools>"
_NO_REASON = str(Path(__file__).with_name("tool_n1_no_reason.txt"))


def convert(row: Any, arguments: argparse.Namespace) -> Iterator[Row]:
    """The row in the requested form; nothing if it lies outside of the part."""
    query, system = text(row, "query"), text(row, "system_prompt")
    low, high = arguments.part
    if not low <= _share(query, arguments.seed) < high:
        return
    response, calls = _trace(text(row, "output"))
    tools = _tools(system)
    unknown = [call["name"] for call in calls if call["name"] not in {tool["name"] for tool in tools}]
    if unknown:
        raise DataError(f"calls {unknown[0]!r}, which is not offered", "one of the tools", field="output")
    if arguments.form == "no-reason":
        system = instruction(tools, template=_NO_REASON)
        response = response.rpartition(THINK_END)[2].lstrip()
    elif not arguments.keep_system:
        system = instruction(tools)
    prompt = [{"role": "system", "content": system}, {"role": "user", "content": query}]
    if arguments.form == "rl":
        yield task("toolcall", "tool", prompt, json.dumps(calls, ensure_ascii=False), "")
    else:
        yield {"messages": [*prompt, {"role": "assistant", "content": response}]}


def _share(query: str, seed: int) -> float:
    """A hash of the query in [0, 1)."""
    return int(hashlib.sha256(f"{seed}\n{query}".encode()).hexdigest()[:13], 16) / 16**13


def _trace(output: str) -> tuple[str, list[dict[str, Any]]]:
    """The response up to its first calls, and these calls. Raises DataError for an invalid trace."""
    calls_text, closing, _ = output.partition(TOOL_CALL_END)
    response = (calls_text + closing).strip()
    if THINK not in response or THINK_END not in response:
        raise DataError("has no thought", f"{THINK} .. {THINK_END} before the calls", field="output")
    block = last_block(response, TOOL_CALL, TOOL_CALL_END)
    if block is None or read_calls(block) is None:
        raise DataError("has no calls that can be read", "a JSON list of calls in <tool_call>", field="output")
    found = json_value(block)
    return response, [found] if isinstance(found, dict) else list(found)


def _tools(system: str) -> list[dict[str, Any]]:
    """The tools, each optionally wrapped as {"type": "function", "function": tool}."""
    inside, closed, _ = system.rpartition(_TOOLS)[2].partition(
        _TOOLS_END
    )  # the published prompt mentions the tags earlier
    if not closed:
        raise DataError("lists no tools", f"lines of JSON between {_TOOLS} and {_TOOLS_END}", field="system_prompt")
    try:
        read = [json.loads(line) for line in inside.splitlines() if line.strip()]
    except ValueError as error:
        raise DataError(f"lists tools that are not JSON ({error})", "one a line", field="system_prompt") from error
    return [each.get("function", each) for each in read]


def _part(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        shares = float(low), float(high)
    except ValueError:
        shares = 1.0, 0.0
    if not 0 <= shares[0] < shares[1] <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not two shares such as 0:0.5")
    return shares


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code."""
    options = parser(__doc__)
    options.add_argument("--form", choices=["reason", "no-reason", "rl"], default="reason")
    options.add_argument("--part", type=_part, default=(0.0, 1.0), metavar="FROM:TO", help="shares of the rows")
    options.add_argument("--keep-system", action="store_true", help="keep the rows' own system prompts")
    arguments = options.parse_args(argv)
    if arguments.keep_system and arguments.form == "no-reason":
        options.error("--keep-system keeps a prompt that asks for a thought: leave it out with --form no-reason")
    return run(arguments, convert, TASKS if arguments.form == "rl" else DEMONSTRATIONS)


if __name__ == "__main__":
    sys.exit(main())
