"""An in-process policy built from the library's parts: one FSDP rank behind a local worker group."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import PreTrainedModel

from toolrl.check.preflight.local_group import LocalGroup
from verl.algorithms.algorithm import Algorithm, KLTerm
from verl.algorithms.estimators.grpo import GRPO
from verl.batch.experience import policy_minibatch, with_advantages
from verl.batch.samples import Sample, batch_of, sample_from_completion
from verl.batch.token_batch import TokenBatch
from verl.trainer.policy import PackSettings, Policy
from verl.types import Completion, FinishReason
from verl.workers.fsdp_engine import FSDPEngine
from verl.workers.model import PackedPolicy, decoder_layers, load_causal_lm
from verl.workers.optim import OptimizerSettings
from verl.workers.policy_worker import PolicyWorker, policy_loss

PLAIN_GRPO: Algorithm = replace(GRPO, kl=KLTerm())  # no KL, so no reference model
LEARNING_RATE = 1e-6
TOKENS_PER_PACK = 5000  # fits next to another engine on a small machine, without checkpointing


def join_alone() -> None:
    """A process group of size one, with one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)


def load_worker(path: Path, dtype: torch.dtype) -> PolicyWorker:
    """A rank with weights and compute in `dtype`, with AdamW."""
    return worker_of(load_causal_lm(str(path), dtype), dtype)


def worker_of(model: PreTrainedModel, dtype: torch.dtype) -> PolicyWorker:
    """A rank with this model, weights in `dtype`, with AdamW."""
    module = PackedPolicy(model)
    optimizer = OptimizerSettings(lr=LEARNING_RATE, weight_decay=0.0)
    layers = decoder_layers(module)
    return PolicyWorker(FSDPEngine(module, layers, init_device_mesh("cpu", (1,)), optimizer, dtype), 1.0)


def policy_of(worker: PolicyWorker | None, share_prefix: bool = True) -> Policy:
    """The controller's view of the worker. Without a worker it can still pack."""
    return Policy(LocalGroup(worker), PackSettings(TOKENS_PER_PACK, share_prefix))


def made_up_groups(lengths: Sequence[tuple[int, int]], n: int, vocabulary: int, seed: int = 0) -> list[Sample]:
    """`n` samples per (prompt length, response length), with random tokens, rewards and log-probs."""
    draw = random.Random(seed)
    samples = []
    for group, (prompt, response) in enumerate(lengths):
        prompt_ids = tuple(draw.randrange(vocabulary) for _ in range(prompt))
        for _ in range(n):
            response_ids = tuple(draw.randrange(vocabulary) for _ in range(response))
            logprobs = tuple(-draw.random() for _ in range(response))
            completion = Completion(response_ids, logprobs, FinishReason.LENGTH, 0)
            samples.append(sample_from_completion(prompt_ids, completion, group, draw.random()))
    return samples


def minibatch_of(samples: Sequence[Sample]) -> TokenBatch:
    """The samples with their group advantages."""
    return with_advantages(batch_of(samples), PLAIN_GRPO)


def gradient_gap(path: Path, ways: Sequence[tuple[TokenBatch, bool]]) -> float:
    """|difference| / |gradient| of the same update computed in two ways, in float32.

    ways: (mini-batch, whether prompts are shared)
    """
    policy = PackedPolicy(load_causal_lm(str(path), torch.float32))
    one, two = (_gradients(policy, *way) for way in ways)
    return float((one - two).norm() / one.norm())


def _gradients(policy: PackedPolicy, minibatch: TokenBatch, share_prefix: bool) -> Tensor:
    """All gradients of the update's loss, as one vector."""
    policy.zero_grad()
    weighted = policy_minibatch(minibatch, PLAIN_GRPO)
    (shard,) = policy_of(None, share_prefix).shard(weighted).shards()
    for packed in shard:
        policy_loss(policy, packed, PLAIN_GRPO, 1.0)[0].backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])
