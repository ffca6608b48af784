"""Search-R1's rewards: exact match of the answer block, and the version that scores the form of the episode too.

An episode goes  (<think> .. </think> <search> .. </search> observation)*  <think> .. </think> <answer> .. </answer>,
with nothing but white space between the blocks. Only what the policy wrote is read, so a single answer block is
enough; the published code also reads the prompt, whose example it has to skip.

    exact match (the paper)   right 1, else 0
    with form (v0.3)          right 1, or 0.8 in bad form; wrong 0.2 in good form, 0.1 with an answer block, else 0

Gold answers are a text, or a JSON list of texts of which any will do, or the JSON of the published rows' object
{"target": that list}.
"""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass

from verl.errors import DataError
from verl.types import Score, Task, Trajectory
from verl.utils.reward_score.base import Mutation, as_mutations, written

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER, _ANSWER_END = "<answer>", "</answer>"
_OBSERVED = "\n[observation]\n"  # text, so that an answer block that runs across an observation is never right


def normalised(answer: str) -> str:
    """SQuAD's normalisation: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def accepted_answers(answer: str) -> list[str]:
    """The texts that count as right: of a JSON list, or of the target in Search-R1's {"target": ..}; numbers as well.

    Raises DataError for an object without a target, which no response could be equal to.
    """
    if answer.startswith(("[", "{")):
        try:
            found = json.loads(answer)
        except ValueError:
            return [answer]
        if isinstance(found, dict):
            target = found.get("target")
            texts = [_target(each) for each in (target if isinstance(target, list) else [target])]
            if not texts or None in texts:
                raise DataError(
                    f"is {answer[:80]}", '{"target": a text, or several}', field="reward_model.ground_truth"
                )
            return [text for text in texts if text is not None]
        accepted = [_target(each) for each in found] if isinstance(found, list) else []
        if accepted and None not in accepted:
            return [text for text in accepted if text is not None]
    return [answer]


def _target(value: object) -> str | None:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    return value if isinstance(value, str) else None


def last_answer(response: str) -> str | None:
    """The inside of the last answer block, stripped; None where there is none.

    A block runs from the first opening tag after the block before to the next closing tag, as in the published code:
    an opening tag inside belongs to the answer.
    """
    closed = [piece for piece in response.split(_ANSWER_END)[:-1] if _ANSWER in piece]
    return closed[-1].partition(_ANSWER)[2].strip() if closed else None


def episode_text(trajectory: Trajectory) -> str:
    """What the policy wrote, with a marker for every observation: answers in what it read are not its own."""
    return written(trajectory, _OBSERVED)


def exact_match(response: str, answer: str) -> bool:
    """Whether the last answer block says one of the gold answers."""
    found = last_answer(response)
    if found is None:
        return False
    return comparable(found) in {comparable(each) for each in accepted_answers(answer)}


def comparable(answer: str) -> str:
    """The normal form, or the text itself of what has none: "The The" and "!!!" are bands, "A+" is a blood type.

    Else an empty answer, or any article, would be right for them.
    """
    return normalised(answer) or answer.strip().lower()


def follows_cycle(trajectory: Trajectory, call: str, observation: str) -> bool:
    """Whether the episode is thought, call, observation, thought, .. , thought, answer.

    call: the tag of calls, such as "search"; observation: the tag that belongs to the environment, never to the policy
    """
    tags = re.compile(f"(</?(?:think|answer|{call}|{observation})>)")
    moves = {
        ("start", "<think>"): "in think",
        ("in think", "</think>"): "thought",
        ("thought", f"<{call}>"): "in call",
        ("in call", f"</{call}>"): "called",
        ("thought", _ANSWER): "in answer",
        ("in answer", _ANSWER_END): "end",
    }
    state: str | None = "start"
    for turn in trajectory.turns:
        for piece in tags.split(turn.message.content):
            if tags.fullmatch(piece):
                state = moves.get((state or "", piece))
            elif piece.strip() and not (state or "").startswith("in "):
                state = None
            if state is None:
                return False
        if turn.responses:
            if state != "called":
                return False
            state = "start"
    return state == "end"


def answer_response(answer: str) -> str:
    """A response in good form that says the first accepted answer."""
    return f"<think>I know this.</think>\n{_ANSWER} {accepted_answers(answer)[0]} {_ANSWER_END}"


def spoiled_answers(answer: str) -> dict[str, str]:
    """`answer_response(answer)` spoiled in every way that costs the answer, by name."""
    response = answer_response(answer)
    wrong = "no accepted answer says this"
    return {
        "empty text": "",
        "wrong answer": answer_response(wrong),
        "answer in a sentence": answer_response(f"I believe that it is {accepted_answers(answer)[0]}"),
        "no answer block": accepted_answers(answer)[0],
        "answer unclosed": response.replace(_ANSWER_END, ""),
        "another answer after it": f"{response}\n{_ANSWER}{wrong}{_ANSWER_END}",
    }


@dataclass(frozen=True)
class SearchR1Reward:
    """Option `with_form`: v0.3's version; the other two are its numbers."""

    with_form: bool = False
    good_form: float = 0.2
    any_answer: float = 0.1

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        response = episode_text(trajectory)
        right = exact_match(response, task.answer)
        if not self.with_form:
            return Score(float(right), {"correct": float(right)})
        form = follows_cycle(trajectory, "search", "information")
        if right:
            total = 1.0 if form else 1.0 - self.good_form
        elif form:
            total = self.good_form
        else:
            total = 0.0 if last_answer(response) is None else self.any_answer
        return Score(total, {"correct": float(right), "format": float(form)})

    def maximum(self, task: Task, step: int) -> float:
        return 1.0

    def gold(self, task: Task, step: int) -> str:
        return answer_response(task.answer)

    def mutations(self, task: Task, step: int) -> list[Mutation]:
        return as_mutations(spoiled_answers(task.answer))
