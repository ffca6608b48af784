"""Records TRL's advantages and losses on small random arrays, in trl.json, with an interpreter that has TRL:

    python record_trl.py ../../../../dataset/mini/tokenizer

The trainer is TRL's own. Given log-probs and entropies take the place of its model's, and given rewards those of its
functions.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

PROMPTS, RESPONSES, LONGEST = 2, 4, 5
COUNT = PROMPTS * RESPONSES
NAMES = ("format", "correctness")
WEIGHTS = [1.0, 0.5]
BETA = 0.1
SETTINGS: dict[str, dict[str, Any]] = {
    "batch": {"scale_rewards": "batch"},
    "parts": {"multi_objective_aggregation": "normalize_then_sum"},
    "opsm": {"off_policy_mask_threshold": 0.5, "loss_type": "grpo"},
    "entropy": {"top_entropy_quantile": 0.2, "loss_type": "grpo"},
}


class Given(trl.GRPOTrainer):
    """With log-probs and entropies that are given."""

    advantages: Any = None

    def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
        return *self.given, None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        made = super()._generate_and_score_completions(inputs)
        self.advantages = made["advantages"]  # before they are shuffled
        return made

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return sum(each.sum() for each in model.parameters()) * 0.0


def trainer_of(tokenizer: Any, rewards: Any, settings: dict[str, Any]) -> Given:
    special = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        **special,
    )
    args = trl.GRPOConfig(
        tempfile.mkdtemp(),
        reward_weights=WEIGHTS,
        per_device_train_batch_size=COUNT,
        num_generations=RESPONSES,
        max_steps=1,
        max_completion_length=LONGEST,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        **settings,
    )
    rows = Dataset.from_list([{"prompt": word} for word in ("One", "Two")])
    return Given(Qwen2ForCausalLM(config), rewards, args, rows, processing_class=tokenizer)


def advantages(tokenizer: Any, settings: dict[str, Any], scores: dict[str, list[float]]) -> list[float]:
    def part(name: str) -> Any:
        def function(**_: Any) -> list[float]:
            return scores[name]

        return function

    trainer = trainer_of(tokenizer, [part(name) for name in NAMES], settings)
    trainer.train()
    return trainer.advantages.tolist()


def loss(tokenizer: Any, name: str, arrays: dict[str, torch.Tensor]) -> dict[str, Any]:
    trainer = trainer_of(tokenizer, [len, len], SETTINGS[name])
    logprobs = arrays["logprobs"].clone().requires_grad_()
    trainer.given = logprobs, arrays["entropies"]
    inputs = {
        "prompt_ids": torch.zeros(COUNT, 1, dtype=torch.long),
        "prompt_mask": torch.ones(COUNT, 1),
        "completion_ids": torch.zeros(COUNT, LONGEST, dtype=torch.long),
        "completion_mask": arrays["mask"],
        "advantages": arrays["advantages"],
        "old_per_token_logps": arrays["old"],
        "ref_per_token_logps": arrays["ref"],
    }
    trainer.model.train()
    trainer.beta = BETA if name == "opsm" else 0.0  # set here, as the setting would load a reference
    trainer.current_gradient_accumulation_steps = 1
    value = trl.GRPOTrainer._compute_loss(trainer, trainer.model, inputs)
    value.backward()
    gradient = logprobs.grad[arrays["mask"].bool()]
    return {"value": value.item(), "gradient": gradient.tolist()}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
    torch.manual_seed(3)
    scores = {name: torch.randn(COUNT).tolist() for name in NAMES}
    lengths = torch.tensor([5, 2, 3, 4, 1, 5, 3, 2])
    columns = {name: 0.5 * torch.randn(COUNT, LONGEST) - 1.0 for name in ("old", "ref")}
    drift = 0.4 * torch.randn(COUNT, LONGEST) - 0.9 * (torch.arange(COUNT) % 2)[:, None]
    arrays = {
        **columns,
        "logprobs": columns["old"] + drift,
        "entropies": torch.rand(COUNT, LONGEST),
        "mask": (torch.arange(LONGEST) < lengths[:, None]).float(),
        "advantages": torch.randn(COUNT),
    }
    flat = {name: arrays[name][arrays["mask"].bool()].tolist() for name in ("old", "ref", "logprobs", "entropies")}
    groups = torch.arange(PROMPTS).repeat_interleave(RESPONSES).tolist()
    text = {
        "version": trl.__version__,
        "given": {"parts": scores, "weights": WEIGHTS, "groups": groups},
        "tokens": {**flat, "lengths": lengths.tolist(), "advantages": arrays["advantages"].tolist()},
        "advantages": {name: advantages(tokenizer, SETTINGS[name], scores) for name in ("batch", "parts")},
        "loss": {name: loss(tokenizer, name, arrays) for name in ("opsm", "entropy")},
    }
    Path(__file__).with_name("trl.json").write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
