"""The other commands: killed between any two of their writes, and with a full disk where they write.

Each has its outputs in a folder of its own, and is deterministic but for what `content` leaves out.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.chaos import outcome
from tests.chaos.checks import check_refused, outputs
from tests.chaos.harness import TRACEBACK, Lab, Result, Running
from tests.chaos.place import Place
from verl.tracking.jsonl import write_jsonl

_SFT_STEPS = 3

Command = Callable[[Lab, Path], list[str]]


def _engine(lab: Lab) -> list[str]:
    overrides = [
        f"model.path={lab.model}",
        "model.compute_dtype=float32",
        "rollout.name=hf",
        "data.max_response_length=16",
    ]
    return [*overrides, "reward.name=tests.chaos.parts:reward"]


def _sft(lab: Lab, out: Path) -> list[str]:
    data = lab.folder / "demonstrations.jsonl"
    if not data.exists():
        rows = [
            [{"role": "user", "content": f"Count to {n}"}, {"role": "assistant", "content": "1 " * n}]
            for n in range(1, 17)
        ]
        write_jsonl(data, [{"messages": row} for row in rows])
    overrides = [f"model.path={lab.model}", "model.compute_dtype=float32", f"data.train_files=[{data}]"]
    overrides += [f"trainer.default_local_dir={out}", "trainer.experiment_name=run", "trainer.device=cpu"]
    overrides += [f"trainer.total_training_steps={_SFT_STEPS}", "trainer.save_freq=1", "data.train_batch_size=4"]
    return ["verl.trainer.main_sft", *overrides]


COMMANDS: Mapping[str, Command] = {
    "export": lambda lab, out: ["toolrl.serve.export", str(_run(lab)), "--out", str(out / "model")],
    "report": lambda lab, out: ["toolrl.analysis.report", str(_run(lab)), "--out", str(out / "report.html")],
    "generate": lambda lab, out: [
        "verl.trainer.main_generation",
        *_engine(lab),
        f"data.val_files=[{lab.val}]",
        f"eval.output={out / 'responses.jsonl'}",
    ],
    "eval": lambda lab, out: [
        "verl.trainer.main_eval",
        *_engine(lab),
        f"eval.benchmarks=[{lab.val}]",
        f"eval.output={out}",
    ],
    "sft": _sft,
    "train": lambda lab, out: ["verl.trainer.main_ppo", *lab.overrides("hf", out)],
}
_QUICK = ("export", "report")
_ONE_OUTPUT = ("export", "report", "generate")  # written in the end alone


def _run(lab: Lab) -> Path:
    return lab.baseline("hf").folder / "run"


def killed(lab: Lab, result: Result, name: str) -> None:
    """Unbroken, then killed again and again in one folder, each time at a later write, then left alone."""
    with outputs() as (where, unbroken), outputs() as (other, out):
        done = _start(lab, where, name, unbroken).ended()
        result.need(done.code == 0, f"unbroken it ended with {done.code}: {done.text[-300:]}")
        writes, whole = int(_count(where).read_text()), content(name, unbroken)
        most = 6 if name in _QUICK else 4
        kills = sorted({round(1 + number * (writes - 1) / (most - 1)) for number in range(most)})
        for write in kills:
            ended = _start(lab, other, name, out, write).ended()
            result.need(ended.code in (-9, 0), f"killed at write {write} of {writes} it ended with {ended.code}")
            result.need(TRACEBACK not in ended.text, f"killed at write {write}: a traceback")
            partial = [path for path, digest in content(name, out).items() if whole.get(path) != digest]
            result.need(not (name in _ONE_OUTPUT and partial), f"killed at write {write}: {partial} are not whole")
            result.need(not (left := other.leftovers()), f"killed at write {write} it left {'; '.join(left[:4])}")
            other.clear()
        if name == "export" and (out / "model").exists():
            result.facts["exit"] = 0
        else:
            again = _start(lab, other, name, out).ended()
            result.facts |= {"exit": again.code, "lines": len(again.printed)}
            result.need(again.code == 0, f"started again it ended with {again.code}: {again.text[-300:]}")
        kept = [path.name for path in out.rglob("*unfinished*") if name in _ONE_OUTPUT]
        result.need(not kept, f"left by those that were killed: {kept}")
        result.facts["bit_equal"] = content(name, out) == whole
        result.need(result.facts["bit_equal"], f"the outputs differ: {_differing(content(name, out), whole)}")


def full(lab: Lab, result: Result, name: str) -> None:
    """The disk of the outputs is full before the command writes them all; with space it completes."""
    with outputs() as (where, unbroken), outputs() as (other, out):
        out.mkdir()
        inside = other.mount(out, "size=16m")
        filling = inside / "filling"
        size = 0 if name in _ONE_OUTPUT else _FREE[name]
        filling.write_bytes(bytes(inside_free(inside) - size))
        ended = _start(lab, other, name, out).ended()
        check_refused(result, ended, (2,), str(out), "Free some space")
        result.need(not (left := other.leftovers()), f"left: {'; '.join(left[:4])}")
        other.clear()
        kept = [path.name for path in inside.rglob("*unfinished*")]
        result.need(not kept, f"left: {kept}")
        filling.unlink()
        again = _start(lab, other, name, out).ended()
        result.need(again.code == 0, f"with space it ended with {again.code}: {again.text[-300:]}")
        done = _start(lab, where, name, unbroken).ended()
        result.need(done.code == 0, f"unbroken it ended with {done.code}")
        result.facts["bit_equal"] = content(name, inside) == content(name, unbroken)
        result.need(result.facts["bit_equal"], "with space the outputs differ")


_FREE = {"eval": 8192, "sft": 1 << 20}  # bytes: the settings of an evaluation, but no answers; less than a checkpoint


def inside_free(folder: Path) -> int:
    line = subprocess.run(["stat", "-f", "-c", "%a %S", str(folder)], check=True, capture_output=True, text=True).stdout
    blocks, size = map(int, line.split())
    return blocks * size


def content(name: str, out: Path) -> dict[str, str]:
    """The outputs that count: path -> what is in it, without what no two runs have in common."""
    if name in ("sft", "train"):
        rows = json.dumps(outcome.metrics(out)) if (out / "run" / "metrics.jsonl").exists() else ""
        return {"metrics": rows, "weights": outcome.weights(out) if outcome.newest(out) else ""}
    found = {}
    for path in sorted(each for each in out.rglob("*") if each.is_file() and each.name != "filling"):
        if any(part.startswith(".") for part in path.relative_to(out).parts):
            continue
        data = path.read_bytes()
        if name == "report":
            data = b"a page" if data.rstrip().endswith(b"</html>") else b""  # which names the minute when it was made
        if path.suffix == ".json" and name == "eval":
            data = b"result" if json.loads(data) else b""
        found[str(path.relative_to(out))] = hashlib.sha256(data).hexdigest()
    return found


def _differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    return sorted(path for path in {*found, *wanted} if found.get(path) != wanted.get(path))[:4]


def _count(where: Place) -> Path:
    return where.tmp.with_suffix(".talk") / "count"


def _start(lab: Lab, where: Place, name: str, out: Path, kill: int = 0) -> Running:
    settings = {"CHAOS_OUT": str(out), "CHAOS_KILL": str(kill), "CHAOS_COUNT": str(_count(where))}
    command = [sys.executable, "-m", "tests.chaos.killed", *COMMANDS[name](lab, out)]
    return Running(where, command, settings, where.tmp.with_suffix(".talk"))
