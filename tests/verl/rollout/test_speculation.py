"""Drafts are made, accepted and counted, and log-probs stay the trainer's. The distribution: tests/gpuset."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import need_vllm
from tests.support.tiny import save_untrained
from tests.verl.rollout.test_vllm_engine import Runner, gaps, shaken
from verl.rollout import vllm_engine
from verl.rollout.engine import Sampling
from verl.rollout.speculation import DraftCounter, until_stop
from verl.rollout.vllm_engine import VLLMSettings
from verl.types import Completion, FinishReason
from verl.workers.model import load_causal_lm

VOCABULARY = 12
# Almost every pair of tokens occurs, so there is a draft after almost every token.
PROMPT = [(number * number + 5 * number // 3) % VOCABULARY for number in range(180)]


def test_the_counter_adds_up_and_starts_again() -> None:
    counter = DraftCounter()
    for drafted, accepted in ((4, 1), (8, 3)):
        drafts = SimpleNamespace(num_draft_tokens=drafted, num_accepted_tokens=accepted)
        counter.record(SimpleNamespace(spec_decoding_stats=drafts), None)
    counter.record(SimpleNamespace(spec_decoding_stats=None), None)
    counter.record(None, None)
    assert counter.take() == {"rollout/draft_tokens": 12.0, "rollout/accepted_tokens": 4.0}
    assert set(counter.take().values()) == {0.0}


@pytest.mark.parametrize(
    ("text", "kept"), [("a call</c> and", "a call</c>"), ("</c>", "</c>"), ("a call", "a call"), ("ll</c", "ll</c")]
)
def test_a_response_ends_with_its_stop_string(text: str, kept: str) -> None:
    ids, logprobs = array("i", map(ord, text)), array("f", range(len(text)))
    whole = Completion(ids, logprobs, FinishReason.STOP, 3)
    cut = until_stop(whole, ("</c>",), lambda tokens: "".join(map(chr, tokens)))
    assert ("".join(map(chr, cut.token_ids)), len(cut.logprobs)) == (kept, len(kept))
    assert until_stop(whole, (), str) is whole


@pytest.mark.long
def test_why_drafts_are_refused_on_a_cpu() -> None:
    """If this fails, vLLM's CPU build may be right by now: see `verl.build.engines.speculation`."""
    need_vllm()
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperatures = torch.full((5,), 7.0)  # of five tokens, as they were in fresh memory
    _expand_kernel_impl(temperatures, torch.tensor([0.5, 2.0]), torch.tensor([3, 5]), 0, 1)  # of their two requests
    assert set(temperatures.tolist()) == {7.0}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save_untrained(path, VOCABULARY, VOCABULARY - 1, initializer_range=0.2)
    return path


@pytest.fixture(scope="module")
def runner(model_path: Path) -> Iterator[Runner]:
    """An engine with drafts, whose sampler is repaired."""
    need_vllm()
    made = vllm_engine.engine_arguments
    extension = {"worker_extension_cls": "tests.support.repaired_sampler.Repaired"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "engine_arguments", lambda *of: made(*of) | extension)
        runner = Runner(VLLMSettings(str(model_path), 256, dtype="float32", kv_cache_gib=0.25, speculation="ngram"))
    yield runner
    runner.close()


@pytest.mark.long
def test_logprobs_are_the_trainers_where_drafts_are_accepted_also_after_a_weight_sync(
    model_path: Path, runner: Runner
) -> None:
    policy = shaken(load_causal_lm(str(model_path)), 1)
    runner.sync(1, policy)
    for temperature in (1.0, 0.7):
        completions = runner.generate([PROMPT], Sampling(32, temperature, n=8))
        counts = runner(runner.engine.metrics())
        drafted, accepted = counts["rollout/draft_tokens"], counts["rollout/accepted_tokens"]
        assert drafted > 100 and 0 < accepted < drafted
        for completion in completions:
            assert completion.weight_version == 1 and len(completion.token_ids) == 32
            assert max(gaps(policy, PROMPT, completion, temperature)) < 1e-4  # as they enter the ratio
