"""Recipes beside the published run scripts: what both resolve to, setting by setting.

PUBLISHED holds what upstream makes of its scripts (its defaults with the script's overrides over them), in veRL's keys.
A recipe may differ only where INTENDED lists it, with the reason; a difference that is gone must go from there, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest

from verl.algorithms.filters import name_of
from verl.algorithms.names import KLPlacement
from verl.build.algorithm import build_algorithm
from verl.config.load import RECIPES, load_config
from verl.config.schema import Config
from verl.errors import ConfigError

Settings = dict[str, Any]
_SHARED: Settings = {  # ToolRL's run_grpo.sh; the others' differences lie over it
    "overlong": "left",  # what its trainer passes to its data set
    "adv_estimator": "grpo",
    "kl_ctrl.kl_coef": 0.001,
    "ppo_mini_batch_size": 128,
    "clip_ratio": 0.2,
    "entropy_coeff": 0.001,
    "use_kl_loss": False,
    "kl_loss_coef": 0.001,
    "grad_clip": 1.0,
    "lr": 1e-6,
    "lr_warmup_steps_ratio": 0.0,
    "n": 4,
    "temperature": 1.0,
    "top_p": 1,
    "top_k": -1,
    "val_kwargs": (1, 0.0, 1.0),  # n, temperature, top_p; greedy, as do_sample=False
    "enable_gradient_checkpointing": True,
    "critic.lr": 1e-5,
    "critic.lr_warmup_steps_ratio": 0.0,
    "critic.cliprange_value": 0.5,
    "train_batch_size": 512,
    "max_prompt_length": 2048,
    "max_response_length": 1024,
    "total_epochs": 15,
    "critic_warmup": 0,
    "save_freq": 15,
    "test_freq": 5,
}
_SEARCH_R1: Settings = {
    "overlong": "error",
    "ppo_mini_batch_size": 256,
    "lr_warmup_steps_ratio": 0.285,
    "top_p": 0.95,
    "max_prompt_length": 4096,
    "max_response_length": 500,
    "total_training_steps": 1005,
    "save_freq": 100,
    "test_freq": 50,
}
_SEARCH_R1_GRPO = {**_SEARCH_R1, "use_kl_loss": True, "n": 5}
_SEARCH_R1_PPO = {**_SEARCH_R1, "adv_estimator": "gae", "n": 1, "critic.lr_warmup_steps_ratio": 0.015}
_RETOOL: Settings = {
    "overlong": "drop",
    "kl_ctrl.kl_coef": 0.0,
    "clip_ratio_high": 0.28,
    "clip_ratio_c": 10.0,
    "entropy_coeff": 0,
    "val_kwargs": (30, 1.0, 0.6),
    "max_response_length": 16384,
    "total_epochs": 1,
    "save_freq": 30,
}
_SKYRL_SWE: Settings = {
    "overlong": "error",
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "entropy_coeff": 0,
    "use_kl_loss": True,
    "train_batch_size": 32,
    "ppo_mini_batch_size": 32,
    "n": 8,  # n_trajectories
    "temperature": 0.6,
    "top_p": 0.95,
    "max_prompt_length": 31232,
    "max_response_length": 1536,
    "total_epochs": 100,
    "save_freq": 1,
    "test_freq": 0,  # -1
    "val_before_train": False,
}
_TORL: Settings = {
    "overlong": "drop",
    "ppo_mini_batch_size": 1024,
    "entropy_coeff": 0,
    "use_kl_loss": True,
    "kl_loss_coef": 0.0,
    "n": 16,
    "train_batch_size": 128,
    "max_prompt_length": 400,
    "max_response_length": 3072,
    "total_epochs": 300,
    "save_freq": 20,
    "test_freq": 4,
}
PUBLISHED: Mapping[str, Settings] = {
    "toolrl_grpo": {},
    "toolrl_ppo": {
        "adv_estimator": "gae",
        "n": 1,
        "enable_gradient_checkpointing": False,
        "max_prompt_length": 1024,
        "max_response_length": 512,
    },
    "torl": _TORL,
    "otc_code": _TORL,  # the paper takes ToRL's settings
    "tool_n1": {
        "overlong": "drop",
        "ppo_mini_batch_size": 256,
        "entropy_coeff": 0,
        "use_kl_loss": True,
        "n": 5,
        "temperature": 0.7,
        "train_batch_size": 1024,
        "max_prompt_length": 4096,
        "max_response_length": 8192,
        "total_epochs": 7,
        "save_freq": 10,
        "test_freq": 10,
        "val_before_train": False,
    },
    "search_r1": _SEARCH_R1_GRPO,
    "search_r1_ppo": _SEARCH_R1_PPO,
    "otc_grpo": _SEARCH_R1_GRPO,  # the paper takes Search-R1's settings
    "otc_ppo": _SEARCH_R1_PPO,
    "retool": {
        **_RETOOL,
        "adv_estimator": "gae",
        "ppo_mini_batch_size": 256,
        "n": 1,
        "critic.lr": 2e-6,
        "train_batch_size": 1024,
        "critic_warmup": 20,
    },
    "retool_dapo": {**_RETOOL, "ppo_mini_batch_size": 64, "n": 16},
    "skyrl_swe_7b": {**_SKYRL_SWE, "train_batch_size": 16, "ppo_mini_batch_size": 16, "n": 16, "temperature": 0.5},
    "skyrl_swe_8b": {**_SKYRL_SWE, "top_k": 20},
    "skyrl_swe_14b": {
        **_SKYRL_SWE,
        "adv_estimator": "gae",
        "clip_ratio_high": 0.28,
        "entropy_coeff": 0.001,
        "max_prompt_length": 31744,
        "max_response_length": 3072,
    },
}
_TURNS = "published for one turn; here it covers the whole episode"
_STEP = "published for one call of the model; the sum, which bounds the episode, is the same"
_PROMPT = "published for the rolling context; the first prompt has 2048 there, too (data.max_start_length)"
INTENDED: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "toolrl_ppo": {"checkpointing": (True, "packs of 16,384 tokens, where the script has one sequence at a time")},
    "search_r1": {"prompt": (2048, _PROMPT), "response": (4096, _TURNS)},
    "search_r1_ppo": {"prompt": (2048, _PROMPT), "response": (4096, _TURNS)},
    "otc_grpo": {
        "prompt": (2048, _PROMPT),
        "response": (4096, _TURNS),
        "aggregation": ("seq-mean-token-mean", "the paper's objective: each response's mean, then theirs"),
    },
    "otc_code": {
        "aggregation": ("seq-mean-token-mean", "the paper's objective: each response's mean, then theirs"),
    },
    "otc_ppo": {"prompt": (2048, _PROMPT), "response": (4096, _TURNS)},
    "retool": {
        "mini_batch": (512, "the paper's"),
        "response": (14336, "the paper's 16,384 tokens are prompt and response together"),
        "steps": (400, "the paper's; the script has one epoch"),
    },
    "skyrl_swe_7b": {"prompt": (12000, _STEP), "response": (20768, _STEP)},
    "skyrl_swe_8b": {"prompt": (12000, _STEP), "response": (20768, _STEP)},
    "skyrl_swe_14b": {"prompt": (12000, _STEP), "response": (22816, _STEP)},
}
_WITHOUT_SCRIPT = {  # nothing published that could be compared
    "artist_math",
    "artist_tools",
    "composed_grpo",
    "composed_ppo",
    "embedded",
    "grpo",
    "learn_calls",
    "learn_tool",
    "mini_grpo",
    "mini_ppo",
    "swe_mini",
    "tool_loop",
    "zerotir",
    "zerotir_pipeline",
    "zerotir_ppo",
}


def published(recipe: str) -> Settings:
    """What upstream's settings mean."""
    values = {**_SHARED, **PUBLISHED[recipe]}
    placement, coefficient, estimator = ("reward", values["kl_ctrl.kl_coef"], "k1")
    if values["use_kl_loss"]:
        placement, coefficient, estimator = ("loss", values["kl_loss_coef"], "k3")
    with_critic = values["adv_estimator"] == "gae"
    mini = min(
        values["ppo_mini_batch_size"], values["train_batch_size"]
    )  # a larger mini-batch is the batch: one update
    warmup = partial(_warmup, updates=values["train_batch_size"] // mini, steps=values.get("total_training_steps", 0))
    return {
        "advantage": values["adv_estimator"],
        "kl": (placement, estimator, coefficient) if coefficient else None,
        "clip": (values["clip_ratio"], values.get("clip_ratio_high", values["clip_ratio"]), values.get("clip_ratio_c")),
        "aggregation": "token-mean",  # veRL's default, and masked_mean over all tokens before there was a choice
        "entropy": values["entropy_coeff"],
        "mini_batch": mini,
        "grad_clip": values["grad_clip"],
        "lr": values["lr"],
        "warmup": warmup(values["lr_warmup_steps_ratio"]),
        "n": values["n"],
        "temperature": values["temperature"],
        "cut": (values["top_p"], values["top_k"]),
        "validation": values["val_kwargs"],
        "checkpointing": values["enable_gradient_checkpointing"],
        "critic": (
            (values["critic.lr"], warmup(values["critic.lr_warmup_steps_ratio"]), values["critic.cliprange_value"])
            if with_critic
            else None
        ),
        "batch": values["train_batch_size"],
        "prompt": values["max_prompt_length"],
        "response": values["max_response_length"],
        "steps": values.get("total_training_steps") or f"{values['total_epochs']} epochs",
        "critic_warmup": values["critic_warmup"],
        "save": values["save_freq"],
        "test": values["test_freq"],
        "val_before_train": values.get("val_before_train", True),
        "overlong": values["overlong"],
    }


def _warmup(ratio: float, updates: int, steps: int) -> int:
    """Optimizer steps: upstream's schedule moves once a training step."""
    return int(ratio * steps) * updates


def resolved(config: Config) -> Settings:
    """What a configuration of ours means, in the same terms."""
    made = build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)
    loss = made.policy_loss
    assert isinstance(loss, partial)
    kl = made.kl
    critic, val = config.critic, config.rollout.val_kwargs
    return {
        "advantage": name_of(made.advantage),
        "kl": None if kl.placement is KLPlacement.NONE else (kl.placement.value, kl.estimator, kl.coefficient),
        "clip": (loss.keywords["clip_low"], loss.keywords["clip_high"], loss.keywords.get("dual_clip")),
        "aggregation": made.aggregation.value,
        "entropy": made.entropy_coefficient,
        "mini_batch": config.actor.ppo_mini_batch_size,
        "grad_clip": config.actor.grad_clip,
        "lr": config.actor.optim.lr,
        "warmup": config.actor.optim.warmup_steps,
        "n": config.rollout.n,
        "temperature": config.rollout.temperature,
        "cut": (config.rollout.top_p, config.rollout.top_k),
        "validation": (val.n, 0.0 if val.greedy else val.temperature, val.top_p),
        "checkpointing": config.model.enable_gradient_checkpointing,
        "critic": ((critic.optim.lr, critic.optim.warmup_steps, critic.cliprange_value) if made.needs_critic else None),
        "batch": config.data.train_batch_size,
        "prompt": config.data.max_prompt_length,
        "response": config.data.max_response_length,
        "steps": config.trainer.total_training_steps or f"{config.trainer.total_epochs} epochs",
        "critic_warmup": config.trainer.critic_warmup,
        "save": config.trainer.save_freq,
        "test": config.trainer.test_freq,
        "val_before_train": config.trainer.val_before_train,
        "overlong": config.data.truncation,
    }


def test_every_recipe_is_compared_or_known_to_have_no_script() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*PUBLISHED, *_WITHOUT_SCRIPT}
    assert {*INTENDED} <= {*PUBLISHED}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_resolves_to_what_its_script_does(recipe: str) -> None:
    theirs, ours = published(recipe), resolved(load_config([f"recipe={recipe}"]))
    differences = {name: ours[name] for name in theirs if ours[name] != theirs[name]}
    assert differences == {name: value for name, (value, _) in INTENDED.get(recipe, {}).items()}


def test_a_setting_that_is_lost_is_noticed() -> None:
    ours = resolved(load_config(["recipe=search_r1", "algorithm.entropy_coefficient=0.0", "trainer.test_freq=5"]))
    theirs = published("search_r1")
    assert {name for name in theirs if ours[name] != theirs[name]} == {"entropy", "test", "prompt", "response"}


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES.glob("*.yaml")])
def test_a_recipe_sets_nothing_about_the_machine(recipe: str) -> None:
    """One command runs on a laptop and on eight GPUs; ranks and parallel sizes are the user's."""
    config = load_config([f"recipe={recipe}"])
    assert (config.trainer.nnodes, config.trainer.n_gpus_per_node, config.rollout.num_engines) == (1, 1, None)
    assert config.rollout.tensor_model_parallel_size == 1 and config.actor.offload == "none"


@pytest.mark.parametrize(
    ("recipe", "tokens", "turns", "penalty", "agents"),
    [
        ("skyrl_swe_7b", 32768, 15, 1.0, 64),
        ("skyrl_swe_8b", 32768, 25, 1.5, 64),
        ("skyrl_swe_14b", 34816, 35, 1.0, 192),
    ],
)
def test_the_agents_of_skyrl(recipe: str, tokens: int, turns: int, penalty: float, agents: int) -> None:
    """Scripts: max_iterations, max_parallel_agents, the sum of both lengths, max_starting_message_length of 12,000."""
    config = load_config([f"recipe={recipe}"])
    assert config.data.max_prompt_length == 12000
    assert config.data.max_prompt_length + config.data.max_response_length == tokens
    assert (config.env.max_turns, config.env.max_tool_calls) == (turns + 1, turns)
    assert config.rollout.repetition_penalty == penalty and config.reward.name == "env"
    assert {config.env.options[f"max_{stage}"] for stage in ("starting", "running", "scoring")} == {agents}


def test_the_pipelined_run_of_zerotir() -> None:
    config = load_config(["recipe=zerotir_pipeline"])
    made = build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)
    assert [name_of(each) for each in made.filters] == ["grader_faults", "accuracy", "truncated"]
    ours = resolved(config)
    assert ours["clip"] == (0.22, 0.28, 3.0) and ours["kl"] is None and ours["advantage"] == "reinforce_pp_baseline"
    assert (ours["batch"], ours["n"], ours["mini_batch"]) == (128, 16, 128)
    assert (config.rollout.max_staleness, config.rollout.on_weight_sync) == (2, "finish")


def test_otcs_limit_on_calls_is_its_smoothing() -> None:
    for recipe in ("otc_grpo", "otc_ppo"):
        assert load_config([f"recipe={recipe}"]).reward.options["max_calls"] == 4
        assert load_config([f"recipe={recipe}", "env.max_tool_calls=3"]).reward.options["max_calls"] == 3
    overrides = ["recipe=torl", "reward.name=otc_grpo", "env.max_tool_calls=3", "env.max_turns=4"]
    for options in ("{answers: math}", "{answers: math, max_calls: 4}"):
        with pytest.raises(
            ConfigError, match=r"max_calls must be env.max_tool_calls=3; write .*=\$\{env.max_tool_calls\}"
        ):
            load_config([*overrides, f"reward.options={options}"])
    written = load_config([*overrides, "reward.options={answers: math, max_calls: 3}"])
    assert written.reward.options["max_calls"] == 3
