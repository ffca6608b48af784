"""Data for scripts/train_swe.sh: functions with a bug on one line, for models of a few million parameters.

    python scripts/swe/make_mini.py --out FOLDER --environment FOLDER [--seed 0]

Writes demonstrations.jsonl (for main_sft), train.jsonl and test.jsonl (rows of `toolrl.swe.tasks`), and a repository
of one file per task in `repositories`. Names and constants vary. No program of test.jsonl occurs elsewhere. A third of
the demonstrations fix the bug; the others leave the line as it is, make another mistake, or edit another line.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.validation import diff, write_files
from toolrl.envs.swe.env import PROMPTS, TOOLS
from verl.formats.prompt import load_template
from verl.formats.toolrl import ToolRlFormat
from verl.types import Message, ToolCall

COUNTS = {"test": 100, "train": 400, "demonstrations": 9600}
KINDS = {"right": 0.35, "unchanged": 0.55, "mistake": 0.05, "elsewhere": 0.05}  # shares of demonstrations
NAMES = {"F": "abcdefghkmpq", "V": "vs", "R": "r", "X": "x"}  # single tokens of the embedded tokenizer
FILE, TEST = "program.py", "test_program.py"
CASES = 6  # asserted calls of a hidden test
TEST_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Family:
    """Functions that differ in names and constants.

    does:   what they return
    code:   F, V, R, X: the function, its argument, a result, an item; K: a constant from 2 to 9
    bugs:   (line, wrong text)
    inputs: what V is: `list` or `number`
    """

    does: str
    code: str
    bugs: tuple[tuple[int, str], ...]
    inputs: str = "list"


LOOP = "def F(V):\n R = {start}\n for X in V:\n  {body}\n return R"
CHOOSE = "def F(V):\n R = {start}\n for X in V:\n  if {test}:\n   {body}\n return R"
FAMILIES = {
    "sum": Family(
        "the sum of V",
        LOOP.format(start="0", body="R += X"),
        ((4, "  R -= X"), (4, "  R = X"), (5, " return X"), (2, " R = 1")),
    ),
    "product": Family(
        "the product of V",
        LOOP.format(start="1", body="R *= X"),
        ((2, " R = 0"), (4, "  R += X"), (5, " return X"), (4, "  R = X")),
    ),
    "max": Family(
        "the maximum of V",
        CHOOSE.format(start="V[0]", test="X > R", body="R = X"),
        ((4, "  if X < R:"), (5, "   R += X"), (6, " return X"), (6, " return V")),
    ),
    "min": Family(
        "the minimum of V",
        CHOOSE.format(start="V[0]", test="X < R", body="R = X"),
        ((4, "  if X > R:"), (2, " R = 0"), (6, " return V"), (6, " return X")),
    ),
    "count": Family(
        "how many of V exceed K",
        CHOOSE.format(start="0", test="X > K", body="R += 1"),
        ((4, "  if X < K:"), (5, "   R += X"), (2, " R = 1"), (5, "   R -= 1")),
    ),
    "reverse": Family(
        "V reversed",
        LOOP.format(start="[]", body="R = [X] + R"),
        ((4, "  R = R + [X]"), (4, "  R = [X]"), (5, " return V"), (5, " return X")),
    ),
    "scale": Family(
        "V times K, by item",
        LOOP.format(start="[]", body="R += [X * K]"),
        ((4, "  R += [X + K]"), (4, "  R += [X]"), (5, " return V"), (4, "  R = [X * K]")),
    ),
    "filter": Family(
        "the items of V that K divides",
        CHOOSE.format(start="[]", test="X % K == 0", body="R += [X]"),
        ((4, "  if X % K == 1:"), (5, "   R += [K]"), (6, " return V"), (4, "  if X == 0:")),
    ),
    "range_sum": Family(
        "the sum from 1 to V",
        "def F(V):\n R = 0\n for X in range(1, V + 1):\n  R += X\n return R",
        ((3, " for X in range(1, V):"), (4, "  R -= X"), (2, " R = 1"), (4, "  R = X")),
        "number",
    ),
    "power": Family(
        "K to the power of V",
        "def F(V):\n R = 1\n for X in range(V):\n  R *= K\n return R",
        ((4, "  R += K"), (2, " R = 0"), (3, " for X in range(K):"), (4, "  R *= X")),
        "number",
    ),
    "clip": Family(
        "V, but at most K",
        "def F(V):\n if V > K:\n  return K\n return V",
        ((2, " if V < K:"), (3, "  return V"), (4, " return K"), (3, "  return 0")),
        "number",
    ),
    "last": Family(
        "the last K of V",
        "def F(V):\n R = V[-K:]\n return R",
        ((2, " R = V[:K]"), (2, " R = V[K:]"), (3, " return V"), (2, " R = V[:-K]")),
    ),
}


@dataclass(frozen=True, slots=True)
class Bug:
    """One task. line: the number of the line that is wrong, from 1 on; asserts: (argument, result)"""

    family: str
    does: str
    function: str
    correct: tuple[str, ...]
    line: int
    wrong: str
    mistakes: tuple[tuple[int, str], ...]
    asserts: tuple[tuple[Any, Any], ...]

    @property
    def code(self) -> str:
        return _file((*self.correct[: self.line - 1], self.wrong, *self.correct[self.line :]))

    @property
    def statement(self) -> str:
        """What the function should do, and the file with numbered lines."""
        numbered = [f"{number} {line}" for number, line in enumerate(self.code.splitlines(), 1)]
        return "\n".join([self.does, *numbered])


def make_bugs(seed: int) -> dict[str, list[Bug]]:
    """The bugs of each file. No program of the tests occurs elsewhere."""
    tested: set[str] = set()
    made: dict[str, list[Bug]] = {}
    for name, count in COUNTS.items():
        draw, made[name] = Random(f"{seed}/{name}"), []
        while len(made[name]) < count:
            family = list(FAMILIES)[len(made[name]) % len(FAMILIES)]
            bug = draw_bug(family, draw)
            if bug is not None and bug.statement not in tested:
                made[name].append(bug)
                if name == "test":
                    tested.add(bug.statement)
        draw.shuffle(made[name])
    return made


def draw_bug(name: str, draw: Random) -> Bug | None:
    """None if none of the asserted calls notices it."""
    family = FAMILIES[name]
    names = {place: draw.choice(letters) for place, letters in NAMES.items()} | {"K": str(draw.randint(2, 9))}

    def named(text: str) -> str:
        return re.sub(r"\b[FVRXK]\b", lambda found: names[found[0]], text)

    bugs = [(line, named(text)) for line, text in family.bugs]
    line, wrong = draw.choice(bugs)
    correct = tuple(named(family.code).split("\n"))
    asserts = []
    for _ in range(CASES):
        argument = _argument(family.inputs, draw)
        asserts.append((argument, _result(_file(correct), names["F"], argument)))
    does = f"{named('F(V)')} returns {named(family.does)}."
    mistakes = tuple(each for each in bugs if each != (line, wrong))
    bug = Bug(name, does, names["F"], correct, line, wrong, mistakes, tuple(asserts))
    noticed = any(_result(bug.code, bug.function, argument) != result for argument, result in asserts)
    return bug if noticed else None


def task_row(bug: Bug, repository: Path, environment: str) -> dict[str, Any]:
    """The row of a task; writes its repository."""
    write_files(repository, {FILE: bug.code})
    asserts = [f"    assert {bug.function}({argument!r}) == {result!r}\n" for argument, result in bug.asserts]
    test = f"from {Path(FILE).stem} import {bug.function}\n\n\ndef test_calls():\n{''.join(asserts)}"
    return {
        "instance_id": repository.name,
        "repository": str(repository),
        "environment": environment,
        "file": FILE,
        "problem_statement": bug.statement,
        "FAIL_TO_PASS": [f"{TEST}::test_calls"],
        "PASS_TO_PASS": [],
        "hidden_tests": json.dumps({TEST: test}),
        "patch": diff({FILE: bug.code}, {FILE: _file(bug.correct)}),
        "test_timeout_s": TEST_TIMEOUT_S,
        "source": bug.family,
    }


def demonstration(bug: Bug, draw: Random) -> dict[str, Any]:
    """A conversation of one call."""
    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
    elsewhere = draw.choice([number for number in range(1, len(bug.correct) + 1) if number != bug.line])
    line, text = {
        "right": (bug.line, bug.correct[bug.line - 1]),
        "unchanged": (bug.line, bug.wrong),
        "mistake": draw.choice(bug.mistakes),
        "elsewhere": (elsewhere, bug.correct[elsewhere - 1]),
    }[kind]
    call = ToolRlFormat().render([ToolCall("edit_line", {"line": line, "text": text})])
    messages = [*prompt(bug), Message("assistant", call)]
    return {"messages": [{"role": message.role, "content": message.content} for message in messages]}


def prompt(bug: Bug) -> Sequence[Message]:
    """What recipe=swe_mini shows the policy."""
    question = Message("user", load_template(str(PROMPTS / "line.txt")).fill(bug.statement, ""))
    shown = ToolRlFormat(prompt_template="mini").render_prompt((question,), (TOOLS["edit_line"].spec,))
    assert not isinstance(shown, str)
    return shown


def _file(lines: Sequence[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _argument(inputs: str, draw: Random) -> Any:
    if inputs == "number":
        return draw.randint(1, 14)
    return [draw.randint(1, 20) for _ in range(draw.randint(3, 6))]


def _result(code: str, function: str, argument: Any) -> Any:
    """What a function of our own returns, or the type of what it raises."""
    namespace: dict[str, Any] = {}
    exec(code, namespace)  # noqa: S102
    try:
        return namespace[function](argument)
    except (TypeError, UnboundLocalError) as error:
        return type(error)


def main(argv: Sequence[str] | None = None) -> None:
    """Write the files."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    options.add_argument("--environment", type=Path, required=True, metavar="FOLDER", help="with pytest")
    options.add_argument("--seed", type=int, default=0)
    arguments = options.parse_args(argv)
    draw = Random(arguments.seed)
    repositories, environment = arguments.out.absolute() / "repositories", str(arguments.environment.absolute())
    for name, bugs in make_bugs(arguments.seed).items():
        if name == "demonstrations":
            rows = [demonstration(bug, draw) for bug in bugs]
        else:
            folders = [repositories / f"{name}-{number}" for number in range(len(bugs))]
            rows = [task_row(bug, folder, environment) for bug, folder in zip(bugs, folders, strict=True)]
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
