"""The tokens of the recipes: a change of the digests changes what every existing run trains on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest

from tests.support.tiny import MINI
from tests.verl.chat.test_chat import QUESTION, TOOL, format_of
from verl.chat.observations import ObservationTokenizer
from verl.data.tasks import TaskSet
from verl.envs.base import Observation
from verl.formats.base import TOOL_CALL_FORMATS, build_tool_call_format
from verl.sft.demonstrations import read_demonstrations, sft_samples, to_demonstration
from verl.types import Message

ROLLOUTS = {
    "mini": "1d03684370ffbaf8",
    "qwen2.5": "1835c257bc68fc10",
    "qwen3": "76e3d0fba37e11fd",
    "smollm2": "87d14d79a48ac505",
}
DEMONSTRATIONS = {"mini": "209baa91f9713ce9", "qwen2.5": "7495321999333c01", "smollm2": "f99c11c3908456cb"}
RESULTS = ("21 degrees", "  21\n", "\n\nsunny", "", "<|im_end|> no", "3.5", "é 雨")
# what a policy writes before it pauses, or ends its turn
WRITTEN = {
    "fence": "Let me see.\n```python\nprint(1)\n```\n```output",
    "zerotir": "Let me see.\n```python\nprint(1)\n```",
    "retool": "Let me see. <code>\n```python\nprint(1)\n```\n</code>",
    "artist": "<python>print(1)</python>",
    "tags": "<code>print(1)</code>",
    "search_r1": "<think>a</think> <search>rain</search>",
    "otc_search": "<think>a</think> <search>rain</search>",
}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "How warm is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "21 degrees", "tool_call_id": "c1", "name": "weather"},
    {"role": "assistant", "content": "It is 21 degrees.  "},
    {"role": "user", "content": "And in Rome?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
]
SCHEMA = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def digest(ids: Iterator[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps([list(map(int, each)) for each in ids]).encode()).hexdigest()[:16]


def rollout_streams(name: str) -> Iterator[Sequence[int]]:
    """Prompts of rows, gold responses, and in every format a prompt, observations and messages after a turn."""
    chat = format_of(name)
    for task in islice(TaskSet(str(MINI / "train.parquet")), 60):
        yield chat.task_prompt_ids(task)
        yield (*chat.response_ids(task.answer)[0], chat.end_token_id)
    unknown = {"native", "toolrl_published"}  # the latter is for evaluations
    unknown |= set() if name == "mini" else {"llama3_json"}  # Qwen's templates drop the role ipython
    for each in sorted(TOOL_CALL_FORMATS.keys() - unknown):
        observations = ObservationTokenizer(chat, build_tool_call_format(each), max_observation_tokens=8)
        tools = () if observations.tool_call_format.template_tools and name in ("mini", "smollm2") else (TOOL,)
        yield observations.prompt_ids(Observation((QUESTION,), tools))
        for text in RESULTS:
            answers = (Message("tool", text, tool="weather"),)
            for written, ended in ((WRITTEN.get(each, "I look."), False), ("I look.", True)):
                yield observations.answer_ids(answers, written, ended)


def sft_streams(name: str) -> Iterator[Sequence[int]]:
    """Demonstrations of text, and conversations with calls where the chat template renders them."""
    chat = format_of(name)
    rows = read_demonstrations(str(MINI / "sft.parquet"))[:200]
    conversation = to_demonstration({"messages": CONVERSATION, "tools": [SCHEMA]})
    for demonstrations, observations in (
        (rows, None),
        (rows, ObservationTokenizer(chat, build_tool_call_format("toolrl"), 512)),
        ([conversation], ObservationTokenizer(chat, build_tool_call_format("toolrl"), 512)),
        *([([conversation], None)] if name == "qwen2.5" else []),
    ):
        for sample in sft_samples(demonstrations, chat, 4096, observations=observations):
            yield sample.token_ids
            yield sample.action_mask


@pytest.mark.parametrize(("name", "expected"), ROLLOUTS.items())
def test_rollouts_have_the_recorded_tokens(name: str, expected: str) -> None:
    assert digest(rollout_streams(name)) == expected


@pytest.mark.parametrize(("name", "expected"), DEMONSTRATIONS.items())
def test_demonstrations_have_the_recorded_tokens(name: str, expected: str) -> None:
    assert digest(sft_streams(name)) == expected
