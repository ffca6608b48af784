"""Row 4: CPU seconds of an update on a padded batch / on packs, at the lengths of ToolRL's real rows.

    python bench/padding.py [--rows 8] [--rounds 3] [--model DIR] [--data FILE]

The lengths are those of the rows' prompts and gold answers; the tokens are random, one response per prompt. The padded
batch is the same update, padded to the longest prompt plus the longest response; the gradients of both are compared.
An update leaves out what follows the last trained token. So on both sides the last token of each sample, padding or
not, is trained with advantage 0. The target is 0.9 of the ratio of the token counts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from common import SMOLLM2, TOOLRL_ROWS, Result, alternate, median_ratio, need_smollm2, need_toolrl_rows, report
from local import PLAIN_GRPO, gradient_gap, join_alone, load_worker, made_up_groups, minibatch_of, policy_of
from transformers import AutoTokenizer

from verl.batch.samples import Sample
from verl.batch.token_batch import TokenBatch
from verl.chat.template import ChatTemplate
from verl.data.tasks import TaskSet, TaskStream

SHARE_OF_PADDING = 0.9
MAX_PROMPT = 2048  # tokens
TOLERANCE = 1e-5
CHECKED = 2  # rows for the float32 gradient comparison


def real_lengths(chat: ChatTemplate, data: Path, rows: int) -> list[tuple[int, int]]:
    """(prompt, response) token counts of rows drawn with a fixed seed."""
    stream = TaskStream([TaskSet(str(data), max_bad_share=1.0)], seed=0)
    lengths = ((len(chat.prompt_ids(task.prompt)), len(chat.response_ids(task.answer)[0]) + 1) for task in stream)
    return list(islice((each for each in lengths if each[0] <= MAX_PROMPT), rows))


def padded(samples: Sequence[Sample], lengths: Sequence[int]) -> list[Sample]:
    """The samples with padding up to these lengths, whose last token is trained."""
    return [
        replace(
            sample,
            token_ids=np.pad(sample.token_ids, (0, length - len(sample.token_ids))),
            action_mask=np.append(np.pad(sample.action_mask, (0, length - 1 - len(sample.token_ids))), True),
            rollout_logprobs=np.append(sample.rollout_logprobs, np.float32(-1.0)),
        )
        for sample, length in zip(samples, lengths, strict=True)
    ]


def minibatch_with_padding(samples: Sequence[Sample]) -> TokenBatch:
    """With advantage 0 for the last token of each sample."""
    minibatch = minibatch_of(samples)
    assert minibatch.advantages is not None
    advantages = minibatch.advantages.copy()
    advantages[minibatch.bounds.trained[1:] - 1] = 0.0
    return replace(minibatch, advantages=advantages)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--data", type=Path, default=TOOLRL_ROWS)
    arguments = parser.parse_args()
    need_smollm2(arguments.model)
    need_toolrl_rows(arguments.data)
    join_alone()
    worker = load_worker(arguments.model, torch.bfloat16)
    chat = ChatTemplate(AutoTokenizer.from_pretrained(arguments.model))
    lengths = real_lengths(chat, arguments.data, arguments.rows)
    samples = made_up_groups(lengths, 1, worker.engine.module.model.config.vocab_size)
    longest = sum(max(each) for each in zip(*lengths, strict=True)) + 1
    batches = {
        "padded": padded(samples, [longest] * len(samples)),
        "packed": padded(samples, [len(sample.token_ids) + 1 for sample in samples]),
    }
    minibatches = {name: minibatch_with_padding(each) for name, each in batches.items()}
    few = [minibatch_with_padding(each[:CHECKED]) for each in batches.values()]
    gap = gradient_gap(arguments.model, [(each, False) for each in few])
    policy = policy_of(worker, share_prefix=False)
    sides = {name: partial(policy.update, each, PLAIN_GRPO) for name, each in minibatches.items()}
    seconds = alternate(sides, arguments.rounds)
    tokens = {name: sum(len(sample.token_ids) for sample in samples) for name, samples in batches.items()}
    report(
        Result(
            row=4,
            name="update, padded batch / packs",
            ratio=median_ratio(seconds["padded"], seconds["packed"]),
            target=SHARE_OF_PADDING * tokens["padded"] / tokens["packed"],
            ours={"CPU s": statistics.median(seconds["packed"]), "tokens": tokens["packed"]},
            theirs={"CPU s": statistics.median(seconds["padded"]), "tokens": tokens["padded"]},
            limits={"relative difference of the gradients": (gap, TOLERANCE)},
        )
    )


if __name__ == "__main__":
    main()
