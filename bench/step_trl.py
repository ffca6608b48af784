"""TRL's side of bench/step.py: GRPOTrainer with its public options, with timers around its own methods."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from accelerate.utils import AutocastKwargs
from common import answer, cpu_seconds, requests
from datasets import Dataset
from local import LEARNING_RATE
from step import MICRO_BATCH, CheckRows, Spec, check_rows, first_tasks, reward
from torch.nn.utils import clip_grad_norm_
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import utils as trl_utils

from verl.chat.template import ChatTemplate

VLLM_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class Steps(TrainerCallback):
    """Waits for a request before each step and answers it after the step."""

    def __init__(self, incoming: Iterator[Any]) -> None:
        self._requests = incoming
        self.spent: Counter[str] = Counter()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        next(self._requests)
        self.spent.clear()
        self._started = cpu_seconds()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        step = cpu_seconds() - self._started
        prepared, rollout = self.spent["prepared"], self.spent["rollout"]  # rollout is part of prepared
        answer({"step": step, "rollout": rollout, "score": prepared - rollout, "update": step - prepared})

    def timed(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`work`, with its CPU seconds added to `name`."""

        def counted(*args: Any, **options: Any) -> Any:
            started = cpu_seconds()
            result = work(*args, **options)
            self.spent[name] += cpu_seconds() - started
            return result

        return counted


def rewards(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """The reward function of our side."""
    return [reward(each[0]["content"], gold) for each, gold in zip(completions, answer, strict=True)]


def build_trainer(spec: Spec, chat: ChatTemplate, steps: Steps, folder: str) -> GRPOTrainer:
    """The trainer as a user would configure it, with timers."""
    tasks = first_tasks(spec, chat, spec.prompts * (spec.rounds + 1))
    rows = [{"prompt": [{"role": m.role, "content": m.content} for m in t.prompt], "answer": t.answer} for t in tasks]
    on_vllm = spec.rollout == "vllm"
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        max_steps=spec.rounds + 1,
        shuffle_dataset=False,
        seed=0,
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=spec.prompts * spec.n // MICRO_BATCH,
        num_generations=spec.n,
        max_completion_length=spec.response,
        generation_kwargs={"ignore_eos": True} if on_vllm else {"min_new_tokens": spec.response},
        temperature=1.0,
        bf16=True,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="grpo",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        model_init_kwargs={"dtype": "bfloat16"},
        use_vllm=on_vllm,
        vllm_mode="colocate",
        vllm_importance_sampling_correction=False,  # needs a pass that our side does not have either
        vllm_max_model_length=spec.max_prompt + spec.response,
    )
    trainer = GRPOTrainer(
        model=spec.model,
        reward_funcs=rewards,
        args=config,
        callbacks=[steps],
        train_dataset=Dataset.from_list(rows),
        processing_class=chat.tokenizer,
    )
    if on_vllm:
        trainer.vllm_generation.sync_weights = lambda: reload_weights(trainer)
    trainer._generate_single_turn = steps.timed(trainer._generate_single_turn, "rollout")
    trainer._generate_and_score_completions = steps.timed(trainer._generate_and_score_completions, "prepared")
    return trainer


def reload_weights(trainer: GRPOTrainer) -> None:
    """Weight sync to the colocated engine. On CPU vLLM drops the unpacked weights, which TRL's own sync needs.

    A tied head has its own packed copy, which is only updated if it is listed.
    """
    model, llm = trainer.model, trainer.vllm_generation.llm
    weights = ((name, each.detach()) for name, each in model.named_parameters(remove_duplicate=False))
    llm.llm_engine.model_executor.driver_worker.model_runner.reload_weights(weights_iterator=weights)
    llm.reset_prefix_cache()


def check(spec: Spec, trainer: GRPOTrainer, chat: ChatTemplate, old_logprobs: list[list[float]]) -> dict[str, float]:
    """Loss and gradient norm of the common batch, temporarily in float32."""
    model = trainer.model.eval()  # in train mode the loss is divided by the number of micro-batches
    mixed, trainer.accelerator.autocast_handler = trainer.accelerator.autocast_handler, AutocastKwargs(enabled=False)
    cast(model, torch.float32)
    loss = trainer.compute_loss(model, padded(check_rows(spec, chat), old_logprobs))
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), float("inf"))
    model.zero_grad()
    cast(model, torch.bfloat16)
    trainer.accelerator.autocast_handler = mixed
    return {"loss": loss.item(), "grad_norm": norm.item()}


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, not the buffers."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def padded(rows: CheckRows, old_logprobs: list[list[float]]) -> dict[str, torch.Tensor]:
    """A batch as TRL lays it out: prompts padded on the left."""
    prompts, responses, advantages = zip(*rows, strict=True)
    pads = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    return {
        "prompt_ids": torch.tensor([(0,) * pad + prompt for pad, prompt in zip(pads, prompts, strict=True)]),
        "prompt_mask": torch.tensor([(0,) * pad + (1,) * len(each) for pad, each in zip(pads, prompts, strict=True)]),
        "completion_ids": torch.tensor(responses),
        "completion_mask": torch.ones(len(responses), len(responses[0]), dtype=torch.long),
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": torch.tensor(old_logprobs),
        "importance_sampling_ratio": torch.ones(len(responses), len(responses[0])),
    }


def main() -> None:
    """Check, then train the given number of steps."""
    os.environ.update(VLLM_VARIABLES)
    torch.set_num_threads(1)
    spec = Spec(**json.loads(sys.argv[1]))
    if spec.trl_head == "responses":  # TRL has no option for it: it decides by the device
        trl_utils._use_triton = lambda device: True  # of this module alone: the loss itself keeps its code for CPUs
    chat = ChatTemplate(AutoTokenizer.from_pretrained(spec.model))
    incoming = requests()
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(spec, chat, Steps(incoming), folder)
        for request in islice(incoming, 1):
            answer(check(spec, trainer, chat, request["old_logprobs"]))
            trainer.train()


if __name__ == "__main__":
    main()
