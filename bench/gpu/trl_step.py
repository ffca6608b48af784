"""TRL's GRPOTrainer on the same machine: wall seconds of a step, with its own vLLM in the same process.

    bash bench/gpu/first_hour.sh trl-64

Its defaults apart from what makes the work the same as in bench/gpu/train_step.py: sizes, no KL penalty, one optimizer
step per batch, reward. The median of all steps but the first counts.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

from piece import NO_CARD, PROMPT, RESPONSE, RESPONSES, Piece, random_folder, start
from rewards import hashed
from train_step import STEPS, write_rows

MICRO_BATCH = 8  # sequences per forward pass


def rewards(completions: list[Any], **_: Any) -> list[float]:
    return [hashed(each[0]["content"], "") for each in completions]


def measure(piece: Piece, size: str, prompts: int) -> dict[str, float]:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        steps: list[float] = []  # noqa: RUF012  one trainer

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self._started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.steps.append(time.perf_counter() - self._started)

    import pyarrow.parquet as pq

    model, response = random_folder(piece, size), 8 if piece.rehearse else RESPONSE
    rows = pq.read_table(write_rows(piece, model, 300 if piece.rehearse else PROMPT)).to_pylist()
    micro = min(MICRO_BATCH, prompts * RESPONSES)
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=piece.rehearse,
            report_to=[],
            save_strategy="no",
            max_steps=STEPS,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=prompts * RESPONSES // micro,
            num_generations=RESPONSES,
            max_completion_length=response,
            generation_kwargs={"min_new_tokens": response} if piece.rehearse else {"ignore_eos": True},
            bf16=True,
            beta=0.0,
            use_vllm=not piece.rehearse,
            vllm_mode="colocate",
            vllm_enable_sleep_mode=True,
            model_init_kwargs={"dtype": "bfloat16" if piece.rehearse else "float32"},
        )
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=rewards,
            args=config,
            callbacks=[Clock()],
            train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.train()
    return {"TRL, a step: s": statistics.median(Clock.steps[1:]), "prompts": prompts}


if __name__ == "__main__":
    piece, arguments = start(
        __doc__, "an NVIDIA GPU, TRL and vLLM", size={"default": "1.5B"}, prompts={"type": int, "default": 64}
    )
    if find_spec("trl") is None:
        print(f"{piece.name}: needs TRL, which this Python lacks", file=sys.stderr)
        raise SystemExit(NO_CARD)
    piece.write(measure(piece, piece.size(arguments.size), 4 if piece.rehearse else arguments.prompts))
