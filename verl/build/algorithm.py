"""Builds the algorithm: a preset with the overrides of the configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from inspect import signature
from math import isfinite
from typing import Any, cast

from verl.algorithms.algorithm import Algorithm, KLTerm, load_preset
from verl.algorithms.correction import Correction
from verl.algorithms.entropy import AdaptiveEntropy
from verl.algorithms.filters import FILTERS, Filter, name_of
from verl.algorithms.kl import AdaptiveKL
from verl.algorithms.names import Aggregation, KLPlacement, Level, OldLogprobs
from verl.algorithms.overlong import Overlong
from verl.config.schema import AlgorithmConfig, Config, CorrectionConfig
from verl.errors import ConfigError
from verl.registry import check_options, resolve
from verl.utils.reward_score.base import GroupReward, Reward

_SETTINGS = ("clip_low", "clip_high", "dual_clip", "gamma", "lam")  # hyperparameters with config keys
_FUNCTIONS = ("advantage", "policy_loss", "selection", "likelihood")  # fields of `Algorithm` whose settings are options
_SHARE = (lambda value: 0 <= value <= 1, "between 0 and 1")
_POSITIVE = (lambda value: value > 0, "positive")
_AT_LEAST_ONE = (lambda value: value >= 1, "at least 1")
_FINITE = (isfinite, "finite")
_NOT_NEGATIVE = (lambda value: value >= 0, "0 or more")
# {function.option: (predicate, its description)} for our own presets and filters; covariance bounds are unrestricted
_DOMAINS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "within_bounds.share": _SHARE,
    "largest.share": _SHARE,
    "highest_entropy.share": _SHARE,
    "right_tokens.threshold": _FINITE,
    "right_tokens.nll_weight": _NOT_NEGATIVE,
    "gae.critic_lam": _SHARE,
    "gae.length_alpha": _POSITIVE,
    "penalty_where_selected.beta": _NOT_NEGATIVE,
    "soft_gated.tau_pos": _POSITIVE,
    "soft_gated.tau_neg": _POSITIVE,
    "gigpo.turn_weight": _NOT_NEGATIVE,
    "by_turn_and_rollout.turn_weight": _SHARE,
    "aspo.delta": _FINITE,
    "aspo.k": _SHARE,
    "right_only.threshold": _FINITE,
    "resample_on_correct.share": _SHARE,
    "resample_on_correct.least": _NOT_NEGATIVE,
    "within_total_variation.ratio_cap": _AT_LEAST_ONE,
    "within_binary_kl.ratio_cap": _AT_LEAST_ONE,
    "penalized_within_bounds.bound": _SHARE,
    "penalized_within_bounds.tau": _NOT_NEGATIVE,
    "clipped_unless_off_policy.max_divergence": _NOT_NEGATIVE,
    "grader_faults.max_share": _SHARE,
    "length.max_tokens": _AT_LEAST_ONE,
    "zero_variance.least_spread": _NOT_NEGATIVE,
}


def needs_reference(algorithm: Algorithm) -> bool:
    return algorithm.kl.placement is not KLPlacement.NONE


def algorithm_of(config: Config) -> Algorithm:
    """The algorithm of a run, with the weight of its teacher.

    Raises ConfigError as `build_algorithm` does, and for an algorithm that has nothing to learn from.
    """
    algorithm = build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)
    if config.teacher.path is not None:
        return replace(algorithm, teacher_weight=config.teacher.weight, teacher_top_k=config.teacher.top_k or 0)
    if algorithm.teacher_weight:
        raise ConfigError(f"algorithm.name={config.algorithm.name} learns from a teacher; set teacher.path to a model")
    return algorithm


def build_algorithm(config: AlgorithmConfig, max_response_length: int, max_staleness: int) -> Algorithm:
    """The preset with its overrides. Raises ConfigError for an override without effect on the preset.

    max_response_length: tokens; default of aggregation_length
    """
    algorithm = load_preset(config.name)
    if config.adv_estimator is not None:
        algorithm = _with_advantage(load_preset(config.advantage_of), algorithm)
    mode = algorithm.aggregation if config.aggregation is None else Aggregation(config.aggregation)
    length = _aggregation_length(config, mode, algorithm.aggregation_length or max_response_length)
    changes: dict[str, Any] = {"aggregation": mode, "aggregation_length": length, **_bind_options(algorithm, config)}
    old = algorithm.old_logprobs if config.old_logprobs is None else OldLogprobs(config.old_logprobs)
    changes |= {"old_logprobs": old, "correction": _correction(config.correction, algorithm, old, max_staleness)}
    filters = None if config.filters is None else tuple(_filter(entry) for entry in config.filters)
    overrides: dict[str, Any] = {"entropy_coefficient": config.entropy_coefficient, "filters": filters}
    overrides |= {"max_resample_rounds": config.max_resample_rounds, "entropy_target": config.entropy_target}
    overrides["observation_coefficient"] = config.observation_coefficient
    changes |= {name: value for name, value in overrides.items() if value is not None}
    changes["overlong"] = _overlong(config, algorithm.overlong, max_response_length)
    changes["kl"] = _kl_term(config, algorithm.kl)
    built = replace(algorithm, **changes)
    if config.max_resample_rounds is not None and config.max_resample_rounds > 1 and not built.filters:
        raise ConfigError(
            f"algorithm.max_resample_rounds={config.max_resample_rounds} has no effect: algorithm.filters drops nothing"
        )
    if built.entropy_target is not None and not 0 <= built.entropy_coefficient <= AdaptiveEntropy.maximum:
        raise ConfigError(
            f"algorithm.entropy_coefficient={built.entropy_coefficient:g}: with an entropy target it adapts from 0 to "
            f"{AdaptiveEntropy.maximum:g}, and begins there"
        )
    return built if built.filters else replace(built, max_resample_rounds=1)


def check_algorithm(algorithm: Algorithm, config: Config) -> None:
    """Raises ConfigError if the algorithm is incompatible with the rest of the configuration."""
    if config.rollout.truncated and (algorithm.correction or algorithm.old_logprobs is OldLogprobs.ROLLOUT):
        raise ConfigError(
            "rollout.top_p, top_k and repetition_penalty change the sampled distribution: the log-probs of the "
            "engine are unusable for algorithm.old_logprobs=rollout and algorithm.correction (on by default if "
            "rollout.max_staleness > 0); disable either of them"
        )
    honors = config.env.name == "agent" and config.env.options.get("on_sampling") == "honor"
    if algorithm.old_logprobs is OldLogprobs.ROLLOUT and (config.env.train_on_observations or honors):
        raise ConfigError(
            f"algorithm.name={algorithm.name} takes the engine's log-probs; those of observations "
            "(env.train_on_observations) or under a program's sampling settings (env.options.on_sampling=honor) are "
            "unusable: set algorithm.old_logprobs=trainer"
        )
    if algorithm.needs_group and config.rollout.n < 2:
        chosen = config.algorithm.adv_estimator or config.algorithm.name
        raise ConfigError(f"{chosen} needs rollout.n >= 2 (advantages are group-relative); got {config.rollout.n}")
    if algorithm.observation_coefficient:
        key = f"algorithm.observation_coefficient={algorithm.observation_coefficient:g}"
        if not config.env.multi_turn:
            raise ConfigError(f"{key} has no effect: without env.tool_call_format an episode has no observations")
        if config.env.train_on_observations:
            raise ConfigError(f"{key} and env.train_on_observations would train observations twice; set one of them")
    if algorithm.needs_turns and config.env.train_on_observations:
        raise ConfigError(
            f"algorithm.name={algorithm.name} distinguishes states by their observations, which "
            "env.train_on_observations=true merges into the response; set it to false"
        )


def check_rewards(algorithm: Algorithm, rewards: Iterable[Reward]) -> None:
    """Raises ConfigError for a reward of whole groups with an algorithm that has a greedy baseline."""
    if algorithm.greedy_baseline and any(isinstance(reward, GroupReward) for reward in rewards):
        raise ConfigError(
            f"the reward scores whole groups, but algorithm.name={algorithm.name} scores each response against a "
            "separate greedy baseline; change reward.name (or the rows' reward) or algorithm.name"
        )


def _with_advantage(preset: Algorithm, algorithm: Algorithm) -> Algorithm:
    """The algorithm with the advantage estimator of a preset and its requirements; all else is unchanged."""
    needs = ("needs_critic", "needs_group", "greedy_baseline", "needs_turns", "takes_turn_rewards")
    names = ("advantage", "by_group", *needs)
    return replace(algorithm, **{name: getattr(preset, name) for name in names})


def _bind_options(algorithm: Algorithm, config: AlgorithmConfig) -> dict[str, Any]:
    """The functions of the preset with the configured hyperparameters bound."""
    keys = {name: f"algorithm.{name}" for name in _SETTINGS if getattr(config, name) is not None}
    settings = {name: getattr(config, name) for name in keys} | config.options
    for name in config.options:
        if name in _SETTINGS:
            raise ConfigError(f"algorithm.options.{name}: use the key algorithm.{name}")
    keys |= {name: f"algorithm.options.{name}" for name in config.options}
    functions = {name: getattr(algorithm, name) for name in _FUNCTIONS}
    accepted = {name: _settings_of(function) for name, function in functions.items() if function is not None}
    for setting, key in keys.items():
        if not any(setting in names for names in accepted.values()):
            known = sorted(set().union(*accepted.values())) or ["none"]
            raise ConfigError(f"{key} has no effect: the options of algorithm {config.name!r} are {', '.join(known)}")
    changes = {}
    for name, names in accepted.items():
        if chosen := {setting: value for setting, value in settings.items() if setting in names}:
            inputs = [None] * (len(signature(functions[name]).parameters) - len(names))
            check_options("algorithm.options of", config.name, functions[name], chosen, *inputs)
            _check_numbers("algorithm.options", functions[name], chosen)
            changes[name] = partial(functions[name], **chosen)
    return changes


def _check_numbers(where: str, function: Callable[..., object], options: Mapping[str, Any]) -> None:
    """Raises ConfigError for a number outside the domain of its option."""
    for name, value in options.items():
        domain = _DOMAINS.get(f"{name_of(function)}.{name}")
        if domain is not None and not domain[0](value):
            raise ConfigError(f"{where}.{name} must be {domain[1]}, got {value!r}")
    bounds = {name: parameter.default for name, parameter in signature(function).parameters.items()} | dict(options)
    if {"low", "high"} <= bounds.keys() and not bounds["low"] <= bounds["high"]:
        raise ConfigError(f"{where}: low={bounds['low']:g} exceeds high={bounds['high']:g}: the interval is empty")


def _settings_of(function: Callable[..., object]) -> list[str]:
    """The parameters of a function that have a default."""
    return [each.name for each in signature(function).parameters.values() if each.default is not each.empty]


def _filter(entry: Any) -> Filter:
    """Build a filter from its name or from {name: .., option: ..}."""
    options = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"algorithm.filters: {entry!r} names no filter; expected a name, or {{name: .., option: ..}}")
    known = {each: f"verl.algorithms.filters:{each}" for each in FILTERS}
    function = resolve("algorithm.filters", name, known)
    check_options("algorithm.filters:", name, function, options, None)
    _check_numbers(f"algorithm.filters: {name}", function, options)
    return partial(function, **options) if options else cast(Filter, function)


def _overlong(config: AlgorithmConfig, preset: Overlong | None, max_response_length: int) -> Overlong | None:
    """The overlong penalty with its lengths set; None if the buffer is 0."""
    buffer = config.overlong_buffer
    if buffer == 0 or (buffer is None and preset is None):
        if config.overlong_factor is not None:
            raise ConfigError("algorithm.overlong_factor has no effect: algorithm.overlong_buffer is 0 or unset")
        return None
    if buffer is not None and buffer > max_response_length:
        raise ConfigError(f"algorithm.overlong_buffer={buffer} exceeds data.max_response_length={max_response_length}")
    base = preset or Overlong()
    factor = base.factor if config.overlong_factor is None else config.overlong_factor
    return replace(base, buffer=buffer or base.buffer, factor=factor).with_max_tokens(max_response_length)


def _aggregation_length(config: AlgorithmConfig, mode: Aggregation, default: float) -> float | None:
    if mode is Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
        return config.aggregation_length or default
    if config.aggregation_length is not None:
        raise ConfigError(f"algorithm.aggregation_length has no effect: {mode} does not divide by a constant length")
    return None


def _correction(config: CorrectionConfig, preset: Algorithm, old: OldLogprobs, max_staleness: int) -> Correction | None:
    """The configured off-policy correction over that of the preset, or over the default; None for no correction.

    old_logprobs=rollout disables preset and default: its ratio corrects already. Raises ConfigError for settings
    without effect.
    """
    levels_set = config.is_level not in ("auto", "none") or config.rejection_level not in (None, "none")
    if old is OldLogprobs.ROLLOUT and (levels_set or config.token_veto is not None):
        raise ConfigError(
            "algorithm.correction with algorithm.old_logprobs=rollout would correct twice: the ratio of the loss "
            "already uses the engine's log-probs; disable one of them"
        )
    base = preset.correction or Correction(is_level=Level.TOKEN if max_staleness > 0 else None)
    if old is OldLogprobs.ROLLOUT:
        base = Correction(is_level=None)
    cap, veto, (lower, upper) = config.is_cap, config.token_veto, config.rejection_bounds or (None, None)
    bounds = {"is_cap": cap, "rejection_lower": lower, "rejection_upper": upper, "token_veto": veto}
    changes: dict[str, Any] = {name: bound for name, bound in bounds.items() if bound is not None}
    if config.is_level != "auto":
        changes["is_level"] = _level(config.is_level)
    if config.rejection_level is not None:
        changes["rejection_level"] = _level(config.rejection_level)
    correction = replace(base, **changes)
    usual = Correction()
    if correction.is_level is None and cap not in (None, usual.is_cap):
        raise _without_level(f"is_cap={cap:g}", "is_level")
    unset = (None, [usual.rejection_lower, usual.rejection_upper])
    if correction.rejection_level is None and config.rejection_bounds not in unset:
        raise _without_level(f"rejection_bounds={config.rejection_bounds}", "rejection_level")
    has_effect = correction.is_level or correction.rejection_level or correction.token_veto is not None
    return correction if has_effect else None


def _without_level(bound: str, level: str) -> ConfigError:
    key = "algorithm.correction"
    return ConfigError(f"{key}.{bound} has no effect: {key}.{level} is none, explicitly or by default")


def _level(name: str) -> Level | None:
    return None if name == "none" else Level(name)


def _kl_term(config: AlgorithmConfig, preset: KLTerm) -> KLTerm:
    placement = preset.placement if config.kl_placement is None else KLPlacement(config.kl_placement)
    if placement is KLPlacement.NONE:
        for name in ("kl_estimator", "kl_coefficient"):
            if config.kl_placement is None and getattr(config, name) is not None:  # else it may be a recipe's
                raise ConfigError(
                    f"algorithm.{name} has no effect: {config.name} has no KL term; set algorithm.kl_placement"
                )
        return KLTerm()
    coefficient = preset.coefficient if config.kl_coefficient is None else config.kl_coefficient
    default = "k3" if placement is KLPlacement.LOSS else "k1"  # not k1 in the loss: its gradient has mean zero
    estimator = config.kl_estimator or (preset.estimator if preset.placement is placement else default)
    if coefficient <= 0:
        raise ConfigError("algorithm.kl_coefficient must be positive; disable KL with algorithm.kl_placement=none")
    return KLTerm(placement, estimator, coefficient)


def build_kl_control(config: AlgorithmConfig, algorithm: Algorithm) -> AdaptiveKL | None:
    """The adaptive controller of the KL coefficient; None without a KL target."""
    if config.kl_target is None:
        return None
    if algorithm.kl.placement is not KLPlacement.REWARD:
        raise ConfigError("algorithm.kl_target has no effect: it adapts the coefficient of KL in the reward")
    return AdaptiveKL(algorithm.kl.coefficient, config.kl_target)


def build_entropy_control(algorithm: Algorithm) -> AdaptiveEntropy | None:
    """The adaptive controller of the entropy bonus; None without a target. It begins with the fixed coefficient."""
    if algorithm.entropy_target is None:
        return None
    first = algorithm.entropy_coefficient
    return AdaptiveEntropy(algorithm.entropy_target, coefficient=first, bonus=first)
