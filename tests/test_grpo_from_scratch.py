"""examples/grpo_from_scratch.py: its formulas are the trainer's, and it learns."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from examples import grpo_from_scratch as scratch
from tests.conftest import ROOT
from verl.algorithms.estimators.advantage import AdvantageInputs, grpo
from verl.algorithms.losses.policy_loss import LossInputs, clipped


def test_advantages_are_those_of_the_trainer() -> None:
    rewards_B = torch.tensor([4.0, -1.0, 0.5, 4.0, 2.0, 2.0, 2.0, 2.0])
    ours = grpo(AdvantageInputs(list(rewards_B.split(1)), torch.arange(8) // 4)).advantages
    torch.testing.assert_close(scratch.group_advantages(rewards_B, 4), torch.cat(ours))  # which is in float64
    assert scratch.group_advantages(rewards_B, 4)[4:].tolist() == [0.0] * 4


def test_the_loss_is_that_of_the_trainer() -> None:
    """Over the tokens of the responses alone; ratios on both sides of the clip range."""
    generator = torch.Generator().manual_seed(0)
    old, change = torch.randn(4, 6, generator=generator), 0.4 * torch.randn(4, 6, generator=generator)
    mask = torch.arange(6) < torch.tensor([[6], [3], [1], [5]])
    advantages_B = torch.tensor([1.0, -1.0, 0.5, -2.0])
    rows = torch.arange(4)[:, None].expand(4, 6)
    inputs = LossInputs((old + change)[mask], old[mask], advantages_B[rows][mask], rows[mask])
    loss = scratch.clipped_loss(old + change, old, advantages_B, mask)
    torch.testing.assert_close(loss, clipped(inputs, scratch.CLIP, scratch.CLIP).loss_T.mean())


def test_log_probs_do_not_depend_on_the_padding() -> None:
    policy, rows = scratch.Policy(scratch.DATA / "model"), scratch.read("test.parquet")[:3]
    torch.manual_seed(0)
    together = policy.sample(rows, 2)
    alone = scratch.Batch(*(each[2:3] for each in vars(together).values()))
    padding = int((alone.prompt_mask == 0).sum())
    alone.prompt_ids, alone.prompt_mask = alone.prompt_ids[:, padding:], alone.prompt_mask[:, padding:]
    torch.testing.assert_close(policy.logprobs(alone), policy.logprobs(together)[2:3], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_it_learns() -> None:
    """The last line: held-out reward A -> B, exact C% -> D%."""
    done = subprocess.run(
        [sys.executable, "examples/grpo_from_scratch.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    before, after, exact_before, exact_after = map(float, re.findall(r"-?\d+\.\d+", done.stdout.splitlines()[-1]))
    assert after > before + 0.4 and exact_after > exact_before
