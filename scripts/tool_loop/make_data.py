"""Data of scripts/train_tool_loop.sh: products that a small model cannot work out, and demonstrations of how to ask.

    python scripts/tool_loop/make_data.py --out FOLDER [--seed 0]

Writes demonstrations.jsonl (for main_sft), train.jsonl and test.jsonl (for main_ppo). No product is in two of them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

FORMS = ("What is {a} times {b}?", "Compute {a} * {b}.", "I want to know {a} times {b}.", "Tell me {a} * {b}.")
LOWEST, HIGHEST = 100, 999
COUNTS = {"demonstrations": 2000, "train": 2000, "test": 100}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    pairs = draw.sample([(a, b) for a in range(LOWEST, HIGHEST + 1) for b in range(LOWEST, HIGHEST + 1)], 5000)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, count in COUNTS.items():
        taken, pairs = pairs[:count], pairs[count:]
        make = demonstration if name == "demonstrations" else task
        lines = (json.dumps(make(draw.choice(FORMS).format(a=a, b=b), a, b)) for a, b in taken)
        (arguments.out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def task(question: str, a: int, b: int) -> dict[str, object]:
    """A row to roll out: the question, and the number that is to be found."""
    return {
        "data_source": "products",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": str(a * b)},
    }


def demonstration(question: str, a: int, b: int) -> dict[str, object]:
    """A conversation; what the interpreter says in it is not learned."""
    heard = f"\n<interpreter>\n{a * b}\n</interpreter>\n"
    reply = {"role": "assistant", "content": f"<code>print({a}*{b})</code>{heard}\\boxed{{{a * b}}}"}
    return {"messages": [{"role": "user", "content": question}, reply]}


if __name__ == "__main__":
    main()
