"""From veRL's spellings to ours: a command of ToolRL's, veRL's or a fork's, word for word (docs/verl_keys.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.algorithms import ADV_ESTIMATORS, ALGORITHMS, DISCOUNTS, DIVIDES_BY_STD, KL_PLACEMENT
from verl.config.verl_keys import ALIASES, INTERPRETED, REFUSED, SAME_AS, VERSIONS, moot_reason, short, spelled
from verl.errors import ConfigError

Settings = dict[str, Any]

_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}
_KL_COEFFICIENT, _KL_TARGET = 0.001, 0.1  # veRL's defaults
_MAX_DRAWS = 10  # where veRL has no limit
_LEFT = "null leaves it at its default"


@dataclass
class Translation:
    """A command in our keys, made of one that may be in veRL's.

    beneath: the value of one of our keys in the recipe, or else its default
    """

    beneath: Callable[[str], Any]
    settings: Settings = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)  # our key -> the key as it was written
    obsolete: dict[str, str] = field(default_factory=dict)  # key as it was written -> why it has nothing left to do
    theirs: dict[str, tuple[str, Any]] = field(default_factory=dict)  # short key -> (as written, value), to be read
    read: set[str] = field(default_factory=set)  # those of veRL's keys that were made into several of ours

    def put(self, key: str, value: Any, written: str) -> None:
        """Set one of our keys; of one key written twice the last value wins.

        Raises ConfigError where another key has set it to another value.
        """
        before = self.spelled.get(key, written)
        if short(before) != short(written) and self.settings[key] != value:
            raise ConfigError(
                f"{before} and {written} contradict each other: {key} would be {self.settings[key]} and {value}; "
                "leave one of them out"
            )
        self.replace(key, value, written)

    def replace(self, key: str, value: Any, written: str) -> None:
        """Set one of our keys, over the value that another key has set."""
        self.settings[key], self.spelled[key] = value, written

    def now(self, key: str) -> Any:
        """What one of our keys comes to so far."""
        return self.settings.get(key, self.beneath(key))

    def take(self, name: str) -> Any:
        """The value of one of veRL's keys, which is read with that; None where it is not written, or null."""
        return self.theirs.pop(name, (name, None))[1]

    def flag(self, name: str) -> bool | None:
        """Likewise, of a switch. Raises ConfigError for what is none."""
        value = self.take(name)
        if value not in (None, True, False):
            raise ConfigError(f"{spelled(name)} must be true or false, got {value!r}")
        return None if value is None else bool(value)

    def count(self, name: str) -> int | None:
        """Likewise, of a number of things. Raises ConfigError for what is none."""
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{spelled(name)} must be a whole number from 1, got {value!r}")
        return value

    def number(self, name: str) -> float | None:
        """Likewise, of any number."""
        value = self.take(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{spelled(name)} must be a number, got {value!r}")
        return value

    def ignore(self, name: str, why: str) -> None:
        """Name one of veRL's keys as moot, if it was written."""
        if name in self.theirs:
            self.obsolete[self.theirs.pop(name)[0]] = why


def translate(written: Mapping[str, Any], beneath: Callable[[str], Any]) -> Translation:
    """The same settings in our keys. Raises ConfigError for values of veRL's that mean nothing here.

    beneath: as in `Translation`
    """
    made = Translation(beneath)
    same: dict[str, Any] = {}
    for key, value in written.items():
        name = short(key)
        why = moot_reason(name)
        if name in ALIASES:
            if value is None and beneath(ALIASES[name]) is not None and "correction" not in ALIASES[name]:
                made.obsolete[key] = _LEFT
            else:
                made.put(ALIASES[name], value, key)
        elif name in INTERPRETED:
            made.theirs[name] = (key, value)
            made.read.add(name)
        elif name in SAME_AS:
            same[name] = value
        elif name in REFUSED:
            only = REFUSED[name]
            if value is not None and value != only.value:
                raise ConfigError(f"{key}={value} is refused: {only.why.replace('`', '')}")
            made.obsolete[key] = "this trainer works in this way alone"
        elif why is not None:
            made.obsolete[key] = why.replace("`", "")
        else:
            made.put(name, value, key)
    for read in _READERS:
        read(made)
    for name, value in same.items():
        _check_same(made, name, value, written)
    _read_lengths(made)
    _read_packs(made)
    _check_context(made)
    assert not made.theirs, f"{sorted(made.theirs)} have no reader"
    return made


def take_defaults(made: Translation) -> list[str]:
    """Takes the defaults of the version of veRL that a command without a recipe is written for and lists them.

    A key that only one version has is the sign of that version. ToolRL's defaults are ours, except for its truncation:
    a whole command in veRL's spelling takes that, if it has no such key and no other reward than ToolRL's.
    """
    if "algorithm.name" in made.settings:
        return []
    written = {short(key) for key in (*made.spelled.values(), *made.obsolete)} | made.read
    versions = [version for version in VERSIONS if version.sign in written]
    of_toolrl = spelled("model.path") in made.spelled.values() and "reward.name" not in made.settings
    if not versions and of_toolrl and "data.truncation" not in made.settings:
        made.settings["data.truncation"] = "left"
        return ["data.truncation=left, as in ToolRL's trainer"]
    taken = []
    for version in versions:
        for ours, (theirs, value) in version.defaults.items():
            if ours not in made.settings and theirs not in written:
                made.settings[ours] = value
                taken.append(f"{spelled(theirs)}={value}, as in {version.name}, which has {spelled(version.sign)}")
    return taken


def our_key(key: str) -> str:
    """The key that another spelling stands for by itself; one that is made of several is for `translate`."""
    return ALIASES.get(short(key), short(key))


def _check_same(made: Translation, name: str, value: Any, written: Mapping[str, Any]) -> None:
    ours = SAME_AS[name]
    if value is not None and value != made.now(ours):
        raise ConfigError(f"{spelled(name)}={value} must equal {spelled(ours)}={made.now(ours)}, which stands for both")
    made.obsolete[next(key for key in written if short(key) == name)] = f"{ours} stands for both"


def _read_lists(made: Translation) -> None:
    for key in ("data.train_files", "data.val_files"):
        if isinstance(made.settings.get(key), str):
            made.settings[key] = [made.settings[key]]


def _read_data(made: Translation) -> None:
    if made.flag("data.filter_overlong_prompts"):
        if "data.truncation" in made.spelled:
            made.obsolete["data.truncation"] = "data.filter_overlong_prompts drops the prompts that are too long"
        made.replace("data.truncation", "drop", "data.filter_overlong_prompts")


def _read_lengths(made: Translation) -> None:
    """Search-R1's lengths are of one turn and of a context that rolls; ours, of the prompt and of all that follows."""
    start = made.count("data.max_start_length")
    if start is None:
        return
    turn, context = (made.settings.get(f"data.max_{name}_length") for name in ("response", "prompt"))
    made.replace("data.max_prompt_length", start, "data.max_start_length")
    if turn is not None:
        made.put("env.max_turn_tokens", turn, "data.max_response_length, as in Search-R1")
        made.settings.pop("data.max_response_length")
    if context is not None:
        made.replace("data.max_response_length", context, "data.max_prompt_length, as in Search-R1")


def _read_packs(made: Translation) -> None:
    """Packs hold the longest sample at least, unless they are asked to be of a size: veRL may count samples instead."""
    key = "actor.max_tokens_per_pack"
    lengths = [made.now(f"data.max_{name}_length") for name in ("prompt", "response")]
    if key not in made.settings and all(isinstance(each, int) for each in lengths) and sum(lengths) > made.now(key):
        made.settings[key] = sum(lengths)


def _check_context(made: Translation) -> None:
    written, context = made.theirs.pop("rollout.max_model_len", ("", None))
    lengths = [made.now(f"data.max_{name}_length") for name in ("prompt", "response")]
    if isinstance(context, int) and all(isinstance(each, int) for each in lengths) and context < sum(lengths):
        raise ConfigError(
            f"{written}={context} is less than data.max_prompt_length + data.max_response_length ({sum(lengths)}), "
            "which are what an engine has room for; lower one of these"
        )
    if written:
        made.obsolete[written] = "engines have room for data.max_prompt_length + data.max_response_length"


def _read_estimator(made: Translation) -> None:
    preset = ADV_ESTIMATORS.get(str(made.now("algorithm.adv_estimator")), str(made.now("algorithm.name")))
    _read_division(made, preset)
    for name, presets in DISCOUNTS.items():
        key = f"algorithm.{name}"
        if preset in ALGORITHMS and preset not in presets and made.settings.get(key) == 1:
            del made.settings[key]
            made.obsolete[made.spelled.pop(key)] = "the advantage does not discount"


def _read_division(made: Translation, preset: str) -> None:
    """Whether advantages are divided by the group's standard deviation. veRL's pass@k is, unlike the paper's."""
    key = "algorithm.norm_adv_by_std_in_grpo"
    by_std = made.flag(key)
    if by_std is None and made.settings.get("algorithm.adv_estimator") == "grpo_passk":
        by_std = True
    if by_std is None:
        return
    if preset in ("pass_at_k", "gigpo"):
        made.settings["algorithm.options.divide_by_std"] = by_std
    elif preset in (*DIVIDES_BY_STD, "dr_grpo"):
        if by_std != (preset != "dr_grpo"):
            made.replace("algorithm.adv_estimator", "grpo" if by_std else "dr_grpo", key)
    else:
        made.obsolete[key] = "the advantage is not divided by a standard deviation"


def _read_clip(made: Translation) -> None:
    both = made.number("actor.clip_ratio")
    if both is not None:  # each side has a key of its own, which goes over it
        made.settings = {"algorithm.clip_low": both, "algorithm.clip_high": both, **made.settings}


def _read_kl(made: Translation) -> None:
    """veRL pays for KL in the loss where use_kl_loss is true, else in the reward; the other side's keys are moot.

    Later versions pay in the reward where use_kl_in_reward is true alone; ToolRL's have no such key.
    """
    of_loss = {"actor.use_kl_loss", "actor.kl_loss_coef", "actor.kl_loss_type"}
    of_reward = {"algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"}
    if not made.theirs.keys() & (of_loss | of_reward):
        return
    before = made.now("algorithm.kl_placement") or KL_PLACEMENT.get(str(made.now("algorithm.name")), "none")
    loss, reward = made.flag("actor.use_kl_loss"), made.flag("algorithm.use_kl_in_reward")
    asked = made.settings.get("algorithm.kl_placement")
    for place, flag, key in (("loss", loss, "actor.use_kl_loss"), ("reward", reward, "algorithm.use_kl_in_reward")):
        if None not in (asked, flag) and flag != (asked == place):
            raise ConfigError(
                f"algorithm.kl_placement={asked} contradicts {spelled(key)}={flag}; leave one of them out"
            )
    loss = before == "loss" if loss is None else loss
    if loss and reward:
        raise ConfigError("KL is paid in one place: set one of actor.use_kl_loss and algorithm.use_kl_in_reward false")
    if asked is not None:
        placement = asked
    elif loss:
        placement = "loss"
    elif reward is not False and (reward or before != "none" or "algorithm.kl_ctrl.kl_coef" in made.theirs):
        placement = "reward"
    else:
        placement = "none"
    sides = {
        "loss": ("actor.kl_loss_coef", "actor.kl_loss_type", "k3"),
        "reward": ("algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "k1"),
    }
    coefficient = made.number(sides[placement][0]) if placement in sides else None
    if coefficient == 0:
        placement = "none"
    made.put("algorithm.kl_placement", placement, "algorithm.kl_placement")
    if placement in sides:
        price, kind, usual = sides.pop(placement)
        _put_kl(made, (price, coefficient), kind, usual if placement != before else None)
    for names in sides.values():
        for name in names[:2]:
            made.ignore(name, "there is no KL" if placement == "none" else f"KL is paid in the {placement}")


def _put_kl(made: Translation, priced: tuple[str, float | None], kind: str, usual: str | None) -> None:
    """Coefficient and estimator of KL.

    priced: veRL's key of the first, and its value; kind: veRL's key of the second
    usual: the estimator of this place, where KL was in another one before
    """
    price, coefficient = priced
    if coefficient is not None:
        made.put("algorithm.kl_coefficient", coefficient, spelled(price))
    estimator = made.take(kind)
    if estimator is not None:
        if not isinstance(estimator, str) or estimator not in _KL_ESTIMATORS:
            raise ConfigError(f"{spelled(kind)} must be one of {', '.join(_KL_ESTIMATORS)}, got {estimator!r}")
        made.put("algorithm.kl_estimator", _KL_ESTIMATORS[estimator], spelled(kind))
    if usual is not None:
        made.settings = {"algorithm.kl_coefficient": _KL_COEFFICIENT, "algorithm.kl_estimator": usual, **made.settings}


def _read_kl_control(made: Translation) -> None:
    kind, target = made.take("algorithm.kl_ctrl.type"), made.number("algorithm.kl_ctrl.target_kl")
    if kind not in (None, "fixed", "adaptive"):
        raise ConfigError(f"algorithm.kl_ctrl.type must be fixed or adaptive, got {kind!r}")
    if kind == "adaptive" or (kind is None and made.now("algorithm.kl_target") is not None and target is not None):
        before = made.now("algorithm.kl_target") or _KL_TARGET
        made.put("algorithm.kl_target", before if target is None else target, "algorithm.kl_ctrl.target_kl")
        return
    if kind == "fixed":
        made.put("algorithm.kl_target", None, "algorithm.kl_ctrl.type")
    if target is not None:
        made.obsolete["algorithm.kl_ctrl.target_kl"] = "algorithm.kl_ctrl.type is fixed"


def _read_schedules(made: Translation) -> None:
    """veRL's warmup counts training steps, ours optimizer steps; a negative number leaves it to the ratio."""
    for group in ("actor.optim", "critic.optim"):
        steps, ratio = (made.number(f"{group}.{name}") for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"))
        if steps is not None and steps >= 0:
            made.put(f"{group}.warmup_steps", int(steps) * _updates_per_step(made), spelled(f"{group}.lr_warmup_steps"))
            made.settings.setdefault(f"{group}.warmup_ratio", 0.0)
        elif ratio is not None:
            made.put(f"{group}.warmup_ratio", ratio, spelled(f"{group}.lr_warmup_steps_ratio"))
            made.settings.setdefault(f"{group}.warmup_steps", 0)
        written, least = made.theirs.pop(f"{group}.min_lr_ratio", ("", None))
        if written:
            made.put(f"{group}.min_lr_ratio", 0.0 if least is None else least, written)


def _updates_per_step(made: Translation) -> int:
    """Optimizer steps; 1 where a size is none, which is an error once the configuration is built."""
    names = ("data.train_batch_size", "actor.ppo_mini_batch_size", "actor.ppo_epochs")
    batch, mini, epochs = (made.now(name) for name in names)
    whole = all(isinstance(each, int) and each > 0 for each in (batch, mini, epochs))
    return max(1, batch // mini) * epochs if whole else 1


def _read_sampling(made: Translation) -> None:
    written, engine = made.theirs.pop("rollout.name", ("rollout.name", None))
    if engine in ("async", "sglang"):
        made.obsolete[written] = "vLLM is the engine that samples"
        engine = "vllm"
    if engine is not None:
        made.put("rollout.name", engine, written)
    if made.flag("rollout.do_sample") is False:
        made.replace("rollout.temperature", 0.0, "actor_rollout_ref.rollout.do_sample")
    for name in ("n_agent", "n_trajectories"):
        times = made.count(f"rollout.{name}")
        if times is not None:
            made.replace("rollout.n", made.settings.get("rollout.n", 1) * times, spelled(f"rollout.{name}"))
    for name in ("top_p", "top_k", "min_p", "repetition_penalty"):
        if made.settings.get(f"rollout.{name}", 0) is None:
            del made.settings[f"rollout.{name}"]
            made.obsolete[made.spelled.pop(f"rollout.{name}")] = _LEFT
    for key in ("rollout.top_k", "rollout.val_kwargs.top_k"):
        if made.settings.get(key) == 0:  # all tokens, as -1
            made.settings[key] = -1


def _read_reward(made: Translation) -> None:
    path = made.take("custom_reward_function.path")
    if path is not None:
        function = made.take("custom_reward_function.name") or "compute_score"
        made.put("reward.name", f"{path}:{function}", "custom_reward_function.path")
    made.ignore("custom_reward_function.name", "custom_reward_function.path names no file")
    for name, option in {"structure_format_score": "good_form", "final_format_score": "any_answer"}.items():
        points = made.number(f"reward_model.{name}")
        if points is not None:
            made.settings["reward.options.with_form"] = True
            made.put(f"reward.options.{option}", points, f"reward_model.{name}")


def _read_filters(made: Translation) -> None:
    filtered = made.flag("algorithm.filter_groups.enable")
    if filtered:
        made.put("algorithm.filters", ["zero_variance"], "algorithm.filter_groups.enable")
        draws = made.number("algorithm.filter_groups.max_num_gen_batches")
        if draws is not None and draws > 0:
            made.put("algorithm.max_resample_rounds", draws, "algorithm.filter_groups.max_num_gen_batches")
        elif made.now("algorithm.max_resample_rounds") is None:
            made.put("algorithm.max_resample_rounds", _MAX_DRAWS, "algorithm.filter_groups.enable")
    made.ignore("algorithm.filter_groups.max_num_gen_batches", "no groups are filtered")


def _read_environments(made: Translation) -> None:
    """Search-R1's, ToRL's and veRL's environments have no names there: a key that only they have stands for each."""
    for name in ("actor.state_masking", "actor.masking"):
        masked = made.flag(name)
        if masked is not None:
            made.put("env.train_on_observations", not masked, spelled(name))
    thinking = made.flag("rollout.qwen3_enable_thinking")
    if thinking is not None:
        key = "model.chat_template_options.enable_thinking"
        made.put(key, thinking, spelled("rollout.qwen3_enable_thinking"))
    turns = made.count("rollout.max_iterations")
    if turns is not None:
        made.put("env.max_turns", turns, spelled("rollout.max_iterations"))
    _read_search_r1(made)
    _read_torl(made)
    _read_multi_turn(made)


def _read_search_r1(made: Translation) -> None:
    search, tool_call_format = made.flag("do_search"), made.now("env.tool_call_format")
    if search and tool_call_format is None and "retriever.url" not in made.theirs:
        raise ConfigError("do_search=true needs a retriever; set retriever.url, or env.tool_call_format and env.tools")
    if search is False:
        if tool_call_format is not None:
            raise ConfigError(
                f"do_search=false contradicts env.tool_call_format={tool_call_format}; leave one of them out"
            )
        for name in ("max_turns", "retriever.url", "retriever.topk"):
            made.ignore(name, "do_search is false")
    calls, topk = made.count("max_turns"), made.count("retriever.topk")
    url = made.take("retriever.url")
    if calls is not None:
        made.put("env.max_tool_calls", calls, "max_turns")
    if url is None and topk is None:
        return
    found = {"retriever": "http", "urls": [url]} if url is not None else {}
    _play(made, "search_r1", "search_r1", "retriever.url")
    if made.settings.get("env.tools"):
        made.obsolete["retriever.url"] = "env.tools names the tools"
    else:
        made.put(
            "env.tools", [{"name": "search", **found, **({} if topk is None else {"topk": topk})}], "retriever.url"
        )


def _read_torl(made: Translation) -> None:
    calls = made.count("rollout.num_llm_calls_available")
    if calls is not None:
        written = spelled("rollout.num_llm_calls_available")
        made.put("env.max_tool_calls", calls, written)
        if _play(made, "fence", "torl", written) and not made.settings.get("env.tools"):
            made.put("env.tools", ["python"], written)


def _read_multi_turn(made: Translation) -> None:
    group = "rollout.multi_turn."
    if not made.flag(f"{group}enable"):
        for name in ("format", "max_assistant_turns", "max_user_turns"):
            made.ignore(f"{group}{name}", "rollout.multi_turn.enable is not true")
        return
    written = spelled(f"{group}enable")
    if made.now("env.name") == "single_turn":
        made.put("env.name", "tool", written)
    tool_call_format = made.take(f"{group}format")
    if tool_call_format is not None or made.now("env.tool_call_format") is None:
        made.put("env.tool_call_format", tool_call_format or "hermes", written)
    turns, answers = made.count(f"{group}max_assistant_turns"), made.count(f"{group}max_user_turns")
    bounds = [*([] if turns is None else [turns - 1]), *([] if answers is None else [answers])]
    if bounds:
        made.put("env.max_tool_calls", min(bounds), written)


def _play(made: Translation, tool_call_format: str, reward: str, written: str) -> bool:
    """In the environment of a paper, unless the command or its recipe has one; whether it is the paper's."""
    if made.now("env.tool_call_format") is not None:
        return False
    made.put("env.name", "tool", written)
    made.put("env.tool_call_format", tool_call_format, written)
    if "reward.name" not in made.settings:
        made.put("reward.name", reward, written)
    return True


def _read_nulls(made: Translation) -> None:
    """What veRL writes for "none", "never" and "all" where ours has another value."""
    for key in ("algorithm.correction.is_level", "algorithm.correction.rejection_level"):
        if key in made.settings and made.settings[key] is None:
            made.settings[key] = "none"
    for key in ("trainer.save_freq", "trainer.test_freq"):
        if made.settings.get(key) == -1:
            made.settings[key] = 0


_READERS = (
    _read_lists,
    _read_data,
    _read_estimator,
    _read_clip,
    _read_kl,
    _read_kl_control,
    _read_schedules,
    _read_sampling,
    _read_reward,
    _read_filters,
    _read_environments,
    _read_nulls,
)
