"""Sizes of attention heads that a run can compute: on a CPU vLLM's kernels limit them, on a GPU the trainer's.

vLLM's CPU build starts with heads of any size and fails at the first request. Its build for CUDA has a kernel for every
size, but training in half precision needs flash attention. Importing this needs nothing but Python.
"""

from collections.abc import Collection

from verl.errors import ConfigError

VLLM_ON_CPU: Collection[int] = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
FLASH: Collection[int] = range(8, 257, 8)


def describe_head_sizes(on_cpu: bool) -> str:
    if on_cpu:
        return f"vLLM's attention on a CPU computes heads of size {', '.join(map(str, VLLM_ON_CPU))}"
    return f"flash attention computes heads whose size is a multiple of {min(FLASH)}, up to {max(FLASH)}"


def check_head_size(size: int, key: str, on_cpu: bool, engine: str | None, dtype: str) -> None:
    """Raises ConfigError for a size that nothing computes.

    key: the configuration key of the model's path; engine: `rollout.name`, or None for a model that is only trained
    dtype: `model.compute_dtype`
    """
    if on_cpu:
        limits, sizes, unlimited = engine == "vllm", VLLM_ON_CPU, "rollout.name=hf"
    else:
        limits, sizes, unlimited = dtype != "float32", FLASH, "model.compute_dtype=float32"
    if limits and size not in sizes:
        raise ConfigError(
            f"{key}: attention heads of size {size} are not supported: {describe_head_sizes(on_cpu)}; "
            f"{unlimited} has no such limit"
        )
