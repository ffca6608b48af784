"""Train a small Qwen2 from nothing on composed tasks.

    python scripts/pretrain_composed.py --tokenizer dataset/composed/tokenizer --out dataset/composed/model

First on right demonstrations, then on those with mistakes, which are what reinforcement learning can undo. Tasks are
drawn on the fly and never repeat. Prints how many golds of held-out tools the model would answer greedily.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from random import Random

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from scripts.composed.circuits import init_copying
from scripts.composed.mistakes import Mistakes
from scripts.composed.muon import Muon
from scripts.composed.pretraining import batches, exact_shares, loss_of
from scripts.composed.tasks import Source, Task

_TOKENS = 4096  # of a batch
_PROMPT_WEIGHT = 0.2  # requests repeat terms of listed tools: predicting them teaches to copy
_ANY_TERMS = 0.4
_LR, _MUON_LR, _WARMUP_STEPS, _LAST_LR = 3e-3, 0.02, 40, 0.02  # the last as a share


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True, help="of make_composed_dataset.py")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--init", type=Path, help="a model to continue with")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--right-share", type=float, default=0.8, help="of the steps, on right demonstrations")
    parser.add_argument("--report-steps", type=int, default=250, help="steps between reports")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    if args.init:
        model = Qwen2ForCausalLM.from_pretrained(args.init, dtype=torch.float32, attn_implementation="eager")
    else:
        model = _untrained(tokenizer, args.seed)
    print(f"{sum(each.numel() for each in model.parameters()):,} parameters")
    random, step = Random(args.seed), 0
    right, careless = Mistakes(random, scale=0.0), Mistakes(random)

    def demonstrate(task: Task) -> str:
        return (right if step < args.right_share * args.steps else careless).demonstrate(task)

    stream = batches(tokenizer, Source(random, any_terms=_ANY_TERMS), random, demonstrate, _TOKENS)
    optimizers, begin = _optimizers(model), time.monotonic()
    for step in range(args.steps):
        _set_rates(optimizers, step, args.steps)
        with torch.autocast("cpu", torch.bfloat16):  # four times as fast as float32 where the CPU has bfloat16
            loss, response_loss = loss_of(model, next(stream), _PROMPT_WEIGHT)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        if (step + 1) % args.report_steps == 0:
            shares = exact_shares(model, tokenizer, Source(Random(1), held_out=True, new_tools=True), 256)
            shown = " ".join(f"{family} {share:.2f}" for family, share in shares.items())
            print(f"{step + 1} {time.monotonic() - begin:.0f} s loss {response_loss:.3f} exact {shown}", flush=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


def _untrained(tokenizer: AutoTokenizer, seed: int) -> Qwen2ForCausalLM:
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=160,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=5,
            num_key_value_heads=5,
            max_position_embeddings=1024,
            initializer_range=0.06,
            rope_theta=10000.0,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            attn_implementation="eager",  # its backward pass is several times as fast in bfloat16 on a CPU
        )
    )
    init_copying(model, torch.Generator().manual_seed(seed))
    return model


def _optimizers(model: Qwen2ForCausalLM) -> tuple[torch.optim.Optimizer, ...]:
    """Muon for the layers' matrices, AdamW for all else."""
    named = dict(model.named_parameters())
    matrices = {name: each for name, each in named.items() if each.ndim == 2 and "embed" not in name}
    others = [each for name, each in named.items() if name not in matrices]
    adam = torch.optim.AdamW(others, lr=_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return adam, Muon(matrices.values(), lr=_MUON_LR)


def _set_rates(optimizers: tuple[torch.optim.Optimizer, ...], step: int, steps: int) -> None:
    """A warm-up, then a cosine."""
    cosine = _LAST_LR + (1 - _LAST_LR) * (1 + math.cos(math.pi * step / steps)) / 2
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            peak = group.setdefault("peak", group["lr"])
            group["lr"] = peak * min(1.0, (step + 1) / _WARMUP_STEPS) * cosine


if __name__ == "__main__":
    main()
