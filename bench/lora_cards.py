"""Planned, not measured: the fewest GPUs of a node that train a model, or an adapter of it, its base in NF4 or not.

    python bench/lora_cards.py [--models 0.5B,1.5B,..]

Prints the table of docs/lora.md. Each cell is the smallest of 1, 2, 4 and 8 GPUs on which `toolrl plan` finds room for
GRPO with vLLM: prompts and responses of up to 1,024 tokens, packs of 4,096, all layers recomputed, no KL penalty. GPUs
train and generate alternately, with everything offloaded meanwhile; or half of them train and the others hold an engine
(s). An engine is split over as many GPUs as it needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from functools import cache

from shapes import QWEN2_5, qwen2

from toolrl.check.plan.cost import meta_model
from toolrl.check.plan.plan import Hardware, Lengths, Plan
from verl.build.algorithm import algorithm_of
from verl.config.load import load_config
from verl.config.schema import Config
from verl.lora import ALL_LINEAR, Lora, add_adapter
from verl.tracking.flops import DEVICES
from verl.workers.memory import ModelShape, shape_of
from verl.workers.model import PackedPolicy

CARDS: Mapping[str, str] = {"24 GB": "RTX 4090", "48 GB": "L40S", "80 GB": "H100", "141 GB": "H200"}
RANK, LENGTH = 32, 1024
SETTINGS = (
    *("algorithm.name=grpo", "algorithm.kl_placement=none", "rollout.n=8", "rollout.name=vllm"),
    *(f"data.max_prompt_length={LENGTH}", f"data.max_response_length={LENGTH}"),
    *("actor.max_tokens_per_pack=4096", "model.enable_gradient_checkpointing=true", "model.compute_dtype=bfloat16"),
    "actor.optim.lr=1e-5",  # does not matter here; without it each load with an adapter warns
)
NUM_GPUS = (1, 2, 4, 8)
TRAINED: Mapping[str, tuple[str, ...]] = {
    "full": (),
    "LoRA": (f"lora.rank={RANK}",),
    "LoRA, nf4": (f"lora.rank={RANK}", "lora.base_dtype=nf4"),
}


@cache
def configs(total: int, trained: str) -> list[tuple[str, Config]]:
    """(mark of the cell, configuration) of every way to use that many GPUs."""
    found = []
    for ranks, kind, mark in ((total, "colocated", ""), (total // 2, "separate", " (s)")):
        offload = ["actor.offload=all"] if kind == "colocated" else []
        for parallel in (each for each in NUM_GPUS if each <= ranks):
            split = [f"rollout.tensor_model_parallel_size={parallel}", f"rollout.placement={kind}"]
            overrides = [*SETTINGS, *TRAINED[trained], *offload, *split, f"trainer.n_gpus_per_node={ranks}"]
            found.append((mark, load_config(overrides)))
    return found


def shape(size: str, trained: str) -> ModelShape:
    """Of Qwen2.5 of this size."""
    config = qwen2(*QWEN2_5[size])
    model = meta_model(config, config.num_hidden_layers)
    if settings := TRAINED[trained]:
        add_adapter(model, Lora(RANK, float(RANK), (ALL_LINEAR,), nf4=len(settings) > 1))
    return shape_of(PackedPolicy(model), config)


def fewest(policy: ModelShape, trained: str, card: str) -> str:
    """The cell of a model, of what is trained, and of a card by its name in `toolrl plan`."""
    device = DEVICES[card]
    for total in NUM_GPUS:
        for mark, config in configs(total, trained):
            hardware, lengths = Hardware(card, device.memory_gib, device), Lengths(LENGTH, LENGTH, "maximum")
            if not Plan(config, algorithm_of(config), policy, None, lengths, hardware).violations():
                return f"{total}{mark}"
    return "more than 8"


def rows(sizes: list[str]) -> Iterator[list[str]]:
    for size in sizes:
        for trained in TRAINED:
            policy = shape(size, trained)
            yield [size, trained, *(fewest(policy, trained, card) for card in CARDS.values())]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(QWEN2_5))
    sizes = parser.parse_args().models.split(",")
    columns = ["model", "trained", *CARDS]
    for cells in (columns, ["---"] * len(columns), *rows(sizes)):
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
