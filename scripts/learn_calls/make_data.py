"""Data for scripts/learn_calls.sh: published rows with calls, split by the names of the APIs that they call.

    python scripts/learn_calls/make_data.py --input FILE .. --tokenizer FOLDER --out FOLDER [--fold 0]

Each real row belongs to one of three folds. Rows whose answers call an API of the same name are in one fold, so that a
fold's APIs are new to a model that was trained on the other two; these do not even list them. Writes

held_out.jsonl         the real rows of the fold
demonstrations.jsonl   a third of the other real rows, for the SFT from which all arms start
train.jsonl            the rest of them, and two rows composed of each: with tools of other rows beside its own
                       (`_others`), and with made-up names of tools and parameters, which their descriptions explain
                       (`_masked`)
all.jsonl              both

A row has at most three tools. Its tools and messages have at most 250 tokens, its answer 64. `data_source` is
another for composed rows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout that is not installed, too

from rich.console import Console
from rich.markup import escape
from scipy.cluster.hierarchy import DisjointSet
from scipy.stats import norm

from verl.data.layouts import as_openai_row
from verl.data.rows import read_rows
from verl.data.tasks import to_tasks
from verl.errors import DataError, VerlError
from verl.formats.openai import as_openai
from verl.formats.prompt import function_schema
from verl.host.exits import write_error
from verl.pretrained import read_tokenizer
from verl.tracking.jsonl import write_jsonl
from verl.types import Task

NUM_FOLDS = 3
MAX_TOOLS = 3
MAX_PROMPT, MAX_ANSWER = 250, 64  # tokens, without those of the chat template
NGRAM = 8  # terms
CHANGED = 0.2  # share of held-out rows on which two models differ, as a pilot found
POWER = 0.8

Count = Callable[[str], int]  # tokens of a text
Json = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A prompt, its answer, and the schemas of its tools by name."""

    source: str
    messages: Sequence[Json]
    tools: Mapping[str, Json]

    @property
    def calls(self) -> list[Json]:
        return [call["function"] for each in self.messages for call in each.get("tool_calls", ())]

    @property
    def apis(self) -> set[str]:
        """Names of the tools that it calls."""
        return {call["name"] for call in self.calls}

    @property
    def question(self) -> str:
        return "\n".join(each["content"] for each in self.messages if each["role"] == "user")

    def with_tools(self, names: Sequence[str], tools: Mapping[str, Json]) -> Row:
        return replace(self, tools={name: tools[name] for name in names})

    def as_openai(self) -> Json:
        return {"data_source": self.source, "messages": [*self.messages], "tools": [*self.tools.values()]}


def read(path: Path, console: Console) -> Iterator[Row]:
    """The rows of a file whose answer calls tools, an answer each. Prints which ones cannot be used."""
    for number, row in enumerate(read_rows(str(path))):
        try:
            tasks = to_tasks(as_openai_row(row), f"{path.stem}#{number}", data_source=path.stem)
        except DataError as error:
            console.print(escape(f"left out: {error.at(file=str(path), row=number)}"))
            continue
        yield from (_row(task, path.stem) for task in tasks if task.gold is not None and task.gold.tool_calls)


def _row(task: Task, source: str) -> Row:
    assert task.gold is not None
    messages = [as_openai(each) for each in (*task.prompt, task.gold)]
    return Row(source, messages, {tool.name: function_schema(tool) for tool in task.tools})


def fits(row: Row, count: Count) -> bool:
    """Whether a small model can train on it."""
    *prompt, answer = row.messages
    texts = [*map(_text, prompt), *(json.dumps(each, ensure_ascii=False) for each in row.tools.values())]
    return len(row.tools) <= MAX_TOOLS and sum(map(count, texts)) <= MAX_PROMPT and count(_text(answer)) <= MAX_ANSWER


def _text(message: Json) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return "\n".join([message["content"] or "", *(json.dumps(each, ensure_ascii=False) for each in calls)])


def few_tools(row: Row, count: Count, draw: random.Random) -> Row:
    """Its own tools, and as many others of its list as fit."""
    chosen = {name for name in row.tools if name in row.apis}
    for name in draw.sample(sorted(row.tools.keys() - chosen), len(row.tools) - len(chosen)):
        more = row.with_tools([each for each in row.tools if each in {*chosen, name}], row.tools)
        if fits(more, count):
            chosen.add(name)
    return row.with_tools([name for name in row.tools if name in chosen], row.tools)


def folds(rows: Sequence[Row]) -> list[int]:
    """The fold of each row: rows that call an API of the same name are in one, and folds are about equally large."""
    sets = DisjointSet(name for row in rows for name in row.apis)
    for row in rows:
        first, *others = sorted(row.apis)
        for name in others:
            sets.merge(first, name)
    root = [sets[min(row.apis)] for row in rows]
    sizes, fold_of = [0] * NUM_FOLDS, dict[str, int]()
    for name, size in sorted(Counter(root).items(), key=lambda each: (-each[1], each[0])):
        fold_of[name] = sizes.index(min(sizes))
        sizes[fold_of[name]] += size
    return [fold_of[name] for name in root]


def others_beside(row: Row, schemas: Mapping[str, Json], draw: random.Random) -> Row:
    """The row with tools of other rows beside its own, in any order; more of them than may stay."""
    others = sorted(schemas.keys() - row.apis)
    names = [*sorted(row.apis), *draw.sample(others, min(2 * MAX_TOOLS, len(others)))]
    draw.shuffle(names)
    return replace(row.with_tools(names, {**schemas, **row.tools}), source=f"{row.source}_others")


def masked(row: Row, draw: random.Random) -> Row:
    """The row with made-up names of its tools and their parameters, as Hammer's function masking (arXiv 2410.04587)."""
    names = dict(zip(row.tools, _made_up("fn", draw, len(row.tools)), strict=True))
    renamed: dict[str, dict[str, str]] = {}
    tools = {}
    for name, tool in row.tools.items():
        function = tool["function"]
        schema = function["parameters"]
        properties = schema.get("properties", {})
        renamed[name] = dict(zip(properties, _made_up("arg", draw, len(properties)), strict=True))
        inner = {renamed[name][key]: value for key, value in properties.items()}
        required = [renamed[name][key] for key in schema.get("required", ()) if key in renamed[name]]
        parameters = {**schema, "properties": inner, "required": required}
        tools[names[name]] = {**tool, "function": {**function, "name": names[name], "parameters": parameters}}

    def call(made: Json) -> Json:
        function = made["function"]
        own = renamed[function["name"]]
        arguments = {own.get(key, key): value for key, value in function["arguments"].items()}
        return {**made, "function": {"name": names[function["name"]], "arguments": arguments}}

    def message(each: Json) -> Json:
        changed = {**each, "name": names[each["name"]]} if each.get("name") in names else each
        return {**changed, "tool_calls": [*map(call, each["tool_calls"])]} if "tool_calls" in each else changed

    return Row(f"{row.source}_masked", [*map(message, row.messages)], tools)


def _made_up(prefix: str, draw: random.Random, number: int) -> list[str]:
    return [f"{prefix}_{code:x}" for code in draw.sample(range(0x100, 0x1000), number)]


def overlap(train: Sequence[Row], held_out: Sequence[Row]) -> float:
    """The share of the held-out questions' n-grams that training has, too."""
    known = {each for row in train for each in _ngrams(row.question)}
    asked = [each for row in held_out for each in _ngrams(row.question)]
    return sum(each in known for each in asked) / max(len(asked), 1)


def _ngrams(text: str) -> Iterator[tuple[str, ...]]:
    terms = text.lower().split()
    return zip(*(terms[start:] for start in range(NGRAM)), strict=False)


def resolvable(num_rows: int) -> float:
    """The smallest difference of two shares that is found with `POWER` at 5 %, two-sided, if `CHANGED` of the paired
    rows differ."""
    return float((norm.ppf(0.975) + norm.ppf(POWER)) * (CHANGED / num_rows) ** 0.5)


def split(rows: Sequence[Row], fold: int, count: Count) -> dict[str, list[Row]]:
    """The files, by name. count: tokens of a text"""
    draw = random.Random(fold)
    place = folds(rows)
    held_out = [row for row, its in zip(rows, place, strict=True) if its == fold]
    new = {name for row in held_out for name in row.apis}
    real = [
        row.with_tools([name for name in row.tools if name not in new], row.tools)
        for row, its in zip(rows, place, strict=True)
        if its != fold
    ]
    draw.shuffle(real)
    schemas = {name: tool for row in real for name, tool in row.tools.items()}
    demonstrations, rest = real[: len(real) // 3], real[len(real) // 3 :]
    composed = [made for row in rest for made in (others_beside(row, schemas, draw), masked(row, draw))]
    short = [few_tools(row, count, draw) for row in composed]
    train = [*rest, *(row for row in short if fits(row, count))]
    draw.shuffle(train)
    everything = [*demonstrations, *train]
    return {"held_out": held_out, "demonstrations": demonstrations, "train": train, "all": everything}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the files; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--tokenizer", required=True, metavar="FOLDER")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--fold", type=int, default=0, choices=range(NUM_FOLDS))
    arguments = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    try:
        tokenizer = read_tokenizer(arguments.tokenizer, "--tokenizer")
        count: Count = lambda text: len(tokenizer(text).input_ids)  # noqa: E731
        whole = [row for path in arguments.input for row in read(path, console)]
        draw = random.Random(0)  # the same real rows for every fold
        rows = [row for row in (few_tools(row, count, draw) for row in whole) if fits(row, count)]
        console.print(f"{len(whole)} answers with calls, of which {len(rows)} are short enough")
        if len(set(folds(rows))) < NUM_FOLDS:
            raise DataError(f"the files have too few answers with calls for {NUM_FOLDS} folds")
    except VerlError as error:
        return write_error(error)
    files = split(rows, arguments.fold, count)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, chosen in files.items():
        write_jsonl(arguments.out / f"{name}.jsonl", [row.as_openai() for row in chosen])
        sources = Counter(row.source for row in chosen)
        console.print(f"{name}: {len(chosen)} rows ({', '.join(f'{key} {sources[key]}' for key in sorted(sources))})")
    share = overlap(files["all"], files["held_out"])
    console.print(f"{NGRAM}-grams of the held-out questions that training has, too: {share:.1%}")
    console.print(
        f"a difference that a fold resolves: {resolvable(len(files['held_out'])):.1%}, all three folds: "
        f"{resolvable(len(rows)):.1%} (power {POWER:.0%}, {CHANGED:.0%} of the answers changed)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
