"""Questions for search agents: {question, golden_answers} rows, or questions generated from passages by template.

    python scripts/data/search_qa.py --input nq_open_dev.jsonl.gz --data-source nq --output dataset/search/nq.parquet
    python scripts/data/search_qa.py --input wiki_passages.jsonl.gz --passages --output dataset/search/film.parquet

With --passages the input is a corpus of {title, contents}, and rows are labeled "templated": who directed a film of the
corpus, and when that director was born if another passage has it. The gold answer of a row is a JSON list of accepted
answers. Bamboogle's {Question, Answer} rows are also supported, and Search-R1's published rows
{prompt, reward_model: {ground_truth: {target}}}, whose prompt is an instruction and the question. Only the question is
kept, for use with the format's own prompt; training can also read the published rows directly, with their prompt.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from scripts.data.common import Row, parser, run, task, text
from verl.data.rows import read_rows

TEMPLATED = "templated"
_QUESTION = "Question: "  # the end of Search-R1's instruction
_NAME = r"[^\W\d_][\w.'\u2019-]*(?: [^\W\d_][\w.'\u2019-]*){1,3}?"
_DIRECTED = re.compile(rf"\bfilm directed by ({_NAME})(?=\s*(?:[,.(]|and\b|starring\b|with\b|for\b|based\b|from\b|$))")
_DATE = r"\d{1,2} [A-Z][a-z]+ \d{4}|[A-Z][a-z]+ \d{1,2}, \d{4}"
_BORN = re.compile(rf"^[^().]{{3,60}}\(\s?(?:born )?({_DATE})")


def convert(row: Any, arguments: argparse.Namespace) -> Iterator[Row]:
    """The task of a question, or the tasks of a passage."""
    if arguments.passages:
        yield from _of_passage(row, arguments.births)
        return
    source, id = row.get("data_source") or arguments.data_source, str(row.get("id", ""))
    if "golden_answers" not in row and "prompt" in row:
        prompt, target = text(row["prompt"][-1], "content"), row["reward_model"]["ground_truth"]["target"]
        question = (prompt.partition(_QUESTION)[2] or prompt).strip()
        yield _task(question, [target] if isinstance(target, str) else target, id, source)
        return
    golden = row.get("golden_answers") or [text(row, "answer", "Answer")]
    yield _task(text(row, "question", "Question"), golden, id, source)


def _of_passage(row: Any, births: dict[str, str]) -> Iterator[Row]:
    """One-hop (film to director) and, if the director has a passage, two-hop questions."""
    title, body = text(row, "title"), text(row, "contents").partition("\n")[2]
    found = _DIRECTED.search(body)
    if not found:
        return
    film, director = re.sub(r" \([^)]*\)$", "", title), found[1].rstrip(".")
    if re.search(rf"{re.escape(director)} and [A-Z]", body):
        return  # two directors; the template asks for one
    yield _task(f"Who directed the film {film}?", [director], f"{row['id']}-director", TEMPLATED)
    if director in births:
        question = f"When was the director of the film {film} born?"
        yield _task(question, [births[director]], f"{row['id']}-born", TEMPLATED)


def births_in(sources: Sequence[str]) -> dict[str, str]:
    """{title of a person's passage: date of birth}."""
    births = {}
    for source in sources:
        for row in read_rows(source):
            found = _BORN.match(text(row, "contents").partition("\n")[2])
            if found:
                births[text(row, "title")] = found[1]
    return births


def _task(question: str, golden: Sequence[str], id: str, data_source: str) -> Row:
    answer = json.dumps(list(golden), ensure_ascii=False)
    return task(data_source, "fact-reasoning", [{"role": "user", "content": question}], answer, id)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code."""
    options = parser(__doc__)
    options.add_argument("--data-source", default="search", help="for rows without data_source")
    options.add_argument("--passages", action="store_true", help="the input is a corpus; generate questions from it")
    arguments = options.parse_args(argv)
    arguments.births = births_in(arguments.input) if arguments.passages else {}
    return run(arguments, convert)


if __name__ == "__main__":
    sys.exit(main())
