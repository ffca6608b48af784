"""The configuration: veRL's keys are understood, unknown keys name the nearest, bad values name their key."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import ROOT
from toolrl.commands import CHAT, EVAL, GENERATE, PROBE
from verl.algorithms import ADV_ESTIMATORS, ALGORITHMS
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.filters import name_of
from verl.build.algorithm import build_algorithm
from verl.build.ranks import rank_spec
from verl.build.run import run_folder
from verl.config.commands import SFT, TRAIN, Command
from verl.config.load import RECIPES, known_keys, load_config
from verl.config.schema import Config, CorrectionConfig
from verl.embedded import embedded_path
from verl.errors import ConfigError
from verl.registry import resolve
from verl.workers.fsdp_engine import Offload


def built(config: Config) -> Algorithm:
    return build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("actor_rollout_ref.ref.fsdp_config.wrap_policy.min_num_params=0", "FSDP2 shards all state"),
        ("actor_rollout_ref.actor.fsdp_config.grad_offload=False", "FSDP2 shards all state"),
        ("actor_rollout_ref.model.use_remove_padding=True", "packs have no padding"),
        ("critic.ppo_mini_batch_size=256", "actor.ppo_mini_batch_size covers both"),
        ("algorithm.kl_ctrl.horizon=10000", "this is the only supported value"),
        ("actor_rollout_ref.rollout.top_p=null", "null keeps the default"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", "KL is in the reward"),
        ("custom_reward_function.name=judge", "custom_reward_function.path is not set"),
    ],
)
def test_an_obsolete_key_is_reported_with_its_reason(word: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    load_config([word])
    (record,) = caplog.records
    assert record.message.startswith("keys that have no effect here:") and why in record.message


def test_obsolete_keys_of_one_reason_share_a_line(caplog: pytest.LogCaptureFixture) -> None:
    load_config(
        ["critic.use_dynamic_bsz=true", "data.val_batch_size=3", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    )
    (record,) = caplog.records
    lines = record.message.splitlines()
    assert len(lines) == 3 and "critic.use_dynamic_bsz, actor_rollout_ref.actor.use_dynamic_bsz: " in lines[1]


def test_the_distribution_may_be_cut(caplog: pytest.LogCaptureFixture) -> None:
    overrides = ["actor_rollout_ref.rollout.top_p=0.9", "rollout.top_k=20", "rollout.repetition_penalty=1.5"]
    rollout = load_config(overrides).rollout
    assert (rollout.top_p, rollout.top_k, rollout.repetition_penalty, rollout.truncated) == (0.9, 20, 1.5, True)
    whole = load_config(["rollout.top_p=1.0", "rollout.top_k=0", "rollout.repetition_penalty=1"])
    assert whole.rollout == load_config([]).rollout and not whole.rollout.truncated and not caplog.records


def test_validation_uses_its_own_sampling_settings() -> None:
    files = "data.val_files=[x.parquet]"
    val = load_config([files, "rollout.top_p=0.9"]).rollout.val_kwargs
    assert (val.n, val.greedy, val.top_p) == (1, True, 1.0)
    overrides = ["n=30", "temperature=1.0", "top_p=0.6"]
    val = load_config(
        [files, *(f"actor_rollout_ref.rollout.val_kwargs.{word}" for word in overrides)]
    ).rollout.val_kwargs
    assert (val.n, val.temperature, val.top_p, val.greedy) == (30, 1.0, 0.6, False)
    sampled = [files, "rollout.val_kwargs.temperature=1.0"]
    for do_sample, greedy in (("false", True), ("true", False), ("null", False)):
        config = load_config([*sampled, f"actor_rollout_ref.rollout.val_kwargs.do_sample={do_sample}"])
        assert config.rollout.val_kwargs.greedy == greedy


def test_verls_keys_for_the_correction_are_understood() -> None:
    theirs = {"rollout_is": "sequence", "rollout_is_threshold": 3, "rollout_rs": "geometric"}
    theirs |= {"rollout_rs_threshold": 1.5, "rollout_rs_threshold_lower": 0.5, "rollout_token_veto_threshold": 1e-4}
    correction = load_config([f"algorithm.rollout_correction.{key}={each}" for key, each in theirs.items()]).algorithm
    assert correction.correction == CorrectionConfig(
        is_level="sequence",
        is_cap=3.0,
        rejection_level="geometric",
        rejection_bounds=[0.5, 1.5],
        token_veto=1e-4,
    )
    none = load_config(["algorithm.rollout_correction.rollout_is=null", "rollout.max_staleness=1"])
    assert none.algorithm.correction.is_level == "none"


@pytest.mark.parametrize(
    ("upper", "lower", "expected"),
    [
        ("4", None, [0.25, 4.0]),
        ("4", "null", [0.25, 4.0]),
        ("1", None, [1.0, 1.0]),
        ("1.5", "0", [0.0, 1.5]),
        (None, "0.1", [0.1, 2.0]),
        ("null", "0.1", [0.1, 2.0]),
        ("null", "null", None),
    ],
)
def test_verls_lower_bound_follows_from_the_upper_one(
    upper: str | None, lower: str | None, expected: list[float] | None
) -> None:
    key = "algorithm.rollout_correction.rollout_rs_threshold"
    given = {key: upper, f"{key}_lower": lower}
    overrides = [f"{each}={bound}" for each, bound in given.items() if bound is not None]
    assert load_config(overrides).algorithm.correction.rejection_bounds == expected
    for bound in ("0", "0.5", "-2"):
        with pytest.raises(ConfigError, match=r"rejection_bounds must be \[lower, upper\], finite and around 1"):
            load_config([f"{key}={bound}"])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("env.train_on_observations_until=200", 200),
        ("env.train_on_observations_until=1", 1),
        ("env.train_on_observations_until=7 env.train_on_observations=7", 7),
        ("env.train_on_observations_until=null", False),
        ("env.train_on_observations_until=0", None),
        ("env.train_on_observations_until=true", None),
        ("env.train_on_observations_until=2.5", None),
        ("env.train_on_observations_until='200'", None),
    ],
)
def test_observations_are_trained_until_a_step(overrides: str, expected: int | None) -> None:
    given = ["recipe=search_r1", *overrides.split()]
    if expected is None:
        with pytest.raises(ConfigError, match=r"env.train_on_observations_until must be a whole number from 1"):
            load_config(given)
        return
    env = load_config(given).env
    assert env.train_on_observations == expected and type(env.train_on_observations) is type(expected)
    assert [env.trains_observations(step) for step in (1, 2, 7, 8, 200, 201)] == [
        step <= expected for step in (1, 2, 7, 8, 200, 201)
    ]


@pytest.mark.parametrize("value", ["2.5", "abc", "null", "[1]", "'200'", "0", "-3"])
def test_train_on_observations_is_a_truth_value_or_a_number_of_steps(value: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.train_on_observations(=| must be true, false or a number)"):
        load_config(["recipe=search_r1", f"env.train_on_observations={value}"])


@pytest.mark.parametrize(
    "word", ["rollout.enforce_eager=true", "rollout.enforce_eager=false", "rollout.sampling_params.top_k=3"]
)
def test_a_key_of_verls_without_its_prefix_is_no_old_command_and_must_have_an_effect(
    word: str, caplog: pytest.LogCaptureFixture
) -> None:
    hf = ["rollout.name=hf"] if "eager" in word else []
    with pytest.raises(ConfigError, match=r"^rollout\.\w+(\.\w+)?=\w+ has no effect"):
        load_config(["data.val_files=[x]", *hf, "rollout.temperature=0", word], GENERATE)
    load_config(["data.val_files=[x]", *hf, "rollout.temperature=0", f"actor_rollout_ref.{word}"], GENERATE)
    assert f"actor_rollout_ref.{word.partition('=')[0]}" in caplog.text


@pytest.mark.parametrize(
    ("overrides", "placement", "estimator", "coefficient"),
    [
        ("actor.use_kl_loss=True actor.kl_loss_coef=0.01 actor.kl_loss_type=low_var_kl", "loss", "k3", 0.01),
        ("actor.use_kl_loss=True actor.kl_loss_coef=0.01", "loss", "k3", 0.01),
        ("actor.use_kl_loss=True", "loss", "k3", 0.001),
        ("actor.use_kl_loss=True actor.kl_loss_coef=0", "none", None, None),
        ("actor.use_kl_loss=True actor.kl_loss_type=mse", "loss", "k2", 0.001),
        ("actor.use_kl_loss=False", "reward", None, None),
        ("algorithm.use_kl_in_reward=False", "none", None, None),
        ("algorithm.use_kl_in_reward=False actor.use_kl_loss=True", "loss", "k3", 0.001),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.2", "reward", None, 0.2),
        ("algorithm.kl_penalty=low_var_kl", "reward", "k3", None),
        ("algorithm.kl_penalty=abs algorithm.kl_ctrl.kl_coef=0.2", "reward", "abs", 0.2),
        ("algorithm.kl_ctrl.kl_coef=0.0", "none", None, None),
        ("", None, None, None),
    ],
)
def test_kl_has_one_place(
    overrides: str, placement: str | None, estimator: str | None, coefficient: float | None
) -> None:
    algorithm = load_config(
        [f"actor_rollout_ref.{w}" if w.startswith("actor") else w for w in overrides.split()]
    ).algorithm
    assert (algorithm.kl_placement, algorithm.kl_estimator, algorithm.kl_coefficient) == (
        placement,
        estimator,
        coefficient,
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("actor.use_kl_loss=true algorithm.kl_placement=reward", "algorithm.kl_placement=reward contradicts"),
        ("algorithm.use_kl_in_reward=true algorithm.kl_placement=none", "algorithm.kl_placement=none contradicts"),
        ("algorithm.kl_ctrl.kl_coef=0.5 algorithm.kl_coefficient=0.3", "algorithm.kl_coefficient would be"),
        ("algorithm.kl_penalty=mse algorithm.kl_estimator=k3", "algorithm.kl_estimator would be"),
        ("algorithm.kl_ctrl.type=fixed algorithm.kl_target=0.2", "algorithm.kl_target would be"),
        ("rollout.sampling_params.temperature=0.3 rollout.temperature=0.7", "rollout.temperature would be"),
        ("algorithm.clip_low=0.1 actor.clip_ratio_low=0.3", "algorithm.clip_low would be"),
        ("env.train_on_observations=true actor.state_masking=true", "env.train_on_observations would be"),
        ("env.train_on_observations=true env.train_on_observations_until=5", "env.train_on_observations would be"),
        ("algorithm.filter_groups.enable=true algorithm.filters=[truncated]", "algorithm.filters would be"),
        ("actor.optim.lr_warmup_steps_ratio=0.2 actor.optim.warmup_steps=0.1", "actor.optim.warmup_steps would be"),
        ("data.seed=3 trainer.seed=4", "trainer.seed would be"),
        ("critic.optim.lr_warmup_steps=10 critic.optim.warmup_steps=3", "critic.optim.warmup_steps would be"),
        ("custom_reward_function.path=a.py reward.name=rlla", "reward.name would be"),
    ],
)
def test_two_keys_of_one_setting_must_agree(overrides: str, message: str) -> None:
    for order in (overrides.split(), overrides.split()[::-1]):
        with pytest.raises(ConfigError, match=message):
            load_config(order)


def test_a_command_without_search_has_no_environment(caplog: pytest.LogCaptureFixture) -> None:
    overrides = ["retriever.url=http://x", "retriever.topk=3", "max_turns=2"]
    plain = load_config([*overrides, "do_search=false"])
    assert (plain.env, plain.reward) == (Config().env, Config().reward)
    assert "max_turns, retriever.url, retriever.topk: do_search is false" in caplog.text
    assert load_config([*overrides, "do_search=true"]) == load_config(overrides)
    with pytest.raises(ConfigError, match="do_search=true needs a retriever"):
        load_config(["do_search=true"])
    with pytest.raises(ConfigError, match=r"do_search=false contradicts env\.tool_call_format"):
        load_config(["recipe=search_r1", "do_search=false"])


def test_a_context_shorter_than_the_lengths_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    lengths = ["data.max_prompt_length=100", "data.max_response_length=28"]
    with pytest.raises(ConfigError, match=r"rollout.max_model_len=127 is less than .* \(128\)"):
        load_config([*lengths, "actor_rollout_ref.rollout.max_model_len=127"])
    for enough in ("128", "null"):
        assert load_config([*lengths, f"rollout.max_model_len={enough}"]) == load_config(lengths)
    assert caplog.text.count("rollout.max_model_len: the context length is") == 2


@pytest.mark.parametrize(("limit", "draws"), [("", 10), ("=0", 10), ("=-1", 10), ("=3", 3)])
def test_filtered_groups_are_drawn_again_as_in_verl(limit: str, draws: int) -> None:
    overrides = ["algorithm.filter_groups.enable=True", "algorithm.adv_estimator=grpo", "rollout.n=2"]
    overrides += [f"algorithm.filter_groups.max_num_gen_batches{limit}"] if limit else []
    config = load_config(overrides)
    assert build_algorithm(config.algorithm, 512, 0).max_resample_rounds == draws
    assert load_config([*overrides[:3], "algorithm.max_resample_rounds=1"]).algorithm.max_resample_rounds == 1


def test_our_keys_fill_in_what_verls_leave_open() -> None:
    loss = load_config(
        ["actor.use_kl_loss=true", "algorithm.kl_coefficient=0.3", "algorithm.kl_estimator=k2"]
    ).algorithm
    assert (loss.kl_placement, loss.kl_coefficient, loss.kl_estimator) == ("loss", 0.3, "k2")
    adaptive = load_config(["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_target=0.2"])
    assert adaptive.algorithm.kl_target == 0.2
    without = load_config(["algorithm.kl_ctrl.kl_coef=0.5", "algorithm.kl_placement=none"])
    assert without.algorithm.kl_placement == "none"
    same = load_config(["rollout.sampling_params.top_p=0.95", "rollout.top_p=0.95"])
    assert same.rollout.top_p == 0.95


def test_the_bounds_of_the_clip_win_over_the_one_for_both() -> None:
    overrides = ["actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio=0.2"]
    for order in (overrides, overrides[::-1]):
        algorithm = load_config(order).algorithm
        assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)


@pytest.mark.parametrize("estimator", ADV_ESTIMATORS)
def test_an_estimator_changes_the_advantage_alone(estimator: str) -> None:
    word = f"algorithm.adv_estimator={estimator}"
    made, before = (built(load_config([*overrides, "rollout.n=2"])) for overrides in ([word], []))
    preset = resolve("algorithm", ADV_ESTIMATORS[estimator], ALGORITHMS)
    assert name_of(made.advantage) == name_of(preset.advantage)
    of_advantage = (
        "advantage",
        "needs_critic",
        "needs_group",
        "greedy_baseline",
        "needs_turns",
        "takes_turn_rewards",
        "by_group",
    )
    assert all(getattr(made, name) == getattr(preset, name) for name in of_advantage[1:])
    assert replace(made, **{name: getattr(before, name) for name in of_advantage}) == before


@pytest.mark.parametrize("name", ["toolrl_grpo", "dapo", "dr_grpo", "reinforce_pp_baseline", "gspo"])
def test_an_estimator_lies_over_a_preset(name: str) -> None:
    preset = resolve("algorithm", name, ALGORITHMS)
    made = built(load_config([f"algorithm.name={name}", "algorithm.adv_estimator=rloo", "rollout.n=2"]))
    assert name_of(made.advantage) == "rloo" and made.policy_loss is preset.policy_loss
    assert (made.aggregation, made.kl, made.filters) == (preset.aggregation, preset.kl, preset.filters)


def test_with_a_recipe_one_of_verls_keys_changes_that_setting_alone() -> None:
    plain = load_config(["recipe=toolrl_grpo"])
    for overrides in (
        ["algorithm.adv_estimator=grpo"],
        ["actor_rollout_ref.actor.use_kl_loss=False", "algorithm.kl_ctrl.kl_coef=0.001"],
        ["actor_rollout_ref.actor.clip_ratio=0.2", "actor_rollout_ref.actor.entropy_coeff=0.001"],
        ["actor_rollout_ref.rollout.n_agent=4", "algorithm.gamma=1.0", "algorithm.lam=1.0"],
        ["algorithm.use_kl_in_reward=True"],
    ):
        config = load_config(["recipe=toolrl_grpo", *overrides])
        assert repr(built(config)) == repr(built(plain)) and replace(config, algorithm=plain.algorithm) == plain
    wider = built(load_config(["recipe=toolrl_grpo", "actor_rollout_ref.actor.clip_ratio_high=0.28"]))
    assert repr(wider) == repr(built(plain)).replace("clip_high=0.2", "clip_high=0.28")
    moved = load_config(["recipe=search_r1", "actor_rollout_ref.actor.use_kl_loss=True"])
    assert built(moved).kl == built(load_config(["recipe=search_r1"])).kl
    off = load_config(["recipe=torl", "actor_rollout_ref.actor.use_kl_loss=False"])
    assert built(off).kl == built(load_config(["recipe=torl"])).kl


def test_the_estimator_of_pass_at_k_is_verls() -> None:
    overrides = ["algorithm.adv_estimator=grpo_passk", "rollout.n=2"]
    assert load_config(overrides).algorithm.options == {"divide_by_std": True}
    plain = load_config([*overrides, "algorithm.norm_adv_by_std_in_grpo=false"])
    assert plain.algorithm.options == {"divide_by_std": False}


def test_whether_an_advantage_is_divided_by_the_std(caplog: pytest.LogCaptureFixture) -> None:
    def advantage(*overrides: str) -> str:
        return name_of(built(load_config([*overrides, "rollout.n=2"])).advantage)

    plain = "algorithm.norm_adv_by_std_in_grpo=false"
    chosen = advantage("algorithm.adv_estimator=grpo", plain), advantage("recipe=toolrl_grpo", plain)
    assert chosen == ("group_centered", "group_centered")
    assert advantage("algorithm.name=dr_grpo", "algorithm.norm_adv_by_std_in_grpo=true") == "grpo"
    assert not caplog.records
    assert advantage("algorithm.adv_estimator=rloo", plain) == "rloo" and "is not divided by" in caplog.text


def test_warmups_are_shares_of_the_run_or_of_training_steps() -> None:
    overrides = [
        "recipe=search_r1",
        "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.285",
    ]  # 1005 steps, 2 updates
    config = load_config([*overrides, "model.path=m"])
    assert config.actor.optim.warmup_steps == 0.285
    assert rank_spec(config, built(config), "cpu", 1005).optimizer.warmup_steps == 572
    steps = load_config(["recipe=search_r1", "actor_rollout_ref.actor.optim.lr_warmup_steps=10"])
    assert steps.actor.optim.warmup_steps == 20
    left = load_config([*overrides, "actor_rollout_ref.actor.optim.lr_warmup_steps=-1"])
    assert left.actor.optim.warmup_steps == 0.285


@pytest.mark.parametrize(
    ("flags", "offload"),
    [("True True", "all"), ("True False", "params"), ("False True", "optimizer"), ("False False", "none")],
)
def test_verls_two_flags_of_offload_are_one_setting(flags: str, offload: str) -> None:
    keys = ("fsdp_config.param_offload", "fsdp_config.optimizer_offload")
    given = list(zip(keys, flags.split(), strict=True))
    overrides = [f"actor_rollout_ref.actor.{key}={flag}" for key, flag in given]
    overrides += ["algorithm.adv_estimator=gae", *(f"critic.model.{key}={flag}" for key, flag in given)]
    config = load_config(overrides)
    assert (config.actor.offload, config.critic.offload) == (offload, offload)
    assert Offload.of(offload) == Offload(*(flag == "True" for flag in flags.split()))


def test_options_of_benchmarks_are_of_known_parts() -> None:
    assert load_config(["eval.options.judge.url=http://x"], EVAL).eval.options == {"judge": {"url": "http://x"}}
    for wrong in ("eval.options={jugde: {url: x}}", "eval.options.search=http"):
        with pytest.raises(ConfigError, match=r"eval\.options must be options of search, judge and user"):
            load_config([wrong], EVAL)


def test_verls_prompt_key_renames_a_column() -> None:
    assert load_config(["data.prompt_key=prompt"]).data.columns == {}
    assert load_config(["data.prompt_key=messages"]).data.columns == {"messages": "prompt"}
    with pytest.raises(ConfigError, match=r"data\.columns and data\.prompt_key contradict"):
        load_config(["data.columns={other: prompt}", "data.prompt_key=messages"])


def test_adaptive_kl_by_verls_names() -> None:
    overrides = ["algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=10000"]
    assert load_config([*overrides, "algorithm.kl_ctrl.target_kl=0.3"]).algorithm.kl_target == 0.3
    assert load_config(overrides).algorithm.kl_target == 0.1
    with pytest.raises(ConfigError, match="horizon=99 is refused"):
        load_config(["algorithm.kl_ctrl.horizon=99"])
    assert load_config(["algorithm.kl_ctrl.type=fixed", "algorithm.kl_ctrl.target_kl=0.1"]).algorithm.kl_target is None


def test_verls_keys_for_tools_and_rewards() -> None:
    search = load_config(["max_turns=2", "retriever.url=http://h/retrieve", "retriever.topk=5"])
    assert (search.env.name, search.env.tool_call_format, search.reward.name) == ("tool", "search_r1", "search_r1")
    assert (search.env.max_tool_calls, search.env.max_turns) == (2, None)  # as many turns as they take
    assert search.env.tools == [{"name": "search", "retriever": "http", "urls": ["http://h/retrieve"], "topk": 5}]
    other = load_config(["recipe=otc_grpo", "retriever.url=http://h/retrieve"])
    assert (other.env.tool_call_format, other.reward.name) == ("otc_search", "otc_grpo") and other.env.tools != [
        "search"
    ]
    torl = load_config(["actor_rollout_ref.rollout.num_llm_calls_available=2"])
    assert (torl.env.tool_call_format, torl.env.tools, torl.env.max_tool_calls, torl.reward.name) == (
        "fence",
        ["python"],
        2,
        "torl",
    )
    group = "actor_rollout_ref.rollout.multi_turn."
    turns = [f"{group}enable=True", f"{group}max_user_turns=8", f"{group}max_assistant_turns=8"]
    env = load_config([*turns, "env.tools=[python]"]).env
    assert (env.name, env.tool_call_format, env.max_tool_calls) == ("tool", "hermes", 7)
    assert load_config([f"{group}format=hermes"]).env.tool_call_format is None
    scores = ["reward_model.structure_format_score=0.2", "reward_model.final_format_score=0.1"]
    assert load_config(scores).reward.options == {"with_form": True, "good_form": 0.2, "any_answer": 0.1}
    own = load_config(
        ["recipe=torl", "env.tools=[{name: python}]", "actor_rollout_ref.rollout.num_llm_calls_available=3"]
    )
    assert (own.env.tools, own.env.max_tool_calls) == ([{"name": "python"}], 3)
    filtered = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"]
    algorithm = load_config(filtered).algorithm
    assert (algorithm.filters, algorithm.max_resample_rounds) == (["zero_variance"], 10)
    plain = load_config(["actor_rollout_ref.rollout.qwen3_enable_thinking=False"]).model
    assert plain.chat_template_options == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (["actor_rollout_ref.model.path=m", "critic.model.path=${actor_rollout_ref.model.path}"], "m"),
        (["model.path=m", "critic.model.path=${actor_rollout_ref.model.path}"], "m"),
        (["actor_rollout_ref.model.path=m", "critic.path=${model.path}/critic"], "m/critic"),
        (["recipe=mini_ppo", "critic.path=${model.path}"], embedded_path("embedded:model")),
        (["model.path=${critic.path}", "critic.path=${trainer.project_name}"], "toolrl"),
        (["critic.path=${oc.env:TOOLRL_MODEL}"], "there"),
    ],
)
def test_values_may_be_made_of_other_keys(overrides: list[str], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLRL_MODEL", "there")
    assert load_config(overrides).critic.path == path


def test_values_of_other_commands_may_be_made_of_keys() -> None:
    assert load_config(["model.path=m", "eval.output=${model.path}.jsonl"], GENERATE).eval.output == "m.jsonl"
    with pytest.raises(ConfigError, match=r"eval\.output must end in \.jsonl.* got 'm\.parquet'"):
        load_config(["model.path=m", "eval.output=m.parquet"], GENERATE)
    files = load_config(["data.val_files=[${model.path}/x.jsonl]", "model.path=m"], GENERATE).data.val_files
    assert files == ["m/x.jsonl"]


def test_a_home_folder_needs_no_quotes() -> None:
    assert load_config(["model.path=~/models/m"]).model.path == str(Path("~/models/m").expanduser())


def test_a_mini_batch_larger_than_the_batch_is_one_update() -> None:
    """The default mini-batch is larger; one that is written is an error."""
    config = load_config(["data.train_batch_size=100", "actor.ppo_epochs=3"])
    assert (config.minibatches_per_step, config.updates_per_step) == (1, 3)
    assert "3 optimizer steps of 100 prompts" in config.batch_arithmetic()


def test_an_experiment_may_lie_in_folders_of_folders() -> None:
    config = load_config(["trainer.experiment_name=PATH/TO/SAVE_DIR", "trainer.default_local_dir=out"])
    assert run_folder(config.trainer) == Path("out/PATH/TO/SAVE_DIR").resolve()


def test_algorithms_that_compare_nothing_do_with_one_response() -> None:
    for name in ("ppo", "reinforce_pp", "remax"):
        assert load_config([f"algorithm.name={name}", "rollout.n=1"]).rollout.n == 1


def test_settings_of_algorithms_are_overrides() -> None:
    overrides = ["algorithm.options.share=0.01", "algorithm.filters=[truncated,{name: length, max_tokens: 9}]"]
    algorithm = load_config(["algorithm.name=kl_cov", "rollout.n=2", *overrides]).algorithm
    assert algorithm.options == {"share": 0.01}
    assert algorithm.filters == ["truncated", {"name": "length", "max_tokens": 9}]


def test_a_users_reward_by_verls_names() -> None:
    path = "custom_reward_function.path=mine.py"
    assert load_config([path]).reward.name == "mine.py:compute_score"
    assert load_config([path, "custom_reward_function.name=judge"]).reward.name == "mine.py:judge"


def test_other_commands_have_defaults_of_their_own() -> None:
    sft = load_config(["actor.optim.lr=3e-3", "trainer.total_training_steps=5"], SFT)
    assert (sft.actor.optim.lr, sft.trainer.total_training_steps, sft.actor.optim.schedule) == (3e-3, 5, "cosine")
    chat = load_config(["model.path=${model.tokenizer_path}", "model.tokenizer_path=m"], CHAT)
    assert (chat.model.path, chat.rollout.temperature, chat.data.max_prompt_length) == ("m", 0.0, 2048)
    assert load_config(["actor_rollout_ref.rollout.n=3"], GENERATE).rollout.n == 3
    assert load_config(["reward.timeout_s=${reward.num_workers}"], EVAL).reward.timeout_s == 1.0


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES.glob("*.yaml")])
def test_recipes_load_and_overrides_replace_their_settings(recipe: str) -> None:
    config = load_config([f"recipe={recipe}", "data.seed=7"])
    assert config.algorithm.name in ALGORITHMS and config.trainer.seed == 7
    assert load_config([f"recipe={recipe}", "rollout.n=9"]).rollout.n == 9


def test_reward_options_are_open() -> None:
    assert load_config(["reward.options.coarse=true"]).reward.options == {"coarse": True}
    assert load_config(["reward.options={coarse: true}"]).reward.options == {"coarse": True}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.train_batch_size=8", "actor.ppo_mini_batch_size=16"],
            "actor.ppo_mini_batch_size=16 has no effect: it is above data.train_batch_size",
        ),
        (["data.train_batchsize=3"], "unknown key 'data.train_batchsize'; did you mean 'data.train_batch_size'?"),
        (["rollout.zzz=3"], "unknown key 'rollout.zzz'; rollout has name, n, temperature, top_p,"),
        (
            ["critic.optim.qqqqqqqqqqq=3"],
            "critic.optim has lr, weight_decay, warmup_steps",
        ),
        (["trainer.max_response_length=3"], "did you mean 'data.max_response_length'?"),
        (["env.python=/usr/bin/python3"], "unknown key 'env.python'; it is now env.options.python"),
        (["env.on_sampling=honor"], "unknown key 'env.on_sampling'; it is now env.options.on_sampling"),
        (
            ["algorithm.correction.rejection_lower=0.5"],
            "it is now algorithm.correction.rejection_bounds=[lower, upper]",
        ),
        (["algorithm.correction.rejection_upper=2"], "it is now algorithm.correction.rejection_bounds=[lower, upper]"),
        (["sandbox.require_cgroup=true"], "it is now sandbox.isolation=strict"),
        (["data.on_bad_row=skip"], "it is now data.max_bad_share"),
        (["env.command=${env.python}"], "${env.python} names no key; it is now env.options.python"),
        (
            ["zzz.yyy=3"],
            "rollout, env, sandbox, algorithm, reward, trainer, eval; --help lists every key",
        ),
        (["rollout.n=four"], "rollout.n='four'"),
        (["rollout.n=0"], "rollout.n must be at least 1, got 0"),
        (["data.truncation=right"], "data.truncation must be error or left or drop"),
        (["data.max_bad_share=1.5"], "data.max_bad_share must be between 0 and 1"),
        (["data.train_batch_size=1000"], "must be a multiple of actor.ppo_mini_batch_size (256)"),
        (["actor.max_tokens_per_pack=1000"], "the longest sample would not fit into a pack"),
        (
            ["trainer.logger=[wandbb]"],
            "some of console, rollouts, verl_names, jsonl, tensorboard, wandb, trackio, mlflow, swanlab",
        ),
        (["recipe=toolrl_gpro"], "unknown recipe 'toolrl_gpro'; did you mean 'toolrl_grpo'?"),
        (
            ["algorithm.name=grpo", "rollout.n=2", "critic.optim.lr=1"],
            "critic.optim.lr=1 has no effect: the algorithm has no critic",
        ),
        (["algorithm.kl_placement=none", "algorithm.kl_coefficient=0.1"], "algorithm.kl_placement is none"),
        (["rollout.name=hf", "rollout.kv_cache_gib=4"], "rollout.kv_cache_gib=4 has no effect"),
        (
            ["rollout.name=hf", "rollout.max_num_batched_tokens=4096"],
            "rollout.max_num_batched_tokens=4096 has no effect",
        ),
        (
            ["rollout.name=hf", "rollout.speculation=ngram"],
            "rollout.speculation=ngram has no effect",
        ),
        (["rollout.name=hf", "rollout.enforce_eager=true"], "rollout.enforce_eager=True has no effect"),
        (
            ["rollout.name=hf", "rollout.engine_options={block_size: 64}"],
            "has no effect: the transformers engine takes none",
        ),
        (["trainer.device=cpu", "ref.offload_params=true"], "ref.offload_params=True has no effect: there is no GPU"),
        (["trainer.device=cpu", "actor.offload=optimizer"], "actor.offload=optimizer has no effect"),
        (["rollout.kv_cache_gib=4", "trainer.device=cuda"], "rollout.kv_cache_gib=4 has no effect: on a GPU"),
        (["trainer.num_threads=4", "trainer.device=cuda"], "trainer.num_threads=4 has no effect"),
        (["trainer.test_freq=7"], "trainer.test_freq=7 has no effect: there are no data.val_files"),
        (["recipe=mini_grpo", "data.val_files=[]", "trainer.keep_best=2"], "trainer.keep_best=2 has no effect"),
        (["eval.limit=9"], "eval.limit=9 has no effect: eval.benchmarks is empty"),
        (["eval.data_dir=x"], "eval.data_dir=x has no effect"),
        (["eval.limit=0"], "eval.limit must be at least 1, got 0"),
        (["env.turn_schedule=[[1,5]]"], "env.turn_schedule has no effect: without env.tool_call_format"),
        *(
            (
                [f"env.turn_schedule={given}"],
                "must be pairs [step, turns] of numbers from 1, in the order of steps",
            )
            for given in ("[[0,5]]", "[[1,0]]", "[[1]]", "[[9,5],[9,6]]", "[[9,5],[1,6]]")
        ),
        (["trainer.health_timeout_s=0"], "trainer.health_timeout_s must be positive, got 0"),
        (
            ["algorithm.adv_estimator=grpo", "rollout.n=2", "critic.path=x"],
            "critic.path=x has no effect: the algorithm",
        ),
        (["rollout.gpu_memory_utilization=0.5", "trainer.device=cpu"], "has no effect: there is no GPU"),
        (["rollout.tensor_model_parallel_size=2"], "must divide trainer.n_gpus_per_node (1)"),
        *(
            (
                [f"trainer.experiment_name={name}"],
                "trainer.experiment_name must be a folder name, or several such as a/b",
            )
            for name in ("a/../b", "..", "/a", "a/", "a//b", ".hidden")
        ),
        (["model.path=${HOME}"], "model.path: ${HOME} names no key"),
        (["model.path=${HDFS_ROOT:-x}/m"], "model.path=${HDFS_ROOT:-x}/m: "),
        (["model.path=${oc.env:NOT_SET_ANYWHERE}"], "model.path=${oc.env:NOT_SET_ANYWHERE}: "),
        (["model.path=${model.pth}"], "${model.pth} names no key; did you mean 'model.path'?"),
        (["model.path=${critic.path}", "critic.model.path=${model.path}"], "circular references"),
        (
            ["actor_rollout_ref.actor.entropy_coef=0"],
            "unknown key 'actor_rollout_ref.actor.entropy_coef'; did you mean 'actor_rollout_ref.actor.entropy_coeff'?",
        ),
        (["actor_rollout_ref.rollout.tempratur=1"], "did you mean 'actor_rollout_ref.rollout.temperature'?"),
        (["algorithm.use_kl_in_rewards=true"], "did you mean 'algorithm.use_kl_in_reward'?"),
        (["actor_rollout_ref.actor.use_kl_loss=True", "algorithm.use_kl_in_reward=True"], "KL has a single placement"),
        (["algorithm.use_kl_in_reward=1.5"], "algorithm.use_kl_in_reward must be true or false, got 1.5"),
        (["algorithm.kl_penalty=full"], "algorithm.kl_penalty must be one of kl, k1"),
        (["algorithm.kl_ctrl.type=linear"], "algorithm.kl_ctrl.type must be fixed or adaptive"),
        (["actor_rollout_ref.rollout.n_agent=0"], "actor_rollout_ref.rollout.n_agent must be a whole number from 1"),
        (["actor_rollout_ref.actor.clip_ratio=wide"], "actor_rollout_ref.actor.clip_ratio must be a number"),
        (["critic.ppo_mini_batch_size=8"], "critic.ppo_mini_batch_size=8 must equal"),
        (["actor_rollout_ref.rollout.response_length=9"], "must equal data.max_response_length=512"),
        (["actor_rollout_ref.rollout.do_sample=False"], "rollout.temperature must be positive"),
        (["data.truncation=middle"], "data.truncation must be error or left or drop"),
        (["actor.optim.warmup_steps=2.5"], "optim.warmup_steps must be a whole number, or a share below 1, got 2.5"),
        (["critic.optim.lr_warmup_steps_ratio=1.5"], "critic.optim.lr_warmup_steps_ratio must be a share below 1"),
        (["algorithm.max_resample_rounds=0"], "algorithm.max_resample_rounds must be at least 1"),
        (["algorithm.overlong_buffer=-1"], "algorithm.overlong_buffer must be 0 or more"),
        (["algorithm.clip_low=-3"], "algorithm.clip_low must be positive"),
        (["algorithm.kl_estimator=k9"], "algorithm.kl_estimator must be one of k1, k2, k3, abs, unbiased_k3, got 'k9'"),
        (["algorithm.aggregation=mean"], "algorithm.aggregation must be one of token-mean"),
        (["algorithm.kl_coefficient=nan"], "algorithm.kl_coefficient must be a finite number"),
        (["actor.optim.lr=inf"], "actor.optim.lr must be a finite number"),
        (
            ["data.train_files=[a,b]", "data.weights=[1]"],
            "one number between 1e-6 and 1e6 for each of the 2 data.train_files",
        ),
        (["actor_rollout_ref.actor.use_kl_loss=no"], "use_kl_loss must be true or false, got 'no'"),
        (
            [
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.actor.kl_loss_coef=0.1",
                "actor_rollout_ref.actor.kl_loss_type=full",
            ],
            "kl_loss_type must be one of kl, k1, mse",
        ),
        (["algorithm.adv_estimator=[1]"], "algorithm.adv_estimator=[1]"),
        (["algorithm.adv_estimator=gea"], "algorithm.adv_estimator must be one of gae, grpo"),
        (["rollout.max_staleness=-1"], "rollout.max_staleness must be 0 or more"),
        (["algorithm.correction.is_level=geometric"], "algorithm.correction.is_level must be one of auto, none, token"),
        (
            ["algorithm.correction.rejection_level=response"],
            "algorithm.correction.rejection_level must be one of none, token, sequence, geometric",
        ),
        (["algorithm.rollout_correction.rollout_is_threshold=0.5"], "algorithm.correction.is_cap must be at least 1"),
        *(
            ([f"algorithm.correction.rejection_bounds={bounds}"], "rejection_bounds must be [lower, upper], finite and")
            for bounds in ("[1.5,2]", "[0.1,0.9]", "[-0.1,2]", "[0.5,inf]", "[2]", "[0.5,1,2]", "[]")
        ),
        (["algorithm.correction.token_veto=0"], "algorithm.correction.token_veto must be more than 0"),
        (["rollout.top_p=0"], "rollout.top_p must be more than 0, at most 1"),
        (["rollout.top_k=-2"], "rollout.top_k must be at least 1, or -1 for all tokens"),
        (["rollout.repetition_penalty=0"], "rollout.repetition_penalty must be positive"),
        (["data.val_files=[x]", "rollout.val_kwargs.n=4"], "rollout.val_kwargs.n=4 greedy responses are identical"),
        (["rollout.val_kwargs.temperature=1.0"], "has no effect: there are no data.val_files"),
        (["data.val_files=[x]", "rollout.val_kwargs.top_p=0.5"], "validation is greedy"),
        (["trainer.total_epochs=0"], "trainer.total_epochs must be at least 1"),
        (["rollout.max_staleness=1", "rollout.max_reuse=2"], "rollout.max_reuse=2: steps that reuse groups draw"),
        (["actor.fsdp_config.optimizer_offlod=true"], "unknown key 'actor.fsdp_config.optimizer_offlod'"),
        (["critic.model.fsdp_config.model_dtyp=fp32"], "unknown key 'critic.model.fsdp_config.model_dtyp'"),
        (
            ["critic.fsdp.model_dtype=bf16"],
            "critic.fsdp.model_dtype=bf16 is refused: the optimizer's weights are float32",
        ),
        (["data.seed"], "is not key=value"),
        (["~data.seed"], "neither deletions nor sweeps"),
        (["data.seed=1,2"], "neither deletions nor sweeps"),
    ],
)
def test_an_unusable_setting_is_an_error_that_names_its_key(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("command", "overrides", "message"),
    [
        (SFT, ["trainer.test_freq=3"], "trainer.test_freq=3 has no effect: there are no data.val_files"),
        (SFT, ["actor.optim.schedule=constant", "actor.optim.min_lr_ratio=0.5"], "actor.optim.schedule is constant"),
        (SFT, ["actor.max_tokens_per_pack=4095"], "the longest sample would not fit into a pack"),
        (
            SFT,
            ["rollout.n=3"],
            "rollout.n=3 has no effect: `sft` does not use rollout; it uses data, env, model, lora, sft, actor, tr",
        ),
        (SFT, ["actor.ppo_epochs=1"], "actor.ppo_epochs=1 has no effect: `sft` does not use it; of actor it uses max_"),
        (SFT, ["actor.optim.lrr=3"], "did you mean 'actor.optim.lr'?"),
        (
            SFT,
            ["rollout.nn=3"],
            "unknown key 'rollout.nn'; there are data, env, model, lora, sft, actor, trainer; --help",
        ),
        (SFT, ["recipe=torl"], "recipe=torl has no effect: `sft` takes no recipe"),
        (GENERATE, ["rollout.name=hf", "rollout.kv_cache_gib=2"], "rollout.kv_cache_gib=2 has no effect"),
        (GENERATE, ["rollout.name=hf", "rollout.tensor_model_parallel_size=2"], "engine has no tensor parallelism"),
        (GENERATE, ["trainer.device=cuda", "rollout.kv_cache_gib=2"], "rollout.kv_cache_gib=2 has no effect: on a GPU"),
        (GENERATE, ["trainer.device=cpu", "rollout.gpu_memory_utilization=0.5"], "there is no GPU"),
        (GENERATE, ["rollout.top_p=0.5"], "rollout.top_p=0.5 has no effect: rollout.temperature=0 is greedy"),
        (GENERATE, ["rollout.temperature=1", "rollout.top_k=-3"], "rollout.top_k must be at least 1, or -1"),
        (GENERATE, ["env.train_on_observations=true"], "`generate` does not use it; of env it uses name, options"),
        (GENERATE, ["data.prompt_template=p"], "data.prompt_template=p has no effect: env.tool_call_format is not set"),
        (GENERATE, ["reward.name=env"], "reward.name=env needs an environment that judges"),
        (EVAL, ["model.path=${HOME}"], "${HOME} names no key"),
        (EVAL, ["rollout.max_staleness=1"], "`eval` does not use it; of rollout it uses name, temperature"),
        (EVAL, ["critic.optim.lr=1e-5"], "`eval` does not use critic; it uses data, model, rollout, trainer, env"),
        (EVAL, ["rollout.n=4"], "rollout.n=4 greedy responses are identical"),
        (EVAL, ["rollout.n=257", "rollout.temperature=1"], "rollout.n must be at most 256, got 257"),
        (PROBE, ["model.enable_gradient_checkpointing=true"], "`probe` does not use it; of model it uses path"),
        (CHAT, ["rollout.n=2"], "`chat` does not use it; of rollout it uses name"),
        (CHAT, ["data.val_files=[x.parquet]"], "`chat` does not use it; of data it uses max_prompt_length"),
        (CHAT, ["reward.options.coarse=true"], "`chat` does not use reward; it uses data, model, rollout, trainer"),
        (CHAT, ["reward.timeout_s=3"], "`chat` does not use reward"),
    ],
)
def test_other_commands_refuse_what_has_no_effect(command: Command, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides, command)
    assert message in str(caught.value)


def test_verls_keys_of_groups_that_a_command_does_not_use_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(["actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.model.path=m"], EVAL)
    assert config.model.path == "m"
    assert "actor_rollout_ref.actor.optim.lr: `eval` does not use actor" in caplog.text


@pytest.mark.parametrize("seed", [-1, 20240101])
def test_seeds_leave_room_for_those_of_single_responses(seed: int) -> None:
    for command in (SFT, GENERATE, EVAL, PROBE):
        with pytest.raises(ConfigError, match=r"trainer\.seed must be"):
            load_config([f"trainer.seed={seed}"], command)


def test_keys_that_ask_for_nothing_or_the_default_are_accepted() -> None:
    load_config(["trainer.test_freq=0", "trainer.keep_best=1", "critic.optim.lr=1e-5"])
    load_config(["algorithm.name=grpo", "rollout.n=2", "critic.optim.lr=1e-5"])
    load_config(["trainer.test_freq=3", "data.val_files=[x.parquet]"], SFT)
    load_config(["trainer.test_freq=7", "trainer.keep_best=2", "eval.benchmarks=[bfcl]", "eval.limit=9"])
    load_config(["rollout.temperature=0.0", "rollout.kv_cache_gib=2", "rollout.gpu_memory_utilization=0.8"], GENERATE)


def test_batch_arithmetic_is_spelled_out() -> None:
    assert Config().batch_arithmetic() == (
        "a step: 1024 prompts x 1 rollouts = 1024 samples; 4 optimizer steps of 256 prompts = 256 samples each; "
        "packs of at most 16384 tokens"
    )
    sizes = ["data.train_batch_size=16", "actor.ppo_mini_batch_size=16", "rollout.n=8"]
    one = load_config(sizes).batch_arithmetic()
    assert one.startswith(
        "a step: 16 prompts x 8 rollouts = 128 samples; 1 optimizer step of 16 prompts = 128 samples;"
    )
    assert "actor.optim.lr" in known_keys() and "reward.options." in known_keys()


def test_loading_imports_nothing_heavy() -> None:
    code = "import sys, verl.config.load; assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_agent_is_the_short_form_of_evaluating_and_training_a_program(tmp_path: Path) -> None:
    for command, files in ((EVAL, "eval.benchmarks"), (TRAIN, "data.train_files")):
        overrides = ["agent=my.py:run", "env.tool_call_format=toolrl", "data=rows.jsonl", "model.path=m"]
        config = load_config(overrides, command)
        assert (config.env.name, config.env.agent, config.reward.name) == ("agent", "my.py:run", "env")
        group, _, key = files.partition(".")
        assert getattr(getattr(config, group), key) == ["rows.jsonl"]
        assert load_config([*overrides, "reward.name=rlla"], command).reward.name == "rlla"
        with pytest.raises(ConfigError, match=r"env\.agent is given twice, once by its shorthand agent="):
            load_config([*overrides, "env.agent=other.py:run"], command)
    with pytest.raises(ConfigError, match=r"eval\.handler=tool_n1 and env\.tool_call_format=toolrl differ"):
        load_config(["agent=my.py:run", "env.tool_call_format=toolrl", "eval.handler=tool_n1"], EVAL)
