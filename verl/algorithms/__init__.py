"""Algorithms as values, one short preset file each. Pure tensor functions: no configuration object, no I/O.

This table needs no torch; `python -m verl.algorithms` prints the components of each preset.
"""

from collections.abc import Mapping

ALGORITHMS: Mapping[str, str] = {
    "grpo": "verl.algorithms.grpo:GRPO",
    "toolrl_grpo": "verl.algorithms.toolrl_grpo:TOOLRL_GRPO",
    "ppo": "verl.algorithms.ppo:PPO",
    "reinforce_pp": "verl.algorithms.reinforce_pp:REINFORCE_PP",
    "reinforce_pp_baseline": "verl.algorithms.reinforce_pp_baseline:REINFORCE_PP_BASELINE",
    "rloo": "verl.algorithms.rloo:RLOO",
    "remax": "verl.algorithms.remax:REMAX",
    "opo": "verl.algorithms.opo:OPO",
    "gpg": "verl.algorithms.gpg:GPG",
    "dr_grpo": "verl.algorithms.dr_grpo:DR_GRPO",
    "dapo": "verl.algorithms.dapo:DAPO",
    "gspo": "verl.algorithms.gspo:GSPO",
    "cispo": "verl.algorithms.cispo:CISPO",
    "gmpo": "verl.algorithms.gmpo:GMPO",
    "sapo": "verl.algorithms.sapo:SAPO",
    "clip_cov": "verl.algorithms.clip_cov:CLIP_COV",
    "kl_cov": "verl.algorithms.kl_cov:KL_COV",
    "pass_at_k": "verl.algorithms.pass_at_k:PASS_AT_K",
    "gigpo": "verl.algorithms.gigpo:GIGPO",
}

# veRL's name of an advantage estimator -> the preset that has it.
ADV_ESTIMATORS: Mapping[str, str] = {
    "gae": "ppo",
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "opo": "opo",
    "gpg": "gpg",
    "grpo_passk": "pass_at_k",
    "gigpo": "gigpo",
}
