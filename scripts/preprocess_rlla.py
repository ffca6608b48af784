"""Convert ToolRL's raw examples to parquet files for the trainer.

    python scripts/preprocess_rlla.py           # dataset/rlla_4k_raw/rlla_rl.json -> dataset/rlla_4k/*.parquet
    python scripts/preprocess_rlla.py --input rlla_sft.json --strip-thoughts --local_dir dataset/rlla_sft
    python scripts/preprocess_rlla.py --drop-in test.parquet --tokenizer MODEL --max-prompt-tokens 2048

The raw file is a list of {"instruction", "input", "output"}. Shuffle and split are ToolRL's: numpy seed 31415, the last
2 % are the test split. Rows pass the checks of training, and a summary line is printed. Rows that are dropped leave a
gap: the others keep the split, order and index that they have in ToolRL's files. Rows are buffered on disk, not in
memory.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from scripts.raw.rlla import SCHEMA, check_example, strip_thought, to_row
from verl.config.schema import DataConfig
from verl.data.report import RowReport
from verl.data.rows import RowStore, encoded, read_rows
from verl.data.tasks import GROUND_TRUTH, to_task, unlisted_call
from verl.errors import ConfigError, DataError, VerlError
from verl.formats.toolrl_text import parse_gold
from verl.host.exits import write_error
from verl.host.files import replacing

DEFAULT_INPUT = "dataset/rlla_4k_raw/rlla_rl.json"
_WRITE_ROWS = 1000

CountTokens = Callable[[dict[str, str]], int]


@dataclass
class Summary:
    """Statistics of the written rows, for the final table."""

    kinds: Counter[str] = field(default_factory=Counter)
    calls: Counter[int] = field(default_factory=Counter)
    prompt_chars: array[int] = field(default_factory=lambda: array("q"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("q"))

    def add(self, example: dict[str, str]) -> None:
        self.prompt_chars.append(len(example["instruction"]) + len(example["input"]))
        calls = parse_gold(example["output"]).calls
        response = "<response>" in example["output"]
        kind = ("both" if response else "call only") if calls else ("response only" if response else "neither")
        self.kinds[kind] += 1
        self.calls[len(calls or ())] += 1


def prompt_hash(example: dict[str, str]) -> bytes:
    """A 16-byte digest of a prompt."""
    return hashlib.blake2b(f"{example['instruction']}\0{example['input']}".encode(), digest_size=16).digest()


def prompts_of(sources: Iterable[str]) -> set[bytes]:
    """The hashes of all prompts in other files, raw or parquet."""
    found = set()
    for source in sources:
        for number, row in enumerate(read_rows(source)):
            raw = row.get("extra_info") or row if isinstance(row, dict) else row
            try:
                found.add(prompt_hash(check_example(raw)))
            except DataError as error:
                raise error.at(file=source, row=number) from error
    return found


def token_counter(name: str) -> CountTokens:
    """Returns a function that counts the tokens of a whole prompt in the tokenizer's chat template."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"--tokenizer needs transformers ({error}): source scripts/setup_env.sh") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--tokenizer {name!r} cannot be loaded: {error}") from error
    if tokenizer.chat_template is None:
        raise ConfigError(f"--tokenizer {name!r} has no chat template, so prompts cannot be measured")

    def count(example: dict[str, str]) -> int:
        prompt = to_row(example, "", 0)["prompt"]
        try:
            return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
        except jinja2.TemplateError as error:
            raise ConfigError(f"--tokenizer {name!r}: its chat template rejects these prompts ({error})") from error

    return count


def kept_examples(
    arguments: argparse.Namespace,
    summary: Summary,
    report: RowReport,
    progress: Callable[[Iterable[Any]], Iterable[Any]],
) -> Iterator[dict[str, str] | None]:
    """The checked examples of the input file, and None for each row that a check or an option drops."""
    dropped = prompts_of(arguments.drop_in)
    count = token_counter(arguments.tokenizer) if arguments.tokenizer else None
    for number, row in enumerate(progress(read_rows(arguments.input))):
        report.num_rows += 1
        try:
            example = check_example(row)
            if arguments.strip_thoughts:
                example["output"] = strip_thought(example["output"])
            task = to_task(to_row(example, "", number), "")
        except DataError as error:
            if error.field == GROUND_TRUTH:
                error.field = "output"  # its name in the raw file
            report.add_bad(error.at(file=arguments.input, row=number), arguments.max_bad_share)
            yield None
            continue
        if dropped and prompt_hash(example) in dropped:
            report.drop(f"that occur in {', '.join(arguments.drop_in)}", number)
            yield None
            continue
        if count:
            tokens = count(example)
            if arguments.max_prompt_tokens is not None and tokens > arguments.max_prompt_tokens:
                report.drop(f"longer than {arguments.max_prompt_tokens} tokens", number)
                yield None
                continue
            summary.prompt_tokens.append(tokens)
        unlisted = unlisted_call(task)
        if unlisted is not None:
            report.unlisted.append(unlisted.at(file=arguments.input, row=number))
        summary.add(example)
        yield example
    report.check(arguments.max_bad_share)


def split_order(num_rows: int, test_fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers of (train, test), shuffled by numpy's legacy generator; test is the tail."""
    order = list(range(num_rows))
    np.random.RandomState(seed).shuffle(order)
    num_train = num_rows - int(num_rows * test_fraction)
    return order[:num_train], order[num_train:]


def write_split(path: Path, store: RowStore, order: Sequence[int], split: str, console: Console) -> int:
    """Atomically write the kept rows in this order. Returns their number."""
    written = 0
    with replacing(path) as unfinished, pq.ParquetWriter(unfinished, SCHEMA) as writer:
        for start in track(range(0, len(order), _WRITE_ROWS), escape(f"Writing {path.name}"), console=console):
            chosen = enumerate(order[start : start + _WRITE_ROWS], start)
            examples = [(index, store[number]) for index, number in chosen]
            rows = [to_row(example, split, index) for index, example in examples if example is not None]
            writer.write_table(pa.Table.from_pylist(rows, SCHEMA))
            written += len(rows)
    return written


def show(summary: Summary, written: dict[Path, int], console: Console) -> None:
    table = Table("what", "rows", title="Summary")
    for path, rows in written.items():
        table.add_row(escape(f"written to {path}"), str(rows))
    table.add_row("all", str(sum(written.values())), end_section=True)
    for kind, rows in summary.kinds.most_common():
        table.add_row(kind, str(rows))
    for calls, rows in sorted(summary.calls.items()):
        table.add_row(f"{calls} call{'s' * (calls != 1)}", str(rows))
    for what, sizes in (("characters", summary.prompt_chars), ("tokens", summary.prompt_tokens)):
        if sizes:
            p50, p95, most = np.percentile(sizes, [50, 95, 100])
            table.add_row(f"prompt {what}: p50, p95, max", f"{p50:.0f}, {p95:.0f}, {most:.0f}")
    console.print(table)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", default=DEFAULT_INPUT, help="raw file: .json list, .jsonl or .parquet")
    parser.add_argument("--local_dir", default="dataset/rlla_4k", help="folder to write train and test.parquet to")
    parser.add_argument("--test-fraction", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=31415, help="seed of numpy's legacy generator, 0 .. 2**32 - 1")
    parser.add_argument("--strip-thoughts", action="store_true", help="replace real thoughts by ToolRL's placeholder")
    parser.add_argument(
        "--drop-in", action="append", default=[], metavar="FILE", help="drop rows whose prompt is in FILE"
    )
    parser.add_argument("--tokenizer", help="folder or hub name; measures prompts under its chat template")
    parser.add_argument("--max-prompt-tokens", type=int, help="drop longer prompts (needs --tokenizer)")
    parser.add_argument(
        "--max-bad-share",
        type=float,
        default=DataConfig.max_bad_share,
        help="as data.max_bad_share; 0: no bad rows allowed",
    )
    arguments = parser.parse_args(argv)
    if not 0.0 <= arguments.test_fraction < 1.0:
        parser.error(f"--test-fraction must lie in [0, 1), got {arguments.test_fraction}")
    if not 0 <= arguments.seed < 2**32:
        parser.error(f"--seed must lie in 0 .. 2**32 - 1, got {arguments.seed}")
    if not 0.0 <= arguments.max_bad_share <= 1.0:
        parser.error(f"--max-bad-share must lie in [0, 1], got {arguments.max_bad_share}")
    if arguments.max_prompt_tokens is not None and not arguments.tokenizer:
        parser.error("--max-prompt-tokens needs --tokenizer")
    if arguments.max_prompt_tokens is not None and arguments.max_prompt_tokens < 1:
        parser.error(f"--max-prompt-tokens must be at least 1, got {arguments.max_prompt_tokens}")
    return arguments


def check_input(path: str) -> None:
    """For a missing input, which is a newcomer's first error, explain where to get it."""
    if Path(path).suffix and not Path(path).is_file():
        raise DataError(
            "there is no such file",
            hint="ToolRL's published rlla_rl.json comes from its repository (qiancheng0/ToolRL): run "
            "python scripts/get_toolrl_data.py, or name a file of yours with --input. To build one from the original "
            "sources: python scripts/build_rlla_raw.py --help. dataset/README.md has the details",
            file=path,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the conversion; returns the exit code."""
    arguments = parse_arguments(argv)
    console = Console(stderr=True)
    summary, report = Summary(), RowReport(arguments.input)
    folder = Path(arguments.local_dir)
    try:
        check_input(arguments.input)
        progress = partial(track, description="Reading", total=None, console=console)
        store = RowStore(map(encoded, kept_examples(arguments, summary, report, progress)))
        train, test = split_order(len(store), arguments.test_fraction, arguments.seed)
        written = {
            path: write_split(path, store, order, path.stem, console)
            for path, order in ((folder / "train.parquet", train), (folder / "test.parquet", test))
        }
    except VerlError as error:
        return write_error(error)
    Console().print(str(report), markup=False, highlight=False, soft_wrap=True)
    show(summary, written, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
