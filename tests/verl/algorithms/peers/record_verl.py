"""Records veRL's advantages of rewards with two parts, in verl.json, with veRL's package first on the path:

PYTHONPATH=FOLDER_OF_VERL python record_verl.py
"""

import json
from pathlib import Path

import numpy as np
import torch
from verl.trainer.ppo.core_algos import compute_gdpo_outcome_advantage

import verl

LENGTHS = (3, 1, 4, 2, 2, 3)
GROUPS = (0, 0, 0, 1, 1, 1)
PARTS = ("format", "correctness")
WEIGHTS = (1.0, 0.5)


def main() -> None:
    draws = np.random.default_rng(7)
    scores = {name: draws.normal(size=len(LENGTHS)).astype(np.float32) for name in PARTS}
    longest = max(LENGTHS)
    mask = torch.tensor([[float(place < length) for place in range(longest)] for length in LENGTHS])
    batch = {
        "prompts": torch.zeros(len(LENGTHS), 1),
        "attention_mask": torch.cat([torch.ones(len(LENGTHS), 1), mask], dim=1).long(),
    }
    config = {"gdpo_reward_keys": PARTS, "gdpo_reward_weights": WEIGHTS}
    found, _ = compute_gdpo_outcome_advantage(
        mask, mask, np.array(GROUPS), config=config, non_tensor_batch=scores, batch=batch
    )
    by_name = {name: values.tolist() for name, values in scores.items()}
    given = {"lengths": LENGTHS, "groups": GROUPS, "parts": by_name, "weights": WEIGHTS}
    text = {"version": verl.__version__, "gdpo": {**given, "advantages": found[mask.bool()].tolist()}}
    Path(__file__).with_name("verl.json").write_text(json.dumps(text, indent=1) + "\n")


if __name__ == "__main__":
    main()
