"""Generate the embedded dataset: python scripts/make_mini_dataset.py [--out dataset/mini] [--seed 0]

Writes train, test, test_new_tools and sft parquet files in ToolRL's schema and a tokenizer, byte-identical for
the same seed and library versions; checks them; prints statistics. The vocabulary is in scripts/mini/.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from statistics import quantiles

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from scripts.mini import overlap, reading
from scripts.mini.baselines import BASELINES, mean_reward
from scripts.mini.build import all_splits, build
from scripts.mini.checks import check_splits
from scripts.mini.reading import Row
from scripts.mini.tokenizer import chat_text, save_tokenizer, train_tokenizer
from scripts.raw.rlla import SCHEMA
from verl.host.files import replacing

ROOT = Path(__file__).resolve().parents[1]
Splits = Mapping[str, Sequence[Row]]
_FAMILIES = ("single", "multiple", "parallel", "irrelevant", "dialogue", "masked")
_TESTS = ("test", "test_new_tools")
_console = Console(width=120)


def main() -> None:
    """Generate, check, write, report."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dataset" / "mini", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="the dataset depends on the seed")
    args = parser.parse_args()

    with _console.status("drawing rows"):
        splits = build(args.seed)
    with _console.status("checking rows"):
        check_splits(splits)
    with _console.status("training the tokenizer"):
        tokenizer = train_tokenizer(chat_text(row) for name in ("train", "sft") for row in splits[name])
    for name, rows in splits.items():
        with replacing(args.out / f"{name}.parquet") as unfinished:
            table = pa.Table.from_pylist(rows, SCHEMA)
            pq.write_table(table, unfinished, compression="zstd", compression_level=19)
    save_tokenizer(tokenizer, args.out / "tokenizer")

    _print_rows(splits, args.seed)
    _print_lengths(splits, tokenizer)
    _print_rewards(splits)
    _print_overlap(splits)
    _print_files(args.out)


def _print_rows(splits: Splits, seed: int) -> None:
    table = Table("split", *_FAMILIES, "rows", "phrasings", title="rows by family, and distinct phrasings")
    for name, rows in splits.items():
        count = Counter(map(reading.family, rows))
        table.add_row(
            name,
            *(str(count[family]) for family in _FAMILIES),
            str(len(rows)),
            str(len(set(map(reading.phrasing, rows)))),
        )
    _console.print(table)

    table = Table("split", *_FAMILIES, title="distinct phrasings by family")
    for name, rows in splits.items():
        phrasings = {
            family: {reading.phrasing(row) for row in rows if reading.family(row) == family} for family in _FAMILIES
        }
        table.add_row(name, *(str(len(phrasings[family])) for family in _FAMILIES))
    _console.print(table)

    table = Table("split", "domains", "tools", "lookups", title="pools of the splits")
    for split in all_splits(seed):
        domains = {tool.domain for tool in split.world.tools}
        table.add_row(split.name, *map(str, (len(domains), len(split.world.tools), len(split.world.lookups))))
    _console.print(table)


def _print_lengths(splits: Splits, tokenizer: Tokenizer) -> None:
    table = Table("split", "chars", "prompt tokens", "response tokens", title="lengths, p50 / p95 / max")
    for name, rows in splits.items():
        measured = (
            [len(reading.system_text(row)) + len(reading.dialogue_text(row)) for row in rows],
            [len(tokenizer.encode(chat_text(row, with_response=False))) for row in rows],
            [len(tokenizer.encode(reading.gold(row))) + 1 for row in rows],  # and <|im_end|>
        )
        table.add_row(name, *map(_quantiles, measured))
    _console.print(table)
    _console.print(f"vocabulary: {tokenizer.get_vocab_size()} tokens")


def _quantiles(lengths: Sequence[int]) -> str:
    cuts = quantiles(lengths, n=20)
    return f"{cuts[9]:.0f} / {cuts[18]:.0f} / {max(lengths)}"


def _print_rewards(splits: Splits) -> None:
    table = Table("response", *splits, title="mean reward of simple policies (rlla, default options)")
    for name, response in BASELINES.items():
        table.add_row(name, *(f"{mean_reward(rows, response):.3f}" for rows in splits.values()))
    _console.print(table)


def _print_overlap(splits: Splits) -> None:
    seen = [*splits["train"], *splits["sft"]]
    table = Table("seen in train or sft", *_TESTS, title="overlap of the tests with training")
    measured = [overlap.measure(seen, splits[name]) for name in _TESTS]
    for n in measured[0].ngrams:
        table.add_row(f"{n}-grams of the user texts", *(f"{found.ngrams[n]:.1%}" for found in measured))
    for item in ("prompts", "answers", "phrasings", "values", "tools"):
        table.add_row(item, *(str(getattr(found, item)) for found in measured))
    _console.print(table)


def _print_files(out: Path) -> None:
    table = Table("file", "bytes", "SHA-256")
    paths = [out / f"{split.name}.parquet" for split in all_splits(0)] + sorted((out / "tokenizer").iterdir())
    for path in paths:
        table.add_row(str(path.relative_to(out)), f"{path.stat().st_size:,}", sha256(path.read_bytes()).hexdigest())
    table.add_row("total", f"{sum(path.stat().st_size for path in paths):,}", "")
    _console.print(table)


if __name__ == "__main__":
    main()
