"""The transformers engine: its log-probs are the trainer's, before and after new weights; requests are repeatable."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.support.weight_sync import sync
from tests.verl.batch.test_packing import VOCABULARY, tiny_model
from verl.batch.packing import make_units, pack
from verl.batch.samples import batch_of, sample_from_completion
from verl.errors import EngineError
from verl.rollout.engine import Sampling
from verl.rollout.hf_engine import HFEngine
from verl.types import Completion, FinishReason
from verl.workers.model import PackedPolicy, hf_named_parameters

PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1]]


def rollout_model() -> PreTrainedModel:
    model = tiny_model("qwen2", tied=True, dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    return model


def generate(engine: HFEngine, prompts: Sequence[Sequence[int]], *samplings: Sampling) -> list[Completion]:
    async def together() -> list[tuple[Completion, ...]]:
        requests = zip(prompts, samplings, strict=True)
        return await asyncio.gather(*(engine.generate(prompt, sampling) for prompt, sampling in requests))

    return [completion for completions in asyncio.run(together()) for completion in completions]


def trainer_logprobs(
    policy: PackedPolicy,
    prompt: Sequence[int],
    response: Sequence[int],
    temperature: float,
    device: str = "cpu",
) -> list[float]:
    completion = Completion(response, (0.0,) * len(response), FinishReason.STOP, 0)
    batch = batch_of([sample_from_completion(prompt, completion)])
    packed = pack(make_units(batch, False, 10_000), batch).to(torch.device(device))
    with torch.no_grad():
        logprobs: list[float] = policy(packed, temperature, False).logprobs.tolist()
    return logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_the_trainers_also_after_a_large_change_of_tied_weights(temperature: float) -> None:
    engine, policy = HFEngine(rollout_model()), PackedPolicy(tiny_model("qwen2", True, torch.float32))
    for version in (0, 1):
        if version:
            torch.manual_seed(0)
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.5 * torch.randn_like(parameter))
            asyncio.run(sync(engine, version, hf_named_parameters(policy)))
        samplings = [Sampling(12, temperature, seed=seed) for seed in range(3)]
        for prompt, completion in zip(PROMPTS, generate(engine, PROMPTS, *samplings), strict=True):
            assert completion.weight_version == version and len(completion.token_ids) == 12
            wanted = trainer_logprobs(policy, prompt, completion.token_ids, temperature)
            assert list(completion.logprobs) == pytest.approx(wanted, abs=1e-4)


def test_a_seeded_request_does_not_depend_on_its_batch() -> None:
    engine = HFEngine(rollout_model())
    samplings = [Sampling(8, seed=seed) for seed in (1, 2, 3)]
    together = generate(engine, PROMPTS, *samplings)
    alone = [generate(engine, [prompt], sampling)[0] for prompt, sampling in zip(PROMPTS, samplings, strict=True)]
    assert together == alone  # log-probs bit for bit, too
    assert generate(engine, PROMPTS[:1], Sampling(8, seed=4))[0].token_ids != alone[0].token_ids


def test_several_completions_of_a_prompt_count_their_seeds_up() -> None:
    engine = HFEngine(rollout_model())
    alone = [generate(engine, PROMPTS[:1], Sampling(8, seed=seed))[0] for seed in (5, 6, 7)]
    together = generate(engine, PROMPTS[:1], Sampling(8, n=3, seed=5))
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def test_a_batch_that_shares_prompts_and_shrinks_answers_as_each_request_alone() -> None:
    engine = HFEngine(rollout_model())
    prompts = [PROMPTS[row % 3] for row in range(9)]
    samplings = [Sampling(1 + 3 * row, temperature=0.0) for row in (4, 0, 1, 5, 2, 2, 0, 8, 3)]
    together = generate(engine, prompts, *samplings)
    for prompt, sampling, completion in zip(prompts, samplings, together, strict=True):
        (alone,) = generate(engine, [prompt], sampling)
        assert completion.token_ids == alone.token_ids and len(alone.token_ids) == sampling.max_tokens
        assert list(completion.logprobs) == pytest.approx(list(alone.logprobs), abs=1e-4)


def test_a_shared_prompt_is_computed_once_and_ended_rows_leave_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = rollout_model()
    engine, forward, shapes = HFEngine(model), model.forward, list[tuple[int, ...]]()

    def recording(*args: Any, **kwargs: Any) -> Any:
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", recording)
    generate(engine, [PROMPTS[0]] * 8, *(Sampling(1 + row // 4, temperature=0.0) for row in range(8)))
    assert shapes == [(1, 3), (4, 1)]


def test_greedy_takes_the_likeliest_token_and_stops_at_stop_tokens() -> None:
    model = rollout_model()
    (free,) = generate(HFEngine(model), [PROMPTS[0]], Sampling(6, temperature=0.0))
    ids = torch.tensor([PROMPTS[0]])
    for token in free.token_ids:
        assert int(model(ids).logits[0, -1].argmax()) == token
        ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    stop = free.token_ids[2]
    (stopped,) = generate(HFEngine(model), [PROMPTS[0]], Sampling(6, temperature=0.0, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (free.finish_reason, stopped.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.long
def test_samples_follow_the_distribution() -> None:
    model = rollout_model()
    drawn = generate(HFEngine(model, 500), [[5]] * 500, *(Sampling(1, 0.5, seed=seed) for seed in range(500)))
    counts = torch.bincount(torch.tensor([each.token_ids[0] for each in drawn]), minlength=VOCABULARY) / 500
    with torch.no_grad():
        probabilities = (model(torch.tensor([[5]])).logits[0, -1] / 0.5).softmax(-1)
    assert float((counts - probabilities).abs().max()) < 0.05


def probabilities_after(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        after: Tensor = model(torch.tensor([list(ids)])).logits[0, -1].softmax(-1)
    return after


@pytest.mark.long
@pytest.mark.parametrize("cut", [{"top_p": 0.4}, {"top_k": 3}, {"top_p": 0.5, "top_k": 9}])
def test_truncated_tokens_are_never_sampled_and_the_rest_sums_to_one(cut: dict[str, float]) -> None:
    model = rollout_model()
    p_V, rank_V = probabilities_after(model, [5]).sort(descending=True)
    kept = len(p_V)
    if "top_k" in cut:
        kept = min(kept, int(cut["top_k"]))
    if "top_p" in cut:  # of what is left, the fewest that are as probable together
        share_V = p_V[:kept] / p_V[:kept].sum()
        kept = min(kept, int((share_V.cumsum(0) < cut["top_p"]).sum()) + 1)
    assert 1 < kept < VOCABULARY
    samplings = [Sampling(1, seed=seed, **cut) for seed in range(300)]  # type: ignore[arg-type]
    drawn = generate(HFEngine(model, 300), [[5]] * 300, *samplings)
    allowed = rank_V[:kept].tolist()
    assert {each.token_ids[0] for each in drawn} <= set(allowed) and len({each.token_ids[0] for each in drawn}) > 1
    mass = float(p_V[:kept].sum())
    for each in drawn[:20]:  # the trainer's log-prob is less by -log of what is kept, for every token
        place = allowed.index(each.token_ids[0])
        assert each.logprobs[0] == pytest.approx(float(p_V[place].log()) - math.log(mass), abs=1e-4)


def test_a_repetition_penalty_makes_repeated_tokens_less_likely() -> None:
    model = rollout_model()
    (completion,) = generate(HFEngine(model), [PROMPTS[0]], Sampling(1, seed=1, repetition_penalty=1.5))
    with torch.no_grad():
        logits_V = model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    for token in PROMPTS[0]:
        logits_V[token] = logits_V[token] / 1.5 if logits_V[token] > 0 else logits_V[token] * 1.5
    token = completion.token_ids[0]
    assert completion.logprobs[0] == pytest.approx(float(logits_V.log_softmax(-1)[token]), abs=1e-4)


def test_a_failure_reaches_every_caller() -> None:
    with pytest.raises(IndexError):
        generate(HFEngine(rollout_model()), [[10**6]], Sampling(1))
    with pytest.raises(EngineError, match=r"lacks \d+ weights"):
        asyncio.run(sync(HFEngine(rollout_model()), 1, []))
    weights = [*rollout_model().named_parameters(remove_duplicate=False), ("no.such.weight", torch.zeros(1))]
    with pytest.raises(EngineError, match=r"unknown 1 weights, e\.g\. 'no\.such\.weight'"):
        asyncio.run(sync(HFEngine(rollout_model()), 1, weights))


@pytest.mark.parametrize("seed", [None, 3])
async def test_an_abandoned_request_delays_no_other_request(seed: int | None) -> None:
    engine = HFEngine(rollout_model())
    requests = [asyncio.create_task(engine.generate(prompt, Sampling(3, seed=seed))) for prompt in PROMPTS]
    await asyncio.sleep(0)  # all of them wait
    requests[0].cancel()
    others = await asyncio.wait_for(asyncio.gather(*requests[1:]), 60)
    assert [len(completions) for completions in others] == [1, 1]
