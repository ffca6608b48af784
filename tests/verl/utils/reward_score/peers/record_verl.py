"""Records what veRL's reward managers hand to a reward function, in verl.json, with veRL's package first on the path:

    PYTHONPATH=FOLDER_OF_VERL python record_verl.py ../../../../dataset/mini/tokenizer

The episode is the case "a call" of cases.json, as veRL's agent loop leaves it in a batch.
"""

import asyncio
import copy
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


ROWS: dict[str, dict[str, Any]] = {  # what a row can hold, beside its prompt and its data source
    "nothing": {"ground_truth": "Rain."},
    "nested": {
        "ground_truth": "Rain.",
        "extra_info": {"a": {"b": [1, None, {"c": "ü"}]}, "hint": None, "big": 2**53 + 1},
    },
    "a dict": {"ground_truth": {"target": ["Rain."], "at": None}, "extra_info": {"index": 1}},
    "a list": {"ground_truth": ["Rain.", "rain"], "extra_info": {"answer": ["x", "y"]}},
    "a number": {"ground_truth": 7, "extra_info": {"split": "test"}},
    "a fraction": {"ground_truth": 0.5, "extra_info": {}},
    "a boolean": {"ground_truth": True, "extra_info": {"index": 0}},
    "a name of its own": {"ground_truth": "Rain.", "extra_info": {"num_turns": 99}},
}
RESULTS: dict[str, Any] = {
    "an integer": 1,
    "a boolean": True,
    "a scalar": np.float32(0.5),
    "a tensor": torch.tensor(0.25),
    "None beside the score": {"score": 0.5, "pred": None, "acc": np.bool_(True), "parts": [1, 2]},
    "a score that is a scalar": {"score": np.int64(2), "format": np.float64(0.5)},
    "a dict without a score": {"acc": 1.0},
    "a text": "1.0",
    "none": None,
    "a list": [1.0],
}


def batch(tokenizer: Any, row: dict[str, Any] | None = None) -> DataProto:
    response = [token for text in TEXTS for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    prompt = tokenizer("<|im_start|>user\nRain in Oslo?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    padding = [tokenizer.pad_token_id] * 3
    given = row or {"ground_truth": "Rain.", "extra_info": {"index": 7, "split": "train"}}
    extra = given.get("extra_info") or {}  # veRL's data set does the same
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([padding + prompt]),
            "responses": torch.tensor([response + padding]),
            "attention_mask": torch.tensor([[0] * 3 + [1] * (len(prompt) + len(response)) + [0] * 3]),
        },
        non_tensors={
            "data_source": np.array(["weather"], dtype=object),
            "reward_model": np.array([{"style": "rule", "ground_truth": given["ground_truth"]}], dtype=object),
            "extra_info": np.array([copy.deepcopy(extra)], dtype=object),
            "__num_turns__": np.array([4], dtype=np.int32),
            "tool_extra_fields": np.array([ADDED], dtype=object),
        },
    )


def in_loop(tokenizer: Any, row: dict[str, Any] | None, function: Any) -> Any:
    asyncio.set_event_loop(asyncio.new_event_loop())
    manager = of_loop("naive")(OmegaConf.create({"reward": {"reward_kwargs": {}}}), tokenizer, function)
    return manager.loop.run_until_complete(manager.run_single(batch(tokenizer, row)))


def of_results(tokenizer: Any) -> dict[str, Any]:
    """The score that veRL's managers trained on for each kind of result; null where one raises."""
    made = {}
    for name, result in RESULTS.items():
        manager = get_reward_manager_cls("naive")(tokenizer=tokenizer, num_examine=0, compute_score=Seen(result))
        try:
            made[name] = manager(batch(tokenizer), return_dict=True)["reward_tensor"].sum().item()
        except (TypeError, ValueError, KeyError, RuntimeError):
            made[name] = None
    return made


def of_forms(tokenizer: Any) -> dict[str, Any]:
    """What functions of other signatures got, or the error."""
    seen: dict[str, Any] = {}

    async def coroutine(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any = None) -> float:
        seen["coroutine"] = [data_source, solution_str, ground_truth]
        return 0.75

    def takes_all(**given: Any) -> float:
        seen["takes all"] = sorted(given)
        return 0.5

    def more(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any, strict: bool = True) -> float:
        seen["more"] = strict
        return 0.25

    def less(data_source: Any, solution_str: Any, ground_truth: Any) -> float:
        return 0.0

    made: dict[str, Any] = {}
    for function in (coroutine, takes_all, more, less):
        try:
            made[function.__name__] = in_loop(tokenizer, None, function)["reward_score"]
        except TypeError as error:
            made[function.__name__] = type(error).__name__
    return {"found": made, "seen": seen}


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
    rows = {}
    for name, row in ROWS.items():
        seen = Seen(1.0)
        in_loop(tokenizer, row, seen)
        rows[name] = {"row": row, "named": seen.named}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "mine.py")
        file.write_text("def mine(**given):\n    return given\n")
        own = {"path": str(file), "name": "mine", "reward_kwargs": {"strict": True, "data_source": "ours"}}
        function = get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": own}}))
        made["reward_kwargs"] = function(data_source="theirs", solution_str="Rain.")
    more = {"rows": rows, "results": of_results(tokenizer), "forms": of_forms(tokenizer)}
    text = {"version": verl.__version__, "given": made, **more}
    (HERE / "verl.json").write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
