"""vLLM's rejection sampler, in Triton's interpreter: drafts change neither the distribution nor the log-probs.

    TRITON_INTERPRET=1 python -m pytest -m gpuset tests/gpuset/test_rejection.py

The model is a Markov chain, so every way to leave a draft has a known probability.
"""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytestmark = [
    pytest.mark.gpuset,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]

VOCABULARY, MAX_DRAFT, REQUESTS = 6, 2, 20_000


class Draft(NamedTuple):
    start: int  # the last token before the draft
    tokens: tuple[int, ...]


class Left(NamedTuple):
    """Where a response leaves its draft: after so many tokens, with this one."""

    draft: Draft
    accepted: int
    token: int


@pytest.fixture(autouse=True)
def no_overflow_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a third of the interpreter's time."""
    builder = importlib.import_module("triton.runtime.interpreter").interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))


def chain() -> Tensor:
    """Logits of the next token, by token."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))


def drafts(table: Tensor) -> list[Draft]:
    """From every token, the most likely tokens: none to MAX_DRAFT of them."""
    following = table.argmax(-1).tolist()
    made = []
    for start in range(VOCABULARY):
        tokens = tuple(accumulate(range(MAX_DRAFT), lambda token, _: following[token], initial=start))[1:]
        made += [Draft(start, tokens[:length]) for length in range(MAX_DRAFT + 1)]
    return made


def law(table: Tensor, draft: Draft, temperature: float) -> dict[Left, float]:
    """The probability of each way to leave the draft; at its end with any token."""
    found, reached = {}, 1.0
    for accepted, (token, drafted) in enumerate(zip((draft.start, *draft.tokens), (*draft.tokens, None), strict=True)):
        shares = (table[token].double() / temperature).softmax(-1).tolist()
        found |= {Left(draft, accepted, each): reached * share for each, share in enumerate(shares) if each != drafted}
        reached *= shares[drafted] if drafted is not None else 0.0
    return found


def sampled(table: Tensor, asked: Sequence[Draft], temperatures: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens and log-probs of one call of vLLM's sampler, as its model runner makes it for drafts of n-grams."""
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.rejection_sampler import RejectionSampler
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

    rows = [table[[each.start, *each.tokens]] for each in asked]
    ends = torch.tensor([len(row) for row in rows]).cumsum(0)
    metadata = SpecDecodeMetadata.make_dummy([list(each.tokens) for each in asked], torch.device("cpu"))
    metadata.bonus_logits_indices = (ends - 1).int()
    is_target = torch.ones(int(ends[-1]), dtype=torch.bool)
    is_target[ends - 1] = False
    metadata.target_logits_indices = is_target.nonzero().squeeze(1).int()
    none, sampler = torch.empty(0), Sampler("processed_logprobs")
    sampling = SamplingMetadata(
        temperature=temperatures,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in asked],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},  # words: allowed
        logitsprocs=LogitsProcessors(),
    )
    with torch.compiler.set_stance("force_eager"):
        output = RejectionSampler(sampler)(metadata, None, torch.cat(rows), sampling)
    tokens, logprobs = RejectionSampler.parse_output(
        output.sampled_token_ids, VOCABULARY, logprobs_tensors=output.logprobs_tensors
    )
    of_request = (logprobs.slice_request(place, len(each)) for place, each in enumerate(tokens))
    return tokens, [of_tokens.logprobs[:, 0].tolist() for of_tokens in of_request]


def p_value(found: Mapping[Left, int], table: Tensor, temperature: float) -> float:
    """Of a chi-square test over all drafts, given how often each was asked; rare ways are one class."""
    from scipy.stats import chi2  # takes a second, which every collection would

    statistic, freedom = 0.0, 0
    for draft in {each.draft for each in found}:
        total = sum(count for left, count in found.items() if left.draft == draft)
        expected = {left: total * share for left, share in law(table, draft, temperature).items()}
        cells = [(found[left], each) for left, each in expected.items() if each >= 5]
        rest = total - sum(count for count, _ in cells), total - sum(each for _, each in cells)
        cells += [rest] if rest[1] >= 5 else []
        statistic += sum((count - each) ** 2 / each for count, each in cells)
        freedom += len(cells) - 1
    return float(chi2.sf(statistic, freedom))


@pytest.mark.parametrize(("temperature", "requests"), [(1.0, REQUESTS), (0.6, REQUESTS // 10)])
def test_drafts_leave_the_distribution_and_the_logprobs_as_they_are(temperature: float, requests: int) -> None:
    torch.manual_seed(0)
    table = chain()
    every: list[Any] = drafts(table)
    asked = [every[place % len(every)] for place in range(requests)]
    responses, logprobs = sampled(table, asked, torch.full((requests,), temperature))
    exact = (table.double() / temperature).log_softmax(-1)
    for draft, tokens, returned in zip(asked, responses, logprobs, strict=True):
        before = [draft.start, *tokens[:-1]]
        assert list(draft.tokens[: len(tokens) - 1]) == tokens[:-1]
        torch.testing.assert_close(torch.tensor(returned).double(), exact[before, tokens], rtol=0, atol=1e-5)
    found = Counter(Left(draft, len(tokens) - 1, tokens[-1]) for draft, tokens in zip(asked, responses, strict=True))
    assert p_value(found, table, temperature) > 1e-3
    assert p_value(found, table, 1.5 * temperature) < 1e-3  # another temperature is distinguished
