"""Search-based QA: Bamboogle (arXiv 2210.03350), HotpotQA (1809.09600), NQ-Open (1906.00300).

The tool is BM25 over the passages in data_dir, or set by `BenchmarkContext.search`: a dense index, a /retrieve server.
"""

import json
from collections.abc import Mapping
from functools import partial

from toolrl.benchmarks.runner.benchmark import Benchmark, BenchmarkContext, Category, EpisodeConfig
from toolrl.benchmarks.runner.files import Fields, RowSet, answer_texts, find_file, rows_of
from toolrl.benchmarks.runner.hub import HubSet
from verl.types import Message, Task

_ASK = Message(
    "system",
    "Answer the user's question. Look up what you do not know for sure with the search tool, as often as you need. End "
    "with the answer itself, a few words without a sentence around them, "  # words: allowed
    "as in <answer>Marie Curie</answer>.",
)


_FIELDS: Fields = {"question": str, "golden_answers": (str, list)}
_BAMBOOGLE_FIELDS: Fields = {"Question": str, "Answer": (str, list)}
_OURS = {"question": "question", "golden_answers": "golden_answers"}
_SETS: Mapping[str, RowSet] = {
    "bamboogle": RowSet(
        ("bamboogle.json", "Bamboogle/data.json"),
        "benchmarks/Bamboogle/data.json of ToolRL's repository (qiancheng0/ToolRL)",
        HubSet("RUC-NLPIR/FlashRAG_datasets", {"Question": "question", "Answer": "golden_answers"}, config="bamboogle"),
    ),
    "search/hotpotqa_100": RowSet(("hotpotqa_100.jsonl",), "100 questions of HotpotQA's dev set (distractor)", None),
    "search/hotpotqa_dev": RowSet(
        ("hotpotqa_dev_closed.jsonl.gz", "hotpotqa_dev.jsonl"),
        "HotpotQA's dev set",
        HubSet("RUC-NLPIR/FlashRAG_datasets", _OURS, split="dev", config="hotpotqa"),
    ),
    "search/nq_open": RowSet(
        ("nq_open_dev.jsonl.gz", "nq_open_dev.jsonl"),
        "NQ-Open's dev set (google-research-datasets/nq_open)",
        HubSet("google-research-datasets/nq_open", {**_OURS, "golden_answers": "answer"}, split="validation"),
    ),
}
_COVERAGE = (
    "share of questions with a gold answer in the ten best of the 7,119 passages: hotpotqa_100 .77, hotpotqa_dev .09, "
    "nq_open .07, bamboogle .06; the scores of the last three measure the model's knowledge, not its search, unless "
    "`search` names a server with all of Wikipedia"
)


def bamboogle(context: BenchmarkContext) -> Benchmark:
    """125 two-hop questions: up to three calls (or the context's limit) and the answer, as in ToolRL."""
    compared = "ToolRL's scores are from a GPT-4o judge, with the top five results of a web search"
    categories = (_category(context, "bamboogle", _episode(context, 3)),)
    return Benchmark("bamboogle", categories, notes=(compared, *_notes(context)))


def search(context: BenchmarkContext) -> Benchmark:
    """HotpotQA and NQ-Open: up to four calls (or the context's limit) and the answer, as in Search-R1."""
    episode = _episode(context, 4)
    names = [name for name in _SETS if name.startswith("search/")]
    return Benchmark("search", tuple(_category(context, name, episode) for name in names), notes=_notes(context))


def _category(context: BenchmarkContext, name: str, episode: EpisodeConfig) -> Category:
    return Category(name, partial(_tasks, context, name), episode, "judge" if context.judge else "exact_match")


def _episode(context: BenchmarkContext, usual_calls: int) -> EpisodeConfig:
    calls = usual_calls if context.max_tool_calls is None else context.max_tool_calls
    hint = "write rows of {id, contents}, or let `search` name a server: {retriever: http, urls: http://host/retrieve}"
    corpora = ("wiki_passages.jsonl.gz", "wiki_passages.jsonl")
    options = context.search or {"corpus": str(find_file(context.data_dir, corpora, hint))}
    judge, tools = {"judge": dict(context.judge)} if context.judge else {}, ({"name": "search", **options},)
    return EpisodeConfig("qa", judge, env="tool", tools=tools, max_tool_calls=calls)


def _notes(context: BenchmarkContext) -> tuple[str, ...]:
    """Notes on the passages' coverage, if they are searched, and on the judge."""
    judged = (f"judged by {context.judge['model']}",) if "model" in context.judge else ()
    return judged if context.search else (_COVERAGE, *judged)


def _tasks(context: BenchmarkContext, name: str) -> list[Task]:
    fields = _BAMBOOGLE_FIELDS if name == "bamboogle" else _FIELDS
    question, golds = fields
    tasks = []
    for place, row in rows_of(context, _SETS[name], name, fields):
        answer = json.dumps(answer_texts(row[golds], place, golds))
        tasks.append(Task(place, (_ASK, Message("user", row[question])), answer, name))
    return tasks
