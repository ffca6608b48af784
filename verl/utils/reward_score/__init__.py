"""Rewards. One file each; importing any of them costs no torch and needs the standard library alone."""

from verl.utils.reward_score.base import LabReward, Mutation, Reward, build_reward
from verl.utils.reward_score.functions import FunctionReward

__all__ = ["FunctionReward", "LabReward", "Mutation", "Reward", "build_reward"]
