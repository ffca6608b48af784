"""Which algorithms differ in what they teach? A study in two stages: docs/algorithm_study.md.

    bash bench/algorithms/run.sh [STAGE ..]                    trains what is missing, then writes the tables
    python bench/algorithms/study.py OUT --known FILE --table   the tables of the runs in folder and file

Stages: sweep (a learning rate for every rule), sort (every rule, three seeds), confirm (GRPO, its three nearest and the
four farthest, eight seeds). Runs are independent: an interrupted call continues with the next missing run.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from bench.algorithms import design
from bench.algorithms.design import SHOP, TOOL_LOOP, StudyRun
from bench.algorithms.tables import Results, best_rates, chosen_rules, tables
from bench.common import Side
from verl.host.lock import alone_in

STAGES = ("sweep", "sort", "confirm")
SHOP_ENVIRONMENT = f"env.name={ROOT}/bench/algorithms/shop.py:Shop"
_TRAINING_ROWS = 1000  # of the composed tasks: 62 batches, read in a second


def data_of(task: str, out: Path) -> list[str]:
    """Files, environment and initial model of a task, as overrides; they are made once."""
    if task == TOOL_LOOP:
        folder = _cold_start("scripts/tool_loop/cold_start.sh", out / "tool_loop_start", "0")
        return [f"model.path={folder}/cold_start/checkpoints/step-000400/hf", *_files(folder / "data")]
    if task == SHOP:
        folder = _cold_start("bench/algorithms/shop_start.sh", out / "shop_start")
        return [
            f"model.path={folder}/cold_start/checkpoints/step-000500/hf",
            f"data.prompt_template={folder}/data/prompt.txt",
            SHOP_ENVIRONMENT,
            *_files(folder / "data"),
        ]
    rows = out.resolve() / "calls.parquet"
    temporary = rows.with_suffix(".tmp")
    pq.write_table(pq.read_table(ROOT / "dataset/mini/composed/train.parquet").slice(0, _TRAINING_ROWS), temporary)
    temporary.rename(rows)
    return [f"data.train_files=[{rows}]"]


def _cold_start(script: str, out: Path, *arguments: str) -> Path:
    folder = out.resolve()
    subprocess.run(["bash", ROOT / script, folder, *arguments], check=True, stdout=sys.stderr)
    return folder


def _files(folder: Path) -> list[str]:
    return [f"data.train_files=[{folder}/train.jsonl]", f"data.val_files=[{folder}/test.jsonl]"]


def finished(out: Path, known: Path | None = None) -> Results:
    """The results below `out`, and those in the file `known`, but for runs with other settings than the design's."""
    lines = [] if known is None else gzip.decompress(known.read_bytes()).decode().splitlines()
    lines += [file.read_text() for file in sorted((out / "runs").glob("*.json"))]
    records = [json.loads(line) for line in lines]
    return {run: each["result"] for each in records if (run := StudyRun(**each["run"])).settings() == each["settings"]}


def record_of(run: StudyRun, result: Mapping[str, Any]) -> str:
    return json.dumps({"run": asdict(run), "settings": run.settings(), "result": result})


def export(results: Results, file: Path) -> None:
    """One line per run; the same runs make the same bytes."""
    lines = [f"{record_of(run, results[run])}\n" for run in sorted(results)]
    temporary = file.with_name(f"{file.name}.tmp")
    temporary.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    temporary.rename(file)


def planned(stage: str, results: Results) -> Iterator[StudyRun]:
    """Raises SystemExit if the stage before is not finished."""
    before = {"sweep": None, "sort": "sweep", "confirm": "sort"}[stage]
    missing = [] if before is None else [run for run in planned(before, results) if run not in results]
    if missing:
        raise SystemExit(
            f"stage {stage} needs all runs of {before}: {len(missing)} are missing, e.g. {missing[0].name}"
        )
    if stage == "sweep":
        yield from design.sweep()
    elif stage == "sort":
        yield from design.sort(best_rates(results))
    else:
        yield from design.confirm(chosen_rules(results), best_rates(results))


def in_the_design(results: Results) -> Results:
    """Those that the design plans: other runs, of a rate that a later sweep has not chosen, are in no table."""
    chosen: dict[StudyRun, Any] = {}
    for stage in STAGES:
        runs = [*planned(stage, results)]
        chosen |= {run: results[run] for run in runs if run in results}
        if not all(run in results for run in runs):
            break
    return chosen


def train_missing(runs: Sequence[StudyRun], out: Path, jobs: int) -> None:
    """In as many processes, each of which trains one run after another."""
    data = {task: data_of(task, out) for task in dict.fromkeys(run.task for run in runs)}
    (out / "runs").mkdir(parents=True, exist_ok=True)
    waiting: SimpleQueue[StudyRun] = SimpleQueue()
    for run in runs:
        waiting.put(run)

    def work(_: int) -> None:
        with Side([sys.executable, str(Path(__file__).with_name("child.py"))]) as side, suppress(Empty):
            while True:
                run = waiting.get_nowait()
                result = side.ask({"overrides": [*run.settings(), *data[run.task]]})
                file = out / "runs" / f"{run.name}.json"
                temporary = file.with_suffix(".tmp")
                temporary.write_text(record_of(run, result))
                temporary.rename(file)
                end = result.get("failed") or f"{result['cpu_s']:.0f} CPU s"
                print(f"{run.name}: {end}, {waiting.qsize()} wait", file=sys.stderr, flush=True)

    with alone_in(out, "name another folder"), ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(work, range(min(jobs, len(runs)))):
            pass


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder of the runs; those that are there are not run again")
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="processes that train at the same time, a core each")
    parser.add_argument("--known", type=Path, metavar="FILE", help="exported runs, which are not run again")
    parser.add_argument("--export", type=Path, metavar="FILE", help="write all runs to this .jsonl.gz")
    parser.add_argument("--table", action="store_true", help="train nothing")
    args = parser.parse_intermixed_args(arguments)  # stages may follow options
    if unknown := [stage for stage in args.stages if stage not in STAGES]:
        parser.error(f"unknown stage: {', '.join(unknown)}; known: {', '.join(STAGES)}")
    if args.known and not args.known.is_file():
        parser.error(f"--known: there is no file {args.known}")
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    if not args.table:
        args.out.mkdir(parents=True, exist_ok=True)
        for stage in args.stages or STAGES:
            results = finished(args.out, args.known)
            train_missing([run for run in planned(stage, results) if run not in results], args.out, args.jobs)
    results = in_the_design(finished(args.out, args.known))
    if args.export:
        export(results, args.export)
    print(tables(results))


if __name__ == "__main__":
    main()
