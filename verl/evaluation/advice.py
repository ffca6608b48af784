"""What to do before training, in plain words. Thresholds stand here and in docs/evaluation.md, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.utils.versions import script

FEW_WELL_FORMED = 0.5  # below this share of responses in a valid format, RL mostly pays for the format
MANY_MALFORMED = 0.25  # of episodes with a call that cannot be read
MANY_CUT_OFF = 0.1  # of responses
FEW_WITH_TOOLS = 0.1  # of episodes that call a tool where there is one
MANY_WITHOUT_SIGNAL = 0.5  # of groups
ENOUGH_GAIN = 0.1  # by which a larger group must lower that share to be worth its price
MANY_USELESS = 0.2  # of rows without a signal that were never right, or always
MANY_TOO_LONG = 0.02  # of prompts
FEW_ROWS = 32  # below this the shares say little


def advice(found: Mapping[str, Any], with_tools: bool) -> list[str]:
    """One line for every reason not to start yet; one that says so where there is none.

    found: of `verl.evaluation.probe.summary`, with rows_too_long; with_tools: whether episodes have several turns
    """
    told = [*_responses(found), *(_calls(found) if with_tools else ()), *_lengths(found), *_groups(found)]
    told = told or ["nothing stands against training with these settings"]
    if found["rows"] < FEW_ROWS:
        told.append(f"probe more rows: {found['rows']} say little")
    return told


def _responses(found: Mapping[str, Any]) -> list[str]:
    if found["format"] is not None and found["format"] < FEW_WELL_FORMED:
        return [f"SFT first: {_percent(1 - found['format'])} of the replies have no valid format"]
    if found["success"]["mean"] == 0 and found["without_signal"]["mean"] > MANY_WITHOUT_SIGNAL:
        return ["SFT first, or take easier rows: no reply was right"]
    return []


def _calls(found: Mapping[str, Any]) -> list[str]:
    told = []
    if found["malformed"] > MANY_MALFORMED:
        share = _percent(found["malformed"])
        told.append(
            f"SFT first, or choose another env.tool_call_format: in {share} of the episodes a call cannot be parsed"
        )
    if found["tools_used"] < FEW_WITH_TOOLS:
        share = _percent(found["tools_used"])
        told.append(f"show how tools are called (SFT, prompt_template): {share} of the episodes call one")
    return told


def _lengths(found: Mapping[str, Any]) -> list[str]:
    told = []
    if found["cut_off"] > MANY_CUT_OFF:
        told.append(f"raise max_response_length: {_percent(found['cut_off'])} of the replies are cut off")
    too_long = found["rows_too_long"] / (found["rows_too_long"] + found["rows"])
    if too_long > MANY_TOO_LONG:
        told.append(f"raise max_prompt_length, or drop rows: {_percent(too_long)} of the prompts are too long")
    return told


def _groups(found: Mapping[str, Any]) -> list[str]:
    told = []
    n, now = found["n"], found["without_signal"]["mean"]
    larger = {size["n"]: size["without_signal"] for size in found["sizes"] if size["n"] > n}
    enough = [size for size, share in larger.items() if share <= MANY_WITHOUT_SIGNAL]
    if now > MANY_WITHOUT_SIGNAL and larger:
        size = min(enough, default=max(larger))
        what = f"raise n to {size}" if now - larger[size] >= ENOUGH_GAIN else "larger groups would not help"
        told.append(
            f"{what}: {_percent(now)} of the groups have no signal at {n}, {_percent(larger[size])} would at {size}"
        )
    never, always = found["useless_never_right"], found["useless_always_right"]
    if MANY_USELESS < never + always < 1:
        told.append(
            f"drop rows that teach nothing: {_percent(never)} were never right, {_percent(always)} always "
            f"({script('scripts/select_by_difficulty.py')})"
        )
    return told


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
