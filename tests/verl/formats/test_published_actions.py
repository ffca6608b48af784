"""Which action a response takes: every inline format in real episodes, beside the rule of the system's published code.

The rules are this file's own implementations, written after Search-R1's `generation.py` (cut and match), ToRL's
`vllm_rollout_spmd.py` (`extract_program`, stop reasons), ReTool's `eval.py` and ZeroTIR's `math_tir.py` (two states).
"""

from __future__ import annotations

import asyncio
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from verl.chat.observations import ObservationTokenizer
from verl.chat.template import ChatTemplate
from verl.envs.base import Observation, StepResult
from verl.episodes.episode import EpisodeLimits, EpisodeRunner
from verl.errors import ConfigError
from verl.formats.base import ParseError, build_tool_call_format
from verl.rollout.engine import Sampling
from verl.types import Completion, FinishReason, Message, StopReason, Task, Trajectory

TASK = Task("t#0", (Message("user", "1+1?"),), "2", "sums")
ROUNDS = 4  # responses of an episode
EPISODES = 1000  # so 4,000 responses of each system
TEXTS = ("so", " 1", " x = 2", "\n", "\n", "\n\n", " ", "print(1)", "\nprint(2)\n", "<", "`", "</", "``")
THOUGHTS = ("<think>", "</think>", "<think>\n", "\n</think>\n")
SEARCH = (
    "<search>", "</search>", "<answer>", "</answer>", "<search>Lisbon</search>", "<answer>4</answer>", " <search> ",
)  # fmt: skip
BLOCK = "\n```python\nprint(3)\n```\n"
FENCES = (BLOCK, "```python", "```python\n", "\n```python\n", "```", "\n```\n", "```bash\n")
OUTPUTS = (BLOCK, f"{BLOCK}```output", "```output", "\n```output", "  ```\n")
CODE = (
    "<code>", "</code>", f"<code>{BLOCK}</code>", "```python\n", "```", "<interpreter>", "</code>\n",
)  # fmt: skip
PYTHON = ("<python>", "</python>", "<python>\nprint(3)\n</python>")


@dataclass
class Noted:
    """Answers every call and notes it."""

    actions: list[str] = field(default_factory=list)

    def __call__(self, task: Task) -> Noted:
        return self

    async def reset(self) -> Observation:
        return Observation(TASK.prompt)

    async def step(self, message: Message) -> StepResult:
        if not message.tool_calls:
            return StepResult(done=True)
        ((text,),) = (call.arguments.values() for call in message.tool_calls)
        self.actions.append(text)
        return StepResult((Message("tool", "7", tool=message.tool_calls[0].name),))

    async def close(self) -> None: ...


class Policy:
    """An engine that generates the next text at every request, up to a stop string or its end token.

    goes_on: a request that follows without an observation gets the rest of the text
    """

    def __init__(self, chat: ChatTemplate, texts: Sequence[str], goes_on: bool) -> None:
        self.chat, self.texts, self.goes_on = chat, list(texts), goes_on
        self.rest: list[int] = []
        self.length = 0  # of the sequence so far
        self.requests = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> tuple[Completion, ...]:
        self.requests += 1
        ids = self.rest
        if not (ids and self.goes_on and len(prompt_ids) == self.length):
            ids = [*self.chat.response_ids(self.texts.pop(0))[0], self.chat.end_token_id]
        size = self._size(ids, sampling.stop_strings)
        made, self.rest = ids[:size], ids[size:]
        self.length = len(prompt_ids) + size
        return (Completion(made, [0.0] * size, FinishReason.STOP, weight_version=0),)

    def _size(self, ids: list[int], stops: Sequence[str]) -> int:
        """The number of tokens up to the one in which a stop string ends, or of all."""

        def stopped(size: int) -> bool:
            text = self.chat.tokenizer.decode(ids[:size])
            return any(stop in text for stop in stops)

        return bisect_left(range(len(ids)), True, key=stopped)


def play(
    chat: ChatTemplate, name: str, texts: Sequence[str], goes_on: bool, max_turns: int, **options: bool
) -> tuple[Trajectory, list[str], Policy]:
    envs, policy = Noted(), Policy(chat, texts, goes_on)
    setting = EpisodeRunner(
        envs,  # type: ignore[arg-type]
        ObservationTokenizer(chat, build_tool_call_format(name, options), 64),
        EpisodeLimits(max_turns=max_turns, max_tool_calls=99, max_tokens=10**6, max_prompt_length=10**6),
    )
    trajectory = asyncio.run(setting.run(policy, Sampling(1), TASK, 0, None))
    assert isinstance(trajectory, Trajectory), trajectory
    return trajectory, envs.actions, policy


def search_r1(texts: Sequence[str]) -> tuple[list[str], int]:
    """(queries that are searched for, invalid actions) up to the answer: a response is cut after its first search or
    else its first answer, and its first complete pair of tags counts."""
    queries, invalid = [], 0
    for text in texts:
        for tag in ("</search>", "</answer>"):
            if tag in text:
                text = text.split(tag)[0] + tag
                break
        found = re.search(r"<(search|answer)>(.*?)</\1>", text, re.DOTALL)
        if found is None:
            invalid += 1
        elif found[1] == "answer":
            return queries, invalid
        else:
            queries.append(found[2].strip())
    raise AssertionError("no answer")


def soup(rng: random.Random, scraps: Sequence[str]) -> str:
    """A response: half of all pieces are text, some are thoughts."""
    kinds = rng.choices((TEXTS, scraps, THOUGHTS), (4, 4, 1), k=rng.randint(1, 9))
    return "".join(rng.choice(kind) for kind in kinds)


@pytest.mark.long
def test_search_r1_takes_the_action_of_its_published_code(chat: ChatTemplate) -> None:
    rng, num_queries = random.Random("search_r1"), 0
    for _ in range(EPISODES):
        texts = [*(soup(rng, SEARCH) for _ in range(ROUNDS)), "<answer>end</answer>"]
        trajectory, queries, _ = play(chat, "search_r1", texts, goes_on=True, max_turns=99)
        assert (queries, trajectory.num_malformed_calls) == search_r1(texts), texts
        assert trajectory.stop_reason is StopReason.STOP
        num_queries += len(queries)
    assert num_queries > EPISODES / 2


def torl(texts: Sequence[str], max_calls: int) -> tuple[list[str], int]:
    """(programs that are run, requests): a request that stops at the output fence is searched for a program, the last
    one has no stop string."""
    programs = []
    for number, text in enumerate(texts[:max_calls], start=1):
        segment, stopped, _ = text.partition("```output")
        if not stopped:
            return programs, number
        program, reading = "", False
        for line in segment.split("\n"):
            if line.startswith("```python") or line.endswith("```python"):
                program, reading = "", True
            elif line.startswith("```"):
                reading = False
            elif reading:
                program += f"{line}\n"
        if program and not reading:
            programs.append(program)
    return programs, max_calls + 1


def retool(texts: Sequence[str], max_calls: int) -> tuple[list[str], int]:
    """(programs that are run, requests): at `</code>` what follows the last opening fence, without fences."""
    programs = []
    for number, text in enumerate(texts[:max_calls], start=1):
        segment, stopped, _ = text.partition("</code>")
        if not stopped:
            return programs, number
        programs.append(segment.split("```python")[-1].replace("```", "").strip())
    return programs, max_calls + 1


def zerotir(texts: Sequence[str], max_calls: int) -> tuple[list[str], int]:
    """(programs that are run, requests): the stop string alternates between an opening and a closing fence."""
    programs, stop = [], "```python"
    for number, text in enumerate(texts[: 2 * max_calls], start=1):
        segment, stopped, _ = text.partition(stop)
        if not stopped:
            return programs, number
        if stop == "```" and segment.strip():
            programs.append(segment.strip())
        stop = "```python" if stop == "```" else "```"
    return programs, 2 * max_calls + 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scraps", "rule", "per_call"),
    [("fence", FENCES + OUTPUTS, torl, 1), ("retool", CODE, retool, 1), ("zerotir", FENCES, zerotir, 2)],
)
def test_code_formats_run_what_their_published_code_runs(
    name: str,
    scraps: Sequence[str],
    rule: Callable[[Sequence[str], int], tuple[list[str], int]],
    per_call: int,
    chat: ChatTemplate,
) -> None:
    rng, num_programs = random.Random(name), 0
    for _ in range(EPISODES):
        max_calls = rng.randint(0, ROUNDS // per_call)
        texts = [soup(rng, scraps) for _ in range(ROUNDS + 1)]
        _, programs, policy = play(chat, name, texts, goes_on=False, max_turns=per_call * max_calls + 1)
        expected, requests = rule(texts, max_calls)
        if name == "fence":
            programs = [f"{program}\n" for program in programs]
        assert (programs, policy.requests) == (expected, requests), (max_calls, texts)
        num_programs += len(programs)
    assert num_programs > EPISODES / 10


@pytest.mark.parametrize(
    ("name", "text", "action"),
    [
        ("search_r1", "<think>I need <search> q </search>", "q"),
        ("search_r1", "<think>so</think> then <think> again <search>q</search>", "q"),
        ("otc_search", "I <think> <search>q</search> </think>", "q"),
        ("artist", "<think>it is <python>print(1)</python>", "print(1)"),
        ("artist", "<think><python>\n```python\nprint(1)\n```\n</python>", "print(1)"),
        ("retool", "<think>so <code>\n```python\nprint(1)\n```\n</code>", "print(1)"),
        ("fence", "<think>so\n```python\nprint(1)\n```\n```output", "print(1)"),
        ("tags", "<think><code>print(1)</code>", "print(1)"),
    ],
)
def test_a_call_in_a_thought_is_run_unless_the_option_is_off(
    name: str, text: str, action: str, chat: ChatTemplate
) -> None:
    assert play(chat, name, [text, "<answer>2</answer>"], goes_on=True, max_turns=3)[1] == [action]
    trajectory, actions, _ = play(
        chat, name, [text, "</think><answer>2</answer>"], goes_on=True, max_turns=3, calls_in_thoughts=False
    )
    assert actions == [] and trajectory.num_tool_calls == 0


def test_an_invalid_action_is_continued_without_its_end_token(chat: ChatTemplate) -> None:
    trajectory, queries, _ = play(
        chat, "search_r1", ["It is 2.", "<search>a</search>", "<answer>2</answer>"], goes_on=True, max_turns=9
    )
    text = chat.tokenizer.decode(
        [token for turn in trajectory.turns for token in (*turn.context_ids, *turn.completion.token_ids)]
    )
    assert queries == ["a"] and "It is 2.\nThat was no action." in text
    assert text.endswith(".\n<search>a</search>\n\n<information>7</information>\n\n<answer>2</answer>")


def test_the_published_sentence_follows_an_invalid_action(tmp_path: Path) -> None:
    path = tmp_path / "invalid.txt"
    path.write_text("That is no action. I try again.", encoding="utf-8")
    tool_call_format = build_tool_call_format("search_r1", {"invalid": str(path)})
    parsed = tool_call_format.parse("It is 2.")
    assert parsed == ParseError("That is no action. I try again.")
    assert tool_call_format.observation([Message("tool", parsed.problem)], "It is 2.") == f"\n{parsed.problem}\n"
    with pytest.raises(ConfigError, match="nowhere"):
        build_tool_call_format("search_r1", {"invalid": "nowhere"})


INLINE = ("artist", "fence", "otc_search", "retool", "search_r1", "tags", "zerotir")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in (*INLINE, "hermes", "xml", "toolrl")),
        *((name, {"calls_in_thoughts": False}) for name in INLINE),
    ],
)
def test_no_policy_causes_more_requests_than_max_turns(name: str, options: dict[str, bool], chat: ChatTemplate) -> None:
    rng = random.Random(name)
    for _ in range(40):
        max_turns = rng.randint(1, 6)
        texts = [soup(rng, (*SEARCH, *FENCES, *OUTPUTS, *CODE, *PYTHON)) for _ in range(8)]
        _, _, policy = play(chat, name, texts, rng.random() < 0.5, max_turns, **options)
        assert policy.requests <= max_turns
