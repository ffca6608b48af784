"""Orders in a shop for bench/algorithms/study.py: the environment, its rows, and demonstrations that mostly fail.

    python bench/algorithms/shop.py --out FOLDER

Writes demonstrations.jsonl (for main_sft), train.jsonl and test.jsonl (for main_ppo), and prompt.txt. No order of the
test is in another file. Most demonstrations forget to pay, or leave out a product: the policy knows the tools, and
rarely ends an order well.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from verl.envs.tools.signature import read_signature
from verl.formats.prompt import function_schema

PROMPT = "{tools}\n"
PRODUCTS = [f"{letter}{digit}" for letter in ascii_uppercase for digit in range(10)]
COUNTS = {"test": 100, "demonstrations": 4800, "train": 1000}
NO_PAYMENT, LEFT_OUT = 0.7, 0.5  # shares of demonstrations


class Shop:
    """A cart, and a purchase that cannot be changed: the contract of docs/environments.md, "A plain class"."""

    def reset(self, order: dict[str, int]) -> None:
        self._order = order
        self._cart: dict[str, int] = {}
        self._paid: dict[str, int] | None = None

    def put(self, id: str, number: int) -> str:
        """Into the cart."""
        if number < 1:
            raise ValueError("nothing to put")
        self._cart[id] = self._cart.get(id, 0) + number
        return "ok"

    def pay(self) -> str:
        """For the cart."""
        if self._paid is not None:
            raise ValueError("paid already")
        self._paid = dict(self._cart)
        return "ok"

    def get_reward(self) -> float:
        return float(self._paid == self._order)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    (out / "prompt.txt").write_text(PROMPT, encoding="utf-8")
    draw = random.Random(0)
    held_out: set[frozenset[tuple[str, int]]] = set()
    for name, count in COUNTS.items():
        new = (order for order in iter(lambda: new_order(draw), None) if frozenset(order.items()) not in held_out)
        orders = list(islice(new, count))
        if name == "test":
            held_out = {frozenset(order.items()) for order in orders}
        rows = [demonstration(order, draw) if name == "demonstrations" else task(order) for order in orders]
        (out / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def new_order(draw: random.Random) -> dict[str, int]:
    """One to three products and how many of each."""
    return {product: draw.randrange(1, 10) for product in draw.sample(PRODUCTS, draw.randrange(1, 4))}


def question(order: dict[str, int]) -> dict[str, str]:
    return {"role": "user", "content": f"Buy {', '.join(f'{number} x {id}' for id, number in order.items())}."}


def task(order: dict[str, int]) -> dict[str, Any]:
    """A row for RL."""
    return {"data_source": "shop", "prompt": [question(order)], "extra_info": {"order": order}}


def demonstration(order: dict[str, int], draw: random.Random) -> dict[str, Any]:
    """A conversation in OpenAI's form."""
    messages: list[dict[str, Any]] = [question(order)]
    for number, calls in enumerate(turns(order, draw)):
        named = {f"call_{number}_{place}": call for place, call in enumerate(calls)}
        functions = {id: {"name": name, "arguments": json.dumps(arguments)} for id, (name, arguments) in named.items()}
        written = [{"id": id, "type": "function", "function": function} for id, function in functions.items()]
        messages.append({"role": "assistant", "content": "", "tool_calls": written})
        messages += [{"role": "tool", "tool_call_id": id, "content": "ok"} for id in named]
    messages.append({"role": "assistant", "content": "Done."})
    tools = [read_signature(function)[0] for function in (Shop.put, Shop.pay)]
    return {"messages": messages, "tools": [function_schema(tool) for tool in tools]}


def turns(order: dict[str, int], draw: random.Random) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """The calls of each turn."""
    products = [*order]
    if len(products) > 1 and draw.random() < LEFT_OUT:
        products.remove(draw.choice(products))
    yield [("put", {"id": id, "number": order[id]}) for id in products]
    if draw.random() >= NO_PAYMENT:
        yield [("pay", {})]


if __name__ == "__main__":
    main()
