r"""Problems with short answers, in words alone and with Python: GSM8K, MATH-500, AIME, AMC, OlympiadBench.

The answer stands in the last `\boxed{}`; math-verify compares it (verl/utils/reward_score/math.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from verl.evaluation.base import Benchmark, Category, Play, Setting
from verl.evaluation.files import answer_texts, find_file, numbered_rows
from verl.types import Message, Task

_ANSWER = r"Reason step by step, and end with the final answer inside \boxed{}."
_PLAIN = f"Solve the user's problem. {_ANSWER}"
_PYTHON = f"Solve the user's problem. Let Python compute what is easy to get wrong. {_ANSWER}"


@dataclass(frozen=True, slots=True)
class _Set:
    """files: names it goes by; faulty: id -> why no other spelling of its answer would ever be found right"""

    files: tuple[str, ...]
    source: str
    faulty: Mapping[str, str]


_SETS: Mapping[str, _Set] = {
    "gsm8k": _Set(("gsm8k_test.jsonl",), "the test set of openai/gsm8k, with what follows #### as the answer", {}),
    "math500": _Set(("math500.jsonl",), "the test set of HuggingFaceH4/MATH-500", {}),
    "aime24": _Set(("aime24.jsonl",), "the 30 problems of AIME 2024", {}),
    "aime25": _Set(("aime25.jsonl",), "the 30 problems of AIME 2025", {}),
    "amc23": _Set(("amc23.jsonl",), "the 40 problems of AMC 2023 with whole-number answers", {}),
    "olympiadbench": _Set(
        ("olympiadbench.jsonl",),
        "the 675 open-ended English text problems of OlympiadBench (Hothan/OlympiadBench)",
        {
            "olympiadbench-1782": "the gold answer m_max = n^2 - n - 1 equals no n^2 - n - 1 for math-verify",
            "olympiadbench-2045": "the gold answer t(0,4] is no interval",
        },
    ),
}


def math(setting: Setting) -> Benchmark:
    """Every set twice: one reply (math/gsm8k), and up to four calls of the Python tool (math/gsm8k_python)."""
    plain = Play("math", handled=False)
    python = Play("math", env="tool", tools=("python",), max_turns=5, max_tool_calls=4)
    categories = [
        Category(f"math/{name}{suffix}", partial(_tasks, setting, name, asked), play)
        for suffix, asked, play in (("", _PLAIN, plain), ("_python", _PYTHON, python))
        for name in _SETS
    ]
    faulty = [f"left out: {row}, {why}" for each in _SETS.values() for row, why in each.faulty.items()]
    few = "sets of 30 or 40 problems: one answer is worth 2.5 to 3.3 points; let several rollouts of each be averaged"
    return Benchmark("math", tuple(categories), notes=(*faulty, few))


def _tasks(setting: Setting, name: str, asked: str) -> list[Task]:
    one = _SETS[name]
    path = find_file(setting.data_dir, one.files, f"it is {one.source}, as rows of {{id, problem, answer}}")
    rows = numbered_rows(path, {"id": str, "problem": str, "answer": (str, list)})
    return [
        Task(
            row["id"],
            (Message("system", asked), Message("user", row["problem"])),
            ", ".join(answer_texts(row["answer"], place, "answer")),
            name,
        )
        for place, row in rows
        if row["id"] not in one.faulty
    ]
