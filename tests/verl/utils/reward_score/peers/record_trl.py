"""Records what TRL hands to a reward function, in trl.json, with an interpreter that has TRL:

    python record_trl.py ../../../../dataset/mini/tokenizer [CASE ..]

Without names all cases are recorded. The trainer is TRL's own; a case's responses take the place of its generation.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import trl
from datasets import Dataset
from tools import KINDS, WEIGHTS, Counter, facts, weather
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from trl.chat_template_utils import qwen3_template

HERE = Path(__file__).parent
GIVEN = json.loads((HERE / "cases.json").read_text())


class Played(trl.GRPOTrainer):
    texts: list[str]
    rewards: Any = None

    def _generate_single_turn(self, prompt_ids: list[Any], *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        ids = self.processing_class(self.texts.pop(0), add_special_tokens=False)["input_ids"]
        return [list(ids) for _ in prompt_ids], None

    def _calculate_rewards(self, *given: Any) -> Any:
        self.rewards = super()._calculate_rewards(*given)
        return self.rewards


def train(case: dict[str, Any], tokenizer: Any, rewards: Any, weights: Any = None) -> Played:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    args = trl.GRPOConfig(
        tempfile.gettempdir(),
        reward_weights=weights,
        per_device_train_batch_size=2,
        num_generations=2,
        max_steps=1,
        max_completion_length=512,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    trainer = Played(
        Qwen2ForCausalLM(config),
        rewards,
        args,
        Dataset.from_list([{"prompt": case["prompt"], **case["columns"]}] * 2),
        processing_class=tokenizer,
        tools=[weather, facts] if case.get("tools") else None,
        environment_factory=Counter if case.get("environment") else None,
    )
    end = "" if case.get("cut") else tokenizer.eos_token
    trainer.texts = [text + end for text in case["responses"]]
    trainer.train()
    return trainer


def record(case: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    seen: list[dict[str, Any]] = []

    def reward(**given: Any) -> list[float]:
        state = given.pop("trainer_state")
        shown = {name: "a function" if callable(value) else value[0] for name, value in given.items()}
        seen.append({**shown, "trainer_state": {"global_step": state.global_step}})
        return [0.0, 1.0]

    train(case, tokenizer, reward)
    (given,) = seen
    if "environments" in given:
        given["environments"] = vars(given["environments"])
    return given


def tokenizer_of(case: dict[str, Any]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
    tokenizer.chat_template = GIVEN["template"]
    if case.get("tools") or case.get("environment"):  # TRL sets it then, for the chat templates that it knows
        tokenizer.response_template = qwen3_template
    return tokenizer


def record_kinds(case: dict[str, Any]) -> dict[str, Any]:
    """What TRL makes of the results of functions of all kinds, and of their weighted sum."""
    trainer = train(case, tokenizer_of(case), list(KINDS), WEIGHTS)
    rewards = trainer.rewards[0]
    total = (rewards * trainer.reward_weights).nansum().item()
    listed = [None if each.isnan() else each.item() for each in rewards]
    return {"names": trainer.reward_func_names, "rewards": listed, "total": total}


def main() -> None:
    made = json.loads((HERE / "trl.json").read_text())["given"] if sys.argv[2:] else {}
    for case in GIVEN["cases"]:
        if not sys.argv[2:] or case["name"] in sys.argv[2:]:
            made[case["name"]] = record(case, tokenizer_of(case))
    kinds = record_kinds(GIVEN["cases"][1])
    text = {"version": trl.__version__, "given": made, "kinds": kinds}
    (HERE / "trl.json").write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
