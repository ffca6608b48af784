r"""Math problems with short answers, without tools and with Python: GSM8K, MATH-500, AIME, AMC, OlympiadBench.

The answer is the last `\boxed{}`; toolrl/reward_score/math_equality.py compares it.
"""

from collections.abc import Mapping
from functools import partial

from toolrl.benchmarks.runner.benchmark import Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.files import Fields, RowSet, answer_texts, rows_of
from toolrl.benchmarks.runner.hub import HubSet
from toolrl.reward_score.math import last_box
from verl.types import Message, Task

_ANSWER = r"Reason step by step, and end with the final answer inside \boxed{}."
_PLAIN = f"Solve the user's problem. {_ANSWER}"
_PYTHON = f"Solve the user's problem. Let Python compute what is easy to get wrong. {_ANSWER}"


_FIELDS: Fields = {"id": str, "problem": str, "answer": (str, list)}
_PROBLEM = {"problem": "problem", "answer": "answer"}
_QUESTION = {"problem": "question", "answer": "answer"}
_SETS: Mapping[str, RowSet] = {
    "gsm8k": RowSet(
        ("gsm8k_test.jsonl",),
        "the test set of openai/gsm8k, with the text after #### as the answer",
        HubSet("openai/gsm8k", _QUESTION, config="main"),
    ),
    "math500": RowSet(
        ("math500.jsonl",),
        "the test set of HuggingFaceH4/MATH-500",
        HubSet("HuggingFaceH4/MATH-500", _PROBLEM),
    ),
    "aime24": RowSet(
        ("aime24.jsonl",),
        "the 30 problems of AIME 2024",
        HubSet("HuggingFaceH4/aime_2024", _PROBLEM, split="train"),
    ),
    "aime25": RowSet(("aime25.jsonl",), "the 30 problems of AIME 2025", HubSet("math-ai/aime25", _PROBLEM)),
    "amc23": RowSet(
        ("amc23.jsonl",),
        "the 40 problems of AMC 2023 with whole-number answers",
        HubSet("math-ai/amc23", _QUESTION),
    ),
    "olympiadbench": RowSet(
        ("olympiadbench.jsonl",),
        "the 675 open-ended English text problems of OlympiadBench (Hothan/OlympiadBench)",
        HubSet(
            "Hothan/OlympiadBench",
            {"id": "id", "problem": "question", "answer": "final_answer"},
            split="train",
            config="OE_TO_maths_en_COMP",
        ),
    ),
}
_FAULTY = {  # id -> why no equivalent answer passes
    "olympiadbench-1782": "the gold answer m_max = n^2 - n - 1 equals no n^2 - n - 1 for math-verify",
    "olympiadbench-2045": "the gold answer t(0,4] is no interval",
}
_CALLS = 4  # default limit on Python calls
_BEFORE_ANSWER = "####"  # in GSM8K's published rows, between solution and answer


def math(context: BenchmarkContext) -> Benchmark:
    """Every set twice: without tools (math/gsm8k), and with Python calls (math/gsm8k_python)."""
    plain = EpisodeConfig("math", uses_tools=False)
    calls = _CALLS if context.max_tool_calls is None else context.max_tool_calls
    python = EpisodeConfig("math", env="tool", tools=("python",), max_tool_calls=calls)
    categories = [
        Category(f"math/{name}{suffix}", partial(_tasks, context, name, asked), episode, answer_of=_boxed_answer)
        for suffix, asked, episode in (("", _PLAIN, plain), ("_python", _PYTHON, python))
        for name in _SETS
    ]
    faulty = [f"excluded: {row}, {why}" for row, why in _FAULTY.items()]
    few = "sets of 30 or 40 problems: one answer is worth 2.5 to 3.3 points; average several rollouts of each (n)"
    return Benchmark("math", tuple(categories), notes=(*faulty, few))


def _boxed_answer(response: str) -> str | None:
    box = last_box(response)
    return None if box is None else "".join(box.split())


def _tasks(context: BenchmarkContext, name: str, asked: str) -> list[Task]:
    tasks = []
    for place, row in rows_of(context, _SETS[name], name, _FIELDS):
        answer = row["answer"]
        if isinstance(answer, str):
            answer = answer.rpartition(_BEFORE_ANSWER)[2].strip()
        prompt = (Message("system", asked), Message("user", row["problem"]))
        tasks.append(Task(row["id"], prompt, ", ".join(answer_texts(answer, place, "answer")), name))
    return [task for task in tasks if task.id not in _FAULTY]
