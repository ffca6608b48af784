"""Memory and time of reading a large task file and sampling from it.

    python bench/task_memory.py [--rows 1000000] [--draws 20000]

Writes a parquet file of --rows rows of dataset/mini, each extended by 600 random characters, then reads it in a
separate process and prints its peak memory, the read time, and the draws per second from a shuffled stream.
"""

from __future__ import annotations

import argparse
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


def write(path: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from scripts.raw.rlla import SCHEMA

    sample = pq.read_table(ROOT / "dataset/mini/train.parquet", schema=SCHEMA).to_pylist()
    with pq.ParquetWriter(path, SCHEMA) as writer:
        for start in range(0, rows, 10_000):
            chosen = [with_noise(sample[number % len(sample)]) for number in range(start, min(start + 10_000, rows))]
            writer.write_table(pa.Table.from_pylist(chosen, SCHEMA))


def with_noise(row: dict[str, Any]) -> dict[str, Any]:
    """The row with 600 random characters in its prompt, so that the file does not compress."""
    system, user = row["prompt"]
    noise = secrets.token_hex(300)
    return row | {"prompt": [system, {"role": "user", "content": f"{user['content']} {noise}"}]}


def read(path: Path, draws: int) -> None:
    from verl.data.tasks import TaskSet, TaskStream

    started = time.perf_counter()
    tasks = TaskSet(str(path))
    ready = time.perf_counter()
    for _ in islice(TaskStream([tasks]), draws):
        pass
    drawn = time.perf_counter()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    size_mib = path.stat().st_size / 2**20
    print(f"{len(tasks):,} rows, {size_mib:,.0f} MiB of parquet: peak memory {peak_mib:,.0f} MiB", end=", ")
    print(f"read in {ready - started:.0f} s", end=", ")
    print(f"{draws / (drawn - ready):,.0f} tasks drawn per second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)  # the measured process
    arguments = parser.parse_args()
    if arguments.read:
        read(arguments.read, arguments.draws)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.parquet"
        write(path, arguments.rows)
        command = [sys.executable, __file__, "--read", str(path), "--draws", str(arguments.draws)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
