"""Train a small Qwen2 from nothing on composed tasks: python scripts/pretrain_composed.py --tokenizer FOLDER --out FOLDER

Tasks are drawn on the fly and never repeat. The loss covers the response, and with a weight the prompt. Prints how many
responses to held-out rows are exactly right (teacher-forced).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout that is not installed, too

from scripts.composed.circuits import init_copying
from scripts.composed.mistakes import Mistakes
from scripts.composed.muon import Muon
from scripts.composed.rows import as_row
from scripts.composed.tasks import Source
from scripts.mini.tokenizer import chat_text

IGNORED = -100
ROWS_DRAWN = 768  # at a time, to sort them by length


class Encoder:
    def __init__(self, tokenizer) -> None:
        self.backend = tokenizer.backend_tokenizer
        self.end = tokenizer.eos_token_id

    def encode(self, pairs):
        """(prompt ids, response ids) of (task, response) pairs"""
        rows = [as_row(task, response, "", 0) for task, response in pairs]
        prompts = self.backend.encode_batch([chat_text(row, with_response=False) for row in rows])
        answers = self.backend.encode_batch([response + "<|im_end|>" for _, response in pairs])
        return [(p.ids, a.ids) for p, a in zip(prompts, answers, strict=True)]


def batches(encoder, random: Random, tokens: int, mistakes_at, any_words: float) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    source = Source(random, any_words=any_words)
    while True:
        tasks = [source.draw() for _ in range(ROWS_DRAWN)]
        pairs = [(task, mistakes_at().demonstrate(task)) for task in tasks]
        rows = sorted(encoder.encode(pairs), key=lambda row: len(row[0]) + len(row[1]))
        groups, group = [], []
        for row in rows:
            if group and (len(group) + 1) * (len(row[0]) + len(row[1])) > tokens:
                groups.append(group)
                group = []
            group.append(row)
        random.shuffle(groups)  # the rest is dropped
        yield from map(padded, groups)


def padded(rows):
    """(token ids, 1 for the response, 0 for the prompt, -1 for padding)"""
    length = max(len(p) + len(a) for p, a in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    part = torch.full((len(rows), length), -1)
    for place, (p, a) in enumerate(rows):
        ids[place, : len(p) + len(a)] = torch.tensor(p + a)
        part[place, : len(p)] = 0
        part[place, len(p) : len(p) + len(a)] = 1
    return ids, part


def copy_batch(generator, vocabulary: int, tokens: int, length: int = 48):
    """Random sequences, each followed by itself: they teach copying."""
    half = torch.randint(3, vocabulary, (tokens // (2 * length), length), generator=generator)
    ids = torch.cat([half, half], 1)
    part = torch.cat([torch.full_like(half, -1), torch.ones_like(half)], 1)
    return ids, part


def loss_of(model, ids, part, prompt_weight):
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    target, kind = ids[:, 1:], part[:, 1:]
    chosen = kind >= (0 if prompt_weight else 1)
    logits = F.linear(hidden[chosen], model.lm_head.weight)
    each = F.cross_entropy(logits.float(), target[chosen], reduction="none")
    weight = torch.where(kind[chosen] == 1, 1.0, prompt_weight)
    response = each[kind[chosen] == 1]
    return (each * weight).sum() / weight.sum(), response.mean().detach()


@torch.no_grad()
def right(model, encoder, seed, new_tools, count=256):
    """family -> share of responses that are exactly right, teacher-forced"""
    source = Source(Random(seed), held_out=True, new_tools=new_tools)
    tasks = [source.draw() for _ in range(count)]
    encoded = encoder.encode([(task, task.gold) for task in tasks])
    order = sorted(range(count), key=lambda place: len(encoded[place][0]))
    found = defaultdict(list)
    for start in range(0, count, 64):
        chosen = order[start : start + 64]
        ids, part = padded([encoded[place] for place in chosen])
        best = model(input_ids=ids).logits[:, :-1].argmax(-1)
        wrong = ((best != ids[:, 1:]) & (part[:, 1:] == 1)).sum(1)
        for place, each in zip(chosen, wrong.tolist(), strict=True):
            found[tasks[place].family].append(each == 0)
            found["all"].append(each == 0)
    return {family: sum(values) / len(values) for family, values in sorted(found.items())}


def save(model, tokenizer, folder: Path) -> None:
    """In bfloat16, as the embedded model is."""
    weights = {name: each.to(torch.bfloat16) for name, each in model.state_dict().items()}
    model.config.dtype = "bfloat16"
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--init", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--copy-steps", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon-lr", type=float, default=0.0)
    parser.add_argument("--prompt-weight", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=5)
    parser.add_argument("--mlp", type=int, default=384)
    parser.add_argument("--init-range", type=float, default=0.06)
    parser.add_argument("--mistakes", type=float, default=0.0)
    parser.add_argument("--warmup", type=int, default=40)
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--right-share", type=float, default=0.0)
    parser.add_argument("--any-words", type=float, default=0.4)
    parser.add_argument("--circuits", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    if args.init:
        model = Qwen2ForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    else:
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer), hidden_size=args.width, intermediate_size=args.mlp,
                num_hidden_layers=args.layers, num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
                max_position_embeddings=1024, initializer_range=args.init_range, rope_theta=10000.0,
                tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id, use_cache=False, attn_implementation="eager",
            )
        )
    if args.circuits:
        init_copying(model, torch.Generator().manual_seed(args.seed))
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    encoder = Encoder(tokenizer)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n] if args.muon_lr else []
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = [torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]
    if matrices:
        optimizers.append(Muon(matrices, lr=args.muon_lr))
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    random = Random(args.seed + 1)
    progress = 0.0
    stream = batches(
        encoder, random, args.tokens, lambda: Mistakes(random, args.mistakes * (progress >= args.right_share)), args.any_words
    )
    generator = torch.Generator().manual_seed(args.seed)
    if args.compile:
        model.model = torch.compile(model.model, dynamic=True)
    begin, seen, mean = time.time(), 0, None
    for step in range(args.steps):
        elapsed = time.time() - begin
        progress = max(step / args.steps, elapsed / args.seconds)
        if progress >= 1:
            break
        factor = min(1.0, (step + 1) / args.warmup) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peaks[optimizers.index(optimizer)] * factor
        ids, part = (
            copy_batch(generator, len(tokenizer), args.tokens) if step < args.copy_steps else next(stream)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            loss, response = loss_of(model, ids, part, args.prompt_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        seen += ids.numel()
        mean = response.item() if mean is None else 0.95 * mean + 0.05 * response.item()
        if (step + 1) % 50 == 0:
            print(f"  {step + 1} {time.time() - begin:.0f}s {mean:.3f}", flush=True)
        if (step + 1) % args.every == 0:
            shares = right(model, encoder, 7, True)
            print(
                f"{step + 1} {time.time() - begin:.0f}s {seen / (time.time() - begin):,.0f} tok/s loss {mean:.3f} "
                f"known {right(model, encoder, 7, False)['all']:.2f} new "
                + " ".join(f"{family} {share:.2f}" for family, share in shares.items()),
                flush=True,
            )
            if args.out:
                save(model, tokenizer, args.out.with_name(args.out.name + ("-right" if progress < args.right_share else "")))
    for new in (False, True):
        print("final", "new" if new else "known", {k: round(v, 2) for k, v in right(model, encoder, 8, new, 768).items()})
    if args.out:
        save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
