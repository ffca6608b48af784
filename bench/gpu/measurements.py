"""What bench/gpu/short.py measures, in order: the most valuable first, as far as processes can be shared.

Importing this needs nothing but Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Figures = dict[str, float | str]  # by name, with its unit: "a pack, forward and backward: ms"


class UnexpectedError(Exception):
    """A measurement whose figures are there, but not as they should be."""

    def __init__(self, reason: str, figures: Mapping[str, float | str]) -> None:
        super().__init__(reason)
        self.figures = dict(figures)


@dataclass(frozen=True)
class Measurement:
    """A method of its session's class.

    seconds: estimate for an H100; it is started only if that much time is left
    limit: seconds after which its process is killed
    needs: modules that it imports beside its session's
    """

    name: str
    shows: str
    seconds: float
    limit: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Session:
    """Measurements that share a process, and so its models.

    location: module:class, which is called with the `Place` and may have a coroutine `close`
    start: estimated seconds until a new process, and the engine that it may need, can measure
    """

    location: str
    start: float
    needs: tuple[str, ...]
    measurements: Sequence[Measurement]


_TRAINER = ("liger_kernel", "blake3")
_RUN = ("ray", "hydra", "vllm", *_TRAINER)
SESSIONS: Sequence[Session] = (
    Session(
        "bench.gpu.exactness:Exactness",
        25,
        (),
        (
            Measurement("ceilings", "speed of a copy and of two matrix products", 5, 30),
            Measurement(
                "gradients",
                "gradients of a fused, packed, sharded model of two layers in bfloat16 against float64",
                30,
                120,
                _TRAINER,
            ),
            Measurement(
                "kernels",
                "attention against float64: 2 key heads for 12 query heads, head sizes 64 and 128, windows, float32",
                25,
                90,
            ),
            Measurement("losses", "Triton's loss kernels against float64", 15, 60),
            Measurement(
                "delta_nets",
                "gated delta nets of a pack by fla-core's kernels and segment by segment: errors, milliseconds",
                25,
                90,
                ("fla",),
            ),
        ),
    ),
    Session(
        "bench.gpu.serving:Serving",
        90,
        ("vllm", "blake3"),
        (
            Measurement("start", "start of an engine, and the memory that it and CUDA's context take", 10, 30),
            Measurement("greedy", "greedy tokens and log-probs of engine and trainer", 15, 60),
            Measurement("sync", "sync of unchanged and of perturbed weights by CUDA IPC", 15, 60),
            Measurement("sleep", "sleep and wake-up: seconds, and memory before, asleep and awake", 15, 60),
            Measurement("decode", "tokens/s and the host's CPU time at 256 to 2,048 sequences", 55, 120),
            Measurement("corrupted", "a corrupted weight bucket is refused", 10, 30),
        ),
    ),
    Session(
        "bench.gpu.runs:Runs",
        15,
        _RUN,
        (Measurement("learns", "the embedded model learns, from a validation total of 1.28 to 2.0", 90, 180),),
    ),
    Session(
        "bench.gpu.packs:Packs",
        35,
        _TRAINER,
        (
            Measurement("packs", "milliseconds of packs by kernel class, MFU, and peak memory", 60, 150),
            Measurement("offload", "parameters and optimizer state to host memory and back", 15, 60),
        ),
    ),
    Session(
        "bench.gpu.runs:Runs",
        15,
        _RUN,
        # Until the first step 80 s: imports and the tokens of all prompts 25, Ray, the ranks and the engine 55. Then
        # three steps of 37 s (docs/benchmarks.md).
        (Measurement("step", "seconds of a 1.5B step by phase, MFU, and peak memory beside the plan", 195, 300),),
    ),
    Session(
        "bench.gpu.trl_step:TRLStep",
        20,
        ("trl", "datasets", "vllm"),
        (Measurement("trl", "a step of TRL's trainer, with its own vLLM in the same process", 150, 240),),
    ),
    Session(
        "bench.gpu.runs:Runs",
        15,
        (*_RUN, "peft"),
        (Measurement("adapter", "LoRA: engine and trainer compute the same after every sync", 70, 150),),
    ),
)


def measured(sessions: Sequence[Session]) -> list[Measurement]:
    return [each for session in sessions for each in session.measurements]


Row = dict[str, Any]  # a line of results.jsonl: name, state, reason, figures, seconds, device, versions
OK, FAILED, SKIPPED = "ok", "failed", "skipped"
