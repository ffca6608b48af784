"""Algorithms as values, one short preset file each. Pure tensors: no configuration object, no input or output."""

from collections.abc import Mapping

ALGORITHMS: Mapping[str, str] = {
    "grpo": "verl.algorithms.grpo:GRPO",
    "toolrl_grpo": "verl.algorithms.toolrl_grpo:TOOLRL_GRPO",
    "reinforce_pp_baseline": "verl.algorithms.reinforce_pp_baseline:REINFORCE_PP_BASELINE",
    "ppo": "verl.algorithms.ppo:PPO",
}
