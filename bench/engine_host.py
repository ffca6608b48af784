"""CPU time of vLLM's Python per sequence and decoding step, without a model: what a GPU cannot hide.

    python bench/engine_host.py [--sequences 256,512,1024,2048] [--steps 48] [--json FILE]

vLLM's own scheduler, message encoding and output processor run as in a rollout (FINAL_ONLY, log-probs of the sampled
tokens, prefix caching) on tokens that are made up. Its core process schedules, updates requests and encodes; the
process of the engine's owner decodes and collects. Both work while the GPU computes, but not longer than the slower
of the two: tokens per second are at most 1 / (the core's seconds per token). The model runner's own preparation is left
out. Runs on vLLM's CPU build and, without a GPU, on its build for CUDA, configured as on an H200 (scripts/gpuset.sh
has the environment). CPU seconds of one thread, of each stage the least of all steps: other programs disturb them.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import common
import numpy as np
import torch
from transformers import Qwen2Config

from tests.gpuset.cards import H200, pretend
from verl.rollout.vllm_engine import VLLMSettings, engine_arguments

PROMPT, BLOCKS = 256, 60_000  # tokens of a prompt; blocks of the KV cache
CORE, OWNER = ("schedule", "update", "encode"), ("decode", "collect")  # stages of each process
Result = TypeVar("Result")


class Stages:
    """CPU seconds of each stage of the current step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, call: Callable[..., Result], *args: Any) -> Result:
        start = time.process_time()
        result = call(*args)
        self.seconds[stage] = time.process_time() - start
        return result


@contextmanager
def configured(sequences: int) -> Iterator[Any]:
    """vLLM's configuration of an engine for that many sequences, on this CPU or as on an H200."""
    from vllm.platforms import current_platform

    with nullcontext() if current_platform.is_cpu() else pretend(H200), tempfile.TemporaryDirectory() as folder:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext

        model = Qwen2Config(hidden_size=1536, num_attention_heads=12, num_key_value_heads=2, vocab_size=151936)
        model.architectures = ["Qwen2ForCausalLM"]
        model.save_pretrained(folder)
        on_cpu = current_platform.is_cpu()
        settings = VLLMSettings(
            folder,
            3072,
            kv_cache_gib=1 if on_cpu else None,
            max_num_seqs=sequences,
            max_num_batched_tokens=32768,
            num_threads=1,
        )
        arguments = AsyncEngineArgs(**engine_arguments(settings, on_cpu))
        yield arguments.create_engine_config(UsageContext.LLM_CLASS)


def steps(config: Any, sequences: int, number: int) -> Iterator[dict[str, float]]:
    """{stage: CPU seconds} of decoding steps with that many running sequences."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
    from vllm.v1.structured_output import StructuredOutputManager

    block = config.cache_config.block_size or 16
    spec = FullAttentionSpec(block_size=block, num_kv_heads=2, head_size=128, dtype=torch.bfloat16)
    cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    config.cache_config.num_gpu_blocks = BLOCKS
    make = config.scheduler_config.get_scheduler_cls()
    scheduler = make(config, cache, StructuredOutputManager(config), block_size=block)
    hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    init_none_hash(hash_function)
    hasher = get_request_block_hasher(block, hash_function)
    processor = OutputProcessor(None, log_stats=False)
    final = RequestOutputKind.FINAL_ONLY
    sampling = SamplingParams(max_tokens=2048, logprobs=0, ignore_eos=True, detokenize=False, output_kind=final)
    random = np.random.default_rng(0)
    for index in range(sequences):
        name = f"verl-{index}"
        prompt = random.integers(0, 1000, PROMPT + index % block).tolist()  # a new block at another step each
        request = EngineCoreRequest(name, prompt, None, sampling, None, 0.0, None, None, None, external_req_id=name)
        processor.add_request(request, None, None, 0, RequestOutputCollector(final, name))
        scheduler.add_request(Request.from_engine_core_request(request, hasher))
    encoder, decoder, stages = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs), Stages()
    done = 0
    while done < number:
        scheduled = stages("schedule", scheduler.schedule)
        names = list(scheduled.num_scheduled_tokens)
        tokens = random.integers(0, 1000, (len(names), 1))
        logprobs = LogprobsLists(tokens.astype(np.int32), -random.random((len(names), 1)), np.ones(len(names)))
        running = (scheduler.requests[name] for name in names)
        whole = [each.num_computed_tokens >= each.num_tokens for each in running]  # no part of the prompt is left
        new = [row if ends else [] for row, ends in zip(tokens.tolist(), whole, strict=True)]
        sampled = ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, new, logprobs=logprobs)
        outputs = stages("update", scheduler.update_from_output, scheduled, sampled)[0]
        frames = stages("encode", encoder.encode, outputs)
        received = stages("decode", decoder.decode, frames)
        stages("collect", processor.process_outputs, received.outputs)
        if all(each == 1 for each in scheduled.num_scheduled_tokens.values()) and len(names) == sequences:
            done += 1
            yield dict(stages.seconds)


def measure(sequences: int, number: int) -> dict[str, float]:
    """{stage: microseconds per sequence and step}, and of each process."""
    with configured(sequences) as config:
        found = list(steps(config, sequences, number))
    by_stage = {stage: 1e6 * min(each[stage] for each in found) / sequences for stage in (*CORE, *OWNER)}
    return by_stage | {"core": sum(by_stage[each] for each in CORE), "owner": sum(by_stage[each] for each in OWNER)}


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="256,512,1024,2048")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    torch.set_num_threads(1)
    rows = {number: measure(number, arguments.steps) for number in map(int, arguments.sequences.split(","))}
    stages = [*CORE, *OWNER, "core", "owner"]
    print(f"| sequences | {' | '.join(stages)} | core, ms a step | tokens/s at most |")
    print(f"| --- |{' --- |' * (len(stages) + 2)}")
    for number, row in rows.items():
        cells = " | ".join(f"{row[stage]:.1f}" for stage in stages)
        print(f"| {number:,} | {cells} | {row['core'] * number / 1e3:.1f} | {1e6 / row['core']:,.0f} |")
    if arguments.json:
        arguments.json.write_text(json.dumps({**common.machine(), **common.versions(), "us": rows}, indent=1))


if __name__ == "__main__":
    main()
