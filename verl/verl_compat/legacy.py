"""Translates commands written for ToolRL, veRL or a fork of it to our keys (docs/verl_keys.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from verl.algorithms import ADV_ESTIMATORS
from verl.config.commands import Command
from verl.config.schema import VERL_NAMES
from verl.errors import ConfigError
from verl.verl_compat.published import AUTO, VERSIONS, Line
from verl.verl_compat.verl_keys import (
    ALIASES,
    INTERPRETED,
    OVERLONG,
    PACKS,
    REWARD_OPTIONS,
    SAME_AS,
    obsolete_reason,
    refusal,
    short,
    spelled,
)

Settings = dict[str, Any]

_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
_KL_COEFFICIENT, _KL_TARGET = 0.001, 0.1  # veRL's defaults
_LORA_ALPHA = 16  # veRL's default
_MAX_RESAMPLE_ROUNDS = 10  # veRL: no limit
_OFFLOADED = {"params": "param", "optimizer": "optimizer"}  # our name: that in veRL's keys
_NULL = "null keeps the default"
_REWARD_FUNCTION = "compute_score"  # veRL's default


@dataclass
class Translation:
    """A command translated to our keys."""

    base: Callable[[str], Any]  # the value of one of our keys in the recipe, or else its default
    lines: Sequence[Line] = ()  # of published commands that apply; `base` has their settings
    settings: Settings = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)  # our key -> the key as written
    obsolete: dict[str, str] = field(default_factory=dict)  # key as written -> why it has no effect
    theirs: dict[str, tuple[str, Any]] = field(default_factory=dict)  # short key -> (as written, value), unread ones
    read: set[str] = field(default_factory=set)  # veRL's keys of INTERPRETED that were written

    def put(self, key: str, value: Any, written: str) -> None:
        """Set one of our keys; if the same key is written twice, the last value wins.

        Raises ConfigError if another key has set it to a different value.
        """
        before = self.spelled.get(key, written)
        if short(before) != short(written) and self.settings[key] != value:
            raise ConfigError(
                f"{before} and {written} contradict each other: {key} would be {self.settings[key]} and {value}; "
                "leave one of them out"
            )
        self.replace(key, value, written)

    def replace(self, key: str, value: Any, written: str) -> None:
        """Set one of our keys, overriding a value set by another key."""
        self.settings[key], self.spelled[key] = value, written

    def now(self, key: str) -> Any:
        return self.settings.get(key, self.base(key))

    def take(self, name: str) -> Any:
        """Consume one of veRL's keys; None if it is not written, or null."""
        return self.theirs.pop(name, (name, None))[1]

    def line_of(self, name: str) -> Line | None:
        """The line of a published command that one of veRL's keys selects."""
        return next((line for line in self.lines if line.has(name)), None)

    def flag(self, name: str) -> bool | None:
        """As `take`, for a boolean. Raises ConfigError for other values."""
        value = self.take(name)
        if value not in (None, True, False):
            raise ConfigError(f"{spelled(name)} must be true or false, got {value!r}")
        return None if value is None else bool(value)

    def count(self, name: str) -> int | None:
        """As `take`, for a positive integer. Raises ConfigError for other values."""
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{spelled(name)} must be a whole number from 1, got {value!r}")
        return value

    def number(self, name: str) -> float | None:
        """As `take`, for a number. Raises ConfigError for other values."""
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{spelled(name)} must be a number, got {value!r}")
        return value

    def move(self, value: Any, key: str, name: str) -> None:
        """As `put`, with a value taken from one of veRL's keys; None: it was not written."""
        if value is not None:
            self.put(key, value, spelled(name))

    def ignore(self, name: str, why: str) -> None:
        """Mark one of veRL's keys as obsolete, if it was written."""
        if name in self.theirs:
            self.obsolete[self.theirs.pop(name)[0]] = why


def translate(written: Mapping[str, Any], base: Callable[[str], Any], lines: Sequence[Line] = ()) -> Translation:
    """Raises ConfigError for unsupported values of veRL's keys."""
    result = Translation(base, lines)
    same: dict[str, tuple[str, Any]] = {}
    for key, value in written.items():
        name = short(key)
        why = obsolete_reason(name)
        if name in ALIASES:
            if value is None and base(ALIASES[name]) is not None and "correction" not in ALIASES[name]:
                result.obsolete[key] = _NULL
            else:
                result.put(ALIASES[name], value, key)
        elif name in INTERPRETED:
            result.theirs[name] = (key, value)
            result.read.add(name)
        elif name in SAME_AS:
            same[name] = key, value
        elif name.startswith(f"{REWARD_OPTIONS}."):
            result.put(f"reward.options{name.removeprefix(REWARD_OPTIONS)}", value, key)
        elif (only := refusal(name)) is not None:
            if value is not None and value != only.value:
                raise ConfigError(f"{key}={value} is refused: {only.why.replace('`', '')}")
            result.obsolete[key] = "this is the only supported value"
        elif why is not None:
            result.obsolete[key] = why.replace("`", "")
        else:
            result.put(name, value, key)
    for read in _READERS:
        read(result)
    for name, (key, value) in same.items():
        ours, expected = SAME_AS[name], result.now(SAME_AS[name])
        if value is not None and value != expected:
            raise ConfigError(f"{spelled(name)}={value} must equal {spelled(ours)}={expected}, which covers both")
        result.obsolete[key] = f"{ours} covers both"
    _read_lengths(result)
    _read_longest(result)
    assert not result.theirs, f"{sorted(result.theirs)} have no reader"
    return result


def take_defaults(result: Translation, command: Command) -> list[str]:
    """Apply and list the defaults of the veRL version that a command without a recipe is written for.

    A version is recognized by a key that only it has. ToolRL's defaults are ours, except for its truncation: early
    versions have no key for it, and cut long prompts or drop them, so the rows decide (data.truncation=auto). That
    applies to a complete command in veRL's keys without a truncation key and without a reward of its own.
    """
    if "algorithm.name" in result.settings:
        return []
    written = {short(key) for key in (*result.spelled.values(), *result.obsolete)} | result.read
    versions = [version for version in VERSIONS if version.sign in written]
    is_early = (
        not versions and spelled("model.path") in result.spelled.values() and "reward.name" not in result.settings
    )
    if is_early and command.has("data.truncation") and "data.truncation" not in result.settings:
        result.settings["data.truncation"] = AUTO
        return ["data.truncation=auto: left for ToolRL's rows, drop for others, as in early versions of veRL"]
    taken = []
    for version in versions:
        for ours, (theirs, value) in version.defaults.items():
            if command.has(ours) and ours not in result.settings and theirs not in written:
                result.settings[ours] = value
                taken.append(f"{spelled(theirs)}={value}, as in {version.name}, which has {spelled(version.sign)}")
    return taken


def our_key(key: str) -> str:
    """Our key for a key of veRL's with a one-to-one mapping; `translate` handles all others."""
    return ALIASES.get(short(key), short(key))


def _read_data(result: Translation) -> None:
    column = result.take("data.prompt_key")
    if column not in (None, "prompt"):
        result.put("data.columns", {column: "prompt"}, "data.prompt_key")
    if result.flag("data.filter_overlong_prompts"):
        if "data.truncation" in result.spelled:
            result.obsolete["data.truncation"] = "data.filter_overlong_prompts drops overlong prompts"
        result.replace("data.truncation", "drop", "data.filter_overlong_prompts")


def _read_lengths(result: Translation) -> None:
    """Search-R1's and SkyRL's are per turn and of the whole context, ours of the first prompt and all responses."""
    starts = {"data.max_start_length": "Search-R1", "rollout.max_starting_message_length": "SkyRL"}
    for name, system in starts.items():
        start = result.count(name)
        if start is None:
            continue
        turn, context = (result.settings.get(f"data.max_{each}_length") for each in ("response", "prompt"))
        result.replace("data.max_prompt_length", start, name)
        if turn is not None:
            result.put("env.max_turn_tokens", turn, f"data.max_response_length, as in {system}")
            result.settings.pop("data.max_response_length")
        if context is not None:
            if system == "SkyRL":  # its last response follows the longest context, its start is part of it
                context += (turn or result.base("data.max_response_length")) - start
            result.replace("data.max_response_length", context, f"data.max_prompt_length, as in {system}")


def _read_longest(result: Translation) -> None:
    """Packs hold the longest sample unless a size is set: veRL may limit samples, not tokens."""
    key = "actor.max_tokens_per_pack"
    lengths = [result.now(f"data.max_{name}_length") for name in ("prompt", "response")]
    whole = all(isinstance(each, int) for each in lengths)
    if key not in result.settings and whole and sum(lengths) > result.now(key):
        result.settings[key] = sum(lengths)
    written, context = result.theirs.pop("rollout.max_model_len", ("", None))
    if isinstance(context, int) and whole and context < sum(lengths):
        raise ConfigError(
            f"{written}={context} is less than data.max_prompt_length + data.max_response_length ({sum(lengths)}), "
            "the context length of the engines; lower one of these"
        )
    if written:
        result.obsolete[written] = "the context length is data.max_prompt_length + data.max_response_length"


def _read_clip(result: Translation) -> None:
    both = result.number("actor.clip_ratio")
    if both is not None:  # the separate keys of both sides take precedence
        result.settings = {"algorithm.clip_low": both, "algorithm.clip_high": both, **result.settings}


def _read_discount(result: Translation) -> None:
    for name in ("gamma", "lam"):
        key = f"algorithm.{name}"
        if result.settings.get(key) == 1 and name not in signature(_advantage(result)).parameters:
            del result.settings[key]
            result.obsolete[result.spelled.pop(key)] = "the advantage does not discount"


def _read_division(result: Translation) -> None:
    """Whether advantages are divided by the group's standard deviation. veRL's pass@k is, unlike the paper's."""
    key = "algorithm.norm_adv_by_std_in_grpo"
    by_std = result.flag(key)
    if by_std is None:
        if result.settings.get("algorithm.adv_estimator") != "grpo_passk":
            return
        by_std = True
    advantage = _advantage(result)
    division = {_advantage_of("grpo"): True, _advantage_of("dr_grpo"): False}
    if "divide_by_std" in signature(advantage).parameters:
        result.settings["algorithm.options.divide_by_std"] = by_std
    elif advantage in division:
        if by_std != division[advantage]:
            result.replace("algorithm.adv_estimator", "grpo" if by_std else "dr_grpo", key)
    else:
        result.obsolete[key] = "the advantage is not divided by a standard deviation"


def _advantage(result: Translation) -> Callable[..., object]:
    estimator, name = (str(result.now(f"algorithm.{key}")) for key in ("adv_estimator", "name"))
    return _advantage_of(ADV_ESTIMATORS.get(estimator, name))


def _advantage_of(name: str) -> Callable[..., object]:
    from verl.algorithms.algorithm import load_preset  # imports torch

    return load_preset(name).advantage


def _read_offload(result: Translation) -> None:
    for ours, group in (("actor.offload", "actor"), ("critic.offload", "critic.model")):
        names = {part: f"{group}.fsdp_config.{key}_offload" for part, key in _OFFLOADED.items()}
        written = [name for name in names.values() if name in result.theirs]
        parts = [part for part, name in names.items() if result.flag(name)]
        if written:
            result.put(ours, "all" if len(parts) == 2 else "".join(parts) or "none", spelled(written[0]))


def _read_kl(result: Translation) -> None:
    """In veRL, KL is in the loss if use_kl_loss is true, else in the reward; the other placement's keys are obsolete.

    In later versions KL is in the reward only if use_kl_in_reward is true; ToolRL's version has no such key.
    """
    of_loss = {"actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type"}
    of_reward = {"algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"}
    if not result.theirs.keys() & (of_loss | of_reward):
        return
    from verl.algorithms.algorithm import load_preset  # imports torch

    before = result.now("algorithm.kl_placement") or load_preset(str(result.now("algorithm.name"))).kl.placement
    loss, reward = result.flag("actor.use_kl_loss"), result.flag("algorithm.use_kl_in_reward")
    explicit = result.settings.get("algorithm.kl_placement")
    for place, flag, key in (("loss", loss, "actor.use_kl_loss"), ("reward", reward, "algorithm.use_kl_in_reward")):
        if None not in (explicit, flag) and flag != (explicit == place):
            raise ConfigError(
                f"algorithm.kl_placement={explicit} contradicts {spelled(key)}={flag}; leave one of them out"
            )
    loss = before == "loss" if loss is None else loss
    if loss and reward:
        raise ConfigError("KL has a single placement: set actor.use_kl_loss or algorithm.use_kl_in_reward to false")
    if explicit is not None:
        placement = explicit
    elif loss:
        placement = "loss"
    elif reward is not False and (reward or before != "none" or "algorithm.kl_ctrl.kl_coef" in result.theirs):
        placement = "reward"
    else:
        placement = "none"
    sides = {
        "loss": ("actor.kl_loss_coef", "actor.kl_loss_type", "k3"),
        "reward": ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "k1"),
    }
    coefficient = result.number(sides[placement][0]) if placement in sides else None
    if coefficient == 0:
        placement = "none"
    result.put("algorithm.kl_placement", placement, "algorithm.kl_placement")
    if placement in sides:
        coefficient_key, estimator_key, usual = sides.pop(placement)
        _put_kl(result, (coefficient_key, coefficient), estimator_key, usual if placement != before else None)
    for names in sides.values():
        for name in names[:2]:
            result.ignore(name, "there is no KL" if placement == "none" else f"KL is in the {placement}")


def _put_kl(result: Translation, weight: tuple[str, float | None], estimator_key: str, usual: str | None) -> None:
    """weight: veRL's key of the coefficient, its value; usual: the default estimator if the placement changes"""
    coefficient_key, coefficient = weight
    result.move(coefficient, "algorithm.kl_coefficient", coefficient_key)
    estimator = result.take(estimator_key)
    if estimator is not None:
        if not isinstance(estimator, str) or estimator not in _KL_ESTIMATORS:
            raise ConfigError(f"{spelled(estimator_key)} must be one of {', '.join(_KL_ESTIMATORS)}, got {estimator!r}")
        result.put("algorithm.kl_estimator", _KL_ESTIMATORS[estimator], spelled(estimator_key))
    if usual is not None:
        defaults = {"algorithm.kl_coefficient": _KL_COEFFICIENT, "algorithm.kl_estimator": usual}
        result.settings = {**defaults, **result.settings}


def _read_kl_control(result: Translation) -> None:
    kind, target = result.take("algorithm.kl_ctrl.type"), result.number("algorithm.kl_ctrl.target_kl")
    if kind not in (None, "fixed", "adaptive"):
        raise ConfigError(f"algorithm.kl_ctrl.type must be fixed or adaptive, got {kind!r}")
    if kind == "adaptive" or (kind is None and result.now("algorithm.kl_target") is not None and target is not None):
        before = result.now("algorithm.kl_target") or _KL_TARGET
        result.put("algorithm.kl_target", before if target is None else target, "algorithm.kl_ctrl.target_kl")
        return
    if kind == "fixed":
        result.put("algorithm.kl_target", None, "algorithm.kl_ctrl.type")
    if target is not None:
        result.obsolete["algorithm.kl_ctrl.target_kl"] = "algorithm.kl_ctrl.type is fixed"


def _read_schedules(result: Translation) -> None:
    """veRL's warmup is in training steps, ours in optimizer steps; if it is negative, the ratio applies."""
    for group in ("actor.optim", "critic.optim"):
        steps, ratio = (result.number(f"{group}.{name}") for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"))
        if steps is not None and steps >= 0:
            updates = int(steps) * _updates_per_step(result)
            result.move(updates, f"{group}.warmup_steps", f"{group}.lr_warmup_steps")
        else:
            name = f"{group}.lr_warmup_steps_ratio"
            if ratio is not None and not 0 <= ratio < 1:
                raise ConfigError(f"{spelled(name)} must be a share below 1 of the run, got {ratio}")
            result.move(ratio, f"{group}.warmup_steps", name)
    written, value = result.theirs.pop("actor.optim.min_lr_ratio", ("", None))
    if written:
        result.put("actor.optim.min_lr_ratio", 0.0 if value is None else value, written)


def _read_lora(result: Translation) -> None:
    """Without a rank or an adapter veRL ignores the other keys. Its alpha is 16 where it is not written."""
    rank, path = result.take("model.lora_rank"), result.take("model.lora_adapter_path")
    result.move(rank, "lora.rank", "model.lora_rank")
    result.move(path, "lora.path", "model.lora_adapter_path")
    if (of_critic := result.take("critic.model.lora_rank")) not in (None, 0, rank):
        raise ConfigError(
            f"{spelled('critic.model.lora_rank')}={of_critic} must equal lora.rank={rank}, which covers both"
        )
    if not rank and path is None:
        for name in ("model.lora_alpha", "model.target_modules"):
            result.ignore(name, "without lora_rank all weights are trained")
        return
    alpha, targets = result.number("model.lora_alpha"), result.take("model.target_modules")
    result.move(_LORA_ALPHA if alpha is None and path is None else alpha, "lora.alpha", "model.lora_alpha")
    result.move([targets] if isinstance(targets, str) else targets, "lora.targets", "model.target_modules")


def _read_mini_batch(result: Translation) -> None:
    """veRL refuses a mini-batch above the batch, unless use_dynamic_bsz is true: then early versions take the batch."""
    key, dynamic = "actor.ppo_mini_batch_size", "actor.use_dynamic_bsz"
    takes_batch = result.theirs.get(dynamic, ("", None))[1] is True
    result.ignore(dynamic, PACKS.replace("`", ""))
    written, mini, batch = result.spelled.get(key, key), result.now(key), result.now("data.train_batch_size")
    if written == key or takes_batch or not (isinstance(mini, int) and isinstance(batch, int)):
        return
    if mini > batch:
        raise ConfigError(f"{written}={mini} is above data.train_batch_size={batch}, which veRL refuses, too; lower it")


def _updates_per_step(result: Translation) -> int:
    """Optimizer steps per training step; 1 for invalid sizes, which are reported later."""
    names = ("data.train_batch_size", "actor.ppo_mini_batch_size", "actor.ppo_epochs")
    batch, mini, epochs = (result.now(name) for name in names)
    whole = all(isinstance(each, int) and each > 0 for each in (batch, mini, epochs))
    return max(1, batch // mini) * epochs if whole else 1


def _read_sampling(result: Translation) -> None:
    written, engine = result.theirs.pop("rollout.name", ("rollout.name", None))
    if engine in ("async", "sglang"):
        result.obsolete[written] = "vLLM is used instead"
        engine = "vllm"
    if engine is not None:
        result.put("rollout.name", engine, written)
    if result.flag("rollout.do_sample") is False:
        result.replace("rollout.temperature", 0.0, "actor_rollout_ref.rollout.do_sample")
    if result.flag("rollout.val_kwargs.do_sample") is False:
        result.replace("rollout.val_kwargs.temperature", 0.0, "actor_rollout_ref.rollout.val_kwargs.do_sample")
    for name in ("n_agent", "n_trajectories"):
        times = result.count(f"rollout.{name}")
        if times is not None:
            result.replace("rollout.n", result.settings.get("rollout.n", 1) * times, spelled(f"rollout.{name}"))
    for name in ("top_p", "top_k", "repetition_penalty"):
        if result.settings.get(f"rollout.{name}", 0) is None:
            del result.settings[f"rollout.{name}"]
            result.obsolete[result.spelled.pop(f"rollout.{name}")] = _NULL


_MANAGERS = ("naive", "prime", "batch", "dapo")  # veRL's that only call the reward


def _read_reward(result: Translation) -> None:
    path = result.take("custom_reward_function.path")
    if line := result.line_of("custom_reward_function.path"):
        function = result.theirs.get("custom_reward_function.name", ("", None))[1]
        if function not in (None, _REWARD_FUNCTION):
            raise ConfigError(
                f"custom_reward_function.name={function} is no function of {line.system}, which "
                f"custom_reward_function.path={path} stands for; for one of yours, set reward.name={path}:{function} "
                "in place of both"
            )
        result.ignore("custom_reward_function.name", f"this is {line.system}")
    elif path is not None:
        function = result.take("custom_reward_function.name") or _REWARD_FUNCTION
        result.put("reward.name", f"{path}:{function}", "custom_reward_function.path")
    result.ignore("custom_reward_function.name", "custom_reward_function.path is not set")
    for option, value in (result.take(REWARD_OPTIONS) or {}).items():
        result.put(f"reward.options.{option}", value, REWARD_OPTIONS)
    manager = result.take("reward_model.reward_manager")
    if manager in _MANAGERS:
        result.obsolete["reward_model.reward_manager"] = "rewards are functions, set by reward.name"
    elif manager is not None and not result.line_of("reward_model.reward_manager"):
        if result.now("reward.name") == AUTO:
            raise ConfigError(
                f"reward_model.reward_manager={manager} names no reward here; set reward.name (docs/reward.md), or a "
                "recipe of docs/recipes"
            )
        result.obsolete["reward_model.reward_manager"] = "reward.name is set"
    for name, option in {"structure_format_score": "good_form", "final_format_score": "any_answer"}.items():
        points = result.number(f"reward_model.{name}")
        if points is not None:
            result.settings["reward.options.with_form"] = True
            result.put(f"reward.options.{option}", points, f"reward_model.{name}")


def _read_overlong(result: Translation) -> None:
    """DAPO's penalty, which veRL's manager `dapo` adds to the reward, as part of the algorithm.

    The formula is the same: veRL's has no lower bound, but a response is never longer than the limit.
    """
    length, factor, longest = f"{OVERLONG}.len", f"{OVERLONG}.penalty_factor", "reward_model.reward_kwargs.max_resp_len"
    if result.theirs.get("reward_model.reward_manager", ("", None))[1] != "dapo":
        for name in (f"{OVERLONG}.enable", f"{OVERLONG}.log", length, factor, longest):
            result.ignore(name, "only veRL's reward manager dapo has an overlong penalty")
        return
    result.ignore(f"{OVERLONG}.log", "the penalty is always logged, as reward/overlong_penalty")
    enabled = result.flag(f"{OVERLONG}.enable")
    if enabled:
        tokens = result.count(longest)
        if tokens not in (None, result.now("data.max_response_length")):
            raise ConfigError(f"{longest}={tokens} must equal data.max_response_length, the limit of a response")
        if length not in result.theirs:
            raise ConfigError(f"{OVERLONG}.enable=true needs {length}, in tokens")
        result.move(result.count(length), "algorithm.overlong_buffer", length)
        result.move(result.number(factor), "algorithm.overlong_factor", factor)
    elif enabled is False:
        result.put("algorithm.overlong_buffer", 0, f"{OVERLONG}.enable")
    for name in (length, factor, longest):
        result.ignore(name, "the overlong penalty is not enabled")


def _read_dataset(result: Translation) -> None:
    path = result.take("data.custom_cls.path")
    if path is not None and not result.line_of("data.custom_cls.path"):
        if result.now("data.map") is None:
            raise ConfigError(
                f"data.custom_cls.path={path}: there are no data set classes; convert rows with "
                "data.map=file.py:function (docs/data.md)"
            )
        result.obsolete["data.custom_cls.path"] = "data.map converts the rows"
    result.ignore("data.custom_cls.name", "data.map converts the rows")


def _read_filters(result: Translation) -> None:
    filtered = result.flag("algorithm.filter_groups.enable")
    if filtered:
        result.put("algorithm.filters", ["zero_variance"], "algorithm.filter_groups.enable")
        rounds = result.number("algorithm.filter_groups.max_num_gen_batches")
        if rounds is not None and rounds > 0:
            result.put("algorithm.max_resample_rounds", rounds, "algorithm.filter_groups.max_num_gen_batches")
        elif result.now("algorithm.max_resample_rounds") is None:
            result.put("algorithm.max_resample_rounds", _MAX_RESAMPLE_ROUNDS, "algorithm.filter_groups.enable")
    result.ignore("algorithm.filter_groups.max_num_gen_batches", "no groups are filtered")


def _read_rejection(result: Translation) -> None:
    """Our key has both bounds. The lower one follows from the upper one, which is the recipe's or the default."""
    key, group = "algorithm.correction.rejection_bounds", "algorithm.rollout_correction.rollout_rs_threshold"
    upper, lower = result.number(group), result.number(f"{group}_lower")
    if upper is not None:
        result.put(key, [1.0 / max(upper, 1.0) if lower is None else lower, upper], group)
    elif lower is not None:
        from verl.algorithms.correction import Correction  # imports torch

        _, upper = result.base(key) or (None, Correction().rejection_upper)
        result.put(key, [lower, upper], f"{group}_lower")


def _read_names(result: Translation) -> None:
    """veRL's names of metrics are one more of our loggers."""
    key, names = "trainer.logger", result.take("tracking.names")
    if names not in (None, "own", "verl"):
        raise ConfigError(f"tracking.names must be own or verl, got {names!r}")
    loggers = result.now(key)
    if names == "verl" and isinstance(loggers, list) and VERL_NAMES not in loggers:
        result.replace(key, [*loggers, VERL_NAMES], result.spelled.get(key, "tracking.names"))


def _read_environments(result: Translation) -> None:
    """Environments of other systems have no names; each is recognized by a key of its own."""
    for name in ("actor.state_masking", "actor.masking"):
        masked = result.flag(name)
        result.move(None if masked is None else not masked, "env.train_on_observations", name)
    name = "env.train_on_observations_until"
    result.move(result.count(name), "env.train_on_observations", name)
    name = "rollout.qwen3_enable_thinking"
    result.move(result.flag(name), "model.chat_template_options.enable_thinking", name)
    agents, turns = (result.count(f"rollout.{name}") for name in ("max_parallel_agents", "max_iterations"))
    if result.now("env.name") != "swe":
        result.move(turns, "env.max_turns", "rollout.max_iterations")
        if agents is not None:
            result.obsolete[spelled("rollout.max_parallel_agents")] = "all episodes of a step run concurrently"
        return
    result.move(turns, "env.max_tool_calls", "rollout.max_iterations")
    result.move(turns and turns + 1, "env.max_turns", "rollout.max_iterations")  # the last one calls nothing
    for stage in ("starting", "running", "scoring"):
        result.move(agents, f"env.options.max_{stage}", "rollout.max_parallel_agents")


def _read_search_r1(result: Translation) -> None:
    search, tool_call_format = result.flag("do_search"), result.now("env.tool_call_format")
    if search and tool_call_format is None:
        raise ConfigError("do_search=true needs a retriever; set retriever.url, or env.tool_call_format and env.tools")
    if search is False:
        if tool_call_format is not None:
            raise ConfigError(
                f"do_search=false contradicts env.tool_call_format={tool_call_format}; leave one of them out"
            )
        for name in ("max_turns", "retriever.url", "retriever.topk"):
            result.ignore(name, "do_search is false")
    calls, topk = result.count("max_turns"), result.count("retriever.topk")
    url = result.take("retriever.url")
    result.move(calls, "env.max_tool_calls", "max_turns")
    if url is None and topk is None:
        return
    found = {"retriever": "http", "urls": [url]} if url is not None else {}
    if result.settings.get("env.tools"):
        result.obsolete["retriever.url"] = "env.tools sets the tools"
    else:
        search_tool = {"name": "search", **found, **({} if topk is None else {"topk": topk})}
        result.put("env.tools", [search_tool], "retriever.url")


def _read_torl(result: Translation) -> None:
    name = "rollout.num_llm_calls_available"
    result.move(result.count(name), "env.max_tool_calls", name)


def _read_multi_turn(result: Translation) -> None:
    group = "rollout.multi_turn."
    tools = result.take(f"{group}tool_config_path")
    loop = result.take("rollout.agent.default_agent_loop")
    if loop not in (None, "single_turn_agent", "tool_agent"):
        raise ConfigError(
            f"{spelled('rollout.agent.default_agent_loop')}={loop} is an agent loop of veRL, which is not available; "
            "set env.name (docs/environments.md), or env.agent for a program of yours (docs/agents.md)"
        )
    if not result.flag(f"{group}enable") and loop != "tool_agent":
        for name in ("format", "max_assistant_turns", "max_user_turns"):
            result.ignore(f"{group}{name}", "rollout.multi_turn.enable is not true")
        if tools is not None:
            result.obsolete[spelled(f"{group}tool_config_path")] = "rollout.multi_turn.enable is not true"
        return
    if tools is not None and not result.line_of(f"{group}tool_config_path"):
        if not result.now("env.tools"):
            raise ConfigError(
                f"{spelled(group)}tool_config_path={tools} lists classes of veRL, which do not exist here; set "
                "env.tools=[python], [search] or functions of yours (docs/tools.md). For ReTool: recipe=retool_dapo"
            )
        result.obsolete[spelled(f"{group}tool_config_path")] = "env.tools sets the tools"
    written = spelled(f"{group}enable")
    if result.now("env.name") == "single_turn":
        result.put("env.name", "tool", written)
    tool_call_format = result.take(f"{group}format")
    if tool_call_format is not None or result.now("env.tool_call_format") is None:
        result.put("env.tool_call_format", tool_call_format or "hermes", written)
    turns, answers = result.count(f"{group}max_assistant_turns"), result.count(f"{group}max_user_turns")
    bounds = [bound for bound in (turns and turns - 1, answers) if bound is not None]
    result.move(min(bounds, default=None), "env.max_tool_calls", f"{group}enable")


def _read_nulls(result: Translation) -> None:
    """Values of veRL that mean "none", "never" or "all" -> ours. A null in our spelling keeps the preset's level."""
    levels = ("algorithm.correction.is_level", "algorithm.correction.rejection_level")
    for keys, theirs, ours in (
        (tuple(key for key in levels if result.spelled.get(key) != key), None, "none"),
        (("trainer.save_freq", "trainer.test_freq"), -1, 0),
        (("rollout.top_k", "rollout.val_kwargs.top_k"), 0, -1),
    ):
        result.settings |= {key: ours for key in keys if key in result.settings and result.settings[key] == theirs}


_READERS = (
    _read_data,
    _read_division,
    _read_clip,
    _read_offload,
    _read_discount,
    _read_kl,
    _read_kl_control,
    _read_mini_batch,
    _read_schedules,
    _read_lora,
    _read_sampling,
    _read_overlong,
    _read_reward,
    _read_dataset,
    _read_filters,
    _read_rejection,
    _read_names,
    _read_environments,
    _read_search_r1,
    _read_torl,
    _read_multi_turn,
    _read_nulls,
)
