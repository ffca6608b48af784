"""Data for scripts/train_tool_loop.sh: products beyond a small model, and poor demonstrations.

    python scripts/tool_loop/make_data.py --out FOLDER [--seed 0]

Writes demonstrations.jsonl (for main_sft), train.jsonl and test.jsonl (for main_ppo). The files share no product.
Most demonstrations guess a number, some call Python: the SFT policy can call the tool, but prefers to guess.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

FORMS = (
    "What is {a} times {b}?",
    "Compute {a} * {b}.",
    "I want to know {a} times {b}.",
    "Tell me {a} * {b}.",  # words: allowed
)
LOWEST, HIGHEST = 100, 999
COUNTS = {"demonstrations": 6400, "train": 2000, "test": 100}
TOOL_SHARE = 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    numbers = range(LOWEST, HIGHEST + 1)
    pairs = draw.sample([(a, b) for a in numbers for b in numbers], sum(COUNTS.values()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count in COUNTS.items():
        taken, pairs = pairs[:count], pairs[count:]
        rows = [demonstration(a, b, draw) if name == "demonstrations" else task(a, b, draw) for a, b in taken]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (arguments.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def user_message(a: int, b: int, draw: random.Random) -> dict[str, str]:
    """The user's message."""
    return {"role": "user", "content": draw.choice(FORMS).format(a=a, b=b)}


def task(a: int, b: int, draw: random.Random) -> dict[str, object]:
    """A row for RL: the question and the gold number."""
    return {
        "data_source": "products",
        "prompt": [user_message(a, b, draw)],
        "reward_model": {"ground_truth": str(a * b)},
    }


def demonstration(a: int, b: int, draw: random.Random) -> dict[str, object]:
    """A conversation; the interpreter output is masked in training."""
    question = user_message(a, b, draw)
    if draw.random() > TOOL_SHARE:
        guess = draw.randrange(LOWEST**2, HIGHEST**2)
        return {"messages": [question, {"role": "assistant", "content": f"\\boxed{{{guess}}}"}]}
    output = f"\n<interpreter>\n{a * b}\n</interpreter>\n"
    response = {"role": "assistant", "content": f"<code>print({a}*{b})</code>{output}\\boxed{{{a * b}}}"}
    return {"messages": [question, response]}


if __name__ == "__main__":
    main()
