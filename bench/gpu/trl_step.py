"""TRL's GRPOTrainer on the same machine: wall seconds of a step, with its own vLLM in the same process.

Its defaults apart from what makes the work the same as in bench/gpu/runs.py: sizes, no KL penalty, one optimizer step
per batch, reward. The median of all steps but the first counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import pyarrow.parquet as pq
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench.gpu.inputs import model_folder
from bench.gpu.measurements import Figures
from bench.gpu.place import RESPONSE, RESPONSES, Place
from bench.gpu.rewards import hashed
from bench.gpu.runs import write_rows

PROMPTS, STEPS = 64, 3
MICRO_BATCH = 8  # sequences per forward pass


class Clock(TrainerCallback):
    """Wall seconds of each step."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(time.perf_counter() - self._started)


class TRLStep:
    """Needs TRL and vLLM."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def trl(self) -> Figures:
        """The time of a step grows with the prompts: compare it per prompt."""
        rehearse, model, clock = self.place.rehearse, model_folder(self.place), Clock()
        prompts, response = (4, 8) if rehearse else (PROMPTS, RESPONSE)
        rows = pq.read_table(write_rows(self.place)).to_pylist()
        micro = min(MICRO_BATCH, prompts * RESPONSES)
        with tempfile.TemporaryDirectory() as folder:
            config = GRPOConfig(
                output_dir=folder,
                use_cpu=rehearse,
                report_to=[],
                save_strategy="no",
                max_steps=STEPS,
                per_device_train_batch_size=micro,
                gradient_accumulation_steps=prompts * RESPONSES // micro,
                num_generations=RESPONSES,
                max_completion_length=response,
                generation_kwargs={"min_new_tokens": response} if rehearse else {"ignore_eos": True},
                bf16=True,
                beta=0.0,
                use_vllm=not rehearse,
                vllm_mode="colocate",
                vllm_enable_sleep_mode=True,
                model_init_kwargs={"dtype": "bfloat16" if rehearse else "float32"},
            )
            trainer = GRPOTrainer(
                model=str(model),
                reward_funcs=rewards,
                args=config,
                callbacks=[clock],
                train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
                processing_class=AutoTokenizer.from_pretrained(model),
            )
            trainer.train()
        return {"TRL, a step: s": statistics.median(clock.steps[1:]), "prompts": prompts}


def rewards(completions: list[Any], **_: Any) -> list[float]:
    return [hashed(each[0]["content"], "") for each in completions]
