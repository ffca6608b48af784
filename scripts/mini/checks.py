"""Invariants of the dataset, checked on finished rows; raises AssertionError."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from scripts.mini.baselines import BASELINES, mean_reward
from scripts.mini.listing import MAX_PROMPT_CHARS
from scripts.mini.overlap import measure
from scripts.mini.reading import Row, dialogue_text, gold, phrasing, system_text
from verl.data.tasks import to_task
from verl.formats.toolrl_text import TOOL_CALL, parse_gold
from verl.utils.reward_score.rlla import RllaOptions, score_response

_TAG = re.compile(r"</?(?:think|tool_call|response|obs|user)>")
_DIALOGUE = re.compile(
    r"\*\*Dialogue Records History\*\*\n<user> [^<>]* </user>"
    r"(\n\n<think> [^<>]* </think>\n<tool_call>\n[^<>]*\n</tool_call>\n<obs> [^<>]* </obs>"
    r"|\n\n<think> [^<>]* </think>\n<response> [^<>]* </response>\n\n<user> [^<>]* </user>)?"
)


def check_row(row: Row) -> None:
    """One row: it loads, its length and tags are valid, and its gold response gets the maximum reward."""
    to_task(row, "row")  # the gold calls parse and call listed tools only
    assert len(system_text(row)) + len(dialogue_text(row)) <= MAX_PROMPT_CHARS, "the prompt is too long"
    assert not _TAG.search(system_text(row)), "a tag in the system text"
    assert _DIALOGUE.fullmatch(dialogue_text(row)), "a misplaced tag in the dialogue"
    calls = parse_gold(gold(row)).calls
    assert calls is not None or TOOL_CALL not in gold(row)
    assert all(list(call) == ["name", "parameters"] for call in calls or ()), "a call with other keys"
    score = score_response(gold(row), gold(row), 0, RllaOptions()).score
    assert score == (1.0 if calls is None else 4.0), f"the gold response scores {score}"


def check_splits(splits: Mapping[str, Sequence[Row]]) -> None:
    """All rows, and the separation of the splits."""
    for rows in splits.values():
        for row in rows:
            check_row(row)
    rows = [row for split in splits.values() for row in split]
    assert len({(system_text(row), dialogue_text(row)) for row in rows}) == len(rows), "duplicate prompts"
    seen = [*splits["train"], *splits["sft"]]
    for name in ("test", "test_new_tools"):
        overlap = measure(seen, splits[name])
        assert overlap.phrasings == overlap.values == overlap.prompts == 0, f"{name}: {overlap}"
    assert overlap.tools == 0, f"{overlap.tools} new tools occur in training"
    assert len(set(map(phrasing, splits["train"]))) > 1000, "too few phrasings"
    for split in ("test", "test_new_tools"):
        for name in ("copy the first tool", "copy it by type"):
            assert mean_reward(splits[split], BASELINES[name]) < -1.0, f"{split}: baseline is too good: {name}"
