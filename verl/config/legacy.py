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
    "critic.model.path": "critic.path",
    "custom_reward_function.path": "reward.path",
}
# a key that is one of these, or lies below one, and is not renamed, has nothing left to do
_MOOT = (
    "data.val_batch_size",
    "model.use_remove_padding",
    "actor.use_dynamic_bsz",
    "actor.ppo_micro_batch_size",
    "actor.ppo_micro_batch_size_per_gpu",
    "actor.fsdp_config",
    "rollout.log_prob_micro_batch_size",
    "rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref",
    "critic.model.use_remove_padding",
    "critic.model.enable_gradient_checkpointing",
    "critic.model.fsdp_config",
    "critic.fsdp_config",
    "critic.use_dynamic_bsz",
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_micro_batch_size",
    "critic.forward_micro_batch_size_per_gpu",
    "critic.forward_max_token_len_per_gpu",
)
_ALGORITHMS = {"gae": "ppo"}
_KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def translate(written: Mapping[str, Any]) -> tuple[Settings, list[str]]:
    """(the same settings in our spelling, the moot keys as they were written)."""
    settings: Settings = {}
    moot: list[str] = []
    for key, value in written.items():
        ours = _our_prefix(key)
        if ours not in _RENAMED and any(ours == dead or ours.startswith(f"{dead}.") for dead in _MOOT):
            moot.append(key)
        else:
            settings[our_key(key)] = value
    if "algorithm.adv_estimator" in settings:
        estimator = settings.pop("algorithm.adv_estimator")
        settings["algorithm.name"] = _ALGORITHMS.get(estimator, estimator)
    if "actor.clip_ratio" in settings:
        settings["algorithm.clip_low"] = settings["algorithm.clip_high"] = settings.pop("actor.clip_ratio")
    for key in ("data.train_files", "data.val_files"):
        if isinstance(settings.get(key), str):
            settings[key] = [settings[key]]
    if "reward.path" in settings:
        settings["reward.name"] = (
            f"{settings.pop('reward.path')}:{settings.pop('custom_reward_function.name', 'compute_score')}"
        )
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


def _place_kl(settings: Settings, moot: list[str]) -> None:
    """veRL pays for KL in the loss where use_kl_loss says so, else in the reward; the other side's keys are moot."""
    asked = settings.pop("actor.use_kl_loss", None)
    in_loss = bool(asked)
    coefficients = {"loss": "actor.kl_loss_coef", "reward": "algorithm.kl_ctrl.kl_coef"}
    placement, other = ("loss", "reward") if in_loss else ("reward", "loss")
    kind = settings.pop("actor.kl_loss_type", None)
    if kind is not None and not in_loss:
        moot.append("actor_rollout_ref.actor.kl_loss_type")
    if settings.pop(coefficients[other], None) is not None:
        moot.append(coefficients[other])
    coefficient = settings.pop(coefficients[placement], None)
    if asked is not None and coefficient is None:
        raise ConfigError(
            f"actor_rollout_ref.actor.use_kl_loss={asked} says where KL is paid but not how much; add "
            + ("actor_rollout_ref.actor.kl_loss_coef" if in_loss else "algorithm.kl_ctrl.kl_coef (0 for no KL)")
        )
    if coefficient is not None:
        settings["algorithm.kl_placement"] = placement if coefficient else "none"
        settings["algorithm.kl_coefficient"] = coefficient
        settings["algorithm.kl_estimator"] = _KL_ESTIMATORS.get(kind, kind) if in_loss and kind else "k1"
