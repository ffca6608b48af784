"""What a command uses of the configuration, its own defaults, its checks; and the commands that train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.config.schema import Config, TrainerConfig
from verl.errors import ConfigError

_DEFAULTS = Config()
_JUDGE_S = 15.0  # default of a judge's timeout_s


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command and its part of the configuration."""

    name: str  # as in `toolrl NAME`
    uses: tuple[str, ...]  # groups, and single keys of groups that are used in part
    defaults: Mapping[str, Any] = field(default_factory=dict)  # where they are not the schema's, those of training
    from_recipe: tuple[str, ...] = ()  # groups and keys; none: the command takes no recipe
    needs_groups: bool = False  # a recipe's rollout.n=1, of one with a critic, is left out
    check: Callable[[Config], None] = lambda _: None  # across groups; raises ConfigError

    def has(self, key: str) -> bool:
        return within(key, self.uses)

    def default_of(self, key: str) -> Any:
        """The default of a key; None below a key that accepts any."""
        if key in self.defaults:
            return self.defaults[key]
        value: Any = _DEFAULTS
        for name in key.split("."):
            value = getattr(value, name, None)
        return value

    def refusal(self, key: str) -> str:
        """Why an unused key is refused: the keys of its group, or the groups, that are used."""
        group = key.partition(".")[0]
        names = [each.partition(".")[2] for each in self.uses if each.startswith(f"{group}.")]
        if names:
            return f"`{self.name}` does not use it; of {group} it uses {', '.join(names)}"
        return f"`{self.name}` does not use {group}; it uses {', '.join(groups_of(self.uses))}"


def within(key: str, groups: tuple[str, ...]) -> bool:
    return any(f"{key}.".startswith(f"{each}.") for each in groups)


def groups_of(keys: tuple[str, ...]) -> list[str]:
    """The top groups of some keys, each once."""
    return list(dict.fromkeys(each.partition(".")[0] for each in keys))


def _check_training(config: Config) -> None:
    data, actor, rollout, trainer = config.data, config.actor, config.rollout, config.trainer
    if rollout.temperature == 0:
        raise ConfigError("rollout.temperature must be positive, got 0: greedy responses are all identical")
    batch, mini = data.train_batch_size, actor.ppo_mini_batch_size
    if mini < batch and batch % mini:
        raise ConfigError(
            f"data.train_batch_size ({batch}) must be a multiple of actor.ppo_mini_batch_size ({mini}), "
            "so that all optimizer steps have the same number of prompts"
        )
    _check_packs(config)
    if rollout.max_reuse > 1 and trainer.total_training_steps is None:
        raise ConfigError(
            f"rollout.max_reuse={rollout.max_reuse}: steps that reuse groups draw fewer prompts, so the "
            "number of steps does not follow from trainer.total_epochs; set trainer.total_training_steps"
        )
    check_verdicts(config)
    for name, options in config.reward.terms.items():
        given, limit = options.get("max_calls"), config.env.call_limit  # c of the paper is this limit
        if name in ("otc_ppo", "otc_grpo") and config.env.multi_turn and given != limit:
            raise ConfigError(
                f"reward.options.max_calls must be env.max_tool_calls={limit}; write "
                f"reward.options.max_calls=${{env.max_tool_calls}}, got {given!r}"
            )
    if config.env.train_on_observations and config.algorithm.old_logprobs == "rollout":
        raise ConfigError(
            "env.train_on_observations needs algorithm.old_logprobs=trainer: the engine has no log-probs of "
            "observation tokens"
        )
    honors = config.env.name == "agent" and config.env.options.get("on_sampling") == "honor"
    if honors and config.algorithm.old_logprobs == "rollout":
        raise ConfigError(
            "env.options.on_sampling=honor needs algorithm.old_logprobs=trainer: the engine's log-probs of such "
            "responses are those of another distribution"
        )
    parallel = rollout.tensor_model_parallel_size
    if rollout.colocated and trainer.n_gpus_per_node % parallel:
        raise ConfigError(
            f"rollout.tensor_model_parallel_size ({parallel}) must divide trainer.n_gpus_per_node "
            f"({trainer.n_gpus_per_node}), because a colocated engine shares that many ranks of one node"
        )
    if rollout.colocated and config.num_engines * parallel > config.num_ranks:
        raise ConfigError(
            f"rollout.num_engines ({config.num_engines}) is more than fit {config.num_ranks} trainer ranks; "
            "lower it, or set rollout.placement=separate"
        )


def _check_packs(config: Config) -> None:
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > config.actor.max_tokens_per_pack:
        raise ConfigError(
            f"actor.max_tokens_per_pack ({config.actor.max_tokens_per_pack}) is less than data.max_prompt_length + "
            f"data.max_response_length ({longest}), so the longest sample would not fit into a pack"
        )


def check_verdicts(config: Config) -> None:
    """With reward=env and an environment that does not judge, all rewards would be 0. A judge that is late must fail by
    its own limit, before the response is scored as empty."""
    if "env" in config.reward.terms and config.env.name in ("single_turn", "tool"):
        raise ConfigError(f"reward.name=env needs an environment that judges; env.name={config.env.name} does not")
    limit_s = config.reward.terms.get("judge", {}).get("timeout_s", _JUDGE_S)
    if "judge" in config.reward.terms and isinstance(limit_s, int | float) and limit_s >= config.reward.timeout_s:
        raise ConfigError(
            f"reward.timeout_s={config.reward.timeout_s:g} must be above timeout_s={limit_s:g} of the judge's options: "
            "beyond it a response is scored as an empty one, though the judge is late and not the policy wrong"
        )


def keys_of(group: str, names: str) -> tuple[str, ...]:
    return tuple(f"{group}.{name}" for name in names.split())


def all_but(group: str, kind: type, *excluded: str) -> tuple[str, ...]:
    return tuple(f"{group}.{each.name}" for each in fields(kind) if each.name not in excluded)


_TRAIN_GROUPS = (
    *("data", "model", "lora", "actor", "ref", "teacher", "critic", "rollout", "env", "sandbox", "algorithm", "reward"),
)
TRAIN = Command(
    name="train",
    uses=(*_TRAIN_GROUPS, "trainer", *keys_of("eval", "benchmarks limit data_dir allow_train_overlap")),
    from_recipe=(*_TRAIN_GROUPS, "trainer", "eval"),
    check=_check_training,
)
SFT = Command(
    name="sft",
    uses=(
        *keys_of("data", "train_files val_files columns map split_turns train_batch_size max_bad_share"),
        *keys_of("data", "max_prompt_length max_response_length prompt_template"),
        *keys_of("env", "tool_call_format tool_call_format_options"),
        "model",
        *keys_of("lora", "rank alpha targets path base_dtype"),
        "sft",
        *keys_of("actor", "max_tokens_per_pack grad_clip optim"),
        *all_but(
            *("trainer", TrainerConfig),
            *("val_before_train", "critic_warmup", "preflight", "on_collapse", "record", "samples_kept", "callbacks"),
        ),
    ),
    defaults={
        "data.train_batch_size": 32,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 2048,
        "actor.optim.lr": 1e-5,
        "actor.optim.schedule": "cosine",
        "actor.optim.min_lr_ratio": 0.1,
        "trainer.total_epochs": 3,
        "trainer.save_freq": 0,
        "trainer.test_freq": 0,
        "trainer.experiment_name": "sft",
    },
    check=_check_packs,
)
