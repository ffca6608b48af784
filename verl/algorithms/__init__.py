"""Algorithms as values, one short preset file each. Pure tensor functions: no configuration object, no I/O.

This table needs no torch; `toolrl algorithms` prints the components of each preset.
"""

from collections.abc import Mapping

ALGORITHMS: Mapping[str, str] = {
    "grpo": "verl.algorithms.estimators.grpo:GRPO",
    "toolrl_grpo": "verl.algorithms.estimators.toolrl_grpo:TOOLRL_GRPO",
    "ppo": "verl.algorithms.losses.ppo:PPO",
    "reinforce_pp": "verl.algorithms.estimators.reinforce_pp:REINFORCE_PP",
    "reinforce_pp_baseline": "verl.algorithms.estimators.reinforce_pp_baseline:REINFORCE_PP_BASELINE",
    "rloo": "verl.algorithms.estimators.rloo:RLOO",
    "remax": "verl.algorithms.estimators.remax:REMAX",
    "opo": "verl.algorithms.estimators.opo:OPO",
    "gpg": "verl.algorithms.estimators.gpg:GPG",
    "dr_grpo": "verl.algorithms.estimators.dr_grpo:DR_GRPO",
    "dapo": "verl.algorithms.losses.dapo:DAPO",
    "gspo": "verl.algorithms.losses.gspo:GSPO",
    "cispo": "verl.algorithms.losses.cispo:CISPO",
    "gmpo": "verl.algorithms.losses.gmpo:GMPO",
    "sapo": "verl.algorithms.losses.sapo:SAPO",
    "clip_cov": "verl.algorithms.losses.clip_cov:CLIP_COV",
    "kl_cov": "verl.algorithms.losses.kl_cov:KL_COV",
    "pass_at_k": "verl.algorithms.estimators.pass_at_k:PASS_AT_K",
    "gigpo": "verl.algorithms.estimators.gigpo:GIGPO",
    "gdpo": "verl.algorithms.estimators.gdpo:GDPO",
    "max_rl": "verl.algorithms.estimators.max_rl:MAX_RL",
    "lite_ppo": "verl.algorithms.estimators.lite_ppo:LITE_PPO",
    "dppo_tv": "verl.algorithms.losses.dppo_tv:DPPO_TV",
    "dppo_kl": "verl.algorithms.losses.dppo_kl:DPPO_KL",
    "ipo": "verl.algorithms.losses.ipo:IPO",
    "opsm": "verl.algorithms.losses.opsm:OPSM",
    "high_entropy": "verl.algorithms.losses.high_entropy:HIGH_ENTROPY",
    "skywork": "verl.algorithms.losses.skywork:SKYWORK",
    "vapo": "verl.algorithms.losses.vapo:VAPO",
    "kpop": "verl.algorithms.losses.kpop:KPOP",
    "simpletir": "verl.algorithms.estimators.simpletir:SIMPLETIR",
    "grpo_roc": "verl.algorithms.estimators.grpo_roc:GRPO_ROC",
    "matchtir": "verl.algorithms.estimators.matchtir:MATCHTIR",
    "aspo": "verl.algorithms.estimators.aspo:ASPO",
    "raft_pp": "verl.algorithms.estimators.raft_pp:RAFT_PP",
    "opd": "verl.algorithms.estimators.opd:OPD",
}

# Name of an advantage estimator, veRL's if it has one -> the preset that has it.
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
    "gdpo": "gdpo",
    "max_rl": "max_rl",
    "lite_ppo": "lite_ppo",
    "matchtir": "matchtir",
    "aspo": "aspo",
}
