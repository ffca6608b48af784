"""The configuration: veRL's words are understood, unknown keys name the nearest, bad values name their key."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from verl.algorithms import ALGORITHMS
from verl.config.idle import IN_A_CHAT
from verl.config.load import RECIPES, known_keys, load_config, load_plain
from verl.config.schema import Config, CorrectionConfig, EvalConfig, GenerationConfig, ProbeConfig, SFTConfig
from verl.errors import ConfigError

# Every override of ToolRL's run_grpo.sh.
TOOLRL_SCRIPT = [
    "algorithm.adv_estimator=grpo",
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "data.train_batch_size=512",
    "data.val_batch_size=128",
    "data.max_prompt_length=2048",
    "data.max_response_length=1024",
    "actor_rollout_ref.model.path=MODEL",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=128",
    "actor_rollout_ref.actor.use_dynamic_bsz=True",
    "actor_rollout_ref.actor.use_kl_loss=False",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.grad_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "trainer.critic_warmup=0",
    "trainer.logger=['console','wandb']",
    "trainer.project_name=TinyZero",
    "trainer.experiment_name=run",
    "trainer.n_gpus_per_node=2",
    "trainer.nnodes=1",
    "trainer.save_freq=15",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]


# The settings of its run_ppo.sh.
TOOLRL_PPO_SCRIPT = [
    "algorithm.adv_estimator=gae",
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "data.train_batch_size=512",
    "data.val_batch_size=128",
    "data.max_prompt_length=1024",
    "data.max_response_length=512",
    "actor_rollout_ref.model.path=MODEL",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.actor.ppo_mini_batch_size=128",
    "actor_rollout_ref.actor.ppo_micro_batch_size=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size=8",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3",
    "actor_rollout_ref.rollout.n=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size=4",
    "critic.optim.lr=1e-5",
    "critic.model.path=MODEL",
    "critic.ppo_micro_batch_size=8",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "trainer.critic_warmup=0",
    "trainer.logger=['console','wandb']",
    "trainer.project_name=TinyZero",
    "trainer.experiment_name=run",
    "trainer.n_gpus_per_node=2",
    "trainer.nnodes=1",
    "trainer.save_freq=15",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
]


def test_toolrls_script_is_understood(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config(TOOLRL_SCRIPT)
    assert (config.model.path, config.actor.optim.lr, config.rollout.n) == ("MODEL", 1e-6, 4)
    assert (config.data.train_files, config.data.val_files) == (["train.parquet"], ["test.parquet"])
    algorithm = config.algorithm
    assert (algorithm.name, algorithm.kl_placement, algorithm.kl_coefficient) == ("grpo", "reward", 0.001)
    assert config.trainer.logger == ["console", "wandb"] and config.minibatches_per_step == 4
    moot = {record.message.partition(" ")[0] for record in caplog.records}
    assert len(caplog.records) == len(moot) == 6 and "data.val_batch_size" in moot
    assert config.ref.offload_params and not config.actor.offload_params


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("actor_rollout_ref.actor.fsdp_config.grad_offload=False", "FSDP2 shards every state"),
        ("actor_rollout_ref.model.use_remove_padding=True", "packs have no padding"),
        ("critic.ppo_mini_batch_size=8", "the critic's mini-batches are the actor's"),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", "KL is paid in the reward"),
    ],
)
def test_a_moot_key_is_told_with_its_reason(word: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
    load_config([word])
    (record,) = caplog.records
    assert "has no effect here: " in record.message and why in record.message


def test_a_whole_distribution_may_be_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    load_config(["actor_rollout_ref.rollout.top_p=1.0", "rollout.top_k=-1", "rollout.min_p=null"])
    assert len(caplog.records) == 3
    assert all("from the policy's whole distribution" in record.message for record in caplog.records)


def test_verls_words_for_the_correction_are_understood() -> None:
    theirs = {"rollout_is": "sequence", "rollout_is_threshold": 3, "rollout_rs": "geometric"}
    theirs |= {"rollout_rs_threshold": 1.5, "rollout_rs_threshold_lower": 0.5, "rollout_token_veto_threshold": 1e-4}
    correction = load_config([f"algorithm.rollout_correction.{key}={each}" for key, each in theirs.items()]).algorithm
    assert correction.correction == CorrectionConfig("sequence", 3.0, "geometric", 1.5, 0.5, 1e-4)
    none = load_config(["algorithm.rollout_correction.rollout_is=null", "rollout.max_staleness=1"])
    assert none.algorithm.correction.weight == "none"


@pytest.mark.parametrize(
    ("words", "placement", "estimator", "coefficient"),
    [
        ("actor.use_kl_loss=True actor.kl_loss_coef=0.01 actor.kl_loss_type=low_var_kl", "loss", "k3", 0.01),
        ("actor.use_kl_loss=True actor.kl_loss_coef=0.01", "loss", "k3", 0.01),
        ("algorithm.kl_ctrl.kl_coef=0.0", "none", "k1", 0.0),
        ("", None, None, None),
    ],
)
def test_kl_has_one_place(words: str, placement: str | None, estimator: str | None, coefficient: float | None) -> None:
    algorithm = load_config([f"actor_rollout_ref.{w}" if w.startswith("actor") else w for w in words.split()]).algorithm
    assert (algorithm.kl_placement, algorithm.kl_estimator, algorithm.kl_coefficient) == (
        placement,
        estimator,
        coefficient,
    )


def test_the_bounds_of_the_clip_win_over_the_one_for_both() -> None:
    words = ["actor_rollout_ref.actor.clip_ratio_high=0.28", "actor_rollout_ref.actor.clip_ratio=0.2"]
    for order in (words, words[::-1]):
        algorithm = load_config(order).algorithm
        assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)


def test_toolrls_ppo_script_is_understood() -> None:
    config = load_config(TOOLRL_PPO_SCRIPT)
    assert (config.algorithm.name, config.critic.optim.lr, config.critic.path) == ("ppo", 1e-5, "MODEL")
    assert (config.rollout.n, config.data.max_prompt_length, config.trainer.critic_warmup) == (1, 1024, 0)


@pytest.mark.parametrize(
    ("estimator", "name"),
    [("gae", "ppo"), ("reinforce_plus_plus", "reinforce_pp"), ("grpo_passk", "pass_at_k"), ("rloo", "rloo")],
)
def test_verls_estimators_are_algorithms(estimator: str, name: str) -> None:
    assert load_config([f"algorithm.adv_estimator={estimator}"]).algorithm.name == name


def test_algorithms_that_compare_nothing_do_with_one_reply() -> None:
    for name in ("ppo", "reinforce_pp", "remax"):
        assert load_config([f"algorithm.name={name}", "rollout.n=1"]).rollout.n == 1


def test_settings_of_algorithms_are_words() -> None:
    words = ["algorithm.options.share=0.01", "algorithm.filters=[truncated,{name: length, max_tokens: 9}]"]
    algorithm = load_config(["algorithm.name=kl_cov", *words]).algorithm
    assert algorithm.options == {"share": 0.01}
    assert algorithm.filters == ["truncated", {"name": "length", "max_tokens": 9}]


def test_a_users_reward_by_verls_names() -> None:
    path = "custom_reward_function.path=mine.py"
    assert load_config([path]).reward.name == "mine.py:compute_score"
    assert load_config([path, "custom_reward_function.name=judge"]).reward.name == "mine.py:judge"


def test_other_commands_have_trees_of_their_own() -> None:
    sft = load_plain(["optim.lr=3e-3", "trainer.total_training_steps=5"], SFTConfig)
    assert (sft.optim.lr, sft.trainer.total_training_steps, sft.optim.schedule) == (3e-3, 5, "cosine")
    with pytest.raises(ConfigError, match=r"unknown key 'rollout\.n'"):
        load_plain(["rollout.n=3"], SFTConfig)
    assert load_plain(["n=3"], GenerationConfig).n == 3


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES.glob("*.yaml")])
def test_recipes_load_and_words_lie_over_them(recipe: str) -> None:
    config = load_config([f"recipe={recipe}", "data.seed=7"])
    assert config.algorithm.name in ALGORITHMS and config.data.seed == 7
    assert load_config([f"recipe={recipe}", "rollout.n=9"]).rollout.n == 9


def test_reward_options_are_open() -> None:
    assert load_config(["reward.options.coarse=true"]).reward.options == {"coarse": True}
    assert load_config(["reward.options={coarse: true}"]).reward.options == {"coarse": True}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["data.train_batchsize=3"], "unknown key 'data.train_batchsize'; did you mean 'data.train_batch_size'?"),
        (["rollout.zzz=3"], "unknown key 'rollout.zzz'; rollout has name, n, temperature, dtype,"),
        (
            ["critic.optim.qqqqqqqqqqq=3"],
            "critic.optim has lr, betas, weight_decay, warmup_steps, schedule, min_lr_ratio",
        ),
        (["trainer.max_response_length=3"], "did you mean 'data.max_response_length'?"),
        (
            ["zzz.yyy=3"],
            "there are data, model, actor, ref, critic, rollout, env, sandbox, algorithm, reward, trainer; --help",
        ),
        (["rollout.n=four"], "rollout.n='four'"),
        (["rollout.n=0"], "rollout.n must be at least 1, got 0"),
        (["data.truncation=right"], "data.truncation must be error or left or drop"),
        (["data.max_bad_share=1.5"], "data.max_bad_share must be between 0 and 1"),
        (["data.train_batch_size=100"], "must be a multiple of actor.ppo_mini_batch_size (128)"),
        (["actor.max_tokens_per_pack=3000"], "the longest sample would fit no pack"),
        (["trainer.logger=[wandbb]"], "some of console, jsonl, tensorboard, wandb"),
        (["recipe=toolrl_gpro"], "unknown recipe 'toolrl_gpro'; did you mean 'toolrl_grpo'?"),
        (["algorithm.name=grpo", "critic.optim.lr=1"], "critic.optim.lr=1 has no effect: the algorithm has no critic"),
        (["algorithm.kl_placement=none", "algorithm.kl_coefficient=0.1"], "algorithm.kl_placement is none"),
        (["rollout.name=hf", "rollout.kv_cache_gib=4"], "rollout.kv_cache_gib=4 has no effect"),
        (
            ["rollout.name=hf", "rollout.max_num_batched_tokens=4096"],
            "rollout.max_num_batched_tokens=4096 has no effect",
        ),
        (["trainer.device=cpu", "ref.offload_params=true"], "ref.offload_params=True has no effect: there is no GPU"),
        (["trainer.device=cpu", "actor.offload_optimizer=true"], "actor.offload_optimizer=True has no effect"),
        (["rollout.kv_cache_gib=4", "trainer.device=cuda"], "rollout.kv_cache_gib=4 has no effect: on a GPU"),
        (["trainer.num_threads=4", "trainer.device=cuda"], "trainer.num_threads=4 has no effect"),
        (["trainer.test_freq=7"], "trainer.test_freq=7 has no effect: there are no data.val_files"),
        (["recipe=mini_grpo", "data.val_files=[]", "trainer.keep_best=2"], "trainer.keep_best=2 has no effect"),
        (["trainer.eval_limit=9"], "trainer.eval_limit=9 has no effect: trainer.eval_benchmarks names none"),
        (["trainer.eval_data_dir=x"], "trainer.eval_data_dir=x has no effect"),
        (["trainer.eval_limit=0"], "trainer.eval_limit must be at least 1, got 0"),
        (["critic.model.path=x"], "critic.model.path=x has no effect: the algorithm has no critic"),
        (
            ["actor_rollout_ref.rollout.gpu_memory_utilization=0.5", "trainer.device=cpu"],
            "actor_rollout_ref.rollout.gpu_memory_utilization=0.5 has no effect: there is no GPU",
        ),
        (["rollout.tensor_model_parallel_size=2"], "must divide trainer.n_gpus_per_node (1)"),
        (["trainer.experiment_name=a/b"], "trainer.experiment_name must be a plain folder name"),
        (["algorithm.name=grpo", "rollout.n=1"], "has nothing to compare"),
        (["actor_rollout_ref.actor.use_kl_loss=True"], "says where KL is paid but not how much"),
        (["algorithm.name=rloo", "rollout.n=1"], "has nothing to compare"),
        (["algorithm.max_draws=0"], "algorithm.max_draws must be at least 1"),
        (["algorithm.overlong_buffer=-1"], "algorithm.overlong_buffer must be 0 or more"),
        (["algorithm.clip_low=-3"], "algorithm.clip_low must be positive"),
        (["algorithm.kl_estimator=k9"], "algorithm.kl_estimator must be one of k1, k2, k3, got 'k9'"),
        (["algorithm.aggregation=mean"], "algorithm.aggregation must be one of token-mean"),
        (["algorithm.kl_coefficient=nan"], "algorithm.kl_coefficient must be a finite number"),
        (["actor.optim.lr=inf"], "actor.optim.lr must be a finite number"),
        (["data.train_files=[a,b]", "data.weights=[1]"], "one positive number for each of the 2 data.train_files"),
        (["actor_rollout_ref.actor.use_kl_loss=no"], "use_kl_loss must be true or false, got 'no'"),
        (
            [
                "actor_rollout_ref.actor.use_kl_loss=true",
                "actor_rollout_ref.actor.kl_loss_coef=0.1",
                "actor_rollout_ref.actor.kl_loss_type=abs",
            ],
            "kl_loss_type must be one of kl, k1, mse",
        ),
        (["algorithm.adv_estimator=[1]"], "algorithm.name"),
        (
            ["algorithm.name=dapo", "algorithm.adv_estimator=grpo"],
            "algorithm.adv_estimator=grpo and algorithm.name=dapo are two words for the same setting and disagree",
        ),
        (["rollout.max_staleness=-1"], "rollout.max_staleness must be 0 or more"),
        (["algorithm.correction.weight=geometric"], "algorithm.correction.weight must be one of auto, none, token"),
        (
            ["algorithm.correction.mask=reply"],
            "algorithm.correction.mask must be one of none, token, sequence, geometric",
        ),
        (["algorithm.rollout_correction.rollout_is_threshold=0.5"], "algorithm.correction.upper must be at least 1"),
        (["algorithm.correction.mask_lower=1.5"], "algorithm.correction.mask_lower must be between 0 and 1"),
        (["algorithm.correction.veto=0"], "algorithm.correction.veto must be more than 0"),
        (["actor_rollout_ref.rollout.top_p=0.9"], "rollout.top_p=0.9 would sample from another distribution"),
        (["rollout.top_k=50"], "leave it at -1 and set rollout.temperature instead"),
        (["rollout.min_p=0.05"], "rollout.min_p=0.05 would sample"),
        (["trainer.total_epochs=0"], "trainer.total_epochs must be at least 1"),
        (["rollout.max_staleness=1", "rollout.max_reuse=2"], "rollout.max_reuse=2: steps that use groups again draw"),
        (["data.seed"], "is not key=value"),
        (["~data.seed"], "neither deletions nor sweeps"),
        (["data.seed=1,2"], "neither deletions nor sweeps"),
    ],
)
def test_what_cannot_be_used_names_its_key(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(words)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        (SFTConfig, ["trainer.test_freq=3"], "trainer.test_freq=3 has no effect: there are no data.val_files"),
        (SFTConfig, ["optim.schedule=constant", "optim.min_lr_ratio=0.5"], "optim.schedule is constant"),
        (GenerationConfig, ["engine=hf", "kv_cache_gib=2"], "kv_cache_gib=2 has no effect"),
        (GenerationConfig, ["device=cuda", "kv_cache_gib=2"], "kv_cache_gib=2 has no effect: on a GPU"),
        (GenerationConfig, ["device=cpu", "gpu_memory_utilization=0.5"], "there is no GPU"),
        (GenerationConfig, ["model.compute_dtype=float32"], "dtype says what the engine computes in"),
    ],
)
def test_other_commands_refuse_what_has_no_effect(kind: type, words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plain(words, kind)
    assert said in str(caught.value)


@pytest.mark.parametrize("seed", [-1, 20240101])
def test_seeds_leave_room_for_those_of_single_replies(seed: int) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.seed must be"):
        load_config([f"trainer.seed={seed}"])
    for kind in (GenerationConfig, EvalConfig, ProbeConfig):
        with pytest.raises(ConfigError, match=f"^seed must be from 0 to less than 8388608, got {seed}"):
            load_plain([f"seed={seed}"], kind)


@pytest.mark.parametrize("word", ["n=2", "files=[x.parquet]", "reward.options.coarse=true", "reward.timeout_s=3"])
def test_a_chat_refuses_what_belongs_to_files(word: str) -> None:
    load_plain([word], GenerationConfig)
    with pytest.raises(ConfigError, match="has no effect: a chat has neither files nor scores"):
        load_plain([word], GenerationConfig, IN_A_CHAT)


def test_what_asks_for_nothing_or_for_the_default_is_no_mistake() -> None:
    load_config(["trainer.test_freq=0", "trainer.keep_best=1", "critic.optim.lr=1e-5", "algorithm.name=grpo"])
    load_plain(["trainer.test_freq=3", "data.val_files=[x.parquet]"], SFTConfig)
    load_config(
        ["trainer.test_freq=7", "trainer.keep_best=2", "trainer.eval_benchmarks=[bfcl]", "trainer.eval_limit=9"]
    )
    load_plain(["model.compute_dtype=bfloat16", "kv_cache_gib=2"], GenerationConfig)


def test_batch_arithmetic_is_spelled_out() -> None:
    assert Config().batch_arithmetic() == (
        "a step: 512 prompts x 4 rollouts = 2048 samples; 4 optimizer steps of 128 prompts = 512 samples each; "
        "packs of at most 16384 tokens"
    )
    assert "actor.optim.lr" in known_keys() and "reward.options." in known_keys()


def test_loading_imports_nothing_heavy() -> None:
    code = "import sys, verl.config.load; assert not {'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
