"""Whole GRPO steps of `toolrl train`: seconds by phase, MFU, canary, and memory beside the plan.

    bash bench/gpu/first_hour.sh canary step-0.5B step-1.5B ours-64

A model with random weights, unless --model names one; 4 responses of 250 tokens to prompts of about 900. No KL penalty,
one optimizer step. The median of all steps but the first counts.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from piece import PROMPT, RESPONSE, RESPONSES, ROOT, Piece, random_folder, start
from transformers import AutoTokenizer

from verl.config.load import load_config
from verl.kit.plan.plan import plan_of_run
from verl.tracking.jsonl import read_jsonl
from verl.trainer.builders.run import load_inputs

STEPS = 4
SHOWN = ("time/", "perf/", "memory/", "engine/", "response_length/mean")  # metrics of a step


def write_rows(piece: Piece, model: Path, tokens: int) -> Path:
    """The embedded rows with their first message lengthened to about `tokens` tokens, differently in each row."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pq.read_table(ROOT / "dataset/mini/train.parquet").to_pylist()
    filler = tokenizer(" ".join(row["prompt"][1]["content"] for row in rows[:200]))["input_ids"]
    for number, row in enumerate(rows):
        row["prompt"][0]["content"] += f"\n\nRecord {number}: "
        missing = max(0, tokens - len(tokenizer("".join(each["content"] for each in row["prompt"]))["input_ids"]))
        row["prompt"][0]["content"] += tokenizer.decode(filler[number : number + missing])
    path = piece.out / f"rows-{piece.name}.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def words_of(piece: Piece, model: Path, rows: Path, prompts: int, response: int, prompt: int) -> list[str]:
    on_cpu = ("trainer.device=cpu", "model.compute_dtype=float32") if piece.rehearse else ()
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
        f"reward.name={ROOT / 'bench/gpu/rewards.py'}:hashed",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.default_local_dir={piece.out / 'runs'}",
        f"trainer.experiment_name={piece.name}",
        "trainer.save_freq=0",
        "trainer.test_freq=0",
        *on_cpu,
    ]


def measure(piece: Piece, words: list[str]) -> dict[str, float]:
    """Of a new run: one that an earlier call left would be resumed, and its figures taken for this call's."""
    config, run = load_config(words), piece.out / "runs" / piece.name
    if run.exists():
        shutil.rmtree(run)
    planned = plan_of_run(config, load_inputs(config)).peak_gib()
    subprocess.run([sys.executable, "-m", "verl.trainer.main_ppo", *words], check=True, cwd=ROOT)
    rows = read_jsonl(run / "metrics.jsonl")[1:]
    names = [name for name in rows[-1] if name.startswith(SHOWN)]
    figures = {name: statistics.median(row[name] for row in rows if name in row) for name in names}
    return {**figures, "planned: memory/trainer_gib": planned, "prompts": config.data.train_batch_size}


if __name__ == "__main__":
    piece, arguments = start(
        __doc__,
        "an NVIDIA GPU and vLLM",
        size={"default": "1.5B"},
        model={"type": Path, "help": "a model folder instead of random weights"},
        prompts={"type": int, "default": 512},
    )
    model = (
        arguments.model if arguments.model and not piece.rehearse else random_folder(piece, piece.size(arguments.size))
    )
    prompt, response, prompts = (400, 8, 4) if piece.rehearse else (PROMPT + 124, RESPONSE, arguments.prompts)
    rows = write_rows(piece, model, 300 if piece.rehearse else PROMPT)
    piece.write(measure(piece, words_of(piece, model, rows, prompts, response, prompt)))
