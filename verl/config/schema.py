"""Every setting, its default and its meaning. The only place where a default lives.

What decides what a run learns has the default of veRL's ppo_trainer.yaml, as ToolRL ships it (docs/training.md).
A group checks its own values; what concerns several groups is checked in `Config`. Batch sizes are in prompts, lengths
in tokens, frequencies in steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.algorithms import ADV_ESTIMATORS, ALGORITHMS, GROUP_FREE, WITH_CRITIC
from verl.errors import ConfigError

_LEAST_SCORING_MIB = 256  # math-verify alone takes half of it
_SEEDS = 2**23  # each has 2**40 for single responses, and engines count in 64 bits
_ENGINES, _DTYPES = ("vllm", "hf"), ("bfloat16", "float32")
_TRUNCATIONS = ("error", "left", "drop")


def _require(condition: bool, key: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"{key} must be {expected}, got {got!r}")


def _one_of(known: tuple[str, ...], key: str, value: str) -> None:
    _require(value in known, key, " or ".join(known), value)


def _a_share(key: str, value: float) -> None:
    _require(0 <= value <= 1, key, "between 0 and 1", value)


def _at_least(least: int, config: object, group: str, *names: str) -> None:
    """Of the settings, those that are set. group: with its dot, empty at the top of the tree"""
    for name in names:
        value = getattr(config, name)
        _require(
            value is None or value >= least, f"{group}{name}", f"at least {least}" if least else "0 or more", value
        )


@dataclass(frozen=True)
class DataConfig:
    """Which tasks, and how many at a time."""

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    weights: list[float] | None = None  # one per training file; by rows if left out
    train_batch_size: int = 1024
    shuffle: bool = True  # draw the rows of a file in a new order in every epoch
    max_prompt_length: int = 512
    max_response_length: int = 512
    prompt_template: str | None = None  # a text with {question}, by path or name; the format's own if left out
    truncation: str = "error"  # error | left (keep the last tokens) | drop (the row): prompts that are too long
    max_bad_share: float = 0.05  # of a file's rows that may be left out as unusable before the run stops; 0: none may
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of(_TRUNCATIONS, "data.truncation", self.truncation)
        _a_share("data.max_bad_share", self.max_bad_share)
        if self.weights is not None:
            expected = f"one positive number for each of the {len(self.train_files)} data.train_files"
            ok = len(self.weights) == len(self.train_files) and all(weight > 0 for weight in self.weights)
            _require(ok, "data.weights", expected, self.weights)
        _at_least(1, self, "data.", "train_batch_size", "max_prompt_length", "max_response_length")


@dataclass(frozen=True)
class ModelConfig:
    """The policy that is trained; reference and critic start as copies of it."""

    path: str | None = None  # a folder or a hub name
    tokenizer_path: str | None = None  # where it is not beside the model
    chat_template_options: dict[str, Any] = field(default_factory=dict)  # variables of it, such as enable_thinking
    enable_gradient_checkpointing: bool = False
    compute_dtype: str = "bfloat16"  # bfloat16 | float32; the masters are float32 always

    def __post_init__(self) -> None:
        _one_of(_DTYPES, "model.compute_dtype", self.compute_dtype)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.01
    warmup_steps: int = 0  # optimizer steps
    warmup_ratio: float = 0.0  # or their share of all optimizer steps of the run
    schedule: str = "constant"  # constant | cosine, which ends with the run
    min_lr_ratio: float = 0.0  # of the cosine's end

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", "positive", self.lr)
        _at_least(0, self, "optim.", "weight_decay", "warmup_steps")
        ok = len(self.betas) == 2 and all(0.0 <= beta < 1.0 for beta in self.betas)
        _require(ok, "optim.betas", "two numbers from 0 up to but not 1", self.betas)
        _require(0.0 <= self.warmup_ratio <= 1.0, "optim.warmup_ratio", "between 0 and 1", self.warmup_ratio)
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(
                f"optim.warmup_steps={self.warmup_steps} and optim.warmup_ratio={self.warmup_ratio:g} both give the "
                "length of the warmup; set one of them to 0"
            )
        _require(0.0 <= self.min_lr_ratio <= 1.0, "optim.min_lr_ratio", "between 0 and 1", self.min_lr_ratio)
        _one_of(("constant", "cosine"), "optim.schedule", self.schedule)


@dataclass(frozen=True)
class ActorConfig:
    """How the policy is updated."""

    ppo_mini_batch_size: int = 256  # per optimizer step; more than data.train_batch_size: one step for the batch
    ppo_epochs: int = 1  # passes over the mini-batches of a batch
    max_tokens_per_pack: int = 16384  # of one forward on one rank; more where the longest sample needs it
    share_prefix: bool = True  # hold the common prompt of a group once
    grad_clip: float = 1.0
    offload_params: bool = False  # GPU: they wait in host memory from a publication to the next scores or update
    offload_optimizer: bool = False  # GPU: its state waits in host memory between updates
    optim: OptimConfig = field(default_factory=OptimConfig)

    def __post_init__(self) -> None:
        _at_least(1, self, "actor.", "ppo_mini_batch_size", "ppo_epochs", "max_tokens_per_pack")
        _require(self.grad_clip > 0, "actor.grad_clip", "positive", self.grad_clip)


@dataclass(frozen=True)
class RefConfig:
    """The frozen copy of the policy that KL is taken against, where the algorithm pays for it."""

    offload_params: bool = False  # GPU: they wait in host memory while nothing is scored


@dataclass(frozen=True)
class CriticConfig:
    """How the critic is updated, where the algorithm has one. Mini-batches and packs are the actor's."""

    path: str | None = None  # the policy's model if left out
    cliprange_value: float = 0.5
    grad_clip: float = 1.0
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    offload_params: bool = False  # GPU: they wait in host memory from the last update of a step to the next scores
    offload_optimizer: bool = False  # GPU: its state waits in host memory between the updates of two steps

    def __post_init__(self) -> None:
        _require(self.cliprange_value > 0, "critic.cliprange_value", "positive", self.cliprange_value)
        _require(self.grad_clip > 0, "critic.grad_clip", "positive", self.grad_clip)


ON_PUBLISH = ("continue", "finish", "abort_and_retry")


def _check_top(config: ValKwargs | RolloutConfig | InferenceConfig, group: str) -> None:
    """group: with its dot, empty at the top of the tree"""
    _require(0 < config.top_p <= 1, f"{group}top_p", "more than 0, at most 1", config.top_p)
    _require(config.top_k == -1 or config.top_k >= 1, f"{group}top_k", "at least 1, or -1 for all tokens", config.top_k)


def _check_truncation(config: RolloutConfig | InferenceConfig, group: str) -> None:
    """The settings that cut or reshape the distribution that is sampled. group: as above"""
    _check_top(config, group)
    _require(0 <= config.min_p <= 1, f"{group}min_p", "between 0 and 1", config.min_p)
    _require(config.repetition_penalty > 0, f"{group}repetition_penalty", "positive", config.repetition_penalty)


@dataclass(frozen=True)
class ValKwargs:
    """How validation samples (veRL's name). Several responses to a prompt are averaged."""

    n: int = 1  # responses to each prompt
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1
    do_sample: bool | None = None  # false: greedy, whatever the temperature; as the temperature says if left out

    def __post_init__(self) -> None:
        group = "rollout.val_kwargs."
        _at_least(1, self, group, "n")
        _at_least(0, self, group, "temperature")
        _check_top(self, group)
        if self.n > 1 and self.greedy:
            raise ConfigError(f"{group}n={self.n} greedy replies are all alike; set {group}temperature, or n=1")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.do_sample is False or self.temperature == 0


@dataclass(frozen=True)
class RolloutConfig:
    """How the policy is sampled."""

    name: str = "vllm"  # vllm | hf
    n: int = 1  # rollouts per prompt
    temperature: float = 1.0
    top_p: float = 1.0  # this and the next three cut the policy's distribution (docs/training.md)
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    val_kwargs: ValKwargs = field(default_factory=ValKwargs)
    dtype: str = "auto"  # auto (model.compute_dtype) | bfloat16 | float32
    max_staleness: int = 0  # weight versions that a sample may be behind; 0: rollouts and training take turns
    max_reuse: int = 1  # steps that a group may be trained in, as far as its staleness allows
    on_weight_sync: str = (
        "continue"  # continue | finish | abort_and_retry: what running responses do when new weights come
    )
    placement: str = "auto"  # colocated: beside the trainer's ranks; separate: their own pool; auto: as staleness asks
    num_engines: int | None = None  # what the trainer's ranks have room for, if left out
    tensor_model_parallel_size: int = 1
    max_num_seqs: int | None = None  # sequences that one engine decodes at once; the device's default if left out
    max_num_batched_tokens: int | None = None  # tokens of one forward of the engine; the device's default if left out
    gpu_memory_utilization: float = 0.6  # of a GPU; the trainer has the rest
    kv_cache_gib: int = 1  # of an engine on CPU
    bucket_mib: int = 256  # in which new weights travel to the engines; two at once, besides the model itself

    def __post_init__(self) -> None:
        _one_of(_ENGINES, "rollout.name", self.name)
        _require(self.temperature > 0, "rollout.temperature", "positive", self.temperature)
        _check_truncation(self, "rollout.")
        share = self.gpu_memory_utilization
        _require(0 < share <= 1, "rollout.gpu_memory_utilization", "more than 0, at most 1", share)
        _one_of(("auto", *_DTYPES), "rollout.dtype", self.dtype)
        _one_of(("auto", "colocated", "separate"), "rollout.placement", self.placement)
        counts = ("n", "num_engines", "tensor_model_parallel_size", "max_num_seqs", "kv_cache_gib", "bucket_mib")
        _at_least(1, self, "rollout.", *counts, "max_num_batched_tokens")
        tokens, sequences = self.max_num_batched_tokens, self.max_num_seqs
        if tokens is not None and sequences is not None:
            wanted = f"at least rollout.max_num_seqs={sequences}"
            _require(tokens >= sequences, "rollout.max_num_batched_tokens", wanted, tokens)
        _at_least(0, self, "rollout.", "max_staleness")
        uses = f"1 to rollout.max_staleness + 1 = {self.max_staleness + 1}"
        _require(1 <= self.max_reuse <= self.max_staleness + 1, "rollout.max_reuse", uses, self.max_reuse)
        _one_of(ON_PUBLISH, "rollout.on_weight_sync", self.on_weight_sync)
        if self.max_staleness and self.placement == "colocated":
            raise ConfigError(
                "rollout.placement=colocated: engines that share the trainer's devices sleep while it learns, so "
                "rollout.max_staleness must be 0; set rollout.placement=separate"
            )

    @property
    def truncated(self) -> bool:
        """Whether the engine samples from another distribution than the policy's."""
        return self.top_p < 1 or self.top_k != -1 or self.min_p > 0 or self.repetition_penalty != 1

    @property
    def colocated(self) -> bool:
        """Whether engines sit beside the trainer's ranks."""
        return self.placement == "colocated" or (self.placement == "auto" and self.max_staleness == 0)


@dataclass(frozen=True)
class EnvConfig:
    """What the policy acts in. With name=single_turn and no format an episode is a prompt and one response."""

    name: str = "single_turn"  # a known one (docs/environments.md), module:Class or file.py:Class
    options: dict[str, Any] = field(default_factory=dict)  # of the environment
    tool_call_format: str | None = None  # how calls and answers look as text (docs/tool_call_formats.md)
    tool_call_format_options: dict[str, Any] = field(default_factory=dict)
    tools: list[Any] = field(default_factory=list)  # names, or {name: .., option: ..}; your own: file.py:attribute
    max_turns: int | None = None  # assistant turns; what max_tool_calls takes in the format's format if left out
    max_tool_calls: int = 8  # in all turns together; with none left the next turn is the last, in which no tool is run
    max_turn_tokens: int | None = None  # of one turn; what is left of data.max_response_length if left out
    max_observation_tokens: int = 512  # of one answer
    observation_cut: str = "middle"  # head | tail | middle | refuse: what becomes of a longer one
    on_parse_error: str = "tell"  # tell | end: what a call does that cannot be read
    tool_timeout_s: float = 30.0
    turn_timeout_s: float = 300.0  # of the environment, to answer a turn; waiting for engine or tool is not counted
    episode_timeout_s: float = 1200.0  # of all its answers
    judge_timeout_s: float = 300.0  # of the environment, to judge an episode that has ended
    max_concurrent_calls: int = 64  # of one tool
    train_on_observations: bool = False  # on what the environment says, too, as a model of it
    retries: int = 2  # of an episode that a broken service ended, and of a call

    def __post_init__(self) -> None:
        _at_least(1, self, "env.", "max_turns", "max_turn_tokens", "max_observation_tokens", "max_concurrent_calls")
        _at_least(0, self, "env.", "max_tool_calls", "retries")
        for name in ("tool_timeout_s", "turn_timeout_s", "episode_timeout_s", "judge_timeout_s"):
            _require(getattr(self, name) > 0, f"env.{name}", "positive", getattr(self, name))
        _one_of(("head", "tail", "middle", "refuse"), "env.observation_cut", self.observation_cut)
        _one_of(("tell", "end"), "env.on_parse_error", self.on_parse_error)
        if self.name != "single_turn" and self.tool_call_format is None:
            raise ConfigError(
                f"env.tool_call_format must say how env.name={self.name} is talked with (docs/tool_call_formats.md)"
            )

    @property
    def multi_turn(self) -> bool:
        """Whether there is more to an episode than a prompt and one response."""
        return self.tool_call_format is not None


@dataclass(frozen=True)
class SandboxConfig:
    """Where code of the policy runs, if a tool runs any."""

    isolation: str = "bubblewrap"  # bubblewrap | none, which only limits what code may use
    urls: list[str] = field(default_factory=list)  # SandboxFusion servers, which are used instead
    num_workers: int | None = None  # of the local pool; one per processor core if left out
    timeout_s: float = 10.0  # of one execution
    memory_mib: int = 1024
    require_cgroup: bool = False  # refuse to start where no cgroup limits memory, processes and processor time

    def __post_init__(self) -> None:
        _one_of(("bubblewrap", "none"), "sandbox.isolation", self.isolation)
        _require(self.timeout_s > 0, "sandbox.timeout_s", "positive", self.timeout_s)
        _at_least(64, self, "sandbox.", "memory_mib")
        theirs = "left out with sandbox.urls: start the servers with --require-cgroup"
        _require(not (self.urls and self.require_cgroup), "sandbox.require_cgroup", theirs, self.require_cgroup)
        _at_least(1, self, "sandbox.", "num_workers")
        web = all(url.startswith(("http://", "https://")) for url in self.urls)
        _require(web, "sandbox.urls", "such as [http://host:8080]", self.urls)


WITHOUT_CRITIC = tuple(name for name in ALGORITHMS if name not in WITH_CRITIC)
_COMPARING = tuple(name for name in ALGORITHMS if name not in GROUP_FREE)
_NAMES = {  # spelled out here, because the algorithms' own enumerations need torch; a test compares them
    "aggregation": ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"),
    "old_logprobs": ("trainer", "rollout"),
    "kl_placement": ("none", "reward", "loss"),
    "kl_estimator": ("k1", "k2", "k3", "abs"),
    "adv_estimator": tuple(ADV_ESTIMATORS),
}


@dataclass(frozen=True)
class CorrectionConfig:
    """What of the engine's difference from the trainer is corrected in the policy loss (docs/algorithms.md).

    A ratio is the trainer's probability of what was sampled, before the update, by the engine's. None leaves the
    preset's value; no preset of ours has a correction, which then is that of `Correction`.
    """

    is_level: str = "auto"  # auto (the preset's, else token where rollout.max_staleness > 0) | none | token | sequence
    is_cap: float | None = None  # at which the ratios that weigh are truncated; usually 2
    rejection_level: str | None = (
        None  # none | token | sequence | geometric: the ratio that leaves out what is beyond the bounds
    )
    rejection_upper: float | None = None  # usually 2
    rejection_lower: float | None = None  # 1 / rejection_upper where that is set
    token_veto: float | None = (
        None  # the ratio of one token below which its whole sample is left out; 1e-4 is catastrophic
    )

    def __post_init__(self) -> None:
        levels, key = ("auto", "none", "token", "sequence"), "algorithm.correction"
        masks = ("none", "token", "sequence", "geometric")
        _require(self.is_level in levels, f"{key}.is_level", f"one of {', '.join(levels)}", self.is_level)
        _require(
            self.rejection_level is None or self.rejection_level in masks,
            f"{key}.rejection_level",
            f"one of {', '.join(masks)}",
            self.rejection_level,
        )
        for name, bound in (("is_cap", self.is_cap), ("rejection_upper", self.rejection_upper)):
            agreed = bound is None or bound >= 1
            _require(agreed, f"{key}.{name}", "at least 1, as policies agree there", bound)
        lower, veto = self.rejection_lower, self.token_veto
        _require(lower is None or 0 <= lower <= 1, f"{key}.rejection_lower", "between 0 and 1", lower)
        _require(veto is None or 0 < veto < 1, f"{key}.token_veto", "more than 0, less than 1", veto)


@dataclass(frozen=True)
class AlgorithmConfig:
    """A preset by name, and what overrides it; None leaves the preset's value."""

    name: str = "ppo"
    adv_estimator: str | None = None  # the advantage alone, in place of the preset's: gae, grpo, rloo .. (veRL's names)
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    aggregation: str | None = None
    aggregation_length: int | None = None  # seq-mean-token-sum-norm's divisor; data.max_response_length if left out
    old_logprobs: str | None = None  # trainer | rollout: whose log-probs the ratio is measured from
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    kl_placement: str | None = None  # none | reward | loss
    kl_estimator: str | None = None  # k1 | k2 | k3 | abs
    kl_coefficient: float | None = None
    kl_target: float | None = None  # the KL that the coefficient is adapted to; it stays fixed if left out
    kl_horizon: int = 10000  # samples over which it adapts
    entropy_coefficient: float | None = None
    gamma: float | None = None  # of returns
    lam: float | None = None  # of GAE
    options: dict[str, Any] = field(default_factory=dict)  # other settings of the preset's own functions
    filters: list[Any] | None = None  # which rollouts are trained on: names, or {name: .., option: ..}
    max_resample_rounds: int | None = None  # times that a step may draw prompts until the filters have left it enough
    overlong_buffer: int | None = None  # tokens before the longest response over which the penalty grows; 0: no penalty
    overlong_factor: float | None = None  # points of penalty at the longest response

    def __post_init__(self) -> None:
        for name, known in _NAMES.items():
            value = getattr(self, name)
            _require(value is None or value in known, f"algorithm.{name}", f"one of {', '.join(known)}", value)
        for name in ("clip_low", "clip_high", "kl_target", "kl_horizon", "aggregation_length", "overlong_factor"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"algorithm.{name}", "positive", value)
        _require(self.dual_clip is None or self.dual_clip > 1, "algorithm.dual_clip", "more than 1", self.dual_clip)
        _at_least(1, self, "algorithm.", "max_resample_rounds")
        _at_least(0, self, "algorithm.", "overlong_buffer")
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            _require(value is None or 0 <= value <= 1, f"algorithm.{name}", "between 0 and 1", value)

    @property
    def advantage_of(self) -> str:
        """The preset whose advantage is taken."""
        return self.name if self.adv_estimator is None else ADV_ESTIMATORS[self.adv_estimator]


@dataclass(frozen=True)
class RewardConfig:
    """Which reward (a known name, module:attribute or file.py:attribute), and its options (docs/reward.md)."""

    name: str = "rlla"
    options: dict[str, Any] = field(default_factory=dict)
    num_workers: int = 1  # processes that score
    timeout_s: float = 20.0  # for one response
    memory_mib: int | None = 4096  # data of a scoring process; null: no limit
    fault_policy: str = "policy"  # a response over these limits: policy (scored as empty) | infrastructure (left out)
    max_fault_share: float = 0.1  # of a step's responses that may fail to be scored before the run stops

    def __post_init__(self) -> None:
        _at_least(1, self, "reward.", "num_workers")
        _check_scoring_limits("reward.", self.timeout_s, self.memory_mib, self.fault_policy)
        _require(0 <= self.max_fault_share <= 1, "reward.max_fault_share", "between 0 and 1", self.max_fault_share)


def _check_scoring_limits(prefix: str, timeout_s: float, memory_mib: int | None, fault_policy: str) -> None:
    _require(timeout_s > 0, f"{prefix}timeout_s", "positive", timeout_s)
    least = _LEAST_SCORING_MIB
    _require(memory_mib is None or memory_mib >= least, f"{prefix}memory_mib", f"at least {least}", memory_mib)
    _one_of(("policy", "infrastructure"), f"{prefix}fault_policy", fault_policy)


def check_env_judges(reward: RewardConfig, env: EnvConfig) -> None:
    """Raises ConfigError where the environment is to judge and never does: every episode would be worth 0."""
    if reward.name == "env" and env.name in ("single_turn", "tool"):
        raise ConfigError(f"reward.name=env needs an environment that judges; env.name={env.name} does not")


def check_call_limit(reward: RewardConfig, env: EnvConfig) -> None:
    """Raises ConfigError where OTC's smoothing c is not the limit on tool calls that the paper takes it for."""
    if reward.name in ("otc_ppo", "otc_grpo") and env.multi_turn:
        given = reward.options.get("max_calls")
        expected = f"env.max_tool_calls={env.max_tool_calls}; write reward.options.max_calls=${{env.max_tool_calls}}"
        _require(given == env.max_tool_calls, "reward.options.max_calls", expected, given)


@dataclass(frozen=True)
class RunConfig:
    """How long, how often, where: what every kind of training has."""

    total_epochs: int = 30
    total_training_steps: int | None = None  # overrules total_epochs
    save_freq: int = 15  # 0: only at the end
    test_freq: int = 5  # 0: only before and after
    experiment_name: str = "default"
    project_name: str = "toolrl"  # W&B's
    default_local_dir: str = "outputs"  # the run's folder is <default_local_dir>/<experiment_name>
    resume_mode: str = "auto"  # auto (go on where the folder's run stopped) | disable (refuse a folder with a run)
    keep_last: int = 2  # checkpoints kept beside the best
    keep_best: int = 1
    logger: list[str] = field(default_factory=lambda: ["console"])  # wandb; console, JSONL and TensorBoard always
    device: str = "auto"  # auto (cuda where there is a GPU) | cpu | cuda
    nnodes: int = 1
    n_gpus_per_node: int = 1  # trainer ranks per node, on CPU too
    num_threads: int | None = None  # of one process on CPU; all cores but one, dealt evenly, if left out
    call_timeout_s: float = 3600.0  # for anything asked of a worker
    health_timeout_s: float = 30.0  # until a process that does not answer, or is stopped, counts as lost
    seed: int = 0
    save_on_signal: bool = False  # write a checkpoint when SIGTERM, SIGHUP or Ctrl-C ends the run (docs/reliability.md)

    def __post_init__(self) -> None:
        _at_least(0, self, "trainer.", "save_freq", "test_freq", "keep_best", "seed")
        _require(self.seed < _SEEDS, "trainer.seed", f"less than {_SEEDS}", self.seed)
        _require(self.call_timeout_s > 0, "trainer.call_timeout_s", "positive", self.call_timeout_s)
        _require(self.health_timeout_s > 0, "trainer.health_timeout_s", "positive", self.health_timeout_s)
        _at_least(1, self, "trainer.", "keep_last", "nnodes", "n_gpus_per_node", "num_threads")
        _at_least(1, self, "trainer.", "total_training_steps", "total_epochs")
        _one_of(("auto", "cpu", "cuda"), "trainer.device", self.device)
        _one_of(("auto", "disable"), "trainer.resume_mode", self.resume_mode)
        plain = all(part and not part.startswith(".") for part in self.experiment_name.split("/"))
        _require(plain, "trainer.experiment_name", "a folder name, or several such as a/b", self.experiment_name)
        known = ("console", "jsonl", "tensorboard", "wandb")
        _require(set(self.logger) <= set(known), "trainer.logger", f"some of {', '.join(known)}", self.logger)


@dataclass(frozen=True)
class TrainerConfig(RunConfig):
    """A reinforcement learning run."""

    val_before_train: bool = True
    critic_warmup: int = 0  # first steps, in which the critic alone learns
    num_transcripts_shown: int = 1  # per step, on the console
    preflight: bool | None = None  # try everything on a tiny model first; true on GPU if left out
    eval_benchmarks: list[str] = field(default_factory=list)  # played when a validation is (docs/evaluation.md)
    eval_limit: int | None = None  # rows of each category; all if left out
    eval_data_dir: str = "dataset/benchmarks"  # the benchmarks' files lie in it or below
    eval_hub: bool = True  # as hub of main_eval
    allow_train_overlap: bool = False  # play benchmark tasks that are trained on, too
    on_collapse: str = "warn"  # warn | stop | rollback (to the last checkpoint); docs/collapse.md
    record: bool = False  # write what every step learned from, so that it can be run again (docs/replay.md)

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, self, "trainer.", "eval_limit")
        _at_least(0, self, "trainer.", "critic_warmup", "num_transcripts_shown")
        _one_of(("warn", "stop", "rollback"), "trainer.on_collapse", self.on_collapse)
        if self.on_collapse == "rollback" and self.save_freq == 0:
            raise ConfigError("trainer.on_collapse=rollback needs trainer.save_freq above 0, or it has no way back")


@dataclass(frozen=True)
class Config:
    """Reinforcement learning: the whole tree."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    def __post_init__(self) -> None:
        batch, mini = self.data.train_batch_size, self.actor.ppo_mini_batch_size
        if mini < batch and batch % mini:
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
        if self.algorithm.advantage_of in _COMPARING and self.rollout.n < 2:
            chosen = self.algorithm.adv_estimator or self.algorithm.name
            raise ConfigError(
                f"rollout.n={self.rollout.n} makes groups of one, where {chosen} has nothing to compare; "
                "set rollout.n to 2 or more"
            )
        if self.rollout.max_reuse > 1 and self.trainer.total_training_steps is None:
            raise ConfigError(
                f"rollout.max_reuse={self.rollout.max_reuse}: steps that use groups again draw fewer prompts, as many "
                "as their age asks for, so trainer.total_epochs does not tell the number of steps; set "
                "trainer.total_training_steps"
            )
        check_env_judges(self.reward, self.env)
        check_call_limit(self.reward, self.env)
        if self.env.train_on_observations and self.algorithm.old_logprobs == "rollout":
            raise ConfigError(
                "env.train_on_observations needs algorithm.old_logprobs=trainer: the engine has none of what it did "
                "not sample"
            )
        ranks, parallel = self.num_ranks, self.rollout.tensor_model_parallel_size
        if self.rollout.colocated and self.trainer.n_gpus_per_node % parallel:
            raise ConfigError(
                f"rollout.tensor_model_parallel_size ({parallel}) must divide trainer.n_gpus_per_node "
                f"({self.trainer.n_gpus_per_node}), because every engine sits beside as many trainer ranks of its node"
            )
        if self.rollout.name == "hf" and parallel > 1:
            raise ConfigError("rollout.tensor_model_parallel_size: the transformers engine is not split over devices")
        if self.rollout.colocated and self.num_engines * parallel > ranks:
            raise ConfigError(
                f"rollout.num_engines ({self.num_engines}) is more than {ranks} trainer ranks have room for; "
                "lower it, or set rollout.placement=separate"
            )

    @property
    def num_ranks(self) -> int:
        """Processes that train."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def num_engines(self) -> int:
        """Rollout engines."""
        return self.rollout.num_engines or max(1, self.num_ranks // self.rollout.tensor_model_parallel_size)

    @property
    def minibatches_per_step(self) -> int:
        """Mini-batches of a batch, each of which is one optimizer step in every pass."""
        return max(1, self.data.train_batch_size // self.actor.ppo_mini_batch_size)

    @property
    def prompts_per_minibatch(self) -> int:
        """Prompts of one optimizer step."""
        return self.data.train_batch_size // self.minibatches_per_step

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps per training step."""
        return self.minibatches_per_step * self.actor.ppo_epochs

    def batch_arithmetic(self) -> str:
        """What a step trains on, in numbers, because nobody should have to guess what a mini-batch is."""
        prompts, n, mini = self.data.train_batch_size, self.rollout.n, self.prompts_per_minibatch
        return (
            f"a step: {prompts} prompts x {n} rollouts = {prompts * n} samples; "
            f"{self.updates_per_step} optimizer steps of {mini} prompts = {mini * n} samples each; "
            f"packs of at most {self.actor.max_tokens_per_pack} tokens"
        )


@dataclass(frozen=True)
class SFTDataConfig:
    """Which demonstrations, and how many at a time."""

    train_files: list[str] = field(default_factory=list)
    val_files: list[str] = field(default_factory=list)
    train_batch_size: int = 32  # responses per optimizer step
    max_length: int = 4096  # tokens of a prompt and its response
    max_bad_share: float = 0.05  # as data.max_bad_share of a reinforcement learning run
    seed: int = 0

    def __post_init__(self) -> None:
        _a_share("data.max_bad_share", self.max_bad_share)
        _at_least(1, self, "data.", "train_batch_size", "max_length")


@dataclass(frozen=True)
class SFTConfig:
    """Supervised learning: the whole tree."""

    data: SFTDataConfig = field(default_factory=SFTDataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5, schedule="cosine", min_lr_ratio=0.1))
    grad_clip: float = 1.0
    max_tokens_per_pack: int = 16384
    trainer: RunConfig = field(
        default_factory=lambda: RunConfig(total_epochs=3, save_freq=0, test_freq=0, experiment_name="sft")
    )

    def __post_init__(self) -> None:
        _require(self.grad_clip > 0, "grad_clip", "positive", self.grad_clip)
        if self.data.max_length > self.max_tokens_per_pack:
            raise ConfigError(
                f"max_tokens_per_pack ({self.max_tokens_per_pack}) is less than data.max_length "
                f"({self.data.max_length}), so the longest sample would fit no pack"
            )

    def batch_arithmetic(self) -> str:
        """What a step trains on, in numbers."""
        return (
            f"a step: {self.data.train_batch_size} replies, one optimizer step; "
            f"packs of at most {self.max_tokens_per_pack} tokens"
        )


@dataclass(frozen=True)
class InferenceConfig:
    """A model in an engine of its own, without a trainer, and how it is sampled."""

    max_prompt_length: int = 2048
    max_response_length: int = 1024
    n: int = 1  # responses to each prompt
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1  # -1: all tokens
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    engine: str = "vllm"  # vllm | hf
    dtype: str = "bfloat16"  # bfloat16 | float32
    tensor_model_parallel_size: int = 1
    gpu_memory_utilization: float = 0.8
    kv_cache_gib: int = 1  # on CPU
    device: str = "auto"
    num_threads: int | None = None  # on CPU; all cores but one if left out
    seed: int = 0
    prompt_template: str | None = None  # as data.prompt_template
    model: ModelConfig = field(default_factory=ModelConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def __post_init__(self) -> None:
        _one_of(_ENGINES, "engine", self.engine)
        _one_of(_DTYPES, "dtype", self.dtype)
        _at_least(0, self, "", "temperature")
        _check_truncation(self, "")
        _require(0 <= self.seed < _SEEDS, "seed", f"from 0 to less than {_SEEDS}", self.seed)
        _at_least(1, self, "", "n", "max_prompt_length", "max_response_length", "num_threads", "kv_cache_gib")


@dataclass(frozen=True)
class GenerationConfig(InferenceConfig):
    """Prompts in, transcripts out."""

    files: list[str] = field(default_factory=list)  # as data.train_files; unused in a chat
    output: str = "transcripts.jsonl"
    limit: int | None = None  # rows of each file; all if left out
    truncation: str = "error"  # as data.truncation
    max_bad_share: float = 0.05  # as data.max_bad_share
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(_TRUNCATIONS, "truncation", self.truncation)
        _a_share("max_bad_share", self.max_bad_share)
        _at_least(1, self, "", "limit")
        check_env_judges(self.reward, self.env)


@dataclass(frozen=True)
class EvalConfig(InferenceConfig):
    """Benchmarks, and how a model is judged by them."""

    benchmarks: list[str] = field(default_factory=list)  # bfcl, bfcl/simple_python, a data file .. (docs/evaluation.md)
    handler: str = (
        "toolrl"  # native (the chat template's own), toolrl, tool_n1, or any format of docs/tool_call_formats.md
    )
    compare: str | None = None  # another model, usually the one before training, judged in the same way
    limit: int | None = None  # rows of each category; all if left out
    data_dir: str = "dataset/benchmarks"  # the benchmarks' files lie in it or below
    hub: bool = True  # published data sets without a file there are loaded by their names; needs the package datasets
    output: str = "outputs/eval"  # one folder in it for each model and setting
    search: dict[str, Any] = field(default_factory=dict)  # options of the search tool; BM25 over data_dir if left out
    judge: dict[str, Any] = field(default_factory=dict)  # url, model, key_variable of an endpoint that judges answers
    user: dict[str, Any] = field(default_factory=dict)  # options of tau2's user; the scripted one if left out
    max_tool_calls: int | None = None  # of math with Python (4) and of search (3 or 4); another number of calls
    max_concurrent: int = 256  # episodes at a time
    reward: str = "rlla"  # of data files; benchmarks have their own
    reward_options: dict[str, Any] = field(default_factory=dict)
    num_scorers: int = 1  # processes that score
    reward_timeout_s: float = 120.0  # for one answer
    reward_memory_mib: int | None = 4096  # data of a process that scores; null: no limit
    reward_fault_policy: str = "policy"  # of an answer over these limits: policy (as empty) | infrastructure (missing)
    max_fault_share: float = 0.1  # of a category's tasks that may fail for no fault of the model before the run stops
    bootstrap: int = 2000  # resamples behind an interval
    allow_train_overlap: bool = False  # judge by tasks that the model was trained on, too

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, self, "", "limit", "max_tool_calls", "max_concurrent", "num_scorers", "bootstrap")
        _check_scoring_limits("reward_", self.reward_timeout_s, self.reward_memory_mib, self.reward_fault_policy)
        _require(0 <= self.max_fault_share <= 1, "max_fault_share", "between 0 and 1", self.max_fault_share)
        _require(self.n <= 256, "n", "at most 256", self.n)
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n={self.n} answers at temperature=0 are all alike; set a temperature, or n=1")


@dataclass(frozen=True)
class ProbeConfig(InferenceConfig):
    """Rollouts of a data file as training would make them, before any training; a recipe tells of the episodes."""

    data: str | None = None  # one file, as data.train_files
    n: int = 8  # rollouts of each prompt
    temperature: float = 1.0
    limit: int | None = 64  # rows, drawn with the seed; null: all
    truncation: str = "error"  # of prompts that are too long: left, as in training; else they are counted, not sampled
    max_bad_share: float = 0.05  # as data.max_bad_share
    output: str = "outputs/probe"  # one folder in it for each model, file and setting
    bootstrap: int = 2000  # resamples behind an interval
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, self, "", "limit", "bootstrap")
        _require(2 <= self.n <= 256, "n", "from 2 (a group of one has nothing to compare) to 256", self.n)
        _require(self.temperature > 0, "temperature", "positive, as in training", self.temperature)
        _one_of(_TRUNCATIONS, "truncation", self.truncation)
        _a_share("max_bad_share", self.max_bad_share)
        check_env_judges(self.reward, self.env)
