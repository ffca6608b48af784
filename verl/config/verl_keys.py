"""veRL's keys, as tables: our key of each, obsolete ones, refused ones.

Keys omit veRL's `actor_rollout_ref.` before `model.`, `actor.`, `rollout.` and `ref.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PREFIX = "actor_rollout_ref."
GROUPS = ("model.", "actor.", "rollout.", "ref.")

# veRL's key -> our key with the same values.
ALIASES: Mapping[str, str] = {
    "data.seed": "trainer.seed",
    "data.tokenizer": "model.tokenizer_path",
    "data.max_obs_length": "env.max_observation_tokens",
    "data.shuffle_train_dataloader": "data.shuffle",
    "data.apply_chat_template_kwargs": "model.chat_template_options",
    "actor.clip_ratio_low": "algorithm.clip_low",
    "actor.clip_ratio_high": "algorithm.clip_high",
    "actor.clip_ratio_c": "algorithm.dual_clip",
    "actor.loss_agg_mode": "algorithm.aggregation",
    "actor.loss_scale_factor": "algorithm.aggregation_length",
    "actor.entropy_coeff": "algorithm.entropy_coefficient",
    "actor.ppo_max_token_len_per_gpu": "actor.max_tokens_per_pack",
    "actor.optim.warmup_style": "actor.optim.schedule",
    "actor.optim.lr_scheduler_type": "actor.optim.schedule",
    "ref.fsdp_config.param_offload": "ref.offload_params",
    "rollout.enforce_eager": "rollout.engine_options.enforce_eager",
    "rollout.sampling_params.temperature": "rollout.temperature",
    "rollout.sampling_params.top_p": "rollout.top_p",
    "rollout.sampling_params.top_k": "rollout.top_k",
    "rollout.sampling_params.repetition_penalty": "rollout.repetition_penalty",
    "critic.model.path": "critic.path",
    "algorithm.rollout_correction.rollout_is": "algorithm.correction.is_level",
    "algorithm.rollout_correction.rollout_is_threshold": "algorithm.correction.is_cap",
    "algorithm.rollout_correction.rollout_rs": "algorithm.correction.rejection_level",
    "algorithm.rollout_correction.rollout_token_veto_threshold": "algorithm.correction.token_veto",
    "trainer.max_actor_ckpt_to_keep": "trainer.keep_last",
}

# Translated to one or several of our keys by verl.config.legacy: a description of each.
INTERPRETED: Mapping[str, str] = {
    "data.prompt_key": "`data.columns={NAME: prompt}`, if it names another column",
    "data.filter_overlong_prompts": "`data.truncation=drop` where true",
    "data.custom_cls.path": "`data.map`, for ReTool's file; for others set `data.map`",
    "data.custom_cls.name": "as `data.custom_cls.path`",
    "data.max_start_length": "`data.max_prompt_length`; Search-R1's `data.max_response_length` then becomes "
    "`env.max_turn_tokens`, and its `data.max_prompt_length` our `data.max_response_length`, over all turns",
    "actor.clip_ratio": "`algorithm.clip_low` and `algorithm.clip_high`",
    "actor.use_kl_loss": "`algorithm.kl_placement`: `loss` where true, else `reward`",
    "actor.kl_loss_coef": "`algorithm.kl_coefficient`, if KL is in the loss",
    "actor.kl_loss_type": "`algorithm.kl_estimator`, if KL is in the loss",
    "actor.optim.lr_warmup_steps": "`actor.optim.warmup_steps` (in optimizer steps instead of training steps)",
    "actor.optim.lr_warmup_steps_ratio": "`actor.optim.warmup_steps`, which is a share of the run below 1",
    "actor.optim.min_lr_ratio": "`actor.optim.min_lr_ratio`; null is 0",
    "actor.fsdp_config.param_offload": "`actor.offload=params` where true; with `optimizer_offload`, `all`",
    "actor.fsdp_config.optimizer_offload": "`actor.offload=optimizer` where true",
    "critic.model.fsdp_config.param_offload": "`critic.offload=params` where true; with `optimizer_offload`, `all`",
    "critic.model.fsdp_config.optimizer_offload": "`critic.offload=optimizer` where true",
    "actor.state_masking": "`env.train_on_observations`, negated",
    "actor.masking": "`env.train_on_observations`, negated",
    "tracking.names": "`trainer.logger` with `verl_names` where `verl`",
    "env.train_on_observations_until": "`env.train_on_observations`, as a number of steps",
    "rollout.name": "`rollout.name`; engines other than `vllm` and `hf` map to vLLM",
    "rollout.do_sample": "`rollout.temperature=0` where false, which training refuses",
    "rollout.val_kwargs.do_sample": "`rollout.val_kwargs.temperature=0` where false",
    "rollout.n_agent": "`rollout.n`, times veRL's `rollout.n`",
    "rollout.n_trajectories": "`rollout.n`, times veRL's `rollout.n`",
    "rollout.max_model_len": "`data.max_prompt_length` + `data.max_response_length`, which must not exceed it",
    "rollout.num_llm_calls_available": "`env.max_tool_calls` with ToRL's `env.tool_call_format=fence`",
    "rollout.max_iterations": "`env.max_turns`; in SkyRL's environment `env.max_tool_calls`, and a turn more",
    "rollout.max_parallel_agents": "`env.options.max_starting`, `max_running` and `max_scoring` of `env.name=swe`",
    "rollout.max_starting_message_length": "`data.max_prompt_length`; SkyRL's `data.max_response_length` then becomes "
    "`env.max_turn_tokens`, and the sum of its lengths that of ours",
    "rollout.qwen3_enable_thinking": "`model.chat_template_options.enable_thinking`",
    "rollout.multi_turn.enable": "`env.name=tool`; set the tools in `env.tools`",
    "rollout.multi_turn.tool_config_path": "`env.tools`, for ReTool's file ([migration.md](migration.md)); "
    "refused for others",
    "rollout.multi_turn.format": "`env.tool_call_format` (default: veRL's `hermes`)",
    "rollout.multi_turn.max_assistant_turns": "`env.max_tool_calls` + 1: tools are disabled in the last turn",
    "rollout.multi_turn.max_user_turns": "`env.max_tool_calls`; with `max_assistant_turns`, the smaller limit",
    "critic.optim.lr_warmup_steps": "`critic.optim.warmup_steps` (in optimizer steps instead of training steps)",
    "critic.optim.lr_warmup_steps_ratio": "`critic.optim.warmup_steps`, which is a share of the run below 1",
    "algorithm.kl_penalty": "`algorithm.kl_estimator`, if KL is in the reward",
    "algorithm.kl_ctrl.type": "`algorithm.kl_target` (default: veRL's 0.1) if `adaptive`",
    "algorithm.kl_ctrl.kl_coef": "`algorithm.kl_coefficient`, if KL is in the reward; 0 disables KL",
    "algorithm.kl_ctrl.target_kl": "`algorithm.kl_target`, if `algorithm.kl_ctrl.type=adaptive`",
    "algorithm.use_kl_in_reward": "`algorithm.kl_placement`: `reward` where true, never where false",
    "algorithm.norm_adv_by_std_in_grpo": "`algorithm.adv_estimator=dr_grpo` where false; for pass@k "
    "and GiGPO, `algorithm.options.divide_by_std`",
    "algorithm.rollout_correction.rollout_rs_threshold": "the upper bound in `algorithm.correction.rejection_bounds`",
    "algorithm.rollout_correction.rollout_rs_threshold_lower": "the lower bound in "
    "`algorithm.correction.rejection_bounds`; default: 1 / the upper one",
    "algorithm.filter_groups.enable": "`algorithm.filters=[zero_variance]` where true",
    "algorithm.filter_groups.max_num_gen_batches": "`algorithm.max_resample_rounds`, if groups are filtered; "
    "the default is 10 (veRL: no limit)",
    "custom_reward_function.path": "`reward.name=path:name`; ReTool's file is `reward.name=retool`",
    "custom_reward_function.name": "`reward.name=path:name`",
    "reward_model.reward_manager": "SkyRL's `swebench` is `reward.name=env` with `env.name=swe`",
    "reward_model.structure_format_score": "`reward.options.good_form` of Search-R1's reward with format",
    "reward_model.final_format_score": "`reward.options.any_answer` of Search-R1's reward with format",
    "do_search": "whether `retriever.url` selects Search-R1's environment",
    "max_turns": "`env.max_tool_calls`, in Search-R1's environment",
    "retriever.url": "`env.tools` with Search-R1's `env.tool_call_format=search_r1` and `reward.name=search_r1`",
    "retriever.topk": "`env.tools`, as `retriever.url`",
}

# veRL's key -> our key that covers both; the values must be equal.
SAME_AS: Mapping[str, str] = {
    "rollout.prompt_length": "data.max_prompt_length",
    "rollout.response_length": "data.max_response_length",
    "critic.ppo_mini_batch_size": "actor.ppo_mini_batch_size",
    "critic.ppo_epochs": "actor.ppo_epochs",
    "critic.grad_clip": "actor.grad_clip",
    "critic.optim.betas": "actor.optim.betas",
    "critic.optim.warmup_style": "actor.optim.schedule",
    "critic.optim.lr_scheduler_type": "actor.optim.schedule",
    "critic.optim.min_lr_ratio": "actor.optim.min_lr_ratio",
}


@dataclass(frozen=True, slots=True)
class Only:
    """The only supported value of a key; null is accepted, too."""

    value: Any
    why: str  # reason why others are refused


REFUSED: Mapping[str, Only] = {
    "data.train_data_num": Only(None, "all rows of a file are used; write a smaller file"),
    "data.val_data_num": Only(None, "all rows of a file are used; write a smaller file"),
    "model.external_lib": Only(None, "no external model code; packs support transformers' architectures"),
    "rollout.ignore_eos": Only(False, "a response ends at the model's end-of-turn token"),
    "algorithm.kl_ctrl.horizon": Only(10000, "an adaptive KL coefficient has the horizon of veRL's default"),
    "algorithm.no_think_rl": Only(False, "the policy generates its own reasoning"),
    "reward_model.enable": Only(False, "rewards are functions (docs/reward.md), which may call a judge model"),
    "reward_model.retrieval_score": Only(0, "there is no separate reward for retrieving the answer"),
    "trainer.val_only": Only(False, "`toolrl eval` evaluates without training"),
    "trainer.default_hdfs_dir": Only(None, "checkpoints are written to `trainer.default_local_dir` only; copy them"),
}

_NO_PADDING = "packs have no padding"
_PACKS = "forward passes are packs of at most `actor.max_tokens_per_pack` tokens"
_WHOLE = "a sample is not split over ranks"
_SHARDED = "FSDP2 shards all state over the ranks; use `actor.offload`, `critic.offload` and `ref.offload_params`"
_VLLM = "the engine's start settings follow from training with weight sync"
_SET = "a validation set is generated as a whole"
_BESIDE = "reference and policy share the same ranks and packs"
_RULES = "rewards are functions, set by `reward.name`"
_ORDER = "mini-batches keep the order of the prompts (`data.shuffle`)"
# Obsolete keys (including all keys below them) at any value -> why.
OBSOLETE: Mapping[str, str] = {
    "data.val_batch_size": _SET,
    "data.return_raw_input_ids": "rows are rendered once",
    "data.return_raw_chat": "rows are rendered once",
    "data.dataloader_num_workers": "rows are read from an index on disk",
    "data.template_type": "`env.tool_call_format` or `data.prompt_template` formats the prompt",
    "actor_rollout_ref.hybrid_engine": "`rollout.placement` sets where engines run",
    "actor_rollout_ref.exchange_size": "the weight sync sends buckets of 256 MiB",
    "model.use_remove_padding": _NO_PADDING,
    "actor.strategy": "training uses FSDP2",
    "actor.use_dynamic_bsz": _PACKS,
    "actor.ppo_micro_batch_size": _PACKS,
    "actor.ppo_micro_batch_size_per_gpu": _PACKS,
    "actor.ulysses_sequence_parallel_size": _WHOLE,
    "actor.shuffle": _ORDER,
    "actor.optim.total_training_steps": "schedules span the run",
    "rollout.mode": "every engine is asynchronous",
    "rollout.calculate_log_probs": "engines always return the log-probs of sampled tokens",
    "rollout.log_prob_micro_batch_size": _PACKS,
    "rollout.log_prob_micro_batch_size_per_gpu": _PACKS,
    "rollout.log_prob_use_dynamic_bsz": _PACKS,
    "rollout.log_prob_max_token_len_per_gpu": _PACKS,
    "rollout.free_cache_engine": _VLLM,
    "rollout.load_format": _VLLM,
    "rollout.enable_memory_saver": _VLLM,
    "rollout.enable_chunked_prefill": _VLLM,
    "rollout.disable_log_stats": _VLLM,
    "ref.log_prob_micro_batch_size": _BESIDE,
    "ref.log_prob_micro_batch_size_per_gpu": _BESIDE,
    "ref.log_prob_use_dynamic_bsz": _BESIDE,
    "ref.log_prob_max_token_len_per_gpu": _BESIDE,
    "ref.ulysses_sequence_parallel_size": _WHOLE,
    "critic.strategy": "training uses FSDP2",
    "critic.model.use_remove_padding": _NO_PADDING,
    "critic.model.enable_gradient_checkpointing": "`model.enable_gradient_checkpointing` also applies to the critic",
    "critic.model.tokenizer_path": "the critic uses the policy's tokenizer",
    "critic.model.external_lib": "the critic is loaded like the policy",
    "critic.use_dynamic_bsz": _PACKS,
    "critic.ppo_micro_batch_size": _PACKS,
    "critic.ppo_micro_batch_size_per_gpu": _PACKS,
    "critic.ppo_max_token_len_per_gpu": _PACKS,
    "critic.forward_micro_batch_size": _PACKS,
    "critic.forward_micro_batch_size_per_gpu": _PACKS,
    "critic.forward_max_token_len_per_gpu": _PACKS,
    "critic.ulysses_sequence_parallel_size": _WHOLE,
    "critic.shuffle": _ORDER,
    "critic.optim.total_training_steps": "schedules span the run",
    "algorithm.filter_groups.metric": "groups are filtered by their scores",
    "reward_model.strategy": _RULES,
    "reward_model.model": _RULES,
    "reward_model.micro_batch_size": _RULES,
    "reward_model.micro_batch_size_per_gpu": _RULES,
    "reward_model.max_length": _RULES,
    "reward_model.ulysses_sequence_parallel_size": _RULES,
    "reward_model.use_dynamic_bsz": _RULES,
    "reward_model.forward_max_token_len_per_gpu": _RULES,
    "trainer.balance_batch": "packs are balanced over the ranks",
    "trainer.samples_save_path": "responses are written to the run's folder (transcripts)",
    "trainer.log_val_generations": "responses are written to the run's folder (transcripts)",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds policy and critic; `trainer.keep_last` limits their number",
    **{
        f"{group}.fsdp_config.{name}": _SHARDED
        for group in ("actor", "ref", "critic.model")
        for name in (
            *("wrap_policy", "grad_offload", "fsdp_size", "offload_policy"),
            *("reshard_after_forward", "forward_prefetch", "use_orig_params"),
        )
    },
}


def short(key: str) -> str:
    """veRL's key without the prefix of the policy's groups."""
    inner = key.removeprefix(_PREFIX)
    return inner if inner.startswith(GROUPS) else key


def spelled(key: str) -> str:
    """A key of these tables as veRL's scripts write it."""
    return _PREFIX + key if key.startswith(GROUPS) else key


def obsolete_reason(key: str) -> str | None:
    """Why a short key or its group is obsolete; None if it is not."""
    return next((why for name, why in OBSOLETE.items() if f"{key}.".startswith(f"{name}.")), None)


def vocabulary() -> list[str]:
    return [spelled(key) for table in (ALIASES, INTERPRETED, SAME_AS, REFUSED, OBSOLETE) for key in table]
