"""Build a raw file with ToolRL's mix from the sources: 2,000 ToolACE, 1,000 Hammer (masked) and 1,000 xLAM rows.

    python scripts/build_rlla_raw.py --toolace toolace.json --xlam xlam.json
    python scripts/build_rlla_raw.py                      # by dataset name; needs the package datasets and a network

ToolACE's dialogues are split into single decisions. Hammer's rows are xLAM rows with function and parameter names
masked (--hammer: a separate file in that format); no row is used both masked and plain. The sampling is seeded.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from scripts.raw import toolace, xlam
from scripts.raw.decision import instruction_like, own_instruction
from scripts.raw.rlla import check_example, to_row
from verl.data.rows import RowStore, encoded, read_rows
from verl.data.tasks import to_task
from verl.errors import DataError, VerlError
from verl.host.exits import write_error
from verl.host.files import ending_in, replacing

Decisions = Callable[[Any], Iterator[dict[str, str]]]
NUM_SHOWN = 10


class Mixer:
    """Draws a seeded sample from each source and counts unusable rows."""

    def __init__(self, generator: random.Random, console: Console) -> None:
        self.dropped: Counter[str] = Counter()
        self._generator = generator
        self._console = console

    def usable(self, source: str, decisions: Decisions) -> Iterator[tuple[Any, list[dict[str, str]]]]:
        """Every row of the source with at least one decision, and its decisions."""
        for row in track(read_rows(source), escape(f"Reading {source}"), total=None, console=self._console):
            try:
                found = list(decisions(row))
                for example in found:
                    to_task(to_row(check_example(example), "train", 0), "")  # the checks of training
            except DataError as error:
                self.dropped[f"{source}: {error.field} {_reason(error)}"] += 1
                continue
            except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
                self.dropped[f"{source}: not of the expected form ({type(error).__name__})"] += 1
                continue
            if found:
                yield row, found
            else:
                self.dropped[f"{source}: no call"] += 1

    def sample(self, source: str, items: Iterable[Any], count: int) -> list[Any]:
        """`count` of the items in random order; reads none for 0. Raises DataError if there are fewer."""
        if not count:
            return []
        store = RowStore(map(encoded, items))
        if len(store) < count:
            raise DataError(
                f"yields {len(store)} usable rows", f"at least {count}", "Ask for fewer or name a larger file", source
            )
        return [store[number] for number in self._generator.sample(range(len(store)), count)]


def _reason(error: DataError) -> str:
    """The problem without names and values, to group similar rows."""
    return re.sub(r"'.*'|\(.*\)|: .*", "..", error.problem)


def build(arguments: argparse.Namespace, mixer: Mixer, generator: random.Random) -> list[dict[str, str]]:
    """The mixed and shuffled examples."""
    instruction = instruction_like(arguments.instruction_from) if arguments.instruction_from else own_instruction
    mask = xlam.masker(generator)

    def plain(row: Any) -> Iterator[dict[str, str]]:
        return xlam.decisions(row, instruction)

    def masked(row: Any) -> Iterator[dict[str, str]]:
        return xlam.decisions(row, instruction, mask)

    def dialogues() -> Iterator[dict[str, str]]:
        for _, examples in mixer.usable(arguments.toolace, lambda row: toolace.decisions(row, instruction)):
            yield from examples

    def rows(source: str) -> Iterator[Any]:
        return (row for row, _ in mixer.usable(source, masked))  # rows that can be masked can also be used plain

    to_mask, to_keep = arguments.num_hammer, arguments.num_xlam
    if arguments.hammer and arguments.hammer != arguments.xlam:
        queries = mixer.sample(arguments.hammer, rows(arguments.hammer), to_mask)
        queries += mixer.sample(arguments.xlam, rows(arguments.xlam), to_keep)
    else:
        queries = mixer.sample(arguments.xlam, rows(arguments.xlam), to_mask + to_keep)
    examples = mixer.sample(arguments.toolace, dialogues(), arguments.num_toolace)
    for number, row in enumerate(queries):
        examples += masked(row) if number < to_mask else plain(row)
    generator.shuffle(examples)
    return examples


def write(path: Path, examples: list[dict[str, str]]) -> None:
    """Atomically write a JSON list, one example per line."""
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(map(json.dumps, examples)) + "\n]\n")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toolace", default="Team-ACE/ToolACE", help="file or dataset name")
    parser.add_argument("--xlam", default="Salesforce/xlam-function-calling-60k", help="file or dataset name")
    parser.add_argument(
        "--hammer", help="file or dataset name in xLAM's format, to be masked; default: further xLAM rows"
    )
    parser.add_argument("--num-toolace", type=int, default=2000)
    parser.add_argument("--num-hammer", type=int, default=1000)
    parser.add_argument("--num-xlam", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=31415)
    parser.add_argument("--instruction-from", metavar="RAW_FILE", help="use the wording of a published raw file")
    parser.add_argument("--out", type=ending_in(".json"), default=Path("dataset/rlla_4k_raw/rlla_rl.json"))
    arguments = parser.parse_args(argv)
    for name in ("num_toolace", "num_hammer", "num_xlam"):
        if getattr(arguments, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    if not arguments.num_toolace + arguments.num_hammer + arguments.num_xlam:
        parser.error("all three numbers are 0: nothing to build")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Build the file; returns the exit code."""
    arguments = parse_arguments(argv)
    console = Console(stderr=True)
    generator = random.Random(arguments.seed)
    mixer = Mixer(generator, console)
    try:
        examples = build(arguments, mixer, generator)
        write(arguments.out, examples)
    except VerlError as error:
        return write_error(error)
    finally:
        for why, rows in mixer.dropped.most_common(NUM_SHOWN):
            console.print(f"dropped {rows}: {escape(why)}", highlight=False, soft_wrap=True)
    table = Table("what", "rows", title="Summary")
    table.add_row(escape(f"written to {arguments.out}"), str(len(examples)))
    for name in ("toolace", "hammer", "xlam"):
        table.add_row(f"  {name}", str(getattr(arguments, f"num_{name}")))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
