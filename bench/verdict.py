"""What a verdict costs: CPU time of the fix's verdict, here and with another checkout of this repository.

    python bench/verdict.py --tasks tasks.jsonl [--against TREE] [--limit 20] [--rounds 2]

Both judge the same patches in turn, one at a time, each with runtimes of its own; CPU time is that of a process with
all of its children. The tasks are rows of ours (scripts/data/inject_bugs.py). Also counts whose fix scores 1, and with
--bug whose bug scores 0 by exactly FAIL_TO_PASS. Prints a line for each side, and the quotient.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def cpu_seconds() -> float:
    """Of this process and of all children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


async def judge(rows: list[dict[str, object]], bug: bool) -> dict[str, object]:
    """CPU seconds of the verdicts, and the tasks whose verdict is not what it should be."""
    from scripts.data.validation import _harmless, diff
    from toolrl.swe.local import LocalRuntimes
    from toolrl.swe.scoring import score_patch
    from toolrl.swe.tasks import read_swe_task

    runtimes = LocalRuntimes()
    harmless = diff({}, {"NOTES.md": "no change\n"})
    wrong, held = [], []
    before = cpu_seconds()
    try:
        for row in rows:
            task = read_swe_task(row)
            verdict = await score_patch(runtimes, task, task.gold_patch)
            held.append(getattr(verdict, "held", 0.0))
            if verdict.score.total != 1:
                wrong.append(f"{task.id}: the fix scores {verdict.outcome}: {verdict.detail[-300:]}")
            if bug and (problem := _harmless(await score_patch(runtimes, task, harmless), task, frozenset())):
                wrong.append(f"{task.id}: {problem}")
    finally:
        await runtimes.close()
    return {"cpu_s": cpu_seconds() - before, "wrong": wrong, "held": statistics.mean(held)}


def side(tree: Path, given: argparse.Namespace) -> dict[str, object]:
    """The same in a process that imports a checkout."""
    command = [sys.executable, __file__, "--here", "--tasks", str(given.tasks), "--limit", str(given.limit)]
    command += ["--skip", str(given.skip), *(["--bug"] if given.bug else [])]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, env=environment, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--here", action="store_true", help="only measure, in this process")
    given = parser.parse_args()
    if given.here:
        rows = [json.loads(line) for line in given.tasks.read_text().splitlines()]
        print(json.dumps(asyncio.run(judge(rows[given.skip :][: given.limit], given.bug))))
        return
    trees = {"here": ROOT, **({"against": given.against.absolute()} if given.against else {})}
    seconds: dict[str, list[float]] = {name: [] for name in trees}
    for _ in range(given.rounds):
        for name, tree in trees.items():
            found = side(tree, given)
            seconds[name].append(float(str(found["cpu_s"])))
            print(json.dumps({"side": name, **found}), flush=True)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    print(json.dumps({"median cpu_s": medians, "quotient": medians["here"] / medians.get("against", medians["here"])}))


if __name__ == "__main__":
    main()
