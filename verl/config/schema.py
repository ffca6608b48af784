"""Every setting, its default and its meaning. The only place where a default lives.

A group checks its own values; what concerns several groups is checked in `Config`. Batch sizes are in prompts, lengths
in tokens, frequencies in steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.errors import ConfigError


def _require(condition: bool, key: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"{key} must be {expected}, got {got!r}")


@dataclass(frozen=True)
class DataConfig:
    """Which tasks, and how many at a time."""

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    weights: list[float] | None = None  # one per training file; by rows if left out
    train_batch_size: int = 512
    max_prompt_length: int = 2048
    max_response_length: int = 1024
    on_bad_row: str = "error"  # error | skip
    seed: int = 0

    def __post_init__(self) -> None:
        _require(self.on_bad_row in ("error", "skip"), "data.on_bad_row", "error or skip", self.on_bad_row)
        for name in ("train_batch_size", "max_prompt_length", "max_response_length"):
            _require(getattr(self, name) >= 1, f"data.{name}", "at least 1", getattr(self, name))


@dataclass(frozen=True)
class ModelConfig:
    """The policy that is trained; reference and critic start as copies of it."""

    path: str | None = None  # a folder or a hub name
    enable_gradient_checkpointing: bool = False
    compute_dtype: str = "bfloat16"  # bfloat16 | float32; the masters are float32 always

    def __post_init__(self) -> None:
        known = ("bfloat16", "float32")
        _require(self.compute_dtype in known, "model.compute_dtype", " or ".join(known), self.compute_dtype)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    weight_decay: float = 0.01
    warmup_steps: int = 0  # optimizer steps
    schedule: str = "constant"  # constant | cosine

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", "positive", self.lr)
        _require(self.schedule in ("constant", "cosine"), "optim.schedule", "constant or cosine", self.schedule)


@dataclass(frozen=True)
class ActorConfig:
    """How the policy is updated."""

    ppo_mini_batch_size: int = 128  # per optimizer step
    max_tokens_per_pack: int = 16384  # of one forward on one rank
    share_prefix: bool = True  # hold the common prompt of a group once
    grad_clip: float = 1.0
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        for name in ("ppo_mini_batch_size", "max_tokens_per_pack"):
            _require(getattr(self, name) >= 1, f"actor.{name}", "at least 1", getattr(self, name))
        _require(self.grad_clip > 0, "actor.grad_clip", "positive", self.grad_clip)


@dataclass(frozen=True)
class RolloutConfig:
    """How the policy is sampled."""

    name: str = "vllm"  # vllm | hf
    n: int = 4  # rollouts per prompt
    temperature: float = 1.0
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.6

    def __post_init__(self) -> None:
        _require(self.name in ("vllm", "hf"), "rollout.name", "vllm or hf", self.name)
        _require(self.n >= 1, "rollout.n", "at least 1", self.n)
        _require(self.temperature > 0, "rollout.temperature", "positive", self.temperature)


@dataclass(frozen=True)
class AlgorithmConfig:
    """A preset by name, and what overrides it; None leaves the preset's value."""

    name: str = "toolrl_grpo"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: str | None = None
    kl_placement: str | None = None  # none | reward | loss
    kl_estimator: str | None = None  # k1 | k2 | k3
    kl_coefficient: float | None = None
    entropy_coefficient: float | None = None


@dataclass(frozen=True)
class RewardConfig:
    """Which reward (a known name, module:attribute or file.py:attribute), and its options (docs/reward.md)."""

    name: str = "rlla"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainerConfig:
    """How long, how often, where."""

    total_epochs: int = 15
    total_training_steps: int | None = None  # overrules total_epochs
    save_freq: int = 15  # 0: only at the end
    test_freq: int = 5  # 0: never
    experiment_name: str = "default"
    default_local_dir: str = "outputs"
    logger: list[str] = field(default_factory=lambda: ["console"])  # console, jsonl, tensorboard, wandb
    nnodes: int = 1
    n_gpus_per_node: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("save_freq", "test_freq"):
            _require(getattr(self, name) >= 0, f"trainer.{name}", "0 or more", getattr(self, name))
        known = ("console", "jsonl", "tensorboard", "wandb")
        _require(set(self.logger) <= set(known), "trainer.logger", f"some of {', '.join(known)}", self.logger)


@dataclass(frozen=True)
class Config:
    """The whole tree."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        batch, mini = self.data.train_batch_size, self.actor.ppo_mini_batch_size
        if batch % mini:
            raise ConfigError(
                f"data.train_batch_size ({batch}) must be a multiple of actor.ppo_mini_batch_size ({mini}), "
                "so that every optimizer step has as many prompts"
            )
        longest = self.data.max_prompt_length + self.data.max_response_length
        if longest > self.actor.max_tokens_per_pack:
            raise ConfigError(
                f"actor.max_tokens_per_pack ({self.actor.max_tokens_per_pack}) is less than data.max_prompt_length + "
                f"data.max_response_length ({longest}), so the longest sample would fit no pack"
            )

    @property
    def minibatches_per_step(self) -> int:
        """Optimizer steps per training step."""
        return self.data.train_batch_size // self.actor.ppo_mini_batch_size

    def batch_arithmetic(self) -> str:
        """What a step trains on, in numbers, because nobody should have to guess what a mini-batch is."""
        prompts, n, mini = self.data.train_batch_size, self.rollout.n, self.actor.ppo_mini_batch_size
        return (
            f"a step: {prompts} prompts x {n} rollouts = {prompts * n} samples; "
            f"{self.minibatches_per_step} optimizer steps of {mini} prompts = {mini * n} samples each; "
            f"packs of at most {self.actor.max_tokens_per_pack} tokens"
        )
