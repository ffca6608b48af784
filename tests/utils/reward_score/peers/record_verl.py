"""Records what veRL's reward managers hand to a reward function, in verl.json, with veRL's package first on the path:

    PYTHONPATH=FOLDER_OF_VERL python record_verl.py ../../../../dataset/mini/tokenizer

The episode is the case "a call" of cases.json, as veRL's agent loop leaves it in a batch.
"""

import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls as of_loop
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.workers.reward_manager import get_reward_manager_cls, prime

import verl
from verl import DataProto

HERE = Path(__file__).parent
TEXTS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
    "\n<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n",
    "Rain.<|im_end|>",
)
QUESTION = [{"role": "user", "content": "Rain in Oslo?"}]
ADDED = {"turn_scores": [], "tool_rewards": [], "raw_prompt": QUESTION}  # by the agent loop
FOUND = {"score": 1.0, "acc": True, "pred": "Rain."}


class Threads(ThreadPoolExecutor):
    """In place of the processes of the manager `prime`, which would record for themselves."""

    _processes: ClassVar[dict[int, Any]] = {}


class Seen:
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.given, self.named = plain(given), plain(named)
        return self.answer


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, np.generic | torch.Tensor) else value


def batch(tokenizer: Any) -> DataProto:
    response = [token for text in TEXTS for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    prompt = tokenizer("<|im_start|>user\nRain in Oslo?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    padding = [tokenizer.pad_token_id] * 3
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([padding + prompt]),
            "responses": torch.tensor([response + padding]),
            "attention_mask": torch.tensor([[0] * 3 + [1] * (len(prompt) + len(response)) + [0] * 3]),
        },
        non_tensors={
            "data_source": np.array(["weather"], dtype=object),
            "reward_model": np.array([{"style": "rule", "ground_truth": "Rain."}], dtype=object),
            "extra_info": np.array([{"index": 7, "split": "train"}], dtype=object),
            "__num_turns__": np.array([4], dtype=np.int32),
            "tool_extra_fields": np.array([ADDED], dtype=object),
        },
    )


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    made: dict[str, Any] = {}
    for name in ("naive", "dapo"):
        seen = Seen(FOUND)
        manager = of_loop(name)(OmegaConf.create({"reward": {"reward_kwargs": {}}}), tokenizer, seen)
        found = manager.loop.run_until_complete(manager.run_single(batch(tokenizer)))
        made[f"loop {name}"] = {"named": seen.named, "found": plain(found)}
    prime.ProcessPoolExecutor = Threads
    options = {"batch": {"strict": True}}
    answers = {"batch": [FOUND], "prime": (1.0, "first")}
    for name in ("naive", "dapo", "batch", "prime"):
        seen = Seen(answers.get(name, FOUND))
        manager = get_reward_manager_cls(name)(
            tokenizer=tokenizer, num_examine=0, compute_score=seen, **options.get(name, {})
        )
        found = manager(batch(tokenizer), return_dict=True)
        reward = found["reward_tensor"].sum().item()
        made[name] = {"given": seen.given, "named": seen.named, "reward": reward}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "mine.py")
        file.write_text("def mine(**given):\n    return given\n")
        own = {"path": str(file), "name": "mine", "reward_kwargs": {"strict": True, "data_source": "ours"}}
        function = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": own}}))
        made["reward_kwargs"] = function(data_source="theirs", solution_str="Rain.")
    (HERE / "verl.json").write_text(json.dumps({"version": verl.__version__, "given": made}, indent=1) + "\n")


if __name__ == "__main__":
    main()
