"""Filter a data file by difficulty: by the success rates of a probe of a model, or by the course of a training run.

    toolrl probe data.train_files=[FILE] model.path=PATH eval.limit=null
    python scripts/select_by_difficulty.py outputs/probe/NAME/probe.jsonl --data FILE --out OUT --least 0.2 --most 0.8

A row is kept if its success rate lies between --least and --most; the ends are excluded unless --inclusive is given, so
that the defaults, 0 and 1, drop rows that were never or always right. --balanced then subsamples to equal numbers of
rows below and above the middle of the window, drawn with --seed.

    python scripts/select_by_difficulty.py outputs/RUN --data FILE --out OUT --impact 0.6

LIMR's learning impact (arXiv 2502.11886), from the transcripts of a run over several epochs: a row is kept if its
success rate follows the mean course with an impact of at least --impact (scripts/limr.py).

Rows keep their format and order; rows that were not probed, or not seen in every epoch, are dropped. Both files are
.parquet or both .jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed, too

from scripts.limr import learning_impact, read_epochs  # noqa: E402
from verl.data.report import CHOICES  # noqa: E402
from verl.data.rows import read_rows  # noqa: E402
from verl.data.tasks import to_task  # noqa: E402
from verl.errors import DataError, VerlError  # noqa: E402
from verl.host.exits import write_error  # noqa: E402
from verl.host.files import replacing  # noqa: E402
from verl.text import prompt_sha256  # noqa: E402

_BATCH_ROWS = 512
Probed = dict[int, tuple[float, str]]  # row -> (success rate or learning impact, the prompt's digest)


def read_probe(path: Path, data: Path) -> Probed:
    """The probe's results for rows of `data`. Raises DataError for another kind of file or other data."""
    probed: Probed = {}
    for number, line in enumerate(read_rows(str(path))):
        if isinstance(line, DataError):
            raise line.at(file=str(path), row=number)
        try:
            name, _, row = line["task_id"].rpartition("#")
            probed[int(row)] = float(line["success_rate"]), line["prompt_sha256"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"is not a probe result ({type(error).__name__}: {error})",
                "task_id, success_rate and prompt_sha256",
                "Pass a probe.jsonl from main_eval --probe",
                str(path),
                number,
            ) from error
        if name != data.name:
            raise DataError(
                f"is of {name}, not of {data.name}", hint="Pass the file that was probed", file=str(path), row=number
            )
    if not probed:
        raise DataError("is empty", "a line per probed row", file=str(path))
    return probed


def choose(probed: Probed, options: argparse.Namespace) -> tuple[set[int], Counter[str]]:
    """(rows to keep, number of dropped rows by reason)."""
    dropped: Counter[str] = Counter()
    window: dict[int, float] = {}
    for row, (rate, _) in probed.items():
        inside = options.least <= rate <= options.most if options.inclusive else options.least < rate < options.most
        if inside:
            window[row] = rate
        else:
            dropped[_why(rate)] += 1
    if options.balanced:
        kept = _balanced(window, (options.least + options.most) / 2, random.Random(options.seed))
        dropped["for the balance"] += len(window) - len(kept)
        return kept, +dropped
    return set(window), dropped


def choose_by_impact(run: Path, data: Path, options: argparse.Namespace) -> tuple[Probed, set[int], Counter[str]]:
    """(rows seen in the run, rows to keep, number of dropped rows by reason)."""
    seen = read_epochs(run, data.name, options.right_at)
    impact = learning_impact(seen.rates, seen.num_epochs)
    kept = {row for row, value in impact.items() if value >= options.impact}
    dropped = Counter({f"learning impact below {options.impact:g}": len(impact) - len(kept)})
    dropped[f"seen in fewer than {seen.num_epochs} epochs"] = len(seen.rates) - len(impact)
    return {row: (impact.get(row, 0.0), digest) for row, digest in seen.prompts.items()}, kept, +dropped


def _why(rate: float) -> str:
    return {0.0: "never right", 1.0: "always right"}.get(rate, "success rate outside the window")


def _balanced(window: Mapping[int, float], middle: float, draw: random.Random) -> set[int]:
    """Equal numbers of hard and easy rows; rows exactly in the middle are all kept."""
    hard = [row for row, rate in window.items() if rate < middle]
    easy = [row for row, rate in window.items() if rate > middle]
    size = min(len(hard), len(easy))
    return (window.keys() - {*hard, *easy}) | {*draw.sample(hard, size), *draw.sample(easy, size)}


def check_same(row: Any, number: int, digest: str, data: Path) -> None:
    """Raises DataError unless the row is the one that was probed."""
    asked = {name: value for name, value in row.items() if name not in CHOICES} if isinstance(row, Mapping) else row
    if prompt_sha256(to_task(asked, "").prompt) != digest:  # whatever reward and environment the row names
        raise DataError(
            "is not the row that was probed", "the file as it was", "Probe it again", str(data), number, "prompt"
        )


def copy_rows(data: Path, out: Path, keep: Callable[[int, Any], bool]) -> int:
    """Atomically writes the kept rows unchanged; returns the number of input rows."""
    copy = _COPIES[data.suffix]
    with replacing(out) as unfinished:
        return copy(data, unfinished, keep)


def _copy_parquet(data: Path, out: Path, keep: Callable[[int, Any], bool]) -> int:
    number = 0
    with pq.ParquetFile(data, pre_buffer=False) as source, pq.ParquetWriter(out, source.schema_arrow) as writer:
        for batch in source.iter_batches(batch_size=_BATCH_ROWS):
            places = [place for place, row in enumerate(batch.to_pylist()) if keep(number + place, row)]
            writer.write_batch(batch.take(pa.array(places, pa.int64())))  # an empty list has no type
            number += batch.num_rows
    return number


def _copy_jsonl(data: Path, out: Path, keep: Callable[[int, Any], bool]) -> int:
    number = -1
    with out.open("w", encoding="utf-8") as file:
        for number, row in enumerate(read_rows(str(data))):
            if keep(number, row):
                file.write(json.dumps(row) + "\n")
    return number + 1


_COPIES = {".parquet": _copy_parquet, ".jsonl": _copy_jsonl}


def select(options: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Select and write the rows; yields lines of the summary."""
    data, out = Path(options.data), Path(options.out)
    if data.suffix not in _COPIES or out.suffix != data.suffix:
        raise DataError(f"cannot be written to {out.name!r}", f"{' or '.join(_COPIES)} for both", file=str(data))
    if data.resolve() == out.resolve():
        raise DataError("would be overwritten", hint="Give --out another name", file=str(data))
    if not data.is_file():
        raise DataError("there is no such file", file=str(data))
    source = Path(options.source)
    if options.impact is None:
        probed = read_probe(source, data)
        kept, dropped = choose(probed, options)
    else:
        probed, kept, dropped = choose_by_impact(source, data, options)
    if not kept:
        reasons = ", ".join(f"{count} {why}" for why, count in dropped.most_common())
        hint = "Widen --least and --most" if options.impact is None else "Lower --impact"
        raise DataError(f"no row would be kept: {reasons}", hint=hint, file=str(data))

    def keep(number: int, row: Any) -> bool:
        if number in probed:
            check_same(row, number, probed[number][1], data)
        return number in kept

    rows = copy_rows(data, out, keep)
    yield str(out), len(kept)
    yield from ((f"dropped: {why}", count) for why, count in dropped.most_common())
    if rows > len(probed):
        yield f"dropped: not {'probed' if options.impact is None else 'trained on'}", rows - len(probed)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="PROBE.jsonl|RUN")
    parser.add_argument("--data", required=True, metavar="FILE", help="the file that was probed or trained on")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--least", type=_share, default=0.0, help="minimum success rate")
    parser.add_argument("--most", type=_share, default=1.0, help="maximum success rate")
    parser.add_argument("--inclusive", action="store_true", help="include rows at --least and --most")
    parser.add_argument("--balanced", action="store_true", help="equal numbers of hard and easy rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of --balanced")
    parser.add_argument("--impact", type=float, help="minimum learning impact; 0.6 in the paper, 0.2 in its code")
    parser.add_argument(
        "--right-at", type=float, help="with --impact: score threshold of a correct rollout, without a part `correct`"
    )
    options = parser.parse_args(argv)
    by_rate = (options.least, options.most, options.inclusive, options.balanced) != (0.0, 1.0, False, False)
    if options.impact is not None and by_rate:
        parser.error("--impact cannot be combined with --least, --most, --inclusive or --balanced")
    if options.impact is None and options.right_at is not None:
        parser.error("--right-at needs --impact")
    if options.least > options.most:
        parser.error(f"--least {options.least:g} is more than --most {options.most:g}")
    table = Table("what", "rows", title="Summary")
    try:
        for what, count in select(options):
            table.add_row(escape(what), str(count))
    except VerlError as error:
        return write_error(error)
    Console(stderr=True).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
