"""The vLLM engine, with real vLLM: its log-probs are the trainer's, before and after new weights; it fails aloud."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tests.conftest import ROOT, need_vllm
from tests.support.every import every
from tests.support.tiny import save_untrained
from tests.support.weight_sync import sync
from tests.toolrl.check.plan.test_plan import plan_of
from tests.verl.rollout.test_hf_engine import trainer_logprobs
from toolrl.check.head_sizes import VLLM_ON_CPU
from toolrl.check.preflight.local_group import LocalGroup
from verl.errors import ConfigError, DataError, EngineError, EngineLostError
from verl.host.scratch import scratch_folder
from verl.rollout.engine import Sampling
from verl.rollout.pool import EnginePool, OnWeightSync
from verl.rollout.speculation import DraftCounter
from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings
from verl.rollout.vllm_extension import _end_with, refusals
from verl.transfer.bucket import BucketLayout, BucketSender
from verl.transfer.shared_memory import ByValue, SharedFile, SharedMemory
from verl.types import Completion, FinishReason
from verl.workers.model import PackedPolicy, hf_named_parameters, load_causal_lm

need_vllm()

VOCABULARY, EOS, ROOM = 200, 3, 512
PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1], list(range(10, 140))]
LONG = [(7 * position) % VOCABULARY for position in range(300)]  # more than two blocks of the prefix cache
TOKENIZER = ROOT / "dataset" / "mini" / "tokenizer"  # knows more tokens than the model
Result = TypeVar("Result")


class Runner:
    """One engine and the loop it lives in."""

    def __init__(self, settings: VLLMSettings) -> None:
        self._runner = asyncio.Runner()
        self.engine = self(VLLMEngine.start(settings))

    def __call__(self, work: Coroutine[Any, Any, Result]) -> Result:
        return self._runner.run(asyncio.wait_for(work, timeout=300))

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        async def together() -> list[tuple[Completion, ...]]:
            return await asyncio.gather(*(self.engine.generate(prompt, sampling) for prompt in prompts))

        return [completion for completions in self(together()) for completion in completions]

    def sync(self, version: int, policy: PackedPolicy) -> None:
        self(sync(self.engine, version, hf_named_parameters(policy), getattr(torch, self.engine._settings.dtype)))

    def close(self) -> None:
        self(self.engine.close())
        self._runner.close()


def settings(path: Path, dtype: str = "float32") -> VLLMSettings:
    return VLLMSettings(str(path), ROOM, dtype=dtype, tokenizer_path=str(TOKENIZER), kv_cache_gib=0.25, max_num_seqs=32)


pytestmark = pytest.mark.long  # an engine takes 10 s to start


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    save_untrained(path, VOCABULARY, EOS, initializer_range=0.2)
    return path


@pytest.fixture(scope="module")
def runner(model_path: Path) -> Iterator[Runner]:
    runner = Runner(settings(model_path))
    yield runner
    runner.close()


@pytest.fixture
def policy(model_path: Path, runner: Runner) -> PackedPolicy:
    """The trainer's model with weights of this test's own, published."""
    policy = shaken(load_causal_lm(str(model_path)), 1)
    runner.sync(1, policy)
    return policy


def shaken(model: PreTrainedModel, seed: int) -> PackedPolicy:
    """A large change of every weight, so that old weights cannot pass for new ones."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return PackedPolicy(model)


def gaps(policy: PackedPolicy, prompt: Sequence[int], completion: Completion, temperature: float) -> list[float]:
    wanted = trainer_logprobs(policy, prompt, completion.token_ids, temperature)
    return [abs(ours - theirs) for ours, theirs in zip(completion.logprobs, wanted, strict=True)]


def mean_gap(runner: Runner, policy: PackedPolicy, temperature: float, version: int) -> float:
    found = []
    for prompt, completion in zip(PROMPTS, runner.generate(PROMPTS, Sampling(12, temperature)), strict=True):
        assert completion.weight_version == version and len(completion.token_ids) == 12
        found += gaps(policy, prompt, completion, temperature)
    return sum(found) / len(found)


@pytest.mark.slow
def test_a_compiled_model_takes_new_weights_too(model_path: Path) -> None:
    runner = Runner(replace(settings(model_path), enforce_eager=False))
    try:
        policy = shaken(load_causal_lm(str(model_path)), 3)
        runner.sync(1, policy)
        assert mean_gap(runner, policy, 1.0, 1) < 1e-4
        assert not runner.engine._llm.vllm_config.model_config.enforce_eager
    finally:
        runner.close()


def test_options_arrive_at_vllm(model_path: Path) -> None:
    options = {"block_size": 64, "long_prefill_token_threshold": 96}
    runner = Runner(replace(settings(model_path), enforce_eager=True, options=options))
    try:
        config = runner.engine._llm.vllm_config
        assert (config.cache_config.block_size, config.scheduler_config.long_prefill_token_threshold) == (64, 96)
        assert config.model_config.enforce_eager
        assert len(runner.generate([[5, 6, 7]], Sampling(4, 1.0))[0].token_ids) == 4
    finally:
        runner.close()


@pytest.mark.parametrize("options", [{"block_size": "many"}, {"compilation_config": {"no_such": 1}}])
def test_values_that_vllm_refuses_are_named(options: dict[str, Any], model_path: Path) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=rf"rollout.engine_options: vLLM refuses {name}="):
        asyncio.run(VLLMEngine.start(replace(settings(model_path), options=options)))


def test_attention_that_the_backend_does_not_compute_is_refused_at_the_start(tmp_path: Path) -> None:
    """vLLM itself starts with heads of this size, and dies at the first request."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"CPU_ATTN does not compute heads of size 16 \(only 32, 64,"):
        asyncio.run(VLLMEngine.start(settings(tmp_path)))


def test_a_backend_is_asked_for_all_that_it_lists() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    def layer(**changes: Any) -> Any:
        usual = {"head_size": 64, "dtype": torch.float32, "kv_cache_dtype": "auto", "attn_type": "decoder"}
        return SimpleNamespace(attn_backend=CPUAttentionBackend, **{**usual, **changes})

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == VLLM_ON_CPU, "what plans and preflight assume"
    assert refusals(layer()) == []
    for changes, what in (
        ({"head_size": 48}, "heads of size 48"),
        ({"dtype": torch.float64}, "torch.float64"),
        ({"kv_cache_dtype": "nvfp4"}, "a KV cache in nvfp4"),
        ({"attn_type": "sideways"}, "attention of type sideways"),
    ):
        (reason,) = refusals(layer(**changes))
        assert reason.startswith(f"CPU_ATTN does not compute {what}")


def test_logprobs_are_the_trainers_also_after_a_large_change_of_tied_weights(model_path: Path, runner: Runner) -> None:
    policy = PackedPolicy(load_causal_lm(str(model_path)))
    runner.sync(1, policy)  # other tests may have come first
    for version, temperature in ((1, 1.0), (1, 0.7)):
        assert mean_gap(runner, policy, temperature, version) < 1e-4
    changed = shaken(policy.model, 2)
    runner.sync(2, changed)
    for version, temperature in ((2, 1.0), (2, 0.7)):
        assert mean_gap(runner, changed, temperature, version) < 1e-4


def test_several_completions_differ_and_follow_the_distribution(runner: Runner, policy: PackedPolicy) -> None:
    drawn = runner.generate([[5]], Sampling(1, 0.5, n=1000))  # the bound below is more than five standard deviations
    assert len(drawn) == 1000
    counts = torch.bincount(torch.tensor([each.token_ids[0] for each in drawn]), minlength=VOCABULARY) / 1000
    logprobs = [trainer_logprobs(policy, [5], [token], 0.5)[0] for token in range(VOCABULARY)]
    assert float((counts - torch.tensor(logprobs).exp()).abs().max()) < 0.08


def test_truncated_tokens_are_never_sampled_and_the_rest_sums_to_one(runner: Runner, policy: PackedPolicy) -> None:
    logprobs_V = torch.tensor([trainer_logprobs(policy, [5], [token], 1.0)[0] for token in range(VOCABULARY)])
    p_V, rank_V = logprobs_V.exp().sort(descending=True)
    for cut in (Sampling(1, n=100, top_k=3), Sampling(1, n=100, top_p=0.4)):
        bound = cut.top_k if cut.top_k != -1 else VOCABULARY
        kept = min(bound, int((p_V.cumsum(0) < cut.top_p).sum()) + 1)
        drawn = runner.generate([[5]], cut)
        assert 1 < kept < VOCABULARY
        assert {each.token_ids[0] for each in drawn} <= set(rank_V[:kept].tolist())
        mass = float(p_V[:kept].sum().log())
        for each in drawn:
            assert each.logprobs[0] == pytest.approx(float(logprobs_V[each.token_ids[0]]) - mass, abs=1e-3)


def test_a_repetition_penalty_makes_repeated_tokens_less_likely(runner: Runner, policy: PackedPolicy) -> None:
    """All other tokens gain the same share. Those of the prompt are drawn with a probability of 0.02 each time."""
    drawn = runner.generate([PROMPTS[2]], Sampling(1, 2.0, n=1000, repetition_penalty=1.5))
    gains: dict[int, float] = {}
    for completion in drawn:
        (token,) = completion.token_ids
        if token not in gains:
            gains[token] = completion.logprobs[0] - trainer_logprobs(policy, PROMPTS[2], [token], 2.0)[0]
    others = [gain for token, gain in gains.items() if token not in PROMPTS[2]]
    assert len(others) > 3 and max(others) - min(others) < 1e-3 and min(others) > 1e-3
    assert every(gain < min(others) - 1e-3 for token, gain in gains.items() if token in PROMPTS[2])


def test_greedy_is_the_likeliest_token_with_its_logprob_at_temperature_1(runner: Runner, policy: PackedPolicy) -> None:
    first, second = runner.generate([PROMPTS[0]], Sampling(6, 0.0, n=2))
    assert first == second
    assert max(gaps(policy, PROMPTS[0], first, 1.0)) < 1e-3
    for place, token in enumerate(first.token_ids):
        before = [*PROMPTS[0], *first.token_ids[:place]]
        logprobs = [trainer_logprobs(policy, before, [other], 1.0)[0] for other in range(VOCABULARY)]
        assert max(range(VOCABULARY), key=logprobs.__getitem__) == token


def test_responses_end_at_stop_tokens_and_nowhere_else(runner: Runner, policy: PackedPolicy) -> None:
    del policy
    (free,) = runner.generate([PROMPTS[0]], Sampling(6, 0.0))
    stop, unsaid = free.token_ids[2], min(set(range(VOCABULARY)) - set(free.token_ids))
    (stopped,) = runner.generate([PROMPTS[0]], Sampling(6, 0.0, stop_token_ids=(unsaid, stop)))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (free.finish_reason, stopped.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    long = runner.generate([[EOS]], Sampling(ROOM, n=16, temperature=2.0))
    assert any(EOS in each.token_ids[:-1] for each in long)  # the model's own end is no end unless asked for
    assert all(len(each.token_ids) == ROOM - 1 and each.finish_reason is FinishReason.LENGTH for each in long)


def test_the_prefix_cache_does_not_survive_an_update(runner: Runner, policy: PackedPolicy) -> None:
    for version in (1, 2):
        for _ in range(2):  # the second time the prompt is in the cache
            (completion,) = runner.generate([LONG], Sampling(12))
            assert max(gaps(policy, LONG, completion, 1.0)) < 1e-3
        if version == 1:
            policy = shaken(policy.model, 3)
            runner.sync(2, policy)


async def some_written(engine: VLLMEngine) -> None:
    """Some tokens have been written, and most have not."""
    while await engine.tokens_written() < 10:
        await asyncio.sleep(0.001)


def test_a_request_that_runs_through_an_update_comes_to_its_end(runner: Runner, policy: PackedPolicy) -> None:
    changed = shaken(load_causal_lm(runner.engine._settings.model_path), 4)

    async def update_meanwhile() -> tuple[Completion, ...]:
        pending = asyncio.ensure_future(runner.engine.generate([5], Sampling(400)))
        await some_written(runner.engine)
        await sync(runner.engine, 2, hf_named_parameters(changed))
        assert not pending.done()
        return await pending

    (completion,) = runner(update_meanwhile())
    assert completion.weight_version == 1 and len(completion.token_ids) == 400
    assert max(gaps(policy, [5], completion, 1.0)[:5]) < 1e-3  # started with the old weights,
    assert max(gaps(changed, [5], completion, 1.0)[-5:]) < 1e-3  # ended with the new ones


def test_an_interrupted_request_continues_with_the_new_weights(runner: Runner, policy: PackedPolicy) -> None:
    changed = shaken(load_causal_lm(runner.engine._settings.model_path), 6)
    pool = EnginePool(LocalGroup(runner.engine), [[0]], OnWeightSync.CONTINUE)

    async def update_meanwhile() -> tuple[Completion, ...]:
        pending = asyncio.ensure_future(pool.generate([5], Sampling(400, n=2)))
        await some_written(runner.engine)
        await sync(runner.engine, 2, hf_named_parameters(changed), pool=pool)
        assert not pending.done()
        return await pending

    completions = runner(update_meanwhile())
    assert len(completions) == 2
    for completion in completions:
        old = completion.versions.count(1)
        assert len(completion.token_ids) == 400 and completion.versions == (1,) * old + (2,) * (400 - old)
        assert 0 < old < 400
        assert max(gaps(policy, [5], completion, 1.0)[:old]) < 1e-3  # every token follows from its version
        assert max(gaps(changed, [5], completion, 1.0)[old:]) < 1e-3


def test_a_forgotten_head_is_refused_and_the_old_weights_stay(runner: Runner, policy: PackedPolicy) -> None:
    changed = shaken(load_causal_lm(runner.engine._settings.model_path), 5)
    without_head = [(name, weight) for name, weight in hf_named_parameters(changed) if name != "lm_head.weight"]
    with pytest.raises(EngineError, match=r"lm_head\.weight is missing"):
        runner(sync(runner.engine, 2, without_head))
    assert mean_gap(runner, policy, 1.0, version=1) < 1e-4


def test_a_forgotten_part_of_a_fused_weight_is_refused(runner: Runner, policy: PackedPolicy) -> None:
    name = "model.layers.1.self_attn.k_proj.bias"
    with pytest.raises(EngineError, match=r"k_proj\.bias is missing"):
        runner(sync(runner.engine, 2, [each for each in hf_named_parameters(policy) if each[0] != name]))


def test_an_unknown_weight_is_refused(runner: Runner, policy: PackedPolicy) -> None:
    unknown = ("model.layers.0.no_such.bias", torch.zeros(3))  # vLLM skips unknown biases
    weights = [*hf_named_parameters(policy), unknown]
    with pytest.raises(EngineError, match=r"model\.layers\.0\.no_such\.bias is unknown"):
        runner(sync(runner.engine, 2, weights))


@pytest.mark.parametrize("bucket_bytes", [1, 2**13, 2**30])
@pytest.mark.parametrize("sender", [SharedMemory, ByValue])
def test_weights_arrive_in_buckets_of_any_size_which_cut_layers_in_two(
    runner: Runner, policy: PackedPolicy, bucket_bytes: int, sender: Callable[[], BucketSender]
) -> None:
    changed = shaken(policy.model, bucket_bytes)
    runner(sync(runner.engine, 2, hf_named_parameters(changed), bucket_bytes=bucket_bytes, sender=sender()))
    assert mean_gap(runner, changed, 1.0, version=2) < 1e-4


@pytest.mark.parametrize(
    ("prompt", "error", "message"),
    [
        ([1] * ROOM, ConfigError, r"512 tokens, data\.max_prompt_length \+ data\.max_response_length"),
        ([], DataError, "empty"),
        ([VOCABULARY], DataError, "0 to 199"),
    ],
)
def test_an_impossible_prompt_is_refused(
    runner: Runner, prompt: list[int], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        runner.generate([prompt], Sampling(1))
    assert len(runner.generate([[1]], Sampling(1))) == 1


def test_sampling_settings_that_vllm_refuses_are_an_error(runner: Runner) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        runner.generate([[1]], Sampling(1, temperature=5.0))


def test_a_stop_string_ends_the_response_and_its_tokens_are_kept_whole(runner: Runner, policy: PackedPolicy) -> None:
    del policy
    decode = AutoTokenizer.from_pretrained(TOKENIZER).decode
    (free,) = runner.generate([PROMPTS[2]], Sampling(20, 0.0))
    texts = (decode([token]) for token in free.token_ids[2:])
    stop = next(text for text in texts if text.isascii() and text.isprintable())  # other tokens are parts of letters
    (stopped,) = runner.generate([PROMPTS[2]], Sampling(20, 0.0, stop_strings=(stop,)))
    shortest = next(length for length in range(1, 21) if stop in decode(free.token_ids[:length]))
    assert stopped.token_ids == free.token_ids[:shortest] and len(stopped.logprobs) == shortest
    assert stopped.finish_reason is FinishReason.STOP


def test_stop_strings_need_a_tokenizer(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.engine, "_settings", replace(runner.engine._settings, tokenizer_path=None))
    with pytest.raises(ConfigError, match="tokenizer_path"):
        runner.generate([[1]], Sampling(1, stop_strings=("</tool_call>",)))


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="dtype"):
        VLLMSettings("x", 10, dtype="fp8")


def test_a_start_that_cannot_work_is_an_error(tmp_path: Path, runner: Runner) -> None:
    with pytest.raises(ConfigError, match="kv_cache_gib"):
        runner(VLLMEngine.start(VLLMSettings(str(tmp_path), 10)))
    with pytest.raises(EngineError, match="did not start"):
        runner(VLLMEngine.start(settings(tmp_path)))


def test_batch_limits_that_are_not_given_are_those_of_offline_batches(runner: Runner) -> None:
    assert runner.engine._llm.vllm_config.scheduler_config.max_num_batched_tokens == 4096  # else 2048 on any device


@pytest.mark.parametrize(
    ("gpu", "name", "gib"), [("h200", "NVIDIA H200", 140), ("a100", "NVIDIA A100-SXM4-80GB", 79)], ids=["h200", "a100"]
)
def test_the_plan_knows_how_many_sequences_vllm_decodes_at_once(
    gpu: str, name: str, gib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine import arg_utils
    from vllm.usage.usage_lib import UsageContext

    card = SimpleNamespace(
        get_device_total_memory=lambda: gib * 2**30,
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", card)
    _, sequences = arg_utils.EngineArgs.get_batch_defaults(1)
    assert plan_of([], gpu).max_num_seqs == sequences[UsageContext.LLM_CLASS]


def test_its_sockets_lie_in_its_own_folder_which_goes_with_it(runner: Runner) -> None:
    assert any(path.is_socket() for path in Path(runner.engine._folder.name).iterdir())


def test_its_folder_lies_in_the_scratch_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where it is removed after kill -9, too."""
    folders: list[Path] = []

    def refuse(settings: VLLMSettings, folder: Path, drafts: DraftCounter) -> None:
        folders.append(folder)
        raise EngineError("not started")

    monkeypatch.setattr("verl.rollout.vllm_engine._start_vllm", refuse)
    with scratch_folder() as scratch, pytest.raises(EngineError, match="not started"):
        asyncio.run(VLLMEngine.start(settings(tmp_path)))
    assert folders[0].is_relative_to(scratch)


def test_the_environment_is_left_as_it_was(runner: Runner) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "PYTHONWARNINGS", "TORCHDYNAMO_DISABLE", "VLLM_LOGGING_CONFIG_PATH"):
        assert name not in os.environ, (name, runner)


@pytest.mark.slow
def test_bf16_weights_are_as_close_after_a_weight_sync_as_after_a_start(tmp_path: Path, model_path: Path) -> None:
    policy = shaken(load_causal_lm(str(model_path)), 6)
    policy.model.save_pretrained(tmp_path)
    published, fresh = Runner(settings(model_path, "bfloat16")), Runner(settings(tmp_path, "bfloat16"))
    try:
        published.sync(1, policy)
        found = {}
        for version, runner in ((1, published), (0, fresh)):
            found[version] = sum(mean_gap(runner, policy, 1.0, version) for _ in range(8)) / 8
    finally:
        published.close()
        fresh.close()
    assert found[1] <= 1.2 * found[0]


class Flipping(SharedMemory):
    """Alters one bit of the third bucket behind its digest."""

    def send(self, layout: BucketLayout, flat: torch.Tensor) -> SharedFile:
        handle = super().send(layout, flat)
        if layout.number == 2:
            flat.view(torch.uint8)[7] ^= 1
        return handle


@pytest.mark.slow
def test_an_altered_bucket_ends_the_engine(model_path: Path) -> None:
    runner = Runner(settings(model_path))
    try:
        policy = PackedPolicy(load_causal_lm(str(model_path)))
        with pytest.raises(EngineError, match=r"checksum mismatch in weight bucket 2"):
            runner(sync(runner.engine, 1, hf_named_parameters(policy), sender=Flipping()))
        with pytest.raises(EngineError, match="weights are inconsistent; restart it"):
            runner.generate([[5]], Sampling(1))
    finally:
        runner.close()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "victim"), [(1, "EngineCore"), (2, "EngineCore"), (2, "Worker")])
def test_a_killed_process_fails_pending_and_later_requests_and_leaves_nothing_behind(
    model_path: Path, workers: int, victim: str
) -> None:
    runner = Runner(replace(settings(model_path), tensor_parallel_size=workers))
    processes = list(runner.engine._processes)
    assert len(processes) == (1 if workers == 1 else 1 + workers)  # a lone worker lives in the core process
    process = next(each for each in processes if victim in each.name())

    async def kill_meanwhile() -> None:
        pending = asyncio.ensure_future(runner.engine.generate([5], Sampling(ROOM, n=32)))
        await asyncio.sleep(0.1)
        process.kill()
        call = asyncio.ensure_future(runner.engine._call_workers("follow", str(os.getpid())))
        for result in await asyncio.gather(pending, call, return_exceptions=True):
            assert isinstance(result, EngineError)

    try:
        started = time.monotonic()
        runner(kill_meanwhile())
        cause = rf"vLLM process {process.pid} was killed by SIGKILL" if victim == "EngineCore" else "vLLM process"
        with pytest.raises(EngineLostError, match=cause):
            runner.generate([[5]], Sampling(1))
        assert time.monotonic() - started < 30
    finally:
        runner.close()
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


@pytest.mark.parametrize(
    ("signum", "message"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        (signal.SIGTERM, "was killed by SIGTERM"),
        (signal.SIGSTOP, "has not responded for 1 s; its process is stopped"),
    ],
)
def test_all_calls_fail_with_the_reason_why_the_process_ended(signum: int, message: str) -> None:
    """A stand-in for vLLM with a real process: nothing of vLLM is started."""
    llm: Any = SimpleNamespace(
        errored=False,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        shutdown=lambda timeout: None,
    )

    async def lost(process: subprocess.Popen[bytes]) -> None:
        folder = tempfile.TemporaryDirectory(prefix="verl-vllm-")
        engine = VLLMEngine(llm, replace(settings(Path("x")), health_timeout_s=1.0), folder, DraftCounter())
        engine._processes = [psutil.Process(process.pid)]
        engine._await_ends()
        call = asyncio.ensure_future(engine._unless_dead(asyncio.sleep(100)))
        await asyncio.sleep(0)
        os.kill(process.pid, signum)
        with pytest.raises(EngineLostError, match=rf"^vLLM process {process.pid} {message}; restart the engine"):
            await asyncio.wait_for(call, 60)
        await engine.close()
        assert not psutil.pid_exists(process.pid)

    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        asyncio.run(lost(process))


@pytest.mark.parametrize("interrupted", [False, True])
def test_an_uninterrupted_request_is_aborted_by_an_engine_that_ends(interrupted: bool) -> None:
    """A stand-in for vLLM with a real process: after SIGTERM its core aborts all requests, then it is gone."""
    aborted = asyncio.Event()

    async def generate(*_: Any, **__: Any) -> AsyncIterator[Any]:
        await aborted.wait()
        output = SimpleNamespace(index=0, token_ids=[], logprobs=[], finish_reason="abort")
        yield SimpleNamespace(finished=True, outputs=[output], num_cached_tokens=None)

    async def abort(_: list[str]) -> None:
        aborted.set()

    llm: Any = SimpleNamespace(
        errored=False,
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
        shutdown=lambda timeout: None,
        generate=generate,
        abort=abort,
    )

    async def ask(process: subprocess.Popen[bytes]) -> None:
        engine = VLLMEngine(llm, settings(Path("x")), tempfile.TemporaryDirectory(prefix="verl-vllm-"), DraftCounter())
        engine._processes = [psutil.Process(process.pid)]
        engine._await_ends()
        engine._version = 0
        call = asyncio.ensure_future(engine.generate([5], Sampling(4)))
        await asyncio.sleep(0.1)
        if interrupted:
            await engine.interrupt()
            (completion,) = await call
            assert completion.finish_reason == "abort"
        else:
            aborted.set()
            process.terminate()
            with pytest.raises(EngineLostError, match=rf"vLLM process {process.pid} was killed by SIGTERM"):
                await asyncio.wait_for(call, 60)
        await engine.close()

    process = subprocess.Popen(["sleep", "600"])
    try:
        asyncio.run(ask(process))
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "victim"), [(1, "EngineCore"), (2, "Worker")])
def test_a_process_that_stays_stopped_is_lost_and_does_not_keep_the_engine_from_ending(
    model_path: Path, workers: int, victim: str
) -> None:
    runner = Runner(replace(settings(model_path), tensor_parallel_size=workers, health_timeout_s=3.0))
    processes = list(runner.engine._processes)
    process = next(each for each in processes if victim in each.name())

    async def stop_meanwhile() -> list[object]:
        pending = asyncio.ensure_future(runner.engine.generate([5], Sampling(ROOM, n=32)))
        await asyncio.sleep(0.1)
        process.suspend()
        await asyncio.sleep(1)
        process.resume()
        (whole, *_) = await pending
        pending = asyncio.ensure_future(runner.engine.generate([5], Sampling(ROOM, n=32)))
        await asyncio.sleep(0.1)
        process.suspend()
        return [whole.finish_reason, *await asyncio.gather(pending, return_exceptions=True)]

    try:
        reason, error = runner(stop_meanwhile())
        assert reason is FinishReason.LENGTH and isinstance(error, EngineLostError)
        assert f"vLLM process {process.pid} has not responded for 3 s; its process is stopped" in str(error)
    finally:
        started = time.monotonic()
        runner.close()
        assert time.monotonic() - started < 30
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes)


OWNER = """
import asyncio, sys
from tests.verl.rollout.test_vllm_engine import settings
from verl.rollout.vllm_engine import VLLMEngine

async def main():
    engine = await VLLMEngine.start(settings(sys.argv[1]))
    print(*(process.pid for process in engine._processes), flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_vllm_ends_with_its_owner(model_path: Path, tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(model_path)]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        owner.kill()
    assert len(pids) == 1
    deadline = time.monotonic() + 20
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, "vLLM lives on"
        time.sleep(0.2)


def test_an_engine_ends_with_an_owner_that_was_not_reaped() -> None:
    owner, core = subprocess.Popen([sys.executable, "-c", ""]), subprocess.Popen(["sleep", "600"])
    while psutil.Process(owner.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    ending = threading.Thread(target=_end_with, args=(owner.pid, core.pid), daemon=True)
    ending.start()
    try:
        assert core.wait(60) == -signal.SIGKILL
    finally:
        owner.wait()
        core.kill()
        core.wait()


def test_tokens_are_counted_while_vllm_writes_them(runner: Runner) -> None:
    """Three responses of one request and two of their own: vLLM keeps the ended ones of the former until all are."""
    engine, looks = runner.engine, list[int]()

    async def look(working: asyncio.Future[Any]) -> None:
        while not working.done():
            looks.append(await engine.tokens_written())
            await asyncio.sleep(0.001)

    async def written() -> None:
        joined = engine.generate(PROMPTS[0], Sampling(max_tokens=300, n=3, stop_token_ids=tuple(range(0, 200, 40))))
        alone = (engine.generate(prompt, Sampling(max_tokens=300)) for prompt in PROMPTS[1:3])
        await look(asyncio.gather(joined, *alone))

    runner(written())
    assert len({*looks}) > 9 and 0 < max(looks) <= 1500
    assert runner(engine.tokens_written()) == 0


def test_a_later_turn_finds_its_context_in_the_cache_of_its_engine(runner: Runner, model_path: Path) -> None:
    """Of 300 tokens, two blocks of 128 are kept. Without the episodes' numbers the second turns, which are asked in the
    other order, go to the engines of one another."""

    async def played(engines: Sequence[VLLMEngine], numbered: bool) -> dict[str, float]:
        pool = EnginePool(SeveralHere(engines), [[0], [0]])  # type: ignore[arg-type]
        await pool.metrics()
        first = 10 + 2 * numbered
        episodes = [[*range(first + place, 190), *range(5, 115 + first + place)] for place in (0, 1)]
        for order in ((0, 1), (1, 0)):
            samplings = [Sampling(4, episode=place if numbered else None) for place in order]
            requests = [pool.generate(episodes[place], each) for place, each in zip(order, samplings, strict=True)]
            for place, (answer,) in zip(order, await asyncio.gather(*requests), strict=True):
                episodes[place] += [*answer.token_ids, *range(60)]
        return await pool.metrics()

    async def with_another() -> list[dict[str, float]]:
        another = await VLLMEngine.start(settings(model_path))
        try:
            return [await played((runner.engine, another), numbered) for numbered in (True, False)]
        finally:
            await another.close()

    for counts, cached in zip(runner(with_another()), (256, 0), strict=True):
        assert counts["rollout/prompt_tokens"] == 2 * (300 + 364)
        assert counts["rollout/cached_tokens"] == 2 * cached


class SeveralHere:
    """A worker group of engines in this process."""

    def __init__(self, engines: Sequence[VLLMEngine]) -> None:
        self._engines, self.size = engines, len(engines)

    async def submit(self, rank: int, function: Callable[..., Any], *args: Any) -> Any:
        return await function(self._engines[rank], *args)
