"""rollout.engine_options: further arguments of vLLM's engine, by vLLM's own names.

They are for what no setting covers, such as another attention backend. Nothing here imports vLLM, which takes ten
seconds, so that a misspelled name ends a run before its ranks start.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.registry import nearest

_CLASSES = ("EngineArgs", "AsyncEngineArgs")  # the second inherits from the first
# Arguments that are set already, by vLLM's name: by which setting, or why they have no other value.
SET_ALREADY: Mapping[str, str] = {
    "model": "set model.path",
    "tokenizer": "set model.tokenizer_path",
    "skip_tokenizer_init": "only stop strings need a tokenizer in the engine",
    "dtype": "set rollout.dtype",
    "max_model_len": "it is data.max_prompt_length + data.max_response_length",
    "tensor_parallel_size": "set rollout.tensor_model_parallel_size",
    "distributed_executor_backend": "an engine starts its own processes, beside Ray",
    "gpu_memory_utilization": "set rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "set rollout.kv_cache_gib on a CPU, rollout.gpu_memory_utilization on a GPU",
    "max_num_seqs": "set rollout.max_num_seqs",
    "max_num_batched_tokens": "set rollout.max_num_batched_tokens",
    "enable_sleep_mode": "an engine sleeps where it shares its GPU with a trainer rank",
    "seed": "set trainer.seed",
    "enable_prefix_caching": "responses to one prompt share its KV cache",
    "generation_config": "sampling is set by rollout.temperature, top_p, top_k and repetition_penalty",
    "logprobs_mode": "log-probs must be those of the sampled distribution",
    "worker_extension_cls": "it receives the weights",
    "speculative_config": "set rollout.speculation",
    "enable_lora": "set lora.rank",
    "max_loras": "an engine has the policy's adapter alone",
    "max_lora_rank": "set lora.rank",
    "disable_log_stats": "only drafts are counted",
    "use_tqdm_on_load": "progress is shown by the run",
}


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for arguments that are set already, and for those that the installed vLLM does not have."""
    for name in options:
        if name in SET_ALREADY:
            raise ConfigError(f"rollout.engine_options.{name} is refused: {SET_ALREADY[name]}")
        known = engine_arguments_of_vllm()
        if known and name not in known:
            raise ConfigError(
                f"rollout.engine_options.{name} is no argument of the installed vLLM (AsyncEngineArgs); "
                f"{nearest(name, known, 'its documentation lists them as engine arguments')}"
            )


def engine_arguments_of_vllm() -> list[str]:
    """The fields of AsyncEngineArgs, from the source of the installed vLLM; none without vLLM."""
    found = find_spec("vllm")  # does not import it
    if found is None or found.origin is None:
        return []
    source = Path(found.origin).parent / "engine" / "arg_utils.py"
    classes = [each for each in ast.parse(source.read_text(encoding="utf-8")).body if isinstance(each, ast.ClassDef)]
    fields = [
        line.target
        for each in classes
        if each.name in _CLASSES
        for line in each.body
        if isinstance(line, ast.AnnAssign) and not ast.unparse(line.annotation).startswith("ClassVar")
    ]
    return [each.id for each in fields if isinstance(each, ast.Name)]
