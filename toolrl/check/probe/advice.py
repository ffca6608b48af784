"""Advice before training, from the results of a probe. The thresholds are documented in docs/evaluation.md."""

from collections.abc import Mapping
from typing import Any

from verl.host.packages import script

FEW_WELL_FORMED = 0.5  # share of responses in a valid format below which RL mostly rewards the format
MANY_MALFORMED = 0.25  # share of episodes with a parse error
MANY_CUT_OFF = 0.1  # share of truncated responses
FEW_WITH_TOOLS = 0.1  # share of episodes with a tool call, if tools are available
MANY_ZERO_VARIANCE = 0.5  # share of groups
ENOUGH_GAIN = 0.1  # minimum decrease of that share for a larger group to be worth its cost
MANY_USELESS = 0.2  # share of zero-variance rows that were never right, or always
MANY_TOO_LONG = 0.02  # share of prompts
FEW_ROWS = 32  # below this the shares are too noisy


def advice(statistics: Mapping[str, Any], with_tools: bool) -> list[str]:
    """A line for every reason not to train yet, or an all-clear. statistics: `statistics.summary` and rows_too_long"""
    lines = [
        *_responses(statistics),
        *(_calls(statistics) if with_tools else ()),
        *_lengths(statistics),
        *_groups(statistics),
    ]
    lines = lines or ["no objection to training with these settings"]
    if statistics["rows"] < FEW_ROWS:
        lines.append(f"probe more rows: {statistics['rows']} are too few for reliable shares")
    return lines


def _responses(statistics: Mapping[str, Any]) -> list[str]:
    if statistics["format"] is not None and statistics["format"] < FEW_WELL_FORMED:
        return [f"SFT first: {_percent(1 - statistics['format'])} of the responses have no valid format"]
    if statistics["success"]["mean"] == 0 and statistics["zero_variance"]["mean"] > MANY_ZERO_VARIANCE:
        return ["SFT first, or use easier rows: no response was right"]
    return []


def _calls(statistics: Mapping[str, Any]) -> list[str]:
    lines, failed, used = [], _percent(statistics["malformed"]), _percent(statistics["tools_used"])
    if statistics["malformed"] > MANY_MALFORMED:
        lines.append(f"SFT first, or choose another env.tool_call_format: {failed} of the episodes have a parse error")
    if statistics["tools_used"] < FEW_WITH_TOOLS:
        lines.append(f"show how tools are called (SFT, prompt_template): {used} of the episodes call one")
    return lines


def _lengths(statistics: Mapping[str, Any]) -> list[str]:
    lines = []
    if statistics["cut_off"] > MANY_CUT_OFF:
        lines.append(
            f"raise data.max_response_length: {_percent(statistics['cut_off'])} of the responses are truncated"
        )
    too_long = statistics["rows_too_long"] / (statistics["rows_too_long"] + statistics["rows"])
    if too_long > MANY_TOO_LONG:
        lines.append(f"raise data.max_prompt_length, or drop rows: {_percent(too_long)} of the prompts are too long")
    return lines


def _groups(statistics: Mapping[str, Any]) -> list[str]:
    lines = []
    n, now = statistics["n"], statistics["zero_variance"]["mean"]
    larger = {size["n"]: size["zero_variance"] for size in statistics["sizes"] if size["n"] > n}
    enough = [size for size, share in larger.items() if share <= MANY_ZERO_VARIANCE]
    if now > MANY_ZERO_VARIANCE and larger:
        size = min(enough, default=max(larger))
        what = f"raise n to {size}" if now - larger[size] >= ENOUGH_GAIN else "larger groups would not help"
        shares = f"{_percent(now)} of the groups have zero variance at n={n}, predicted {_percent(larger[size])}"
        lines.append(f"{what}: {shares} at n={size}")
    never, always = statistics["useless_never_right"], statistics["useless_always_right"]
    if MANY_USELESS < never + always < 1:
        shares = f"{_percent(never)} were never right, {_percent(always)} always"
        select = script("scripts/select_by_difficulty.py")
        lines.append(f"drop rows without a learning signal: {shares} ({select})")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
