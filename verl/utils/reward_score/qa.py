"""Answers to questions: exact match, F1, containment, and the word of a language model where one is asked.

The answer is the last `<answer>` block of the final message, else its `<response>` block, else all of it, always
without the thought in front. Texts are compared in SQuAD's normal form (Rajpurkar et al., arXiv 1606.05250), each with
the gold answer that fits best:

    exact_match   they are equal
    f1            2 PR / (P + R) over their words, with P and R the shares of answer and gold that they have in common
    contains      the gold answer's words stand in the answer, in a row
    judge         a language model says that they mean the same

A judge that fails or says neither yes nor no raises ServiceDownError, so that the answer has no score, rather than 0.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError, ServiceDownError
from verl.services import completion_text
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.parsing import RESPONSE, RESPONSE_END, THINK_END
from verl.utils.reward_score.search_r1 import accepted_answers, comparable, last_answer

_JUDGE_KEYS = ("url", "model", "key_variable")
_ATTEMPTS = 3
_DEADLINE_S = 15.0  # of all attempts together
_CHECK_S = 8.0  # of the one at the start, below that of all services
_JUDGED_CHARS = 2000  # of an answer; a longer one is no answer
_VERDICT = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)
_QUESTION = """Question: {question}
Right answer: {gold}
Answer to judge: {answer}

Does the answer to judge give the right answer to the question? Other words for the same thing are right; a missing,
different or undecided answer is wrong. Say Yes or No, and nothing else."""


@dataclass(frozen=True)
class QaReward:
    """Task.answer: a text, or a JSON list of texts of which any will do. The question is the task's last message.

    judge: `url` of an OpenAI-compatible endpoint (http://host:8000/v1), its `model` and, if it needs a key,
        `key_variable`, the environment variable that holds it; empty: nobody judges

    The total is the judge's word, or exact match where there is none.

    Raises ConfigError for a judge without url or model.
    """

    judge: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [key for key in self.judge if key not in _JUDGE_KEYS]
        if unknown or (self.judge and not (self.judge.get("url") and self.judge.get("model"))):
            raise ConfigError(
                f"judge={dict(self.judge)}: expected url (as http://host:8000/v1), model and, if the endpoint needs a "
                "key, key_variable"
            )

    async def check_services(self) -> None:
        """Asks the judge, if there is one, what is easily judged. Raises ServiceDownError where it does not."""
        if self.judge:
            try:
                await asyncio.to_thread(_says_yes, self.judge, "What is 2 + 2?", ["4"], "4", _CHECK_S)
            except ServiceDownError as error:
                hint = "Start it, or correct url, model and key_variable"
                raise ServiceDownError(error.service, f"{error.problem}. {hint}") from None

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        answer = final_answer(trajectory.response)
        golds = accepted_answers(task.answer)
        words = comparable(answer)
        parts = {
            "exact_match": float(any(words == comparable(gold) for gold in golds)),
            "f1": max(_f1(words.split(), comparable(gold).split()) for gold in golds),
            "contains": float(any(_within(comparable(gold), words) for gold in golds)),
        }
        if self.judge:
            parts["judge"] = float(_judged(self.judge, task.prompt[-1].content, golds, answer))
        return Score(parts["judge" if self.judge else "exact_match"], parts)


def final_answer(response: str) -> str:
    """What a final message gives as its answer, stripped."""
    said = response.rpartition(THINK_END)[2]
    answer = last_answer(said)
    if answer is None and RESPONSE in said:
        answer = said.rpartition(RESPONSE)[2].partition(RESPONSE_END)[0]
    return (said if answer is None else answer).strip()


def _f1(answer: list[str], gold: list[str]) -> float:
    shared = (Counter(answer) & Counter(gold)).total()
    return 2.0 * shared / (len(answer) + len(gold)) if shared else 0.0


def _within(gold: str, answer: str) -> bool:
    return f" {gold} " in f" {answer} "


def _judged(judge: Mapping[str, Any], question: str, golds: list[str], answer: str) -> bool:
    if not answer or len(answer) > _JUDGED_CHARS:
        return False
    return _says_yes(judge, question, golds, answer, _DEADLINE_S)


def _says_yes(judge: Mapping[str, Any], question: str, golds: list[str], answer: str, deadline_s: float) -> bool:
    said = _completion(judge, _QUESTION.format(question=question, gold=" or ".join(golds), answer=answer), deadline_s)
    verdict = _VERDICT.match(said)
    if verdict is None:
        raise ServiceDownError(f"judge at {judge['url']}", f"says neither yes nor no: {said[:80]!r}")
    return verdict[1].lower() == "yes"


def _completion(judge: Mapping[str, Any], asked: str, deadline_s: float) -> str:
    """What the judge says. Quick failures are tried again; one that does not answer has had its time."""
    import httpx2  # rewards load without it

    key = os.environ.get(judge["key_variable"]) if "key_variable" in judge else None
    url = f"{judge['url'].rstrip('/')}/chat/completions"
    body = {"model": judge["model"], "messages": [{"role": "user", "content": asked}], "temperature": 0.0}
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    ends, problem = time.monotonic() + deadline_s, ""
    for _ in range(_ATTEMPTS):
        left_s = ends - time.monotonic()
        if left_s <= 0:
            break
        try:
            return completion_text(httpx2.post(url, json=body, headers=headers, timeout=left_s))
        except httpx2.TimeoutException:
            problem = f"did not answer within {deadline_s:g} s"
        except ValueError as error:
            problem = str(error)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            problem = f"{type(error).__name__}: {error}"
    raise ServiceDownError(f"judge at {judge['url']}", problem)
