"""From overrides to objects: presets with overrides, run folders, tasks with room for their prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import ByT5Tokenizer

from tests.support.tiny import MINI, run_overrides, save_tiny_model
from verl.algorithms import ALGORITHMS
from verl.algorithms.algorithm import KLTerm, load_preset
from verl.algorithms.correction import Correction
from verl.algorithms.entropy import AdaptiveEntropy
from verl.algorithms.estimators.advantage import gae
from verl.algorithms.estimators.grpo import GRPO
from verl.algorithms.filters import FILTERS, name_of
from verl.algorithms.losses.policy_loss import clipped
from verl.algorithms.losses.ppo import PPO
from verl.algorithms.names import Aggregation, KLPlacement, Level, OldLogprobs
from verl.algorithms.overlong import Overlong
from verl.batch.samples import to_batch
from verl.build.algorithm import (
    _DOMAINS,
    _FUNCTIONS,
    build_algorithm,
    build_entropy_control,
    build_kl_control,
    check_algorithm,
    check_rewards,
)
from verl.build.engines import compiling_pays, share_beside, start_engine, with_limits, with_model_limits
from verl.build.env import single_turn_runner
from verl.build.ranks import abs_paths, check_device, choose_device, rank_spec, warn_of_slow_dtype
from verl.build.run import (
    load_chat_template,
    load_tasks,
    run_folder,
    train_sampling,
    val_sampling,
    warn_of_other_prompts,
)
from verl.build.workers import Workers, start_workers
from verl.config.load import load_config
from verl.config.schema import AlgorithmConfig, Config, CorrectionConfig, DataConfig, ModelConfig
from verl.data.tasks import TaskSet
from verl.embedded import embedded_path
from verl.episodes.group import GroupRollout
from verl.errors import ConfigError, DataError
from verl.registry import resolve
from verl.rollout.engine import Sampling
from verl.rollout.hf_engine import load_hf_engine
from verl.rollout.speculation import NGRAM
from verl.rollout.vllm_engine import VLLMEngine, VLLMSettings, engine_arguments
from verl.scoring.pool import DirectScorer
from verl.sft.demonstrations import read_demonstrations, sft_samples
from verl.single_controller.group import WorkerContext
from verl.single_controller.ray import Bundle, Cluster
from verl.trainer import main_ppo, main_sft
from verl.types import Outcome, Score, Task, Trajectory, TrajectoryGroup
from verl.utils.reward_score.base import build_reward
from verl.workers.memory import ModelShape
from verl.workers.rank import TrainingRank


def test_a_model_trained_on_other_prompts_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = tmp_path / "step-000010"
    save_tiny_model(checkpoint / "hf")
    then = {"env.tool_call_format": "toolrl", "data.prompt_template": "mini"}
    (checkpoint / "state.json").write_text(json.dumps({"resume_config": then}))
    overrides = [f"model.path={checkpoint / 'hf'}", "env.tool_call_format=toolrl"]
    warn_of_other_prompts(load_config([*overrides, "data.prompt_template=mini"]))
    assert caplog.text == ""
    warn_of_other_prompts(load_config(overrides))
    message = (
        "trained with data.prompt_template=mini, this run has data.prompt_template=null: it may not read these prompts"
    )
    assert message in caplog.text and "env.tool_call_format" not in caplog.text


def test_a_preset_alone_is_itself() -> None:
    assert build_algorithm(AlgorithmConfig(name="grpo"), 64, 0) == GRPO
    assert build_algorithm(AlgorithmConfig(name="ppo"), 64, 0).kl == PPO.kl


def test_building_an_algorithm_requires_the_maximum_staleness() -> None:
    """A caller who forgot it would train on stale samples without a correction."""
    with pytest.raises(TypeError, match="max_staleness"):
        build_algorithm(AlgorithmConfig(name="grpo"), 64)  # type: ignore[call-arg]


def test_an_update_does_not_go_on_while_engines_tidy_up() -> None:
    done: list[str] = []

    class Group(Mock):
        size = 1

        async def submit(self, rank: int, function: object) -> None:
            done.append("tidied up")

    trainer, engines = Group(), Group()
    trainer.close = lambda: done.append("no more update")
    engines.close = lambda: done.append("ended")
    Workers(trainer, engines, Mock()).close()
    assert done == ["no more update", "tidied up", "ended"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_stale_engine_is_corrected_without_being_asked_to(name: str) -> None:
    """Unless its ratio is to the engine's log-probs, which corrects already."""
    preset = load_preset(name)
    assert build_algorithm(AlgorithmConfig(name=name), 64, 0).correction == preset.correction
    usual = Correction(Level.TOKEN, is_cap=2.0) if preset.old_logprobs is OldLogprobs.TRAINER else None
    assert build_algorithm(AlgorithmConfig(name=name), 64, 1).correction == (preset.correction or usual)
    nothing = CorrectionConfig(is_level="none", rejection_level="none")
    for off in {"correction": nothing}, {"old_logprobs": "rollout"}:
        assert build_algorithm(AlgorithmConfig(name=name, **off), 64, 1).correction is None  # type: ignore[arg-type]


def test_a_correction_is_what_was_asked_for() -> None:
    asked = CorrectionConfig(
        is_level="sequence", is_cap=3.0, rejection_level="geometric", rejection_bounds=[0.8, 1.25], token_veto=1e-4
    )
    made = build_algorithm(AlgorithmConfig(name="grpo", correction=asked), 64, 0)
    assert made.correction == Correction(Level.SEQUENCE, 3.0, Level.GEOMETRIC, 0.8, 1.25, 1e-4)
    masked = build_algorithm(
        AlgorithmConfig(name="grpo", correction=CorrectionConfig(rejection_level="token", rejection_bounds=[0.0, 2.0])),
        64,
        0,
    )
    assert masked.correction == Correction(None, 2.0, Level.TOKEN, 0.0, 2.0)
    with pytest.raises(ConfigError, match="would correct twice"):
        build_algorithm(AlgorithmConfig(name="grpo", old_logprobs="rollout", correction=asked), 64, 0)


def test_a_correction_of_ones_own_algorithm_stays(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import replace\nfrom verl.algorithms.correction import Correction\n"
        "from verl.algorithms.estimators.grpo import GRPO\nMINE = replace(GRPO, correction=Correction(is_cap=5.0))\n"
    )
    for stale in (0, 1):
        assert build_algorithm(AlgorithmConfig(name=f"{own}:MINE"), 64, stale).correction == Correction(is_cap=5.0)
        wider = AlgorithmConfig(name=f"{own}:MINE", correction=CorrectionConfig(is_cap=3.0, token_veto=1e-4))
        assert build_algorithm(wider, 64, stale).correction == Correction(is_cap=3.0, token_veto=1e-4)
        masked = AlgorithmConfig(
            name=f"{own}:MINE", correction=CorrectionConfig(rejection_level="token", rejection_bounds=[0.25, 4.0])
        )
        expected = Correction(is_cap=5.0, rejection_level=Level.TOKEN, rejection_lower=0.25, rejection_upper=4.0)
        assert build_algorithm(masked, 64, stale).correction == expected
    off = AlgorithmConfig(name=f"{own}:MINE", correction=CorrectionConfig(is_level="none"))
    assert build_algorithm(off, 64, 0).correction is None
    assert build_algorithm(AlgorithmConfig(name=f"{own}:MINE", old_logprobs="rollout"), 64, 0).correction is None


@pytest.mark.parametrize(
    ("settings", "stale", "message"),
    [
        (CorrectionConfig(is_cap=3.0), 0, "is_cap=3 has no effect: algorithm.correction.is_level is none"),
        (CorrectionConfig(is_level="none", is_cap=3.0), 1, "is_cap=3 has no effect"),
        (CorrectionConfig(token_veto=1e-4, is_cap=3.0), 0, "is_cap=3 has no effect"),
        (
            CorrectionConfig(rejection_bounds=[0.5, 3.0]),
            1,
            r"rejection_bounds=\[0.5, 3.0\] has no effect: algorithm.correction.rejection_level is none",
        ),
        (
            CorrectionConfig(is_level="token", rejection_bounds=[0.1, 2.0]),
            1,
            r"rejection_bounds=\[0.1, 2.0\] has no effect",
        ),
    ],
)
def test_a_bound_without_effect_is_refused(settings: CorrectionConfig, stale: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(AlgorithmConfig(name="grpo", correction=settings), 64, stale)


def test_a_bound_beside_a_ratio_that_corrects_by_itself_is_refused(tmp_path: Path) -> None:
    """Be it the configuration or the preset that measures the ratio from the engine."""
    own = tmp_path / "own.py"
    own.write_text(
        "from dataclasses import replace\nfrom verl.algorithms.names import OldLogprobs\n"
        "from verl.algorithms.estimators.grpo import GRPO\nMINE = replace(GRPO, old_logprobs=OldLogprobs.ROLLOUT)\n"
    )
    bound = CorrectionConfig(is_cap=3.0)
    asked = AlgorithmConfig(name="grpo", old_logprobs="rollout", correction=bound)
    for config in asked, AlgorithmConfig(name=f"{own}:MINE", correction=bound):
        with pytest.raises(ConfigError, match="is_cap=3 has no effect"):
            build_algorithm(config, 64, 1)


def test_overrides_replace_what_they_name_and_nothing_else() -> None:
    made = build_algorithm(AlgorithmConfig(name="ppo", clip_high=0.28, lam=0.95, aggregation="token-sum"), 64, 0)
    assert isinstance(made.policy_loss, partial) and made.policy_loss.func is clipped
    assert made.policy_loss.keywords == {"clip_low": 0.2, "clip_high": 0.28}
    assert isinstance(made.advantage, partial) and made.advantage.func is gae
    assert made.advantage.keywords == {"gamma": 1.0, "lam": 0.95}
    assert made.aggregation is Aggregation.TOKEN_SUM and made.kl == PPO.kl


@pytest.mark.parametrize(
    ("overrides", "kl"),
    [
        ({"kl_placement": "none"}, KLTerm()),
        ({"kl_placement": "loss", "kl_estimator": "k3", "kl_coefficient": 0.01}, KLTerm(KLPlacement.LOSS, "k3", 0.01)),
        ({"kl_placement": "reward", "kl_estimator": "k3"}, KLTerm(KLPlacement.REWARD, "k3", GRPO.kl.coefficient)),
        ({"kl_placement": "reward"}, KLTerm(KLPlacement.REWARD, "k1", GRPO.kl.coefficient)),
        ({"name": "ppo", "kl_placement": "loss"}, KLTerm(KLPlacement.LOSS, "k3", 0.001)),
        ({"name": "dapo", "kl_placement": "none", "kl_coefficient": 0.1}, KLTerm()),
    ],
)
def test_kl_is_placed_where_it_is_configured(overrides: dict[str, object], kl: KLTerm) -> None:
    assert build_algorithm(AlgorithmConfig(**{"name": "grpo", **overrides}), 64, 0).kl == kl  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"name": "grppo"}, "did you mean 'grpo'"),
        ({"name": "verl.types:Task"}, "is not an Algorithm"),
        (
            {"lam": 0.9},
            "algorithm.lam has no effect: the options of algorithm 'grpo' are clip_high, clip_low",
        ),
        (
            {"name": "rloo", "clip_low": 0.1},
            "clip_low has no effect: the options of algorithm 'rloo' are none",
        ),
        ({"options": {"tau_pos": 2.0}}, "algorithm.options.tau_pos has no effect"),
        ({"name": "sapo", "options": {"tau_pos": "hot"}}, "option 'tau_pos' must be of type float, not 'hot'"),
        ({"name": "sapo", "options": {"tau_pos": True}}, "option 'tau_pos' must be of type float, not True"),
        ({"name": "pass_at_k", "options": {"divide_by_std": 3}}, "option 'divide_by_std' must be of type bool, not 3"),
        ({"name": "clip_cov", "options": {"share": "all"}}, "option 'share' must be of type float, not 'all'"),
        ({"options": {"clip_low": -1.0}}, "algorithm.options.clip_low: use the key algorithm.clip_low"),
        ({"filters": ["zero_varianc"]}, "unknown algorithm.filters 'zero_varianc'; did you mean 'zero_variance'?"),
        ({"filters": [{"low": 0.1}]}, "names no filter"),
        ({"filters": [{"name": "accuracy", "hihg": 0.1}]}, "'accuracy' has no option 'hihg'; did you mean 'high'?"),
        ({"filters": [{"name": "accuracy", "high": "0.8"}]}, "option 'high' must be of type float, not '0.8'"),
        ({"filters": [{"name": "accuracy", "part": 1}]}, "option 'part' must be of type str or None, not 1"),
        ({"filters": [{"name": "length", "max_tokens": "9"}]}, "option 'max_tokens' must be of type int, not '9'"),
        ({"filters": ["length"]}, "'length': missing a required argument: 'max_tokens'; its options are max_tokens"),
        ({"max_resample_rounds": 3}, "algorithm.max_resample_rounds=3 has no effect"),
        ({"name": "dapo", "filters": [], "max_resample_rounds": 3}, "algorithm.max_resample_rounds=3 has no effect"),
        ({"overlong_factor": 0.5}, "algorithm.overlong_factor has no effect"),
        ({"overlong_buffer": 65}, "algorithm.overlong_buffer=65 exceeds data.max_response_length=64"),
        ({"aggregation": "mean"}, "algorithm.aggregation must be one of token-mean"),
        ({"aggregation_length": 9}, "algorithm.aggregation_length has no effect: seq-mean-token-mean"),
        ({"kl_placement": "both"}, "algorithm.kl_placement must be one of none, reward, loss"),
        ({"kl_placement": "loss", "kl_coefficient": 0.0}, "must be positive"),
        ({"name": "dapo", "kl_coefficient": 0.01}, "algorithm.kl_coefficient has no effect: dapo has no KL term; set"),
        ({"name": "dapo", "kl_estimator": "k3"}, "algorithm.kl_estimator has no effect"),
    ],
)
def test_overrides_without_use_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_algorithm(AlgorithmConfig(**{"name": "grpo", **overrides}), 64, 0)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_rollout_settings_of_a_preset_can_be_overridden() -> None:
    assert build_algorithm(AlgorithmConfig(name="dapo"), 100, 0).overlong == Overlong(100, 20, 1.0)
    filters = ["truncated", {"name": "accuracy", "low": 0.1}]
    settings = AlgorithmConfig(name="dapo", filters=filters, max_resample_rounds=3, overlong_buffer=0)
    made = build_algorithm(settings, 100, 0)
    assert [name_of(each) for each in made.filters] == ["truncated", "accuracy"]
    assert made.max_resample_rounds == 3 and made.overlong is None
    assert build_algorithm(AlgorithmConfig(name="dapo", filters=[]), 100, 0).max_resample_rounds == 1
    added = build_algorithm(AlgorithmConfig(name="grpo", overlong_buffer=8, overlong_factor=0.5), 100, 0)
    assert added.overlong == Overlong(100, 8, 0.5)


def test_options_reach_the_function_that_has_them() -> None:
    made = build_algorithm(AlgorithmConfig(name="kl_cov", options={"share": 0.1, "beta": 2.0}), 64, 0)
    assert isinstance(made.selection, partial) and made.selection.keywords == {"share": 0.1}
    assert isinstance(made.policy_loss, partial) and made.policy_loss.keywords == {"beta": 2.0}
    assert build_algorithm(AlgorithmConfig(name="gigpo", gamma=1.0), 64, 0).advantage.keywords["gamma"] == 1.0  # type: ignore[attr-defined]


class Ranks:
    """A reward that compares the responses to a prompt."""

    def score(self, trajectory: Trajectory, task: Task, step: int) -> Score:
        return Score(0.0, {})

    def shape(self, group: TrajectoryGroup, state: Mapping[str, Any]) -> tuple[Sequence[float], Mapping[str, Any]]:
        return group.rewards, state


def test_unmet_requirements_of_an_algorithm_are_an_error() -> None:
    remax, gigpo = (load_config([f"algorithm.name={name}", "rollout.n=2"]) for name in ("remax", "gigpo"))
    with pytest.raises(ConfigError, match=r"algorithm\.name=remax scores each response against"):
        check_rewards(build_algorithm(remax.algorithm, 64, 0), [build_reward("math"), Ranks()])
    watching = replace(gigpo, env=replace(gigpo.env, train_on_observations=True))
    with pytest.raises(ConfigError, match=r"algorithm\.name=gigpo distinguishes states"):
        check_algorithm(build_algorithm(gigpo.algorithm, 64, 0), watching)
    check_algorithm(build_algorithm(gigpo.algorithm, 64, 0), gigpo)
    check_rewards(build_algorithm(gigpo.algorithm, 64, 0), [Ranks()])
    check_rewards(build_algorithm(remax.algorithm, 64, 0), [build_reward("math")])


def test_a_ratio_to_the_engines_log_probs_needs_them_of_all_tokens() -> None:
    config = load_config(["algorithm.name=ipo", "rollout.n=2"])
    check_algorithm(build_algorithm(config.algorithm, 64, 0), config)
    watching = replace(config, env=replace(config.env, train_on_observations=True))
    agent = replace(config.env, name="agent", tool_call_format="native", options={"on_sampling": "honor"})
    for each in (watching, replace(config, env=agent)):
        with pytest.raises(ConfigError, match=r"algorithm\.name=ipo takes the engine's log-probs; .* unusable"):
            check_algorithm(build_algorithm(config.algorithm, 64, 0), each)
        check_algorithm(build_algorithm(replace(config.algorithm, old_logprobs="trainer"), 64, 0), each)


@pytest.mark.parametrize(
    "chosen", ["algorithm.name=grpo", "algorithm.adv_estimator=grpo", "algorithm.name=rloo", "OWN"]
)
def test_group_relative_advantages_need_several_responses(chosen: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from verl.algorithms.estimators.grpo import GRPO as MINE\n")
    word = f"algorithm.name='{tmp_path}/mine.py:MINE'" if chosen == "OWN" else chosen
    for n in (1, 2):
        config = load_config([word, f"rollout.n={n}"])
        algorithm = build_algorithm(config.algorithm, 64, 0)
        if n == 1:
            with pytest.raises(ConfigError, match=r"needs rollout\.n >= 2 \(advantages are group-relative\); got 1"):
                check_algorithm(algorithm, config)
        else:
            check_algorithm(algorithm, config)


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=20", "repetition_penalty=1.5"])
def test_a_cut_distribution_goes_without_the_engines_log_probs(cut: str) -> None:
    def check(*overrides: str) -> None:
        config = load_config([f"rollout.{cut}", *overrides])
        made = build_algorithm(config.algorithm, 64, config.rollout.max_staleness)
        check_algorithm(made, config)

    check()
    check("rollout.max_staleness=1", "algorithm.correction.is_level=none")
    for overrides in (
        ["algorithm.old_logprobs=rollout", "algorithm.kl_placement=none"],
        ["algorithm.correction.is_level=token"],
        ["algorithm.correction.rejection_level=geometric"],
        ["algorithm.correction.token_veto=1e-4"],
        ["rollout.max_staleness=1"],
    ):
        with pytest.raises(ConfigError, match=r"change the sampled distribution"):
            check(*overrides)


def test_training_validation_and_canary_sample_on_their_own(caplog: pytest.LogCaptureFixture) -> None:
    overrides = ["rollout.top_p=0.9", "rollout.top_k=7", "rollout.repetition_penalty=1.5"]
    config = load_config([*overrides, "data.val_files=[x]", "rollout.temperature=0.7", "data.max_response_length=9"])
    training = train_sampling(config, (3,))
    assert training == Sampling(9, 0.7, 1, (3,), top_p=0.9, top_k=7, repetition_penalty=1.5)
    assert "engine/kl measures this bias" in caplog.text
    assert val_sampling(config, training) == Sampling(9, 0.0, 1, (3,))
    val = [f"rollout.val_kwargs.{word}" for word in ("temperature=1.0", "top_p=0.6", "top_k=5", "n=30")]
    config = load_config([*overrides, *val, "data.val_files=[x]", "data.max_response_length=9"])
    assert val_sampling(config, train_sampling(config, (3,))) == Sampling(9, 1.0, 1, (3,), top_p=0.6, top_k=5)
    assert training.whole() == Sampling(9, 0.7, 1, (3,))


def test_a_constant_length_is_the_longest_response_unless_it_is_given() -> None:
    norm = AlgorithmConfig(name="grpo", aggregation="seq-mean-token-sum-norm")
    assert build_algorithm(norm, 64, 0).aggregation_length == 64
    assert build_algorithm(replace(norm, aggregation_length=10), 64, 0).aggregation_length == 10
    assert build_algorithm(AlgorithmConfig(name="grpo"), 64, 0).aggregation_length is None


def test_the_kl_controller_is_made_where_a_target_is_set() -> None:
    config = AlgorithmConfig(name="toolrl_grpo", kl_target=0.1)
    control = build_kl_control(config, build_algorithm(config, 64, 0))
    assert control is not None and (control.coefficient, control.target) == (0.001, 0.1)
    assert build_kl_control(AlgorithmConfig(name="grpo"), GRPO) is None
    with pytest.raises(ConfigError, match="has no effect"):
        build_kl_control(
            AlgorithmConfig(kl_target=0.1, kl_placement="none"), build_algorithm(AlgorithmConfig(name="grpo"), 64, 0)
        )


def test_the_entropy_controller_is_made_where_a_target_is_set() -> None:
    skywork = build_algorithm(AlgorithmConfig(name="skywork"), 64, 0)
    assert build_entropy_control(skywork) == AdaptiveEntropy(target=0.2, coefficient=0.0, bonus=0.0)
    config = AlgorithmConfig(name="toolrl_grpo", entropy_target=0.5)  # algorithm.entropy_target over a fixed bonus
    assert build_entropy_control(build_algorithm(config, 64, 0)) == AdaptiveEntropy(0.5, coefficient=0.001, bonus=0.001)
    assert build_entropy_control(build_algorithm(AlgorithmConfig(name="grpo"), 64, 0)) is None
    with pytest.raises(ConfigError, match=r"algorithm\.entropy_target must be positive"):
        AlgorithmConfig(entropy_target=0.0)
    for outside in (-0.1, 1.5):
        with pytest.raises(ConfigError, match=r"entropy_coefficient=.*: with an entropy target it adapts from 0 to 1"):
            build_algorithm(AlgorithmConfig(name="skywork", entropy_coefficient=outside), 16, 0)


@pytest.mark.parametrize(("placement", "shares"), [("colocated", True), ("separate", False)])
def test_ranks_free_cached_memory_for_engines_on_their_gpus_alone(placement: str, shares: bool) -> None:
    config = load_config(["model.path=unused", f"rollout.placement={placement}"])
    assert rank_spec(config, build_algorithm(config.algorithm, 64, 0), "cpu", total_steps=1).shares_device is shares


def test_the_models_of_ranks_follow_from_the_algorithm(tmp_path: Path) -> None:
    config = load_config([*run_overrides(tmp_path, tmp_path, "hf", 10), "algorithm.name=ppo", "critic.path=other"])
    spec = rank_spec(config, build_algorithm(config.algorithm, 64, 0), "cpu", total_steps=10)
    assert spec.critic_path == "other" and spec.with_reference and spec.optimizer.total_steps == 20
    plain = rank_spec(config, build_algorithm(AlgorithmConfig(name="grpo", kl_placement="none"), 64, 0), "cpu", 10)
    assert plain.critic_path is None and not plain.with_reference


def test_workers_are_given_whole_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    config = abs_paths(load_config(["model.path=model", "algorithm.name=ppo", "critic.path=owner/name"]))
    assert (config.model.path, config.critic.path) == (str((tmp_path / "model").resolve()), "owner/name")


class Rooms:
    """A cluster that counts what is put into the bundles of its placement groups."""

    def __init__(self) -> None:
        self.pools: list[list[float]] = []  # CPUs left in each bundle

    def pool(self, bundles: Sequence[Bundle], *_: Any) -> list[float]:
        self.pools.append([bundle.num_cpus for bundle in bundles])
        return self.pools[-1]

    def group(
        self, role: str, make: Any, room: list[float], bundle: Bundle, places: Any = None, *_: Any, **__: Any
    ) -> Any:
        for place in range(len(room)) if places is None else places:
            room[place] -= bundle.num_cpus
        return Mock(nodes=["here"], gpus=[()] * 2)


@pytest.mark.parametrize(
    ("overrides", "num_pools"),
    [
        ([], 1),
        (["rollout.placement=colocated"], 1),
        (["rollout.placement=separate"], 2),
        (["rollout.max_staleness=1"], 2),
        (["trainer.n_gpus_per_node=2", "rollout.num_engines=2"], 1),
    ],
)
def test_every_worker_has_room_in_its_pool(overrides: list[str], num_pools: int, tmp_path: Path) -> None:
    cluster = Rooms()
    config = load_config([*run_overrides(save_tiny_model(tmp_path), tmp_path, "hf", 1), *overrides])
    start_workers(config, cluster, GRPO, "cpu", total_steps=1)  # type: ignore[arg-type]
    assert cluster.pools == [[0.0]] * num_pools


def test_a_folder_with_a_run_is_refused_where_resuming_is_off(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    overrides = run_overrides(tmp_path, tmp_path, "hf", 1)
    assert run_folder(load_config(overrides).trainer) == (tmp_path / "run").resolve()
    with pytest.raises(ConfigError, match="already holds a run"):
        run_folder(load_config([*overrides, "trainer.resume_mode=disable"]).trainer)


def test_prompts_that_are_too_long_are_an_error_or_left_out(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    files = f"data.train_files=[{MINI / 'test.parquet'}]", f"data.val_files=[{MINI / 'test_new_tools.parquet'}]"
    overrides = [*run_overrides(model, tmp_path, "hf", 1), *files]
    chat = load_chat_template(load_config(overrides).model)
    (train,), val, reports = load_tasks(load_config(overrides), chat.task_prompt_ids)
    assert len(train) == 200 and list(val) == ["test_new_tools"]
    assert [str(report) for report in reports] == [
        "test.parquet: 200 rows, 200 used, 0 dropped",
        "test_new_tools.parquet: 200 rows, 200 used, 0 dropped",
    ]
    with pytest.raises(
        DataError, match=r"test.parquet, row \d+: the prompt has \d+ tokens, more than data.max_prompt_length=90"
    ):
        load_tasks(load_config([*overrides, "data.max_prompt_length=90"]), chat.task_prompt_ids)
    skipping = load_config([*overrides, "data.max_prompt_length=90", "data.truncation=drop"])
    (some,), _, (report, _) = load_tasks(skipping, chat.task_prompt_ids)
    num_dropped = 200 - len(some)
    assert 0 < len(some) < 200 and all(len(chat.prompt_ids(task.prompt)) <= 90 for task in some)
    assert str(report).endswith(f"{len(some)} used, {num_dropped} dropped ({num_dropped} longer than 90 tokens)")
    with pytest.raises(DataError, match=r"has no usable row \(200 longer than 9 tokens\)"):
        load_tasks(load_config([*overrides, "data.max_prompt_length=9", "data.truncation=drop"]), chat.task_prompt_ids)


def test_a_template_that_refuses_a_row_names_it(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    rows = [{"role": "user", "content": "Hi"}], [{"role": "system", "content": "Be"}, {"role": "user", "content": "Hi"}]
    data = tmp_path / "data.jsonl"
    common = {"data_source": "mine", "reward_model": {"ground_truth": "Ho"}}
    data.write_text("\n".join(json.dumps({"prompt": prompt, **common}) for prompt in rows))
    template = model / "chat_template.jinja"
    template.write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('No system role!') }}{% endif %}"
        "{% for message in messages %}{{ message.content }}<|im_end|>{% endfor %}"
    )
    overrides = [*run_overrides(model, tmp_path, "hf", 1), f"data.train_files=[{data}]", "data.train_batch_size=1"]
    overrides.append("actor.ppo_mini_batch_size=1")
    config = load_config(overrides)
    chat = load_chat_template(config.model)
    with pytest.raises(
        DataError,
        match=r"data\.jsonl: 1 of 2 rows .*row 1: the chat template rejects .* system, user \(No system role!\)",
    ):
        load_tasks(config, chat.task_prompt_ids)
    half = replace(config, data=replace(config.data, max_bad_share=0.5))
    (kept,), _, (report,) = load_tasks(half, chat.task_prompt_ids)
    assert len(kept) == 1 and "2 rows, 1 used, 1 dropped (1 unreadable, row 1: the chat template" in str(report)
    demonstrations = read_demonstrations(str(data))
    with pytest.raises(DataError, match=r"data\.jsonl, row 1: the chat template rejects"):
        sft_samples(demonstrations, chat, 99)
    assert len(sft_samples(demonstrations, chat, 99, 0.5)) == 1
    template.write_text("{{ 'Hi' + messages[0].nothing.at_all }}")
    with pytest.raises(DataError, match=r"data\.jsonl: 2 of 2 rows .*row 0: the chat template rejects .* roles user"):
        load_tasks(config, load_chat_template(config.model).task_prompt_ids)
    template.write_text("Hi {% for %}")
    with pytest.raises(ConfigError, match=r"chat template of the tokenizer in .*model' cannot be parsed \(line 1: "):
        load_tasks(config, load_chat_template(config.model).task_prompt_ids)


def test_a_tokenizer_without_token_offsets_is_refused(tmp_path: Path) -> None:
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = "Hi"
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"the tokenizer in .* is a slow tokenizer.* add its tokenizer\.json"):
        load_chat_template(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(("listed", "expected"), [([2, 5, 7], (2, 5, 7)), (5, (2, 5)), (None, (2,))])
def test_a_turn_ends_at_every_token_that_the_model_lists(listed: object, expected: object, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    chat = load_chat_template(ModelConfig(path=str(model)))
    assert chat.stop_token_ids == expected and chat.end_token_id == 2
    for stop in chat.stop_token_ids:
        assert chat.response_text((*chat.response_ids("so be it")[0], stop)) == "so be it"


@pytest.mark.parametrize(("listed", "expected"), [([2, 5, 7], (2, 5, 7)), (5, (2, 5)), (None, (2,))])
def test_without_a_generation_configuration_the_models_own_list_counts(
    listed: object, expected: object, tmp_path: Path
) -> None:
    """As in transformers, which makes one from config.json."""
    model = save_tiny_model(tmp_path)
    (model / "generation_config.json").unlink()
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "eos_token_id": listed}))
    assert load_chat_template(ModelConfig(path=str(model))).stop_token_ids == expected
    own = load_hf_engine(str(model), torch.float32, "cpu", 8)._model.generation_config.eos_token_id
    assert own == listed


def test_any_end_token_of_a_turn_is_trained_but_not_scored(tmp_path: Path) -> None:
    model, tasks = save_tiny_model(tmp_path), TaskSet(str(MINI / "test.parquet"))
    plain = load_chat_template(ModelConfig(path=str(model)))
    listed = tuple(range(3, len(plain.tokenizer), 2))  # an untrained model ends soon, seldom at eos_token
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    chat = load_chat_template(ModelConfig(path=str(model)))
    engine = load_hf_engine(str(model), torch.float32, "cpu", 8)
    sampling = Sampling(60, stop_token_ids=chat.stop_token_ids)
    rollout = GroupRollout(
        engine, DirectScorer(build_reward("rlla")), sampling, single_turn_runner(chat, sampling.max_tokens)
    )
    group = asyncio.run(rollout.run(tasks[0], 4, 0, first_seed=1))
    batch = to_batch([group])
    last = batch.bounds.tokens[1:] - 1
    ends = set(batch.token_ids[last[batch.action_mask[last]]].tolist())
    assert len(ends) > 1 and ends <= set(chat.stop_token_ids)
    for trajectory in group.trajectories:
        ids = trajectory.turns[0].completion.token_ids
        assert (trajectory.stop_reason, trajectory.outcome) == ("stop", Outcome.SCORED)
        assert trajectory.response == plain.response_text(ids[:-1]) and not set(ids[:-1]) & set(chat.stop_token_ids)


def test_a_generation_configuration_may_be_missing_but_not_damaged(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path)
    (model / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json in .* cannot be read"):
        load_chat_template(ModelConfig(path=str(model)))
    (model / "generation_config.json").unlink()
    assert load_chat_template(ModelConfig(path=str(model))).stop_token_ids == (2,)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_not_made_up() -> None:
    assert choose_device(load_config([]).trainer) == "cpu"
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        choose_device(load_config(["trainer.device=cuda"]).trainer)


@pytest.mark.parametrize(
    ("capability", "dtype", "num_warnings"),
    [("AVX2", "bfloat16", 1), ("AVX2", "float32", 0), ("AVX512", "bfloat16", 0)],
)
def test_bfloat16_without_its_instructions_is_warned_of(
    capability: str, dtype: str, num_warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    warn_of_slow_dtype(load_config(["trainer.device=cpu", f"model.compute_dtype={dtype}"]))
    assert caplog.text.count("model.compute_dtype=float32 is many times faster") == num_warnings


def test_a_joined_cluster_reports_its_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    auto, cuda, cpu = (load_config([f"trainer.device={name}"]).trainer for name in ("auto", "cuda", "cpu"))
    assert [choose_device(each, 8.0) for each in (auto, cuda, cpu)] == ["cuda", "cuda", "cpu"]
    assert choose_device(auto, 0.0) == "cpu"
    with pytest.raises(ConfigError, match="the Ray cluster has no GPU"):
        choose_device(cuda, 0.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_device(cuda)  # of no matter here: workers will not be on this machine
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        check_device(cuda)


@pytest.mark.long
@pytest.mark.parametrize(("main", "data"), [(main_ppo.main, "train.parquet"), (main_sft.main, "sft.parquet")])
def test_a_run_asks_the_cluster_that_it_joined_what_gpus_there_are(
    main: Callable[[list[str]], int],
    data: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def joined(*_: object) -> Iterator[Cluster]:
        yield Cluster(num_gpus=0.0)

    monkeypatch.setattr(Cluster, "start", joined)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    overrides = [
        f"model.path={save_tiny_model(tmp_path / 'model')}",
        f"data.train_files=[{MINI / data}]",
        f"trainer.default_local_dir={tmp_path / 'out'}",
        "trainer.total_training_steps=1",
        "trainer.device=cuda",
    ]
    assert main(overrides) == 2
    assert "the Ray cluster has no GPU" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            AlgorithmConfig(name="clip_cov", options={"share": 1.5}),
            "options.share must be between 0 and 1, got 1.5",
        ),
        (AlgorithmConfig(name="kl_cov", options={"share": -0.1}), "algorithm.options.share must be between 0 and 1"),
        (AlgorithmConfig(name="kl_cov", options={"beta": -1.0}), "algorithm.options.beta must be 0 or more"),
        (AlgorithmConfig(name="sapo", options={"tau_neg": 0.0}), "algorithm.options.tau_neg must be positive"),
        (
            AlgorithmConfig(name="gigpo", options={"turn_weight": -1.0}),
            "algorithm.options.turn_weight must be 0 or more",
        ),
        (AlgorithmConfig(name="clip_cov", options={"low": 6.0}), "low=6 exceeds high=5"),
        (AlgorithmConfig(filters=[{"name": "accuracy", "low": 0.9, "high": 0.1}]), "low=0.9 exceeds high=0.1"),
        (AlgorithmConfig(filters=[{"name": "length", "max_tokens": 0}]), "length.max_tokens must be at least 1"),
        (AlgorithmConfig(filters=[{"name": "grader_faults", "max_share": 2.0}]), "max_share must be between 0 and 1"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(settings: AlgorithmConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(settings, 64, 0)


def test_every_number_among_the_options_of_ours_has_a_domain() -> None:
    presets = [resolve("algorithm", name, ALGORITHMS) for name in ALGORITHMS]
    functions = [each for made in presets for name in _FUNCTIONS if (each := getattr(made, name)) is not None]
    checked_elsewhere = {"clip_low", "clip_high", "dual_clip", "gamma", "lam", "low", "high"}
    for function in (*functions, *FILTERS.values()):
        for name, parameter in signature(function).parameters.items():
            number = parameter.annotation in ("float", "int", "float | None")
            assert not number or name in checked_elsewhere or f"{name_of(function)}.{name}" in _DOMAINS


@pytest.mark.parametrize(
    ("device", "share", "overrides", "expected"),
    [
        ("cuda", None, [], {"max_num_seqs": None, "max_num_batched_tokens": None, "kv_cache_memory_bytes": None}),
        ("cpu", None, [], {"max_num_seqs": None, "max_num_batched_tokens": None, "kv_cache_memory_bytes": 2**30}),
        (
            "cuda",
            0.4,
            ["actor_rollout_ref.rollout.max_num_batched_tokens=8192", "actor_rollout_ref.rollout.max_num_seqs=512"],
            {"max_num_seqs": 512, "max_num_batched_tokens": 8192, "enable_sleep_mode": True, "enforce_eager": False},
        ),
        ("cuda", 0.4, [], {"gpu_memory_utilization": 0.4, "enable_sleep_mode": True}),
        ("cuda", None, [], {"gpu_memory_utilization": 0.9, "enable_sleep_mode": False}),
        ("cuda", None, ["rollout.gpu_memory_utilization=0.5"], {"gpu_memory_utilization": 0.5}),
        ("cuda", None, ["rollout.speculation=ngram"], {"speculative_config": NGRAM, "disable_log_stats": False}),
        ("cpu", None, [], {"speculative_config": None, "disable_log_stats": True}),
        ("cuda", None, ["actor_rollout_ref.rollout.enforce_eager=True"], {"enforce_eager": True}),
        ("cpu", None, ["rollout.enforce_eager=false"], {"enforce_eager": False}),
        ("cpu", None, ["rollout.enforce_eager=null"], {"enforce_eager": True}),
        ("cpu", None, ["rollout.engine_options={enforce_eager: false, block_size: 64}"], {"enforce_eager": False}),
        ("cuda", 0.4, ["rollout.engine_options={block_size: 64}"], {"block_size": 64, "enforce_eager": False}),
        (
            "cpu",
            None,
            ["rollout.max_num_seqs=8"],
            {"max_num_seqs": 8, "enable_sleep_mode": False, "enforce_eager": True},
        ),
    ],
)
def test_batch_limits_reach_vllm_and_are_its_own_where_none_are_given(
    device: str,
    share: float | None,
    overrides: list[str],
    expected: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[VLLMSettings] = []

    async def start(settings: VLLMSettings) -> None:
        started.append(settings)

    monkeypatch.setattr(VLLMEngine, "start", start)
    config = load_config([f"model.path={save_tiny_model(tmp_path)}", "data.max_response_length=64", *overrides])
    config = replace(config, data=replace(config.data, max_prompt_length=64))
    asyncio.run(start_engine(config, device, WorkerContext(0, 1), share))
    arguments = engine_arguments(started[0], on_cpu=device == "cpu")
    assert expected.items() <= arguments.items()
    assert arguments["max_model_len"] == 128


@pytest.mark.parametrize(
    ("steps", "overrides", "compiler", "compiled"),
    [
        (1300, [], "true", True),
        (1299, [], "true", False),
        (1300, ["rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2"], "true", False),
        (1300, [], "no-such-compiler", False),
    ],
)
def test_a_cpu_engine_is_compiled_in_long_runs(
    steps: int, overrides: list[str], compiler: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    assert compiling_pays(load_config(["data.max_response_length=100", *overrides]), steps) is compiled


def test_drafts_are_refused_on_a_cpu_before_anything_starts(tmp_path: Path) -> None:
    config = load_config([f"model.path={save_tiny_model(tmp_path)}", "rollout.speculation=ngram"])
    config = replace(config, data=replace(config.data, max_prompt_length=64, max_response_length=64))
    for start in (
        lambda: start_workers(config, SimpleNamespace(), SimpleNamespace(), "cpu", 1),  # type: ignore[arg-type]
        lambda: asyncio.run(start_engine(config, "cpu", WorkerContext(0, 1))),
    ):
        with pytest.raises(ConfigError, match=r"rollout.speculation=ngram needs a GPU: .* uninitialized temperatures"):
            start()


def test_an_unknown_option_of_the_engine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    overrides = [f"model.path={save_tiny_model(tmp_path)}", "rollout.engine_options={blok_size: 64}"]
    config = load_config(overrides)
    config = replace(config, data=replace(config.data, max_prompt_length=64, max_response_length=64))
    for start in (
        lambda: start_workers(config, SimpleNamespace(), SimpleNamespace(), "cpu", 1),  # type: ignore[arg-type]
        lambda: asyncio.run(start_engine(config, "cpu", WorkerContext(0, 1))),
    ):
        with pytest.raises(ConfigError, match=r"blok_size is no argument .*did you mean 'block_size'"):
            start()


def ranks_holding(*gib: float, contexts: tuple[float, ...] | None = None) -> Any:
    """Trainer ranks on GPUs of 100 GiB. contexts: of each what its GPU holds beside torch's memory; 1 GiB"""
    answers = {
        TrainingRank.held_bytes: gib,
        TrainingRank.context_bytes: contexts or (1.0,) * len(gib),
        TrainingRank.device_bytes: (100.0,),
    }
    return SimpleNamespace(call=lambda method, *_: [each * 2**30 for each in answers[method]])


def test_colocated_engines_get_what_the_largest_rank_leaves() -> None:
    assert share_beside(load_config([]), ranks_holding(20.0, 30.3)) == 0.67  # less 1 GiB for the engine's context
    measured = ranks_holding(20.0, 30.3, contexts=(0.5, 3.2))
    assert share_beside(load_config([]), measured) == 0.65  # 100 - 30.3 - 3.2 - 1.0
    busy = ranks_holding(20.0, 10.0, contexts=(0.5, 30.0))  # another program on the second GPU
    assert share_beside(load_config([]), busy) == 0.59
    assert share_beside(load_config([]), ranks_holding(0.0)) == 0.9
    assert share_beside(load_config(["rollout.gpu_memory_utilization=0.5"]), ranks_holding(99.0)) == 0.5
    with pytest.raises(ConfigError, match=r"holds 100.0 of the GPU's 100.0 GiB .* actor.offload=optimizer"):
        share_beside(load_config([]), ranks_holding(98.0))


def test_a_context_is_what_a_gpu_holds_beside_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, of which 50.5 are free and torch has reserved 28: 1.5 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (50.5 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 28 * 2**30)
    rank = TrainingRank(SimpleNamespace(), SimpleNamespace(), None, None)  # type: ignore[arg-type]
    assert rank.context_bytes() == 1.5 * 2**30


def test_many_sequences_are_the_default_of_engines_whose_cache_holds_them() -> None:
    """On GPUs of 100 GiB, 2,048 sequences of 256 + 64 tokens, 4 kB each: 2.5 GiB."""
    shape = ModelShape(1_000_000, 0, 0, 8, 512, 8, 512, 128, 2048, 1000, 2, False)
    ranks: Any = SimpleNamespace(call=lambda method: [shape if method is TrainingRank.policy_shape else 100 * 2**30])
    config = load_config(["rollout.n=4", "data.max_prompt_length=1024", "data.max_response_length=64"])
    many, few = (with_limits(config, ranks, share).rollout for share in (0.5, 0.02))
    assert (many.max_num_seqs, many.max_num_batched_tokens) == (2048, 32768)
    assert (few.max_num_seqs, few.max_num_batched_tokens) == (None, None)
    given = replace(config, rollout=replace(config.rollout, max_num_seqs=64))
    assert with_limits(given, ranks, 0.5) is given
    tokens = replace(config, rollout=replace(config.rollout, max_num_batched_tokens=4096))
    assert with_limits(tokens, ranks, 0.5).rollout.max_num_batched_tokens == 4096


def test_a_batch_of_fewer_tokens_than_sequences_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.max_num_batched_tokens.*at least rollout\.max_num_seqs=64"):
        load_config(["rollout.max_num_batched_tokens=63", "rollout.max_num_seqs=64"])


def test_training_seeds_requests_of_the_transformers_engine_alone() -> None:
    seeds = {name: load_config([f"rollout.name={name}", "trainer.seed=3"]).rollout_seed for name in ("vllm", "hf")}
    assert seeds == {"vllm": None, "hf": 3}


@pytest.mark.parametrize(
    ("asked", "limited"),
    [
        ((2048, 1024), (512, 512)),  # the embedded model has 1024 positions
        ((2048, 96), (928, 96)),
        ((900, 124), (900, 124)),
        ((256, 2048), (256, 768)),
        ((600, 600), (512, 512)),
    ],
)
def test_lengths_are_limited_by_the_model_only_as_far_as_both_do_not_fit(
    asked: tuple[int, int], limited: tuple[int, int]
) -> None:
    lengths = DataConfig(max_prompt_length=asked[0], max_response_length=asked[1])
    found = with_model_limits(Config(model=ModelConfig(path=embedded_path("embedded:model")), data=lengths)).data
    assert (found.max_prompt_length, found.max_response_length) == limited
