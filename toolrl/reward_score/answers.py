"""Answers in `<answer>` blocks, and the episodes around them: shared by several papers' rewards.

A gold answer is a text, a JSON list of accepted texts, or the published rows' JSON object {"target": that list}.
"""

import json
import re
import string

from verl.errors import DataError
from verl.json_values import JsonError, read_json
from verl.types import GROUND_TRUTH, ToolStatus, Trajectory
from verl.utils.reward_score.base import written

FAILED = (ToolStatus.USER_ERROR, ToolStatus.TIMEOUT)  # the policy's fault; an unavailable sandbox is not
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ANSWER, _ANSWER_END = "<answer>", "</answer>"
_OBSERVED = "\n[observation]\n"  # a non-empty marker, so that an answer block spanning an observation is never right


def normalized(answer: str) -> str:
    """SQuAD's normalization: lower case, no punctuation, no articles, single spaces."""
    return " ".join(_ARTICLES.sub(" ", answer.lower().translate(_NO_PUNCTUATION)).split())


def accepted_answers(answer: str) -> list[str]:
    """The accepted texts, numbers as text. Raises DataError for an object without a target."""
    if answer.startswith(("[", "{")):
        try:
            found = read_json(answer)
        except JsonError as error:
            raise error.in_data(GROUND_TRUTH) from error
        except ValueError:
            return [answer]
        target = found.get("target") if isinstance(found, dict) else found
        targets = target if isinstance(target, list) else [target]
        if targets and all(isinstance(each, str | int | float) and not isinstance(each, bool) for each in targets):
            return [each if isinstance(each, str) else json.dumps(each) for each in targets]
        if isinstance(found, dict):
            expected = '{"target": a text, or several}'
            raise DataError(f"is {answer[:80]}", expected, field=GROUND_TRUTH)
    return [answer]


def last_block(text: str, opening: str, closing: str) -> str | None:
    """Content of the last block; None if there is none.

    A block extends from the first opening tag after the previous block to the next closing tag, as in the published
    code: an opening tag inside belongs to its content.
    """
    closed = [piece for piece in text.split(closing)[:-1] if opening in piece]
    return closed[-1].partition(opening)[2] if closed else None


def last_answer(response: str) -> str | None:
    """Content of the last answer block, stripped; None if there is none."""
    found = last_block(response, _ANSWER, _ANSWER_END)
    return None if found is None else found.strip()


def episode_text(trajectory: Trajectory) -> str:
    """The policy's text, with a marker for every observation: answers inside observations do not count."""
    return written(trajectory, _OBSERVED)


def exact_match(response: str, answer: str) -> bool:
    found = last_answer(response)
    return found is not None and comparable(found) in map(comparable, accepted_answers(answer))


def comparable(answer: str) -> str:
    """The normalized text, or the text itself if that is empty: "The The" and "!!!" are bands, "A+" a blood type."""
    return normalized(answer) or answer.strip().lower()


def follows_cycle(trajectory: Trajectory, call: str, observation: str) -> bool:
    """Whether the episode is thought, `call`, observation, .. , answer. The tag `observation` is never written."""
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
    """A well-formed response with the first accepted answer."""
    return f"<think>I know this.</think>\n{_ANSWER} {accepted_answers(answer)[0]} {_ANSWER_END}"


def corrupted_answers(answer: str) -> dict[str, str]:
    """All corruptions of `answer_response(answer)` that must lose the reward, by name."""
    response = answer_response(answer)
    wrong = "this is not an accepted answer"
    return {
        "empty text": "",
        "wrong answer": answer_response(wrong),
        "answer in a sentence": answer_response(f"I believe that it is {accepted_answers(answer)[0]}"),
        "no answer block": accepted_answers(answer)[0],
        "answer unclosed": response.replace(_ANSWER_END, ""),
        "another answer after it": f"{response}\n{_ANSWER}{wrong}{_ANSWER_END}",
    }
