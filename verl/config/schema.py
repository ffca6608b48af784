"""The configuration schema: one tree for all commands, every setting with its default and meaning.

Training hyperparameters default to those of veRL's ppo_trainer.yaml in ToolRL's version (docs/training.md). Groups
validate their own values, verl/config/commands.py across groups. Batch sizes are in prompts, lengths in tokens,
frequencies in steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple, cast

from verl.algorithms import ADV_ESTIMATORS
from verl.algorithms.names import Aggregation, KLEstimate, KLPlacement, Level, OldLogprobs
from verl.errors import ConfigError

_SEEDS = 2**23  # each is expanded to 2**40 seeds for single responses, within 64 bits
_DTYPES = ("bfloat16", "float32")
OFFLOAD = ("none", "params", "optimizer", "all")
VERL_NAMES = "verl_names"
LOGGERS = ("console", "rollouts", VERL_NAMES, "jsonl", "tensorboard", "wandb", "trackio", "mlflow", "swanlab")


def _require(condition: bool, key: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"{key} must be {expected}, got {got!r}")


def _one_of(known: tuple[str, ...], key: str, value: str) -> None:
    _require(value in known, key, " or ".join(known), value)


def _at_least(minimum: int, config: object, group: str, *names: str) -> None:
    """Checks settings that are not None. group: with its dot"""
    expected = f"at least {minimum}" if minimum else "0 or more"
    for name in names:
        value = getattr(config, name)
        _require(value is None or value >= minimum, f"{group}{name}", expected, value)


def _positive(config: object, group: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or value > 0, f"{group}{name}", "positive", value)


def _shares(config: object, group: str, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value is None or 0 <= value <= 1, f"{group}{name}", "between 0 and 1", value)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)  # files, folders or hub names of the training rows
    val_files: list[str] = field(default_factory=list)  # validation rows; each file is a validation set
    columns: dict[str, str] = field(default_factory=dict)  # {column of the files: its name in docs/data.md}
    map: str | None = None  # file.py:function, row -> row or list of rows, applied before everything else
    split_turns: str = "all"  # trained assistant turns of rows with messages: all (a task each) | last
    weights: list[float] | None = None  # sampling weight per training file; default: number of rows
    val_share: float = 0.0  # share of the rows of each training file that is held out for validation
    train_batch_size: int = 1024  # prompts per step
    shuffle: bool = True  # reshuffle the rows of a file in every epoch
    max_prompt_length: int = 512  # tokens; longer ones: data.truncation
    max_response_length: int = 512  # tokens of an episode after its prompt; in SFT, the sum of both limits a sample
    prompt_template: str | None = None  # a text with {question}, by path or name; default: the format's own
    # for overlong prompts: error | left (keep the last tokens) | drop (the row) | auto (left for ToolRL's rows or drop)
    truncation: str = "error"
    max_bad_share: float = 0.05  # share of a file's rows that may be skipped as invalid before the run stops; 0: none
    user_code: bool = False  # whether rows may name code of their own, which then runs, as reward and env

    def __post_init__(self) -> None:
        _one_of(("error", "left", "drop", "auto"), "data.truncation", self.truncation)
        _one_of(("all", "last"), "data.split_turns", self.split_turns)
        _shares(self, "data.", "max_bad_share", "val_share")
        if self.val_share and self.val_files:
            raise ConfigError("data.val_share holds out training rows in place of data.val_files; set one of them")
        if self.weights is not None:
            expected = f"one number between 1e-6 and 1e6 for each of the {len(self.train_files)} data.train_files"
            ok = len(self.weights) == len(self.train_files) and all(1e-6 <= each <= 1e6 for each in self.weights)
            _require(ok, "data.weights", expected, self.weights)
        _at_least(1, self, "data.", "train_batch_size", "max_prompt_length", "max_response_length")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy model; reference and critic start as copies of it."""

    path: str | None = None  # a folder or a hub name
    tokenizer_path: str | None = None  # folder or hub name of the tokenizer; default: the model's
    chat_template_options: dict[str, Any] = field(default_factory=dict)  # template variables, such as enable_thinking
    enable_gradient_checkpointing: bool | str = False  # true (all layers) | false | auto (what a GPU's memory requires)
    fused_kernels: str = "auto"  # auto (on a GPU: liger-kernel 0.8, fla-core 0.6) | liger (required) | none (eager)
    compute_dtype: str = "bfloat16"  # bfloat16 | float32; master weights are always float32

    def __post_init__(self) -> None:
        _one_of(_DTYPES, "model.compute_dtype", self.compute_dtype)
        _one_of(("auto", "liger", "none"), "model.fused_kernels", self.fused_kernels)
        known = self.enable_gradient_checkpointing in (True, False, "auto")
        expected = "true, false or auto"
        _require(known, "model.enable_gradient_checkpointing", expected, self.enable_gradient_checkpointing)


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of the policy, trained in place of its weights, which are frozen (docs/lora.md)."""

    rank: int | None = None  # rank of the adapters; 0 or none: all weights are trained
    alpha: float | None = None  # an adapter's product is scaled by alpha / rank; default: 32
    targets: list[str] | None = None  # linear layers by the ends of their names, such as q_proj; default: all-linear
    path: str | None = None  # folder of an adapter, in peft's format, to start from; it has its rank, alpha and targets
    base_dtype: str = "auto"  # of the frozen weights: auto (model.compute_dtype) | nf4 (linear layers in four bits)
    sync: str = "adapter"  # what a weight sync sends to engines: adapter | merged (whole weights, rounded to a dtype)

    def __post_init__(self) -> None:
        _at_least(0, self, "lora.", "rank")
        _positive(self, "lora.", "alpha")
        _require(self.targets is None or len(self.targets) > 0, "lora.targets", "names of layers", self.targets)
        _one_of(("auto", "nf4"), "lora.base_dtype", self.base_dtype)
        _one_of(("adapter", "merged"), "lora.sync", self.sync)

    @property
    def enabled(self) -> bool:
        return bool(self.rank) or self.path is not None


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Of `toolrl sft` (docs/training.md)."""

    loss: str = "nll"  # nll (of demonstrations) | dpo (rows with chosen and rejected responses)
    beta: float = 0.1  # DPO: implicit rewards are beta * (log p - log p before the training)

    def __post_init__(self) -> None:
        _one_of(("nll", "dpo"), "sft.loss", self.loss)
        _positive(self, "sft.", "beta")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    lr: float = 1e-6  # learning rate of AdamW
    weight_decay: float = 0.01  # weight decay of AdamW
    warmup_steps: float = 0.0  # optimizer steps; below 1, a share of the run's

    def __post_init__(self) -> None:
        _positive(self, "optim.", "lr")
        _at_least(0, self, "optim.", "weight_decay", "warmup_steps")
        whole = self.warmup_steps < 1 or self.warmup_steps == int(self.warmup_steps)
        _require(whole, "optim.warmup_steps", "a whole number, or a share below 1", self.warmup_steps)


@dataclass(frozen=True, kw_only=True)
class ActorOptimConfig(OptimConfig):
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])  # AdamW's, for policy and critic
    schedule: str = "constant"  # learning rate: constant | cosine (over the whole run)
    min_lr_ratio: float = 0.0  # final LR as a fraction of lr (cosine)

    def __post_init__(self) -> None:
        OptimConfig.__post_init__(self)
        ok = len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)
        _require(ok, "optim.betas", "two numbers in [0, 1)", self.betas)
        _shares(self, "optim.", "min_lr_ratio")
        _one_of(("constant", "cosine"), "optim.schedule", self.schedule)


@dataclass(frozen=True, kw_only=True)
class ActorConfig:
    ppo_mini_batch_size: int = 256  # prompts per optimizer step; a default above data.train_batch_size is the batch
    ppo_epochs: int = 1  # passes over each batch
    max_tokens_per_pack: int = 16384  # tokens per forward pass and rank; raised if the longest sample needs it
    grad_clip: float = 1.0  # maximum norm of the gradient
    offload: str = "none"  # to host memory when unused, on a GPU: none | params | optimizer | all (docs/training.md)
    optim: ActorOptimConfig = field(default_factory=ActorOptimConfig)

    def __post_init__(self) -> None:
        _at_least(1, self, "actor.", "ppo_mini_batch_size", "ppo_epochs", "max_tokens_per_pack")
        _positive(self, "actor.", "grad_clip")
        _one_of(OFFLOAD, "actor.offload", self.offload)


@dataclass(frozen=True, kw_only=True)
class RefConfig:
    """The frozen models: the reference policy of the KL penalty, if the algorithm has one, and the teacher."""

    offload_params: bool = False  # GPU: reference and teacher to host memory except during scoring


BEST_OF_GROUP = "best_of_group"


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """On-policy distillation: a model scores the tokens that the policy sampled (docs/training.md)."""

    # the teacher: folder, hub, http://.., or the policy, shown the gold (self) or the best response (best_of_group)
    path: str | None = None
    weight: float = 1.0  # of log p_teacher - log p in the advantages beside those of the reward, or of the loss
    top_k: int | None = None  # its likeliest tokens, over which the KL divergence is a loss; default: advantages

    def __post_init__(self) -> None:
        _positive(self, "teacher.", "weight")
        _at_least(1, self, "teacher.", "top_k")

    @property
    def url(self) -> str | None:
        """Of the server that the teacher is behind."""
        return self.path if self.path and self.path.startswith(("http://", "https://")) else None

    @property
    def local(self) -> str | None:
        """The model that the ranks load."""
        return None if self.url or self.is_policy else self.path

    @property
    def is_policy(self) -> bool:
        return self.path in ("self", BEST_OF_GROUP)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """Critic updates, if the algorithm has a critic. Mini-batches, packs, clipping, betas, schedule: the actor's."""

    path: str | None = None  # folder or hub name of the critic; default: the policy's model
    cliprange_value: float = 0.5  # clip range of the value loss
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    offload: str = "none"  # from the last update of a step: none | params | optimizer | all

    def __post_init__(self) -> None:
        _positive(self, "critic.", "cliprange_value")
        _one_of(OFFLOAD, "critic.offload", self.offload)


ON_WEIGHT_SYNC = ("auto", "continue", "finish", "abort_and_retry")


def _check_top(config: ValKwargs | RolloutConfig, group: str) -> None:
    """group: with its dot"""
    _require(0 < config.top_p <= 1, f"{group}top_p", "more than 0, at most 1", config.top_p)
    _require(config.top_k == -1 or config.top_k >= 1, f"{group}top_k", "at least 1, or -1 for all tokens", config.top_k)


@dataclass(frozen=True, kw_only=True)
class ValKwargs:
    """Sampling for validation (veRL's name). Scores are averaged over a prompt's responses."""

    n: int = 1  # responses to each prompt
    temperature: float = 0.0  # sampling temperature; 0: greedy
    top_p: float = 1.0  # share of the probability to sample from
    top_k: int = -1  # number of tokens to sample from; -1: all

    def __post_init__(self) -> None:
        group = "rollout.val_kwargs."
        _at_least(1, self, group, "n")
        _at_least(0, self, group, "temperature")
        _check_top(self, group)
        if self.n > 1 and self.greedy:
            raise ConfigError(f"{group}n={self.n} greedy responses are identical; set {group}temperature, or n=1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    name: str = "vllm"  # inference engine: vllm | hf
    n: int = 1  # responses to each prompt
    temperature: float = 1.0  # sampling temperature; 0: greedy
    top_p: float = 1.0  # share of the probability to sample from; this and the next two: docs/training.md
    top_k: int = -1  # number of tokens to sample from; -1: all
    repetition_penalty: float = 1.0  # penalty for tokens that have occurred; 1: none
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    dtype: str = "auto"  # engine: auto (model.compute_dtype) | bfloat16 | float32
    max_staleness: int = 0  # maximum age of samples in weight versions; 0: on-policy, rollout and training alternate
    max_reuse: int = 1  # number of steps that may train on a group, within max_staleness
    # responses in progress at a weight sync: continue | finish | abort_and_retry | auto (finish if env.name=agent, else
    # continue)
    on_weight_sync: str = "auto"
    placement: str = "auto"  # colocated (on the trainer's devices) | separate | auto (separate if max_staleness > 0)
    num_engines: int | None = None  # default: as many as fit the trainer's ranks
    tensor_model_parallel_size: int = 1  # GPUs per engine
    max_num_seqs: int | None = None  # concurrent sequences per engine; default: by device and model
    max_num_batched_tokens: int | None = None  # tokens per forward pass of an engine; default: by device
    gpu_memory_utilization: float | None = None  # share of a GPU for the engine; default: what the trainer leaves
    kv_cache_gib: int = 1  # GiB of KV cache per engine, on CPU
    speculation: str = "none"  # none | ngram: vLLM drafts tokens by looking up the last ones in the context
    # further arguments of vLLM's engine, by its names: enforce_eager (default: on a CPU, in short runs), block_size ..
    engine_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _one_of(("vllm", "hf"), "rollout.name", self.name)
        _check_top(self, "rollout.")
        _positive(self, "rollout.", "repetition_penalty")
        share = self.gpu_memory_utilization
        _require(share is None or 0 < share <= 1, "rollout.gpu_memory_utilization", "more than 0, at most 1", share)
        _one_of(("auto", *_DTYPES), "rollout.dtype", self.dtype)
        _one_of(("auto", "colocated", "separate"), "rollout.placement", self.placement)
        _one_of(("none", "ngram"), "rollout.speculation", self.speculation)
        counts = ("n", "num_engines", "tensor_model_parallel_size", "max_num_seqs", "kv_cache_gib")
        _at_least(1, self, "rollout.", *counts, "max_num_batched_tokens")
        tokens, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and sequences is not None:
            expected = f"at least rollout.max_num_seqs={sequences}"
            _require(tokens >= sequences, "rollout.max_num_batched_tokens", expected, tokens)
        _at_least(0, self, "rollout.", "temperature", "max_staleness")
        expected = f"1 to rollout.max_staleness + 1 = {self.max_staleness + 1}"
        _require(1 <= self.max_reuse <= self.max_staleness + 1, "rollout.max_reuse", expected, self.max_reuse)
        _one_of(ON_WEIGHT_SYNC, "rollout.on_weight_sync", self.on_weight_sync)
        eager = self.engine_options.get("enforce_eager")
        _require(eager in (None, True, False), "rollout.engine_options.enforce_eager", "true or false", eager)
        if self.max_staleness and self.placement == "colocated":
            raise ConfigError(
                "rollout.placement=colocated: engines that share the trainer's devices sleep during updates, so "
                "rollout.max_staleness must be 0; set rollout.placement=separate"
            )

    @property
    def truncated(self) -> bool:
        """Whether the sampling distribution differs from the policy's."""
        return self.top_p < 1 or self.top_k != -1 or self.repetition_penalty != 1

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated" or (self.placement == "auto" and self.max_staleness == 0)


class ObservationCut(NamedTuple):
    """How observations are truncated. chars: limit in characters, besides that in tokens; gap: shown for what is cut"""

    place: str
    chars: int | None = None
    gap: str = "\n[...]\n"


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The environment. With name=single_turn and no tool_call_format an episode is a prompt and one response."""

    name: str = "single_turn"  # a known one (docs/environments.md), module:Class or file.py:Class
    options: dict[str, Any] = field(default_factory=dict)  # options of the environment (docs/environments.md)
    agent: str | None = None  # with name=agent: your program, file.py:function or module:function (docs/agents.md) ..
    command: str | None = None  # .. or a command line; {task_json} becomes the path of a file with the task
    tool_call_format: str | None = None  # text format of calls and observations (docs/tool_call_formats.md), or auto
    tool_call_format_options: dict[str, Any] = field(
        default_factory=dict
    )  # options of the format (docs/tool_call_formats.md)
    tools: list[Any] = field(default_factory=list)  # names, or {name: .., option: ..}; your own: file.py:attribute
    max_turns: int | None = None  # max assistant turns; default: enough for max_tool_calls. No tools in the last one
    # [[step, turns], ..]: in training at most so many from each of these steps on, such as [[1, 5], [100, 10]]
    turn_schedule: list[list[int]] = field(default_factory=list)
    # Per episode; when they are used up, one last turn without tools follows. Default: 8; benchmarks have their own
    max_tool_calls: int | None = None
    max_turn_tokens: int | None = None  # per turn; default: the rest of data.max_response_length
    max_observation_tokens: int = 512  # tokens per observation; longer ones: env.observation_cut
    # head | tail | middle | refuse: how longer ones are truncated; or [that, a limit in characters, the text between]
    observation_cut: list[str | int | None] = field(default_factory=lambda: ["middle"])
    on_parse_error: str = "feedback"  # feedback (report it to the policy) | terminate (the episode)
    tool_timeout_s: float = 30.0  # seconds of a tool call
    turn_timeout_s: float = 300.0  # an environment step, and the environment's verdict; excludes engine and tools
    max_concurrent_calls: int = 64  # calls in progress per tool; with name=agent: programs
    train_on_observations: bool | int = False  # train observation tokens, too; a number: in as many first steps

    def __post_init__(self) -> None:
        _at_least(1, self, "env.", "max_turns", "max_turn_tokens", "max_observation_tokens", "max_concurrent_calls")
        _at_least(0, self, "env.", "max_tool_calls")
        _positive(self, "env.", "tool_timeout_s", "turn_timeout_s")
        _ = self.cut
        trained = self.train_on_observations
        number = type(trained) is int and trained > 0
        _require(
            type(trained) is bool or number, "env.train_on_observations", "true, false or a number of steps", trained
        )
        _one_of(("feedback", "terminate"), "env.on_parse_error", self.on_parse_error)
        pairs = all(len(pair) == 2 and min(pair) >= 1 for pair in self.turn_schedule)
        rises = pairs and all(earlier < later for (earlier, _), (later, _) in pairwise(self.turn_schedule))
        expected = "pairs [step, turns] of numbers from 1, in the order of steps"
        _require(rises, "env.turn_schedule", expected, self.turn_schedule)
        if self.turn_schedule and not self.multi_turn:
            raise ConfigError("env.turn_schedule has no effect: without env.tool_call_format an episode has one turn")
        if self.name != "agent" and (self.agent or self.command):
            raise ConfigError(f"env.agent and env.command need env.name=agent; it is {self.name}")
        if self.name == "agent" and self.max_tool_calls is not None:
            raise ConfigError("env.max_tool_calls has no effect with env.name=agent; env.max_turns limits its requests")
        if self.name != "single_turn" and self.tool_call_format is None:
            raise ConfigError(f"env.name={self.name} needs env.tool_call_format (docs/tool_call_formats.md)")

    @property
    def multi_turn(self) -> bool:
        """Whether an episode can have more than one response."""
        return self.tool_call_format is not None

    @property
    def cut(self) -> ObservationCut:
        """env.observation_cut, checked."""
        expected = "one of head, tail, middle, refuse, or [one of them, a limit in characters or null, a text]"
        _require(1 <= len(self.observation_cut) <= 3, "env.observation_cut", expected, self.observation_cut)
        cut = ObservationCut(*cast(Any, self.observation_cut))  # checked below
        valid = cut.place in ("head", "tail", "middle", "refuse") and isinstance(cut.gap, str)
        valid = valid and (cut.chars is None or (type(cut.chars) is int and cut.chars > 0))
        _require(valid, "env.observation_cut", expected, self.observation_cut)
        return cut

    def trains_observations(self, step: int) -> bool:
        """Whether the update with this number, from 1, trains observation tokens."""
        trained = self.train_on_observations
        return trained if isinstance(trained, bool) else step <= trained

    def turns_at(self, step: int) -> int | None:
        """The scheduled limit of turns for the update with this number, from 1; None without one."""
        started = [turns for first, turns in self.turn_schedule if first <= step]
        return started[-1] if started else None

    @property
    def call_limit(self) -> int:
        return 8 if self.max_tool_calls is None else self.max_tool_calls


@dataclass(frozen=True, kw_only=True)
class SandboxConfig:
    """The sandbox for code written by the policy, if a tool runs code."""

    isolation: str = "bubblewrap"  # strict (bubblewrap, or no start without a cgroup) | bubblewrap | none (limits only)
    urls: list[str] = field(default_factory=list)  # SandboxFusion servers to use instead
    num_workers: int | None = None  # local pool; default: one per CPU core
    timeout_s: float = 10.0  # seconds per execution
    memory_mib: int = 1024  # memory limit per execution

    def __post_init__(self) -> None:
        _one_of(("strict", "bubblewrap", "none"), "sandbox.isolation", self.isolation)
        _positive(self, "sandbox.", "timeout_s")
        _at_least(64, self, "sandbox.", "memory_mib")
        _at_least(1, self, "sandbox.", "num_workers")
        web = all(url.startswith(("http://", "https://")) for url in self.urls)
        _require(web, "sandbox.urls", "such as [http://host:8080]", self.urls)


_CHOICES = {
    "aggregation": tuple(Aggregation),
    "old_logprobs": tuple(OldLogprobs),
    "kl_placement": tuple(KLPlacement),
    "kl_estimator": tuple(KLEstimate),
    "adv_estimator": tuple(ADV_ESTIMATORS),
}


@dataclass(frozen=True, kw_only=True)
class CorrectionConfig:
    """Off-policy correction of the engine-trainer mismatch: importance sampling and rejection (docs/algorithms.md).

    A ratio is the trainer's probability before the update divided by the engine's. None keeps the preset's value; most
    presets have no correction, so the default is that of `Correction`.
    """

    is_level: str = "auto"  # auto (the preset's, else token if rollout.max_staleness > 0) | none | token | sequence
    is_cap: float | None = None  # truncation of importance weights; usually 2
    rejection_level: str | None = None  # none | token | sequence | geometric | binary_kl: what the bounds apply to
    rejection_bounds: list[float] | None = None  # [lower, upper]; usually [0.5, 2]
    token_veto: float | None = None  # token ratio below which the whole sample is rejected, such as 1e-4

    def __post_init__(self) -> None:
        levels, key = ("auto", "none", Level.TOKEN, Level.SEQUENCE), "algorithm.correction"
        masks, level = ("none", *Level), self.rejection_level
        _require(self.is_level in levels, f"{key}.is_level", f"one of {', '.join(levels)}", self.is_level)
        _require(level in (None, *masks), f"{key}.rejection_level", f"one of {', '.join(masks)}", level)
        cap, bounds = self.is_cap, self.rejection_bounds
        _require(cap is None or cap >= 1, f"{key}.is_cap", "at least 1, the ratio of equal policies", cap)
        around = bounds is None or (len(bounds) == 2 and 0 <= bounds[0] <= 1 <= bounds[1] < inf)
        expected = "[lower, upper], finite and around 1, the ratio of equal policies"
        _require(around, f"{key}.rejection_bounds", expected, bounds)
        veto = self.token_veto
        _require(veto is None or 0 < veto < 1, f"{key}.token_veto", "more than 0, less than 1", veto)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """An algorithm preset and its overrides; None keeps the preset's value."""

    name: str = "ppo"  # preset: grpo, ppo, dapo ..; `toolrl algorithms` lists all (docs/algorithms.md)
    # the advantage estimator only, by veRL's name: gae | grpo | dr_grpo | reinforce_plus_plus |
    # reinforce_plus_plus_baseline | remax | rloo | opo | gpg | grpo_passk | gigpo | gdpo; or ours: max_rl |
    # lite_ppo | matchtir | aspo
    adv_estimator: str | None = None
    clip_low: float | None = None  # the ratio is clipped below 1 - clip_low
    clip_high: float | None = None  # the ratio is clipped above 1 + clip_high
    dual_clip: float | None = None  # bound of the ratio where the advantage is negative, above 1
    # token-mean | token-sum | seq-mean-token-sum | seq-mean-token-mean | seq-mean-token-sum-norm
    aggregation: str | None = None
    aggregation_length: int | None = None  # divisor of seq-mean-token-sum-norm; default: data.max_response_length
    old_logprobs: str | None = None  # trainer | rollout: source of the old log-probs in the ratio
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl_placement: str | None = None  # where the KL penalty is applied: none | reward | loss
    kl_estimator: str | None = None  # estimator of the KL divergence: k1 | k2 | k3 | abs | unbiased_k3
    kl_coefficient: float | None = None  # coefficient of the KL penalty
    kl_target: float | None = None  # target of the KL coefficient, which adapts over 10,000 samples; default: fixed
    entropy_coefficient: float | None = None  # coefficient of the entropy bonus
    entropy_target: float | None = None  # entropy in nats toward which the coefficient adapts; default: fixed
    observation_coefficient: float | None = None  # coefficient of the cross-entropy on observation tokens (ECHO)
    gamma: float | None = None  # discount factor of GAE and returns
    lam: float | None = None  # lambda of GAE
    options: dict[str, Any] = field(default_factory=dict)  # other settings of the preset's functions
    filters: list[Any] | None = None  # rejection sampling of rollouts: names, or {name: .., option: ..}
    max_resample_rounds: int | None = None  # rounds of prompts per step until enough groups pass the filters
    overlong_buffer: int | None = None  # tokens before the length limit over which the penalty grows; 0: no penalty
    overlong_factor: float | None = None  # overlong penalty at the length limit

    def __post_init__(self) -> None:
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            _require(value is None or value in known, f"algorithm.{name}", f"one of {', '.join(known)}", value)
        _positive(self, "algorithm.", "clip_low", "clip_high", "kl_target", "entropy_target")
        _positive(self, "algorithm.", "aggregation_length", "overlong_factor")
        _require(self.dual_clip is None or self.dual_clip > 1, "algorithm.dual_clip", "more than 1", self.dual_clip)
        _at_least(1, self, "algorithm.", "max_resample_rounds")
        _at_least(0, self, "algorithm.", "overlong_buffer", "observation_coefficient")
        _shares(self, "algorithm.", "gamma", "lam")

    @property
    def advantage_of(self) -> str:
        return self.name if self.adv_estimator is None else ADV_ESTIMATORS[self.adv_estimator]


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """A known name, module:attribute or file.py:attribute, and its options (docs/reward.md).

    Several: reward=[{name: .., weight: .., options: {..}}, ..]
    """

    name: str = "auto"  # calls for rows with a gold turn; for others by data_source (docs/migration.md)
    options: dict[str, Any] = field(default_factory=dict)  # options of the reward (docs/reward.md)
    num_workers: int = 1  # scoring processes
    timeout_s: float = 20.0  # seconds per response
    memory_mib: int | None = 4096  # data limit of a scoring process; null: no limit
    fault_policy: str = "policy"  # a response over these limits: policy (scored as empty) | infrastructure (dropped)
    max_fault_share: float = 0.1  # share of a step's or a benchmark's responses that may fail before the run stops

    def __post_init__(self) -> None:
        _at_least(1, self, "reward.", "num_workers")
        _positive(self, "reward.", "timeout_s")
        _at_least(256, self, "reward.", "memory_mib")  # math-verify alone needs half of it
        _one_of(("policy", "infrastructure"), "reward.fault_policy", self.fault_policy)
        _shares(self, "reward.", "max_fault_share")

    @property
    def terms(self) -> dict[str, dict[str, Any]]:
        """{name: options} of the reward, or of all in a sum."""
        if self.name != "sum":
            return {self.name: self.options}
        terms: list[Any] = self.options.get("terms", [])
        given: list[dict[str, Any]] = [{"name": each} if isinstance(each, str) else each for each in terms]
        return {each["name"]: each.get("options", {}) for each in given if isinstance(each, dict) and "name" in each}


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """Duration, frequencies, folders, devices."""

    total_epochs: int = 30  # passes over the training rows
    total_training_steps: int | None = None  # steps of the run; overrides total_epochs
    save_freq: int = 15  # steps between checkpoints; 0: only at the end
    test_freq: int = 5  # steps between validations; 0: only before and after
    experiment_name: str = "default"  # name of the run; one that exists is resumed
    project_name: str = "toolrl"  # name of the project, for trackers
    default_local_dir: str = "outputs"  # the run's folder is <default_local_dir>/<experiment_name>
    resume_mode: str = "auto"  # auto (resume the run in the folder) | disable (refuse a folder with a run)
    # settings and ToolRL's variables that may differ from the saved run, also by the content of files they name
    allow_changed: list[str] = field(default_factory=list)
    keep_last: int = 2  # latest checkpoints to keep, besides the best
    keep_best: int = 1  # checkpoints with the best validation to keep
    # console | rollouts (one of every step, too) | verl_names (metrics under veRL's names, too) | jsonl | tensorboard |
    # wandb | trackio | mlflow | swanlab, or your own, file.py:attribute (docs/tracking.md)
    logger: list[str] = field(default_factory=lambda: ["console"])
    callbacks: list[Any] = field(default_factory=list)  # early_stopping, or your own, file.py:Class: docs/tracking.md
    device: str = "auto"  # auto (cuda where there is a GPU) | cpu | cuda
    nnodes: int = 1  # machines; above 1, of a Ray cluster
    n_gpus_per_node: int = 1  # trainer ranks per node, on CPU too
    num_threads: int | None = None  # per process on CPU; default: all cores but one, split evenly
    stall_timeout_s: float = 3600.0  # seconds of a worker call, and of the run without any progress, until it ends
    health_timeout_s: float = 30.0  # seconds after which an unresponsive or stopped process counts as lost
    seed: int = 0  # random seed: of the order of the data, of sampling and of new weights
    save_on_signal: bool = False  # write a checkpoint when SIGTERM, SIGHUP or Ctrl-C ends the run (docs/reliability.md)

    val_before_train: bool = True  # validate before the first step
    critic_warmup: int = 0  # number of the first step that updates the policy; those before it, the critic only
    preflight: bool | None = None  # dry run on a tiny model first; default: on GPU only
    on_collapse: str = "warn"  # warn | stop (early stopping) | rollback (to the last checkpoint); docs/collapse.md
    record: bool = False  # record every step's inputs for replay (docs/replay.md)
    samples_kept: int = 16  # rollouts of every step whose tokens are kept, to be looked at; 0: none

    def __post_init__(self) -> None:
        _at_least(0, self, "trainer.", "save_freq", "test_freq", "keep_best", "seed", "critic_warmup", "samples_kept")
        _require(self.seed < _SEEDS, "trainer.seed", f"less than {_SEEDS}", self.seed)
        _positive(self, "trainer.", "stall_timeout_s", "health_timeout_s")
        _at_least(1, self, "trainer.", "keep_last", "nnodes", "n_gpus_per_node", "num_threads")
        _at_least(1, self, "trainer.", "total_training_steps", "total_epochs")
        _one_of(("auto", "cpu", "cuda"), "trainer.device", self.device)
        _one_of(("auto", "disable"), "trainer.resume_mode", self.resume_mode)
        plain = all(part and not part.startswith(".") for part in self.experiment_name.split("/"))
        _require(plain, "trainer.experiment_name", "a folder name, or several such as a/b", self.experiment_name)
        named = {each for each in self.logger if ":" not in each}
        what = f"some of {', '.join(LOGGERS)}, module:attribute, file.py:attribute"
        _require(named <= set(LOGGERS), "trainer.logger", what, self.logger)
        _one_of(("warn", "stop", "rollback"), "trainer.on_collapse", self.on_collapse)
        if self.on_collapse == "rollback" and self.save_freq == 0:
            raise ConfigError("trainer.on_collapse=rollback needs trainer.save_freq above 0: it loads a checkpoint")

    @property
    def verl_names(self) -> bool:
        """Whether metrics are logged under veRL's names, too."""
        return VERL_NAMES in self.logger

    @property
    def critic_only_updates(self) -> int:
        """Steps before the policy's first update; steps count from 1, so they are one less than critic_warmup."""
        return max(0, self.critic_warmup - 1)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What is evaluated, during training or without it, and where the results go."""

    benchmarks: list[str] = field(default_factory=list)  # bfcl, bfcl/simple_python, a data file .. (docs/evaluation.md)
    handler: str = "toolrl"  # native (the chat template's), toolrl, tool_n1, any format of docs/tool_call_formats.md
    compare: str | None = None  # a baseline model, usually the one before training, evaluated in the same way
    limit: int | None = None  # rows per benchmark category or data file; default: all
    # folder of the benchmarks' files; what is not there or below it is loaded by name
    data_dir: str = "dataset/benchmarks"
    output: str = "outputs/eval"  # parent of one folder per model and settings; the file that `generate` writes
    # search: options of the search tool; judge: url, model, key_variable of an endpoint; user: of tau2's simulator
    options: dict[str, Any] = field(default_factory=dict)
    allow_train_overlap: bool = False  # evaluate on tasks in the model's training data, too

    def __post_init__(self) -> None:
        _at_least(1, self, "eval.", "limit")
        known = set(self.options) <= {"search", "judge", "user"} and all(
            isinstance(each, dict) for each in self.options.values()
        )
        _require(known, "eval.options", "options of search, judge and user, such as {search: {topk: 5}}", self.options)


@dataclass(frozen=True, kw_only=True)
class Config:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def num_ranks(self) -> int:
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def num_engines(self) -> int:
        return self.rollout.num_engines or max(1, self.num_ranks // self.rollout.tensor_model_parallel_size)

    @property
    def rollout_seed(self) -> int | None:
        """Seed of the requests; None: the engine's own random stream.

        vLLM samples seeded rows one by one in a Python loop,
        and results depend on the batch composition anyway.
        """
        return self.trainer.seed if self.rollout.name == "hf" else None

    @property
    def minibatches_per_step(self) -> int:
        """Mini-batches per batch; each is one optimizer step per PPO epoch."""
        return max(1, self.data.train_batch_size // self.actor.ppo_mini_batch_size)

    @property
    def prompts_per_minibatch(self) -> int:
        return self.data.train_batch_size // self.minibatches_per_step

    @property
    def updates_per_step(self) -> int:
        return self.minibatches_per_step * self.actor.ppo_epochs

    def batch_arithmetic(self) -> str:
        prompts, n, mini = self.data.train_batch_size, self.rollout.n, self.prompts_per_minibatch
        updates = "1 optimizer step" if self.updates_per_step == 1 else f"{self.updates_per_step} optimizer steps"
        return (
            f"a step: {prompts} prompts x {n} rollouts = {prompts * n} samples; "
            f"{updates} of {mini} prompts = {mini * n} samples{'' if self.updates_per_step == 1 else ' each'}; "
            f"packs of at most {self.actor.max_tokens_per_pack} tokens"
        )
