"""Generate the composed data set: python scripts/make_composed_dataset.py [--out dataset/composed] [--seed 0]

Writes train, test, test_new_tools and sft parquet files in ToolRL's schema and a tokenizer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from scripts.composed.rows import build
from scripts.composed.tokenizer import train
from scripts.mini.tokenizer import chat_text, save_tokenizer
from scripts.raw.rlla import SCHEMA
from verl.host.files import replacing

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Generate and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dataset" / "composed", help="folder to write to")
    parser.add_argument("--seed", type=int, default=0, help="the data set depends on the seed")
    args = parser.parse_args()
    files = build(args.seed)
    for name, rows in files.items():
        with replacing(args.out / f"{name}.parquet") as unfinished:
            pq.write_table(pa.Table.from_pylist(rows, SCHEMA), unfinished, compression="zstd", compression_level=19)
    everything = (chat_text(row) for rows in files.values() for row in rows)
    save_tokenizer(train(everything), args.out / "tokenizer")
    sizes = {path.name: path.stat().st_size for path in sorted(args.out.rglob("*")) if path.is_file()}
    Console(width=120).print(sizes)


if __name__ == "__main__":
    main()
