"""Pretraining on composed tasks: batches of tasks that never repeat, their loss, and how many responses are right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedTokenizerFast as Fast
from transformers import Qwen2ForCausalLM

from scripts.composed.rows import as_row
from scripts.composed.tasks import Source, Task
from scripts.mini.tokenizer import chat_text

_DRAWN = 768  # tasks at a time, sorted by length: a batch has hardly any padding
_PADDING, _PROMPT, _RESPONSE = -1, 0, 1
Ids = list[int]


class Batch(NamedTuple):
    """ids: tokens, (rows, length); part: which of padding, prompt and response each is"""

    ids: Tensor
    part: Tensor


def encode(tokenizer: Fast, tasks: Sequence[Task], responses: Sequence[str]) -> list[tuple[Ids, Ids]]:
    """Prompt and response of every task, in tokens."""
    rows = [as_row(task, response, "", 0) for task, response in zip(tasks, responses, strict=True)]
    encode_all = tokenizer.backend_tokenizer.encode_batch
    prompts = encode_all([chat_text(row, with_response=False) for row in rows])
    answers = encode_all([f"{response}{tokenizer.eos_token}" for response in responses])
    return [(prompt.ids, answer.ids) for prompt, answer in zip(prompts, answers, strict=True)]


def batch_of(rows: Sequence[tuple[Ids, Ids]]) -> Batch:
    """The rows, padded on the right."""
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), length, dtype=torch.long)
    part = torch.full((len(rows), length), _PADDING)
    for place, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[place, :end] = torch.tensor(prompt + answer)
        part[place, : len(prompt)] = _PROMPT
        part[place, len(prompt) : end] = _RESPONSE
    return Batch(ids, part)


def batches(
    tokenizer: Fast, source: Source, random: Random, demonstrate: Callable[[Task], str], tokens: int
) -> Iterator[Batch]:
    """Endless batches of up to this many tokens, padding included. demonstrate: the response to learn"""
    while True:
        tasks = [source.draw() for _ in range(_DRAWN)]
        rows = encode(tokenizer, tasks, list(map(demonstrate, tasks)))
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        groups: list[list[tuple[Ids, Ids]]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * (len(row[0]) + len(row[1])) > tokens:
                groups.append([])
            groups[-1].append(row)
        random.shuffle(groups)
        yield from map(batch_of, groups)


def loss_of(model: Qwen2ForCausalLM, batch: Batch, prompt_weight: float) -> tuple[Tensor, float]:
    """(loss, mean loss of the response's tokens); prompt_weight: of a prompt's token, where a response's has 1"""
    hidden = model.model(input_ids=batch.ids).last_hidden_state[:, :-1]
    targets, part = batch.ids[:, 1:], batch.part[:, 1:]
    chosen = part >= (_PROMPT if prompt_weight else _RESPONSE)
    logits = functional.linear(hidden[chosen], model.lm_head.weight)
    losses = functional.cross_entropy(logits.float(), targets[chosen], reduction="none")
    responds = part[chosen] == _RESPONSE
    weights = torch.where(responds, 1.0, prompt_weight)
    return (losses * weights).sum() / weights.sum(), losses[responds].mean().item()


@torch.no_grad()
def exact_shares(model: Qwen2ForCausalLM, tokenizer: Fast, source: Source, count: int) -> dict[str, float]:
    """Family, or "all": share of the gold responses whose every token is the likeliest, as greedy decoding needs."""
    tasks = [source.draw() for _ in range(count)]
    rows = encode(tokenizer, tasks, [task.gold for task in tasks])
    found: dict[str, list[bool]] = defaultdict(list)
    order = sorted(range(count), key=lambda place: len(rows[place][0]) + len(rows[place][1]))
    for start in range(0, count, 64):
        places = order[start : start + 64]
        ids, part = batch_of([rows[place] for place in places])
        likeliest = model(input_ids=ids).logits[:, :-1].argmax(-1)
        wrong = ((likeliest != ids[:, 1:]) & (part[:, 1:] == _RESPONSE)).any(1)
        for place, each in zip(places, wrong.tolist(), strict=True):
            found[tasks[place].family].append(not each)
            found["all"].append(not each)
    return {family: sum(each) / len(each) for family, each in sorted(found.items())}
