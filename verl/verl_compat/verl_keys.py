"""veRL's keys, as tables: our key of each, obsolete ones, refused ones.

Keys omit veRL's `actor_rollout_ref.` before `model.`, `actor.`, `rollout.` and `ref.`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_PREFIX = "actor_rollout_ref."
GROUPS = ("model.", "actor.", "rollout.", "ref.")
COMPLETE = "0.9.1"  # the version all of whose keys these tables have

# Groups that later versions have moved -> their place in these tables.
MOVED: Mapping[str, str] = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model.": "reward_model.",
    "reward.sandbox_fusion.": "sandbox_fusion.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward_model.overlong_buffer.": "reward_model.reward_kwargs.overlong_buffer_cfg.",
    "critic.fsdp.": "critic.model.fsdp_config.",
}
REWARD_OPTIONS = "custom_reward_function.reward_kwargs"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"

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
    "actor.fsdp_config.dtype": "model.compute_dtype",
    "actor.optim.clip_grad": "actor.grad_clip",
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

# Translated to one or several of our keys by verl.verl_compat.legacy: a description of each.
INTERPRETED: Mapping[str, str] = {
    "data.prompt_key": "`data.columns={NAME: prompt}`, if it names another column",
    "data.filter_overlong_prompts": "`data.truncation=drop` where true",
    "data.custom_cls.path": "`data.map`, for ReTool's file; for others set `data.map`",
    "data.custom_cls.name": "as `data.custom_cls.path`",
    "data.max_start_length": "`data.max_prompt_length`; Search-R1's `data.max_response_length` then becomes "
    "`env.max_turn_tokens`, and its `data.max_prompt_length` our `data.max_response_length`, over all turns",
    "model.lora_rank": "`lora.rank`; 0 trains all weights",
    "model.lora_alpha": "`lora.alpha` (default: veRL's 16), with `lora_rank`",
    "model.target_modules": "`lora.targets`, with `lora_rank`",
    "model.lora_adapter_path": "`lora.path`",
    "critic.model.lora_rank": "`lora.rank`, to which it must be equal, or 0: both models have adapters, or none",
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
    "rollout.agent.default_agent_loop": "`tool_agent` is `rollout.multi_turn.enable`; others are refused",
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
    "actor.use_dynamic_bsz": "whether a mini-batch above the batch is the batch (true) or refused (false); no more, as "
    "packs hold a number of tokens",
    "algorithm.filter_groups.enable": "`algorithm.filters=[zero_variance]` where true",
    "algorithm.filter_groups.max_num_gen_batches": "`algorithm.max_resample_rounds`, if groups are filtered; "
    "the default is 10 (veRL: no limit)",
    "custom_reward_function.path": "`reward.name=path:name`; ReTool's file is `reward.name=retool`",
    "custom_reward_function.name": "`reward.name=path:name`",
    REWARD_OPTIONS: "`reward.options`: further arguments of the function",
    "reward_model.reward_manager": "SkyRL's `swebench` is `reward.name=env` with `env.name=swe`",
    f"{OVERLONG}.enable": "the overlong penalty of veRL's manager `dapo`; where false, `algorithm.overlong_buffer=0`",
    f"{OVERLONG}.len": "`algorithm.overlong_buffer`, if the penalty is enabled",
    f"{OVERLONG}.penalty_factor": "`algorithm.overlong_factor`, if the penalty is enabled",
    f"{OVERLONG}.log": "the metric `reward/overlong_penalty` is always logged",
    "reward_model.reward_kwargs.max_resp_len": "`data.max_response_length`, to which it must be equal",
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
    "critic.optim.clip_grad": "actor.grad_clip",
    "critic.loss_agg_mode": "algorithm.aggregation",
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


_MEGATRON_LORA = "adapters of Megatron's; set `lora.rank`"
_MOE = "no expert parallelism"
_QUANTIZED = "no quantized training or rollouts"
_PROFILER = "no profiler"
_FROM_FILE = "no tools from a file of veRL's; set `env.tools`"
_MANAGER = "no reward managers of one's own; set `reward.name`"
_REMOTE = "no external model code"
_OPTIMIZER = "the optimizer is PyTorch's AdamW"
# Features that do not exist here, by their switches: the only supported value of each, which is veRL's own default.
ABSENT_FEATURES: Mapping[str, Only] = {
    **{
        f"{group}{key}": only
        for group in ("model.", "critic.model.")
        for key, only in {
            "mtp.enable": Only(False, "no multi-token prediction"),
            "trust_remote_code": Only(False, _REMOTE),
            "hf_config_path": Only(None, "the configuration is that of the model"),
            "override_config": Only({}, "the configuration is that of the model"),
            "custom_chat_template": Only(None, "set `model.tokenizer_path` to a tokenizer with the chat template"),
        }.items()
    },
    **{
        f"{group}.lora.{key}": Only(default, _MEGATRON_LORA)
        for group in ("model", "critic.model")
        for key, default in {"rank": 0, "adapter_path": None}.items()
    },
    "model.exclude_modules": Only(None, "set `lora.targets` to the layers that have an adapter"),
    "critic.model.lora_adapter_path": Only(None, "a critic's adapter starts at zero"),
    **{
        f"{group}.{key}": only
        for group in ("actor", "critic")
        for key, only in {
            "optim.optimizer": Only("AdamW", _OPTIMIZER),
            "optim.optimizer_impl": Only("torch.optim", _OPTIMIZER),
            "optim.override_optimizer_config": Only(None, _OPTIMIZER),
            "optim.num_cycles": Only(0.5, "a cosine schedule is half a wave"),
        }.items()
    },
    **{f"{group}.profiler.enable": Only(False, _PROFILER) for group in ("actor", "ref", "rollout", "critic")},
    **{
        f"{group}.fsdp_config.{key}": only
        for group in ("actor", "ref", "critic.model")
        for key, only in {
            "qat.enable": Only(False, _QUANTIZED),
            "full_determinism": Only(False, "no deterministic kernels; `trainer.seed` seeds the run"),
        }.items()
    },
    **{
        f"{group}.fsdp_config.model_dtype": Only("fp32", "the optimizer's weights are float32")
        for group in ("actor", "critic.model")
    },
    "actor.qat.enable": Only(False, _QUANTIZED),
    "actor.calculate_sum_pi_squared": Only(False, "no optimal token baseline"),
    "actor.policy_loss.loss_mode": Only("vanilla", "set `algorithm.name`, a preset with another loss"),
    "rollout.nnodes": Only(0, "set `rollout.placement` for engines of their own"),
    "rollout.full_determinism": Only(False, "no deterministic kernels; `trainer.seed` seeds the run"),
    "rollout.cudagraph_capture_sizes": Only(None, "set `rollout.engine_options.cudagraph_capture_sizes`"),
    "rollout.data_parallel_size": Only(
        1, "every engine is a replica; `rollout.tensor_model_parallel_size` sets its size"
    ),
    "rollout.expert_parallel_size": Only(1, _MOE),
    "rollout.pipeline_model_parallel_size": Only(1, "no pipeline parallelism"),
    "rollout.logprobs_mode": Only("processed_logprobs", "log-probs are those of the sampling distribution"),
    "rollout.scheduling_policy": Only("fcfs", "set `rollout.engine_options.scheduling_policy`"),
    "rollout.over_sample_rate": Only(0, "no over-sampling; `rollout.max_staleness` keeps engines busy"),
    "rollout.engine_kwargs.vllm": Only({}, "set `rollout.engine_options`"),
    "rollout.router_config_path": Only(None, "no router of veRL's"),
    "rollout.multi_turn.function_tool_path": Only(None, _FROM_FILE),
    "rollout.multi_turn.num_repeat_rollouts": Only(None, "set `rollout.n`"),
    "rollout.agent.agent_loop_config_path": Only(None, "no agent loops of veRL's; set `env.name` or `env.agent`"),
    "rollout.agent.custom_async_server.path": Only(None, "no servers of one's own"),
    "rollout.checkpoint_engine.custom_backend_module": Only(None, "no weight sync of one's own"),
    "rollout.trace.backend": Only(None, "no traces; transcripts have every response"),
    "rollout.enable_rollout_routing_replay": Only(False, "no routing replay"),
    "rollout.moe_load_balance_metrics_interval": Only(0, _MOE),
    "rollout.prometheus.enable": Only(False, "no Prometheus server"),
    "rollout.quantization": Only(None, _QUANTIZED),
    "rollout.quantization_config_file": Only(None, _QUANTIZED),
    "rollout.qat": Only(None, _QUANTIZED),
    "rollout.mtp": Only(None, "no multi-token prediction"),
    "rollout.disaggregation.enabled": Only(False, "no engines for prefill alone"),
    "data.train_max_samples": Only(-1, "all rows of a file are used; write a smaller file"),
    "data.val_max_samples": Only(-1, "all rows of a file are used; write a smaller file"),
    "data.reward_fn_key": Only("data_source", "set `data.columns={NAME: data_source}`"),
    "data.gen_batch_size": Only(None, "groups that are filtered are drawn again (`algorithm.max_resample_rounds`)"),
    "data.tool_config_path": Only(None, _FROM_FILE),
    "data.function_tool_path": Only(None, _FROM_FILE),
    "data.trust_remote_code": Only(False, _REMOTE),
    "reward_model.reward_loop_source": Only(None, _MANAGER),
    "reward.reward_manager.source": Only("register", _MANAGER),
    "reward.reward_manager.module.path": Only(None, _MANAGER),
    "sandbox_fusion.url": Only(
        None, "no Sandbox Fusion; code runs in the sandbox of `sandbox.isolation` or `sandbox.urls`"
    ),
    "algorithm.rollout_correction.bypass_mode": Only(False, "log-probs are always computed anew"),
    "algorithm.rollout_correction.loss_type": Only("ppo_clip", "corrections weight the clipped loss"),
    "algorithm.rollout_correction.rollout_is_batch_normalize": Only(False, "weights are not normalized"),
    "algorithm.use_pf_ppo": Only(False, "no PF-PPO"),
    "distillation.enabled": Only(False, "set `teacher.path` for on-policy distillation"),
    "trainer.esi_redundant_time": Only(0, "no elastic instances"),
    "trainer.resume_from_path": Only(None, "a run resumes in its own folder; `model.path` starts from a model"),
    "trainer.checkpoint_callback_class": Only(None, "no callbacks of checkpoints"),
    "trainer.del_local_ckpt_after_load": Only(False, "`trainer.keep_last` limits checkpoints"),
    "trainer.v1.trainer_mode": Only("sync", "set `rollout.max_staleness` for rollouts ahead of training"),
    "trainer.v1.sampler.custom_sampler.path": Only(None, "no samplers of one's own"),
    "global_profiler.tool": Only(None, _PROFILER),
    **{
        f"skip.{name}.enable": Only(False, "no rollouts from files")
        for name in ("rollout", "rollout_tq", "async_rollout")
    },
}

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
PACKS = "forward passes are packs of at most `actor.max_tokens_per_pack` tokens"
_WHOLE = "a sample is not split over ranks"
_SHARDED = "FSDP2 shards all state over the ranks; use `actor.offload`, `critic.offload` and `ref.offload_params`"
_VLLM = "the engine's start settings follow from training with weight sync"
_SET = "a validation set is generated as a whole"
_BESIDE = "reference and policy share the same ranks and packs"
_RULES = "rewards are functions, set by `reward.name`"
_ORDER = "mini-batches keep the order of the prompts (`data.shuffle`)"
_KERNELS = "the forward pass has kernels and memory limits of its own"
_APPENDED = "tokens are appended, and never rendered twice"
_CHECKPOINT = "a checkpoint has model, optimizer and data position, and is written asynchronously"
_IMAGES = "rows with images are refused"
_OFF = "the feature does not exist here, and its switch is off"
_RESULTS = "`env.max_observation_tokens` and `env.observation_cut` limit results"
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
    "actor.ppo_micro_batch_size": PACKS,
    "actor.ppo_micro_batch_size_per_gpu": PACKS,
    "actor.ulysses_sequence_parallel_size": _WHOLE,
    "actor.shuffle": _ORDER,
    "actor.optim.total_training_steps": "schedules span the run",
    "rollout.mode": "every engine is asynchronous",
    "rollout.calculate_log_probs": "engines always return the log-probs of sampled tokens",
    "rollout.log_prob_micro_batch_size": PACKS,
    "rollout.log_prob_micro_batch_size_per_gpu": PACKS,
    "rollout.log_prob_use_dynamic_bsz": PACKS,
    "rollout.log_prob_max_token_len_per_gpu": PACKS,
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
    "critic.use_dynamic_bsz": PACKS,
    "critic.ppo_micro_batch_size": PACKS,
    "critic.ppo_micro_batch_size_per_gpu": PACKS,
    "critic.ppo_max_token_len_per_gpu": PACKS,
    "critic.forward_micro_batch_size": PACKS,
    "critic.forward_micro_batch_size_per_gpu": PACKS,
    "critic.forward_max_token_len_per_gpu": PACKS,
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
    **{
        f"{group}.{name}": why
        for group in ("actor", "ref", "critic")
        for name, why in {
            "rollout_n": "`rollout.n` is the one number of responses",
            "use_torch_compile": _KERNELS,
            "use_fused_kernels": _KERNELS,
            "entropy_from_logits_with_chunking": _KERNELS,
            "entropy_from_logits_chunk_size": _KERNELS,
            "entropy_checkpointing": _KERNELS,
            "pad_to_length": _NO_PADDING,
            "use_remove_padding": _NO_PADDING,
            "data_loader_seed": _ORDER,
            "profiler": _OFF,
            "checkpoint": _CHECKPOINT,
            "optim.zero_indexed_step": "schedules count updates from 1",
        }.items()
    },
    **{
        f"{group}{name}": why
        for group in ("model.", "critic.model.")
        for name, why in {
            **dict.fromkeys(("lora", "mtp"), _OFF),
            **dict.fromkeys(("use_liger", "use_fused_kernels", "fused_kernel_options", "tiled_mlp"), _KERNELS),
            "enable_activation_offload": "use `model.enable_gradient_checkpointing`",
            "use_shm": "models are read from disk",
        }.items()
    },
    **{f"critic.model.{name}": _OFF for name in ("lora_alpha", "target_modules", "exclude_modules")},
    **dict.fromkeys(("actor.qat", "actor.policy_loss", "actor.tau_pos", "actor.tau_neg"), _OFF),
    "actor.calculate_entropy": "entropy is always measured",
    "actor.use_prefix_grouper": "packs share the prompts of a group",
    "actor.freeze_vision_tower": _IMAGES,
    "ref.strategy": "training uses FSDP2",
    "critic.enable": "`algorithm.adv_estimator` decides whether there is a critic",
    "critic.loss_scale_factor": "`algorithm.aggregation_length` covers both",
    "rollout.n_gpus_per_node": "`rollout.placement` sets where engines run",
    "rollout.seed": "`trainer.seed` seeds the run",
    **dict.fromkeys(("rollout.enable_prefix_caching", "rollout.skip_tokenizer_init"), _VLLM),
    **dict.fromkeys(("rollout.layered_summon", "rollout.multi_stage_wake_up", "rollout.checkpoint_engine"), _VLLM),
    **dict.fromkeys(("rollout.engine_kwargs.sglang", "rollout.engine_kwargs.trtllm"), "the engine is vLLM"),
    **dict.fromkeys(("rollout.disaggregation", "rollout.prometheus", "rollout.trace", "rollout.profiler"), _OFF),
    "rollout.multi_turn.max_parallel_calls": "all calls of a turn are made",
    "rollout.multi_turn.max_tool_response_length": _RESULTS,
    "rollout.multi_turn.tool_response_truncate_side": _RESULTS,
    "rollout.multi_turn.use_inference_chat_template": _APPENDED,
    "rollout.multi_turn.tokenization_sanity_check_mode": _APPENDED,
    "rollout.agent.num_workers": "episodes run in one event loop",
    "rollout.agent.custom_async_server.name": _OFF,
    "actor_rollout_ref.nccl_timeout": "`trainer.stall_timeout_s` limits calls",
    "data.use_shm": "rows are read from an index on disk",
    "data.filter_overlong_prompts_workers": "rows are read from an index on disk",
    "data.return_full_prompt": "rows are rendered once",
    "data.validation_shuffle": _SET,
    **dict.fromkeys([f"data.{name}_key" for name in ("image", "video", "audio")], _IMAGES),
    **dict.fromkeys(("data.image_patch_size", "data.return_multi_modal_inputs", "data.mm_processor_kwargs"), _IMAGES),
    **dict.fromkeys(
        [
            f"reward_model.{name}"
            for name in (
                "num_workers",
                "enable_resource_pool",
                "n_gpus_per_node",
                "nnodes",
                "rollout",
                "model_path",
                "reward_loop_module_path",
                "reward_loop_class_name",
            )
        ],
        _RULES,
    ),
    "reward.reward_manager": _RULES,
    "sandbox_fusion": _OFF,
    "algorithm.filter_groups.max_inflight_gen_batches": "groups are drawn one by one",
    "algorithm.pf_ppo": _OFF,
    "distillation": _OFF,
    "transfer_queue": "batches go through Ray's object store",
    "trainer.rollout_data_dir": "responses are written to the run's folder (transcripts)",
    "trainer.validation_data_dir": "responses are written to the run's folder (transcripts)",
    "trainer.ray_wait_register_center_timeout": "`trainer.stall_timeout_s` limits calls",
    "trainer.use_v1": "there is one trainer",
    "trainer.v1": _OFF,
    "global_profiler": _OFF,
    "skip": _OFF,
    "ray_kwargs": "Ray is started with the run's own settings",
    "trainer.balance_batch": "packs are balanced over the ranks",
    "trainer.samples_save_path": "responses are written to the run's folder (transcripts)",
    "trainer.log_val_generations": "responses are written to the run's folder (transcripts)",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint holds policy and critic; `trainer.keep_last` limits their number",
    **{
        f"{group}.fsdp_config.{name}": _SHARDED
        for group in ("actor", "ref", "critic.model")
        for name in (
            *("wrap_policy", "grad_offload", "fsdp_size", "offload_policy", "reshard_after_forward"),
            *("forward_prefetch", "use_orig_params", "forward_only", "seed", "strategy", "turbo_config", "qat"),
            *("ulysses_sequence_parallel_size", "use_no_sync_for_gradient_accumulation", "use_torch_compile"),
            *("entropy_checkpointing", "entropy_from_logits_chunk_size", "entropy_from_logits_with_chunking"),
            *("pad_to_length", "pad_to_length_bucket"),
        )
    },
    **dict.fromkeys([f"{group}.fsdp_config.dtype" for group in ("ref", "critic.model")], _BESIDE),
    **dict.fromkeys(("ref.fsdp_config.model_dtype", "ref.fsdp_config.optimizer_offload"), _BESIDE),
}


def short(key: str) -> str:
    """veRL's key without the prefix of the policy's groups, in the place where these tables have it."""
    inner = key.removeprefix(_PREFIX)
    key = inner if inner.startswith(GROUPS) else key
    group = next((each for each in MOVED if key.startswith(each)), None)
    return key if group is None else MOVED[group] + key.removeprefix(group)


def spelled(key: str) -> str:
    """A key of these tables as veRL's scripts write it."""
    return _PREFIX + key if key.startswith(GROUPS) else key


def refusal(key: str) -> Only | None:
    """The only value of a short key; of a key below one, None alone. None if it is not refused."""
    table = {**REFUSED, **ABSENT_FEATURES}
    if key in table:
        return table[key]
    above = next((only for name, only in table.items() if key.startswith(f"{name}.")), None)
    return None if above is None else Only(None, above.why)


def obsolete_reason(key: str) -> str | None:
    """Why a short key or its group is obsolete; None if it is not."""
    if key.endswith("._target_"):
        return "the name of a class of veRL's"
    return next((why for name, why in OBSOLETE.items() if f"{key}.".startswith(f"{name}.")), None)


def vocabulary() -> list[str]:
    tables = (ALIASES, INTERPRETED, SAME_AS, REFUSED, ABSENT_FEATURES, OBSOLETE)
    return [spelled(key) for table in tables for key in table] + [group.rstrip(".") for group in MOVED]
