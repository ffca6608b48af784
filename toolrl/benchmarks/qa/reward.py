"""Question answering: exact match, F1, containment, and optionally an LLM judge.

The answer is the last `<answer>` block of the final message, else its `<response>` block, else the whole message,
always without the leading thought. Texts are normalized as in SQuAD (Rajpurkar et al., arXiv 1606.05250) and compared
with the best-matching gold answer:

    exact_match   they are equal
    f1            2 PR / (P + R), with word-level precision P and recall R
    contains      the gold answer is contiguous word by word in the answer
    judge         a language model judges them equivalent

A judge that fails or answers neither yes nor no raises ServiceDownError, so that the response has no score, not 0.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from toolrl.reward_score.answers import accepted_answers, comparable, last_answer
from toolrl.servers.chat_endpoint import ChatEndpoint
from verl.errors import ConfigError, ServiceDownError
from verl.formats.toolrl_text import THINK_END, shown_text
from verl.types import Score, Task, Trajectory

_JUDGE_KEYS = ("url", "model", "key_variable")
_DEADLINE_S = 15.0  # limit for all attempts together
_CHECK_S = 8.0  # limit for the check at start-up; below the limit for all services
_JUDGED_CHARS = 2000  # longer answers are wrong without asking the judge
_VERDICT = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)
_QUESTION = (
    "Question: {question}\nRight answer: {gold}\nAnswer to judge: {answer}\n\n"
    "Does the answer to judge give the right answer to the question? "
    "Other words for the same thing are right; "  # words: allowed
    "a missing,\ndifferent or undecided answer is wrong. "
    "Say Yes or No, and nothing else."  # words: allowed
)


@dataclass(frozen=True)
class QaReward:
    """Task.answer: a text, or a JSON list of accepted texts. The question is the task's last message.

    judge: `url` of an OpenAI-compatible endpoint (http://host:8000/v1), its `model` and, if it needs a key,
        `key_variable`, the environment variable that holds it; empty: no judge

    The total is the judge's verdict, or exact match without a judge. Raises ConfigError for one without url or model.
    """

    reads_step: ClassVar[bool] = False

    judge: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [key for key in self.judge if key not in _JUDGE_KEYS]
        if unknown or (self.judge and not (self.judge.get("url") and self.judge.get("model"))):
            expected = "url (as http://host:8000/v1), model and, if the endpoint needs a key, key_variable"
            raise ConfigError(f"eval.options.judge={dict(self.judge)}: expected {expected}")

    async def check_services(self) -> None:
        """Sends the judge, if there is one, an easy question. Raises ServiceDownError if it fails."""
        if self.judge:
            try:
                await asyncio.to_thread(_ask_judge, self.judge, "What is 2 + 2?", ["4"], "4", _CHECK_S)
            except ServiceDownError as error:
                hint = "Start it, or correct url, model and key_variable"
                raise ServiceDownError(error.service, f"{error.problem}. {hint}") from None

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        answer = final_answer(trajectory.response)
        golds = accepted_answers(task.answer)
        text = comparable(answer)
        compared = [comparable(gold) for gold in golds]
        parts = {
            "exact_match": float(text in compared),
            "f1": max(_f1(text.split(), gold.split()) for gold in compared),
            "contains": float(any(f" {gold} " in f" {text} " for gold in compared)),
        }
        if self.judge:
            asked = 0 < len(answer) <= _JUDGED_CHARS
            question = task.prompt[-1].content
            parts["judge"] = float(asked and _ask_judge(self.judge, question, golds, answer, _DEADLINE_S))
        return Score(parts["judge" if self.judge else "exact_match"], parts)


def final_answer(response: str) -> str:
    answer = last_answer(response.rpartition(THINK_END)[2])
    return shown_text(response) if answer is None else answer


def _f1(answer: list[str], gold: list[str]) -> float:
    shared = (Counter(answer) & Counter(gold)).total()
    return 2.0 * shared / (len(answer) + len(gold)) if shared else 0.0


def _ask_judge(judge: Mapping[str, Any], question: str, golds: list[str], answer: str, deadline_s: float) -> bool:
    prompt = _QUESTION.format(question=question, gold=" or ".join(golds), answer=answer)
    name = f"judge at {judge['url']}"
    text = ChatEndpoint(**judge).ask([{"role": "user", "content": prompt}], deadline_s, name)
    verdict = _VERDICT.match(text)
    if verdict is None:
        raise ServiceDownError(name, f"answered neither yes nor no: {text[:80]!r}")
    return verdict[1].lower() == "yes"
