"""veRL's spellings, as ToolRL's scripts use them: aliases of ours, and keys that packing and FSDP2 make moot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.errors import ConfigError

Settings = dict[str, Any]

_PREFIXES = {
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.actor.": "actor.",
    "actor_rollout_ref.rollout.": "rollout.",
}
_RENAMED = {
    "actor.clip_ratio_low": "algorithm.clip_low",
    "actor.clip_ratio_high": "algorithm.clip_high",
    "actor.clip_ratio_c": "algorithm.dual_clip",
    "actor.loss_agg_mode": "algorithm.aggregation",
    "actor.loss_scale_factor": "algorithm.aggregation_length",
    "actor.entropy_coeff": "algorithm.entropy_coefficient",
    "actor.ppo_max_token_len_per_gpu": "actor.max_tokens_per_pack",
    "actor.optim.lr_warmup_steps": "actor.optim.warmup_steps",
    "critic.optim.lr_warmup_steps": "critic.optim.warmup_steps",
    "actor.fsdp_config.param_offload": "actor.offload_params",
    "actor.fsdp_config.optimizer_offload": "actor.offload_optimizer",
    "actor_rollout_ref.ref.fsdp_config.param_offload": "ref.offload_params",
    "critic.model.fsdp_config.param_offload": "critic.offload_params",
    "critic.model.fsdp_config.optimizer_offload": "critic.offload_optimizer",
    "critic.model.path": "critic.path",
    "custom_reward_function.path": "reward.path",
    "algorithm.rollout_correction.rollout_is": "algorithm.correction.weight",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction.upper",
    "algorithm.rollout_correction.rollout_rs": "algorithm.correction.mask",
    "algorithm.rollout_correction.rollout_rs_threshold": "algorithm.correction.mask_upper",
    "algorithm.rollout_correction.rollout_rs_threshold_lower": "algorithm.correction.mask_lower",
    "algorithm.rollout_correction.rollout_token_veto_threshold": "algorithm.correction.veto",
}
# Values under which nothing of the policy's distribution is cut off; None stands for them, too.
_WHOLE_DISTRIBUTION = {"top_p": (1,), "top_k": (-1, 0), "min_p": (0,), "repetition_penalty": (1,)}
_NO_PADDING = "packs have no padding"
_PACKS = "forward passes are packs of at most actor.max_tokens_per_pack tokens"
_SHARDED = (
    "FSDP2 shards every state over the ranks; actor.offload_params and actor.offload_optimizer are the choices left"
)
# a key that is one of these, or lies below one, and is not renamed, has nothing left to do: why
_MOOT = {
    "data.val_batch_size": "a validation set is rolled out as a whole",
    "model.use_remove_padding": _NO_PADDING,
    "actor.use_dynamic_bsz": _PACKS,
    "actor.ppo_micro_batch_size": _PACKS,
    "actor.ppo_micro_batch_size_per_gpu": _PACKS,
    "actor.fsdp_config": _SHARDED,
    "rollout.calculate_log_probs": "engines tell the log-probs of what they sample always",
    "rollout.log_prob_micro_batch_size": _PACKS,
    "rollout.log_prob_micro_batch_size_per_gpu": _PACKS,
    "actor_rollout_ref.ref": "the reference lives in the actor's ranks and takes the actor's packs",
    "critic.model.use_remove_padding": _NO_PADDING,
    "critic.model.enable_gradient_checkpointing": "model.enable_gradient_checkpointing is for the critic, too",
    "critic.model.fsdp_config": _SHARDED,
    "critic.fsdp_config": _SHARDED,
    "critic.use_dynamic_bsz": _PACKS,
    "critic.ppo_mini_batch_size": "the critic's mini-batches are the actor's (actor.ppo_mini_batch_size)",
    "critic.ppo_micro_batch_size": _PACKS,
    "critic.ppo_micro_batch_size_per_gpu": _PACKS,
    "critic.ppo_max_token_len_per_gpu": _PACKS,
    "critic.forward_micro_batch_size": _PACKS,
    "critic.forward_micro_batch_size_per_gpu": _PACKS,
    "critic.forward_max_token_len_per_gpu": _PACKS,
}
_ALGORITHMS = {
    "gae": "ppo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "grpo_passk": "pass_at_k",
}
_KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def translate(written: Mapping[str, Any]) -> tuple[Settings, dict[str, str]]:
    """(the same settings in our spelling, {moot key as it was written: why it is moot})."""
    settings: Settings = {}
    moot: dict[str, str] = {}
    for key, value in written.items():
        ours = _our_prefix(key)
        why = next((why for dead, why in _MOOT.items() if f"{ours}.".startswith(f"{dead}.")), None)
        if why is not None and ours not in _RENAMED:
            moot[key] = why
        else:
            settings[our_key(key)] = value
    if "algorithm.adv_estimator" in settings:
        estimator = settings.pop("algorithm.adv_estimator")
        name = _ALGORITHMS.get(str(estimator), estimator)
        if settings.get("algorithm.name", name) != name:
            raise ConfigError(
                f"algorithm.adv_estimator={estimator} and algorithm.name={settings['algorithm.name']} are two words "
                "for the same setting and disagree; leave one of them out"
            )
        settings["algorithm.name"] = name
    if "actor.clip_ratio" in settings:
        both = settings.pop("actor.clip_ratio")
        settings = {"algorithm.clip_low": both, "algorithm.clip_high": both, **settings}  # each has a key of its own
    for key in ("data.train_files", "data.val_files"):
        if isinstance(settings.get(key), str):
            settings[key] = [settings[key]]
    if "reward.path" in settings:
        settings["reward.name"] = (
            f"{settings.pop('reward.path')}:{settings.pop('custom_reward_function.name', 'compute_score')}"
        )
    for key in ("algorithm.correction.weight", "algorithm.correction.mask"):
        if key in settings and settings[key] is None:
            settings[key] = "none"
    _refuse_truncation(settings, moot)
    _place_kl(settings, moot)
    return settings, moot


def our_key(key: str) -> str:
    """The key that another spelling stands for by itself; one that is made of several is for `translate`."""
    ours = _our_prefix(key)
    return _RENAMED.get(ours, ours)


def _our_prefix(key: str) -> str:
    for theirs, ours in _PREFIXES.items():
        if key.startswith(theirs):
            return ours + key.removeprefix(theirs)
    return key


def _refuse_truncation(settings: Settings, moot: dict[str, str]) -> None:
    """A policy is sampled as it is: the log-probs of what a truncated one says are not those that the loss takes."""
    for name, harmless in _WHOLE_DISTRIBUTION.items():
        key = f"rollout.{name}"
        if key not in settings:
            continue
        value = settings.pop(key)
        if value is not None and value not in harmless:
            raise ConfigError(
                f"{key}={value} would sample from another distribution than the policy's, and nothing corrects the "
                f"loss's ratios for that; leave it at {harmless[0]} and set rollout.temperature instead"
            )
        moot[key] = "replies are sampled from the policy's whole distribution"


def _place_kl(settings: Settings, moot: dict[str, str]) -> None:
    """veRL pays for KL in the loss where use_kl_loss says so, else in the reward; the other side's keys are moot."""
    asked = settings.pop("actor.use_kl_loss", None)
    if asked not in (None, True, False):
        raise ConfigError(f"actor_rollout_ref.actor.use_kl_loss must be true or false, got {asked!r}")
    in_loss = asked is True
    coefficients = {"loss": "actor.kl_loss_coef", "reward": "algorithm.kl_ctrl.kl_coef"}
    placement, other = ("loss", "reward") if in_loss else ("reward", "loss")
    kind = settings.pop("actor.kl_loss_type", None)
    if kind is not None and not in_loss:
        moot["actor_rollout_ref.actor.kl_loss_type"] = "KL in the reward is estimated by k1 alone"
    if settings.pop(coefficients[other], None) is not None:
        moot[coefficients[other]] = f"KL is paid in the {placement}, as actor.use_kl_loss says or leaves it"
    coefficient = settings.pop(coefficients[placement], None)
    if asked is not None and coefficient is None:
        raise ConfigError(
            f"actor_rollout_ref.actor.use_kl_loss={asked} says where KL is paid but not how much; add "
            + ("actor_rollout_ref.actor.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef (0 for no KL)")
        )
    if coefficient is not None:
        settings["algorithm.kl_placement"] = placement if coefficient else "none"
        settings["algorithm.kl_coefficient"] = coefficient
        kind = kind or "low_var_kl"  # veRL's own default
        if in_loss and (not isinstance(kind, str) or kind not in _KL_ESTIMATORS):
            known = ", ".join(_KL_ESTIMATORS)
            raise ConfigError(f"actor_rollout_ref.actor.kl_loss_type must be one of {known}, got {kind!r}")
        settings["algorithm.kl_estimator"] = _KL_ESTIMATORS[kind] if in_loss else "k1"
