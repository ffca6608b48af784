"""Questions that want looking up: Bamboogle (arXiv 2210.03350), HotpotQA (1809.09600), NQ-Open (1906.00300).

The tool is BM25 over the passages in data_dir, or whatever `BenchmarkContext.search` says: a dense index, a /retrieve
server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from verl.evaluation.base import Benchmark, BenchmarkContext, Category, EpisodeConfig
from verl.evaluation.files import Fields, answer_texts, find_file, rows_of
from verl.evaluation.hub import HubSet
from verl.types import Message, Task

_ASK = Message(
    "system",
    "Answer the user's question. Look up what you do not know for sure with the search tool, as often as you need. End "
    "with the answer itself, a few words without a sentence around them, as in <answer>Marie Curie</answer>.",
)


@dataclass(frozen=True, slots=True)
class _Set:
    """files: names it goes by; hub: where it is published, if it is; question, golds: fields of its rows"""

    files: tuple[str, ...]
    source: str
    hub: HubSet | None
    question: str = "question"
    golds: str = "golden_answers"


_OURS = {"question": "question", "golden_answers": "golden_answers"}
_SETS: Mapping[str, _Set] = {
    "bamboogle": _Set(
        ("bamboogle.json", "Bamboogle/data.json"),
        "benchmarks/Bamboogle/data.json of ToolRL's repository (qiancheng0/ToolRL)",
        HubSet("RUC-NLPIR/FlashRAG_datasets", {"Question": "question", "Answer": "golden_answers"}, config="bamboogle"),
        "Question",
        "Answer",
    ),
    "search/hotpotqa_100": _Set(
        ("hotpotqa_100.jsonl",), "a hundred questions of HotpotQA's dev set (distractor)", None
    ),
    "search/hotpotqa_dev": _Set(
        ("hotpotqa_dev_closed.jsonl.gz", "hotpotqa_dev.jsonl"),
        "HotpotQA's dev set",
        HubSet("RUC-NLPIR/FlashRAG_datasets", _OURS, split="dev", config="hotpotqa"),
    ),
    "search/nq_open": _Set(
        ("nq_open_dev.jsonl.gz", "nq_open_dev.jsonl"),
        "NQ-Open's dev set (google-research-datasets/nq_open)",
        HubSet(
            "google-research-datasets/nq_open",
            {"question": "question", "golden_answers": "answer"},
            split="validation",
        ),
    ),
}
_COVERAGE = (
    "share of questions with a gold answer in the ten best of the 7,119 passages: hotpotqa_100 .77, hotpotqa_dev .09, "
    "nq_open .07, bamboogle .06; the figures of the last three tell what the model knows, not how it searches, unless "
    "`search` names a server with all of Wikipedia"
)


def bamboogle(setting: BenchmarkContext) -> Benchmark:
    """125 questions of two hops: up to three calls (or `setting`'s) and the answer, as ToolRL plays them."""
    compared = "ToolRL's figures are a GPT-4o judge's, over the five best results of a web search"
    categories = (_category(setting, "bamboogle", _play(setting, 3)),)
    return Benchmark("bamboogle", categories, notes=(compared, *_notes(setting)))


def search(setting: BenchmarkContext) -> Benchmark:
    """HotpotQA and NQ-Open: up to four calls (or `setting`'s) and the answer, as Search-R1 plays them."""
    play = _play(setting, 4)
    names = [name for name in _SETS if name.startswith("search/")]
    return Benchmark("search", tuple(_category(setting, name, play) for name in names), notes=_notes(setting))


def _category(setting: BenchmarkContext, name: str, play: EpisodeConfig) -> Category:
    return Category(name, partial(_tasks, setting, name), play, "judge" if setting.judge else "exact_match")


def _play(setting: BenchmarkContext, usual_calls: int) -> EpisodeConfig:
    calls = usual_calls if setting.max_tool_calls is None else setting.max_tool_calls
    options = setting.search or {"corpus": str(_corpus(setting))}
    return EpisodeConfig(
        "qa",
        {"judge": dict(setting.judge)} if setting.judge else {},
        env="tool",
        tools=({"name": "search", **options},),
        max_tool_calls=calls,
    )


def _corpus(setting: BenchmarkContext) -> Path:
    hint = "write rows of {id, contents}, or let `search` name a server: {retriever: http, urls: http://host/retrieve}"
    return find_file(setting.data_dir, ("wiki_passages.jsonl.gz", "wiki_passages.jsonl"), hint)


def _notes(setting: BenchmarkContext) -> tuple[str, ...]:
    """What the passages hold, where they are searched, and who judges."""
    judged = (f"judged by {setting.judge['model']}",) if "model" in setting.judge else ()
    return judged if setting.search else (_COVERAGE, *judged)


def _tasks(setting: BenchmarkContext, name: str) -> list[Task]:
    one = _SETS[name]
    fields: Fields = {one.question: str, one.golds: (str, list)}
    hint = f"it is {one.source}, as rows of {{{one.question}, {one.golds}}}"
    return [
        Task(
            place,
            (_ASK, Message("user", row[one.question])),
            json.dumps(answer_texts(row[one.golds], place, one.golds)),
            name,
        )
        for place, row in rows_of(setting, one.files, one.hub, name, fields, hint)
    ]
