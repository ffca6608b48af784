"""Whole training runs: the embedded model, which must learn, and steps of the measured one, by phase."""

from __future__ import annotations

import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bench.gpu.measurements import Figures, UnexpectedError
from bench.gpu.place import PROMPT, RESPONSE, RESPONSES, ROOT, Place
from verl.tracking.jsonl import read_jsonl

PROMPTS, STEPS = 512, 3  # the first step warms up
LEARNING_STEPS, LEARNT = 16, 2.0
ADAPTER_STEPS, SAME = 4, 1e-3  # nats, in float32
AFTER, CANARY = "validation after", "largest canary: nats"
END_S = 15.0  # of a measurement's limit, to report the steps of a run that is not finished
SHOWN = ("time/", "perf/", "memory/", "engine/", "response_length/mean")  # metrics of a step
ROWS = ROOT / "dataset/mini"
REWARD = f"{ROOT / 'bench/gpu/rewards.py'}:hashed"
ON_CPU = ("trainer.device=cpu", "model.compute_dtype=float32")


class Runs:
    """Each in processes of its own."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def learns(self) -> Figures:
        """The embedded default in float32. Raises UnexpectedError if its greedy validation does not reach LEARNT."""
        figures = self._embedded("learns", LEARNING_STEPS)
        after = figures[AFTER]
        if not self.place.rehearse and not float(after) >= LEARNT:
            raise UnexpectedError(f"the validation reached {after:.3g}, not {LEARNT}", figures)
        return figures

    def adapter(self) -> Figures:
        """The same with LoRA, whose adapter alone is synced: every step's canary compares engine and trainer.

        Raises UnexpectedError if they differ.
        """
        figures = self._embedded("adapter", ADAPTER_STEPS, "lora.rank=16")
        gap = float(figures[CANARY])
        if not gap <= SAME:
            raise UnexpectedError(f"engine and trainer differ by {gap:.3g} nats, bound {SAME}", figures)
        return figures

    def _embedded(self, name: str, steps: int, *more: str) -> Figures:
        place, steps = self.place, 1 if self.place.rehearse else steps
        overrides = [
            *more,
            "recipe=mini_grpo",
            f"trainer.total_training_steps={steps}",
            f"trainer.test_freq={steps}",
            "trainer.save_freq=0",
            "rollout.max_num_seqs=128",  # all of a batch, and few CUDA graphs to capture
        ]
        if place.rehearse:
            files = [f"data.{name}_files=[{self._few_rows(4)}]" for name in ("train", "val")]
            overrides += [*ON_CPU, *files, "rollout.name=hf", "data.train_batch_size=2", "actor.ppo_mini_batch_size=2"]
        else:
            overrides.append(f"data.val_files=[{ROWS / 'test.parquet'}]")
        started = time.perf_counter()
        rows = self._run(name, overrides)
        total = f"val/{'few' if place.rehearse else 'test'}/total"
        return {
            "validation before": rows[0][total],
            AFTER: rows[-1][total],
            "steps": rows[-1]["step"],
            "log-probs of engine and trainer, float32: nats": _largest(rows, "engine/logprob_diff_mean"),
            CANARY: _largest(rows, "engine/canary_logprob_diff"),
            "a step: s": statistics.median(row["time/step_s"] for row in rows[1:]),
            "the run: s": time.perf_counter() - started,
        }

    def step(self) -> Figures:
        """4 responses of 250 tokens to each of 512 prompts of about 900. No KL penalty, one optimizer step.

        The median of all steps but the first; of those that are done when the time is over.
        """
        from bench.gpu.inputs import model_folder  # slow imports, torch among them, that `learns` does without
        from toolrl.check.plan.plan import Lengths, build_plan, find_hardware
        from verl.config.load import load_config

        started = time.perf_counter()
        model, rows = model_folder(self.place), write_rows(self.place)
        rehearsed, real = (4, 8, 400, 2), (PROMPTS, RESPONSE, PROMPT + 124, STEPS)
        prompts, response, prompt, steps = rehearsed if self.place.rehearse else real
        overrides = step_overrides(model, rows, prompts, response, prompt, steps)
        overrides += (*ON_CPU, "rollout.name=hf") if self.place.rehearse else ()
        config = load_config(overrides)
        planned = build_plan(config, Lengths(PROMPT, RESPONSE, "as written"), find_hardware(config)).peak_gib()
        limit = self.place.limit - END_S - (time.perf_counter() - started)
        medians = _medians(self._run("step", overrides, limit))
        if not medians:
            raise UnexpectedError(f"no second step within {limit:.0f} s", {})
        return {**medians, "planned: memory/trainer_gib": planned, "prompts": prompts}

    def _run(self, name: str, overrides: Sequence[str], limit: float | None = None) -> list[dict[str, Any]]:
        """The metrics by step of a new run: one that an earlier call left would be resumed, and taken for this one.

        limit: seconds after which the steps so far count. Raises UnexpectedError for a run that fails, with its steps.
        """
        folder = self.place.work / "runs"
        shutil.rmtree(folder / name, ignore_errors=True)
        where = [f"trainer.default_local_dir={folder}", f"trainer.experiment_name={name}"]
        where.append("trainer.preflight=false")  # on by default on a GPU, where it takes the CPU 15 s and more
        # what failed before may have been compilation or CUDA graphs
        eager = ["rollout.enforce_eager=true"] if self.place.again and not self.place.rehearse else []
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *where, *eager]
        code = 0
        with suppress(subprocess.TimeoutExpired):
            code = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=limit).returncode
        metrics = folder / name / "metrics.jsonl"
        rows = read_jsonl(metrics) if metrics.exists() else []
        if code:
            raise UnexpectedError(f"the run ended with exit code {code}", _medians(rows))
        return rows

    def _few_rows(self, count: int) -> Path:
        path = self.place.work / "few.parquet"
        pq.write_table(pq.read_table(ROWS / "test.parquet").slice(0, count), path)
        return path


def _medians(rows: Sequence[dict[str, Any]]) -> Figures:
    """Of all steps but the first, which warms up; empty without any. Values that are not finite are left out."""
    done = [row for row in rows if row["step"] > 1]
    names = {name for row in done for name, value in row.items() if name.startswith(SHOWN) and value is not None}
    medians = {
        name: statistics.median(row[name] for row in done if row.get(name) is not None) for name in sorted(names)
    }
    return {**medians, "steps": len(done)} if done else {}


def step_overrides(model: Path, rows: Path, prompts: int, response: int, prompt: int, steps: int) -> list[str]:
    return [
        f"model.path={model}",
        f"data.train_files=[{rows}]",
        f"data.train_batch_size={prompts}",
        f"actor.ppo_mini_batch_size={prompts}",
        f"data.max_prompt_length={prompt}",
        "data.truncation=left",
        f"data.max_response_length={response}",
        f"rollout.n={RESPONSES}",
        "algorithm.name=grpo",
        "algorithm.kl_placement=none",
        f"reward.name={REWARD}",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=0",
        "trainer.test_freq=0",
    ]


def write_rows(place: Place) -> Path:
    """The embedded rows with their first message lengthened to about PROMPT tokens, differently in each row."""
    from transformers import AutoTokenizer  # slow

    path, tokens = place.work / "rows.parquet", 300 if place.rehearse else PROMPT
    tokenizer = AutoTokenizer.from_pretrained(ROWS / "tokenizer")
    rows = pq.read_table(ROWS / "train.parquet").to_pylist()
    rows = rows[:64] if place.rehearse else rows
    filler = tokenizer(" ".join(row["prompt"][1]["content"] for row in rows[:200]))["input_ids"]
    for number, row in enumerate(rows):
        row["prompt"][0]["content"] += f"\n\nRecord {number}: "
        missing = max(0, tokens - len(tokenizer("".join(each["content"] for each in row["prompt"]))["input_ids"]))
        row["prompt"][0]["content"] += tokenizer.decode(filler[number : number + missing])
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _largest(rows: Sequence[dict[str, Any]], name: str) -> float:
    """NaN if a step has no finite value, or none has any."""
    values = [math.nan if row[name] is None else row[name] for row in rows if name in row]
    return math.nan if any(map(math.isnan, values)) else max(values, default=math.nan)
