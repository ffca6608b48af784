#!/bin/bash
# GRPO with an adapter on a 7B model, on one GPU of 24 GB: lora_24gb.sh ROWS [MODEL]
# Planned, not measured: 23 GiB in a weight sync. Needs bitsandbytes: pip install 'toolrl[nf4]'.
set -euo pipefail
settings=(
    data="$1" model="${2:-Qwen/Qwen2.5-7B-Instruct}"
    data.max_prompt_length=1024 data.max_response_length=1024 rollout.n=8
    lora.rank=32 lora.base_dtype=nf4 algorithm.kl_placement=none model.compute_dtype=bfloat16
    model.enable_gradient_checkpointing=true actor.max_tokens_per_pack=4096 actor.offload=all
    trainer.n_gpus_per_node=1 rollout.placement=colocated
)
toolrl plan "${settings[@]}" gpu=rtx4090
toolrl train "${settings[@]}"
