"""Published commands, word for word: they resolve to what their own framework makes of them, setting by setting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.conftest import ROOT
from tests.support.every import every
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.filters import name_of
from verl.algorithms.names import KLPlacement
from verl.build.algorithm import build_algorithm, build_kl_control
from verl.build.ranks import rank_spec
from verl.config.load import RECIPES, flattened, known_keys, load_config
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.verl_compat.published import overlong_of
from verl.verl_compat.verl_keys import (
    ABSENT_FEATURES,
    ALIASES,
    COMPLETE,
    INTERPRETED,
    OBSOLETE,
    REFUSED,
    SAME_AS,
    obsolete_reason,
    refusal,
    short,
    spelled,
)

PUBLISHED = json.loads(Path(__file__).with_name("published_commands.json").read_text())
SCRIPTS: dict[str, Any] = PUBLISHED["scripts"]
DEFAULTS: dict[str, Any] = PUBLISHED["toolrl_defaults"]["values"]
ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
STEPS = 1000  # of a run, of which warmups are a share


def built(config: Config) -> Algorithm:
    return build_algorithm(config.algorithm, config.data.max_response_length, config.rollout.max_staleness)


def ours(overrides: list[str]) -> dict[str, Any]:
    """What a command comes to: the built algorithm, what the ranks get, and the numbers of the run."""
    config = load_config(overrides)
    algorithm = built(config)
    spec = rank_spec(config, algorithm, "cpu", STEPS)
    clip: Mapping[str, Any] = algorithm.policy_loss.keywords  # type: ignore[attr-defined]
    discount = getattr(algorithm.advantage, "keywords", {})
    kl, data, trainer, rollout = algorithm.kl, config.data, config.trainer, config.rollout
    control = build_kl_control(config.algorithm, algorithm)
    found = {
        "advantage": name_of(algorithm.advantage),
        "discount": (discount["gamma"], discount["lam"]) if discount else None,
        "policy loss": name_of(algorithm.policy_loss),
        "aggregation": algorithm.aggregation.value,
        "clip": (clip["clip_low"], clip["clip_high"], clip.get("dual_clip")),
        "entropy": algorithm.entropy_coefficient,
        "kl": (kl.placement.value, kl.estimator, kl.coefficient) if kl.placement is not KLPlacement.NONE else None,
        "adaptive kl": control is not None,
        "updates": config.updates_per_step,
        "epochs of a batch": config.actor.ppo_epochs,
        "lr": spec.optimizer.lr,
        "warmup": spec.optimizer.warmup_steps,
        "schedule": spec.optimizer.schedule,
        "grad clip": spec.optimizer.max_grad_norm,
        "checkpointing": spec.gradient_checkpointing,
        "sampling": (rollout.n, rollout.temperature, rollout.top_p, rollout.top_k, rollout.repetition_penalty),
        "batch": data.train_batch_size,
        "lengths": (data.max_prompt_length, data.max_response_length, config.env.max_turn_tokens),
        "observations are trained": config.env.train_on_observations,
        "run": (trainer.total_epochs, trainer.save_freq, trainer.test_freq, trainer.val_before_train),
        "steps": trainer.total_training_steps,
        "shuffle": data.shuffle,
        "validation": (rollout.val_kwargs.n, rollout.val_kwargs.temperature, rollout.val_kwargs.top_p),
        "tool calls": config.env.max_tool_calls if config.env.multi_turn else None,
        "critic": None,
    }
    if spec.critic_path is not None:
        critic = spec.critic_optimizer
        found["critic"] = (critic.lr, critic.warmup_steps, spec.cliprange_value, trainer.critic_warmup)
    return found


def theirs(overrides: list[str], resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The same of what upstream resolves the command to, as its source reads those keys. Every key is read."""
    read: set[str] = set()
    written = dict(word.lstrip("+").split("=", 1) for word in overrides)

    def get(key: str, otherwise: Any = None) -> Any:
        read.add(key)
        return resolved.get(key, otherwise)

    def asked(key: str, otherwise: Any) -> Any:
        """Of a fork's own key, which is in the command alone."""
        return type(otherwise)(written.get(key, otherwise))

    estimator, n = get("algorithm.adv_estimator"), get(f"{ROLLOUT}n")
    n *= get(f"{ROLLOUT}n_agent", 1) * asked(f"{ROLLOUT}n_trajectories", 1)
    both = get(f"{ACTOR}clip_ratio")
    mini, batch = get(f"{ACTOR}ppo_mini_batch_size"), get("data.train_batch_size")
    epochs = get(f"{ACTOR}ppo_epochs")
    updates = max(1, batch // mini) * epochs
    loss = ("loss", {"low_var_kl": "k3"}[get(f"{ACTOR}kl_loss_type")], get(f"{ACTOR}kl_loss_coef"))
    reward = ("reward", {"kl": "k1"}[get("algorithm.kl_penalty")], get("algorithm.kl_ctrl.kl_coef"))
    in_loss, in_reward = get(f"{ACTOR}use_kl_loss"), get("algorithm.use_kl_in_reward", True)
    kl = loss if in_loss else reward if in_reward else None
    prompt, response, turn = get("data.max_prompt_length"), get("data.max_response_length"), None
    if "data.max_start_length" in written:  # Search-R1's context rolls, its responses are turns
        prompt, response, turn = int(written["data.max_start_length"]), prompt, response
    if f"{ROLLOUT}max_starting_message_length" in written:  # SkyRL's limits are of one call of the model
        whole, prompt = prompt + response, int(written[f"{ROLLOUT}max_starting_message_length"])
        response, turn = whole - prompt, response
    discount = (get("algorithm.gamma"), get("algorithm.lam"))
    sampling = (
        n,
        get(f"{ROLLOUT}temperature"),
        get(f"{ROLLOUT}top_p"),
        asked(f"{ROLLOUT}sampling_params.top_k", get(f"{ROLLOUT}top_k")),  # what SkyRL's agents are sampled with
        asked(f"{ROLLOUT}sampling_params.repetition_penalty", 1.0),
    )
    critic = (float(get("critic.optim.lr")), None, get("critic.cliprange_value"), get("trainer.critic_warmup"))
    ratio = asked("critic.optim.lr_warmup_steps_ratio", 0.0)
    turns = {"max_turns": 0, f"{ROLLOUT}num_llm_calls_available": 0, f"{ROLLOUT}multi_turn.max_user_turns": 0}
    turns[f"{ROLLOUT}max_iterations"] = 0
    turns[f"{ROLLOUT}multi_turn.max_assistant_turns"] = 1  # the last of them calls nothing
    calls = [int(written[key]) - less for key, less in turns.items() if key in written]
    found = {
        "advantage": {"gae": "gae", "grpo": "grpo"}[estimator],
        "discount": discount if estimator == "gae" else None,  # GRPO's does not discount
        "policy loss": "clipped",
        "aggregation": get(f"{ACTOR}loss_agg_mode", "token-mean"),
        "clip": (
            get(f"{ACTOR}clip_ratio_low", both),
            get(f"{ACTOR}clip_ratio_high", both),
            get(f"{ACTOR}clip_ratio_c"),
        ),
        "entropy": get(f"{ACTOR}entropy_coeff"),
        "kl": kl if kl is not None and kl[-1] != 0 else None,
        "adaptive kl": get("algorithm.kl_ctrl.type") == "adaptive",
        "updates": updates,
        "epochs of a batch": epochs,
        "lr": float(get(f"{ACTOR}optim.lr")),
        "warmup": int(
            get(f"{ACTOR}optim.lr_warmup_steps_ratio") * (STEPS - (critic[-1] if estimator == "gae" else 0)) * updates
        ),
        "schedule": "constant",
        "grad clip": get(f"{ACTOR}grad_clip"),
        "checkpointing": get("actor_rollout_ref.model.enable_gradient_checkpointing"),
        "sampling": sampling,
        "batch": batch,
        "lengths": (prompt, response, turn),
        "observations are trained": not get(f"{ACTOR}state_masking", True),
        "run": (
            get("trainer.total_epochs"),
            max(0, get("trainer.save_freq")),
            max(0, get("trainer.test_freq")),
            get("trainer.val_before_train", True),
        ),
        "steps": asked("trainer.total_training_steps", 0) or None,
        "shuffle": written.get("data.shuffle_train_dataloader", "True").lower() == "true",
        "validation": tuple(
            asked(f"{ROLLOUT}val_kwargs.{name}", value)
            for name, value in (("n", 1), ("temperature", 0.0), ("top_p", 1.0))
        ),
        "tool calls": min(calls, default=None),
        "critic": (critic[0], int(ratio * STEPS * updates), *critic[2:]) if estimator == "gae" else None,
    }
    assert not set(resolved) - read, "facts that are compared with nothing"
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_published_command_comes_to_what_upstream_makes_of_it(name: str) -> None:
    overrides = SCRIPTS[name]["overrides"]
    assert ours(overrides) == theirs(overrides, SCRIPTS[name]["resolved"])


# Another value for every word that decides what is learned.
OTHER = {
    "algorithm.adv_estimator": "rloo",
    "algorithm.gamma": "0.9",
    "algorithm.lam": "0.9",
    "algorithm.kl_ctrl.kl_coef": "0.7",
    "data.train_batch_size": "4096",
    "data.max_prompt_length": "333",
    "data.max_response_length": "334",
    "data.max_start_length": "335",
    f"{ACTOR}optim.lr": "3e-5",
    f"{ACTOR}optim.lr_warmup_steps_ratio": "0.5",
    f"{ACTOR}ppo_mini_batch_size": "8",
    f"{ACTOR}use_kl_loss": "flip",
    f"{ACTOR}kl_loss_coef": "0.7",
    f"{ACTOR}kl_loss_type": "mse",
    f"{ACTOR}entropy_coeff": "0.7",
    f"{ACTOR}clip_ratio_low": "0.1",
    f"{ACTOR}clip_ratio_high": "0.7",
    f"{ACTOR}clip_ratio_c": "5.0",
    f"{ACTOR}state_masking": "false",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "flip",
    f"{ROLLOUT}n": "3",
    f"{ROLLOUT}n_agent": "3",
    f"{ROLLOUT}n_trajectories": "3",
    f"{ROLLOUT}temperature": "0.3",
    f"{ROLLOUT}top_p": "0.3",
    f"{ROLLOUT}sampling_params.top_k": "3",
    f"{ROLLOUT}sampling_params.repetition_penalty": "1.1",
    "critic.optim.lr": "3e-3",
    "critic.optim.lr_warmup_steps_ratio": "0.5",
    "trainer.critic_warmup": "7",
    "trainer.save_freq": "77",
    "trainer.test_freq": "77",
    "trainer.val_before_train": "flip",
    "trainer.total_epochs": "77",
    "trainer.total_training_steps": "77",
    "data.shuffle_train_dataloader": "flip",
    "max_turns": "9",
    f"{ROLLOUT}num_llm_calls_available": "9",
    f"{ROLLOUT}multi_turn.max_user_turns": "3",
    f"{ROLLOUT}multi_turn.max_assistant_turns": "3",
    f"{ROLLOUT}val_kwargs.n": "7",
    f"{ROLLOUT}val_kwargs.temperature": "0.3",
    f"{ROLLOUT}val_kwargs.top_p": "0.3",
}
# Keys that upstream does not read, either, in this command: KL is paid elsewhere, or has no price.
UNREAD: dict[str, set[str]] = {
    "ToolRL grpo": {f"{ACTOR}kl_loss_coef", f"{ACTOR}kl_loss_type"},
    "ToolRL ppo": set(),
    "ToRL": {f"{ACTOR}kl_loss_type", "algorithm.kl_ctrl.kl_coef", f"{ACTOR}use_kl_loss"},
    "Tool-N1": {"algorithm.kl_ctrl.kl_coef"},
    "SearchR1 grpo": set(),
    "SearchR1 ppo": set(),
    "SearchR1 v0.3 fmt": set(),
    "ReTool dapo": {f"{ACTOR}kl_loss_coef", "algorithm.kl_ctrl.kl_coef", f"{ACTOR}use_kl_loss"},
    "ReTool ppo": {f"{ACTOR}kl_loss_coef", "algorithm.kl_ctrl.kl_coef", f"{ACTOR}use_kl_loss"},
    "SkyRL 8b": set(),
    "ReTool 7b dapo": {f"{ACTOR}kl_loss_coef", "algorithm.kl_ctrl.kl_coef", f"{ACTOR}use_kl_loss"},
}


ALIKE = ("SearchR1 grpo", "SearchR1 v0.3 fmt", "ReTool dapo", "ReTool 7b dapo")  # others have the same keys


def changes() -> Iterator[Any]:
    for name, script in SCRIPTS.items():
        written = {word.lstrip("+").partition("=")[0] for word in script["overrides"]}
        marks = [pytest.mark.slow] if name in ALIKE else []
        yield from (pytest.param(name, key, marks=marks) for key in OTHER if key in written)


@pytest.mark.long
@pytest.mark.parametrize(("name", "key"), [*changes()])
def test_one_word_changed_comes_to_something_else(name: str, key: str) -> None:
    def changed(word: str) -> str:
        value = word.partition("=")[2]
        flipped = {"true": "False", "false": "True"}.get(value.lower(), "")
        return word.removesuffix(value) + (flipped if OTHER[key] == "flip" else OTHER[key])

    overrides = SCRIPTS[name]["overrides"]
    other = [changed(word) if word.lstrip("+").startswith(f"{key}=") else word for word in overrides]
    assert other != overrides
    try:
        differs = ours(other) != theirs(overrides, SCRIPTS[name]["resolved"])
    except ConfigError:  # two keys that now contradict each other, or a value that training refuses
        differs = True
    assert differs == (key not in UNREAD[name])


@cache
def unchanged(name: str) -> Config:
    return load_config(SCRIPTS[name]["overrides"])


def settings_once() -> Iterator[tuple[str, str]]:
    """(script, word) for every key of all scripts, at its first place."""
    seen = set()
    for name, script in SCRIPTS.items():
        for each in script["overrides"]:
            key = each.lstrip("+").partition("=")[0]
            if key not in seen:
                yield name, each
            seen.add(key)


@pytest.mark.long
@pytest.mark.parametrize(("name", "written"), [*settings_once()])
def test_another_value_acts_or_is_refused_or_named(name: str, written: str, caplog: pytest.LogCaptureFixture) -> None:
    key, _, value = written.lstrip("+").partition("=")
    if value.lower() in ("true", "false"):
        other = str(value.lower() == "false")
    elif value.isdecimal():
        other = str(int(value) // 2 if int(value) > 1 else int(value) + 1)
    else:
        other = "[other]" if value.startswith("[") else "0.01" if re.fullmatch(r"[\d.e-]+", value) else "other"
    assert other != value
    base, overrides = unchanged(name), SCRIPTS[name]["overrides"]
    caplog.clear()
    try:
        changed = load_config(
            [f"{written.removesuffix(value)}{other}" if each == written else each for each in overrides]
        )
    except ConfigError:
        return
    assert changed != base or key in caplog.text


@pytest.mark.parametrize("name", SCRIPTS)
def test_another_fact_of_upstreams_is_noticed(name: str) -> None:
    overrides, resolved = SCRIPTS[name]["overrides"], SCRIPTS[name]["resolved"]
    for key in (
        f"{ACTOR}grad_clip",
        f"{ACTOR}clip_ratio",
        f"{ACTOR}ppo_epochs",
        f"{ROLLOUT}top_p",
        "trainer.save_freq",
    ):
        if key == f"{ACTOR}clip_ratio" and f"{ACTOR}clip_ratio_low" in resolved:
            continue
        assert ours(overrides) != theirs(overrides, {**resolved, key: 17})


@pytest.mark.parametrize("name", SCRIPTS)
def test_obsolete_keys_are_named_once_in_one_warning(name: str, caplog: pytest.LogCaptureFixture) -> None:
    load_config(SCRIPTS[name]["overrides"])
    warnings = [record.message for record in caplog.records if record.message.startswith("keys that have no effect")]
    assert len(warnings) == 1
    reasons = [line.rpartition(": ")[2] for line in warnings[0].splitlines()[1:]]
    assert len(set(reasons)) == len(reasons)
    keys = [key for line in warnings[0].splitlines()[1:] for key in line.strip().rpartition(": ")[0].split(", ")]
    written = {word.lstrip("+").partition("=")[0] for word in SCRIPTS[name]["overrides"]}
    assert len(keys) == len(set(keys)) and set(keys) <= written


# Where one machine is assumed, not eight GPUs; where nothing is logged elsewhere; and how often a run is looked at.
OWN_DEFAULTS = {
    "data.train_files",
    "data.val_files",
    "data.tokenizer",
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "actor_rollout_ref.rollout.dtype",
    "actor_rollout_ref.rollout.enforce_eager",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.logger",
    "trainer.n_gpus_per_node",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.default_local_dir",
}


def word(key: str) -> str:
    value = DEFAULTS[key]
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value).replace("'", "")
    return f"{key}={text}"


@pytest.mark.parametrize("key", DEFAULTS)
def test_each_default_of_toolrls_is_ours(key: str) -> None:
    more = ["trainer.n_gpus_per_node=8"] if key.endswith("tensor_model_parallel_size") else []
    config = load_config([word(key), *more])
    if key not in OWN_DEFAULTS:
        assert numbers(config) == untouched()


@cache
def untouched() -> tuple[Any, ...]:
    return numbers(load_config([]))


def numbers(config: Config) -> tuple[Any, ...]:
    """All that is learned by, the preset's settings spelled out."""
    data = config.data
    spec = rank_spec(replace(config, model=replace(config.model, path="m")), built(config), "cpu", STEPS)
    return (
        data.train_batch_size,
        data.max_prompt_length,
        data.max_response_length,
        data.truncation,
        repr(built(config)),
        spec.optimizer,
        spec.critic_optimizer,
        spec.cliprange_value,
        spec.gradient_checkpointing,
        config.actor,
        config.rollout,
        config.reward,
        config.env,
        config.trainer,
    )


def test_all_defaults_of_toolrls_together_are_ours() -> None:
    config = load_config([word(key) for key in DEFAULTS])
    with_own = [word(key) for key in OWN_DEFAULTS]
    assert numbers(config) == numbers(load_config(with_own))
    assert (config.algorithm.name, config.rollout.n, config.rollout.tensor_model_parallel_size) == ("ppo", 1, 2)
    assert config.critic.path == config.model.path == str(Path("~/models/deepseek-llm-7b-chat").expanduser())
    assert config.trainer.default_local_dir == "checkpoints/verl_examples/gsm8k"


def test_an_early_command_treats_long_prompts_as_the_trainer_of_its_rows_does(caplog: pytest.LogCaptureFixture) -> None:
    path = "actor_rollout_ref.model.path=m"
    assert load_config([path]).data.truncation == "auto"
    assert "data.truncation=auto: left for ToolRL's rows, drop for others" in caplog.text
    for overrides in (
        [path, "data.truncation=error"],
        [path, "reward.name=torl"],
        [path, "actor_rollout_ref.rollout.n_agent=1"],
        [path, "recipe=mini_ppo"],
        ["model.path=m"],
    ):
        assert load_config(overrides).data.truncation == "error"


# `data_source` of the script's rows, and what its trainer does with overlong ones: ToolRL's passes truncation="left" to
# its data set, those of ToRL and Tool-N1 always filter, veRL's and SkyRL's do so by a key, Search-R1's raises.
OVERLONG = {
    "ToolRL grpo": ("rlla", "left"),
    "ToolRL ppo": ("rlla", "left"),
    "ToRL": ("math", "drop"),
    "Tool-N1": ("toolcall", "drop"),
    "SearchR1 grpo": ("nq", "error"),
    "SearchR1 ppo": ("nq", "error"),
    "SearchR1 v0.3 fmt": ("nq", "error"),
    "ReTool dapo": ("math_dapo", "drop"),
    "ReTool ppo": ("math_dapo", "drop"),
    "ReTool 7b dapo": ("math_dapo", "drop"),
    "SkyRL 8b": ("swe-gym", "error"),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_overlong_rows_of_a_published_command_meet_what_its_trainer_does(name: str) -> None:
    source, expected = OVERLONG[name]
    truncation = load_config(SCRIPTS[name]["overrides"]).data.truncation
    assert (overlong_of(source) if truncation == "auto" else truncation) == expected


def test_no_key_has_two_meanings_and_the_names_of_ours_exist() -> None:
    tables = [set(ALIASES), set(INTERPRETED), set(SAME_AS), set(REFUSED), set(ABSENT_FEATURES), set(OBSOLETE)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    known = known_keys()
    options = tuple(key for key in known if key.endswith("."))
    assert every(ours in known or f"{ours}.".startswith(options) for ours in (*ALIASES.values(), *SAME_AS.values()))


LEAVES: Mapping[str, Any] = json.loads(Path(__file__).with_name(f"verl_{COMPLETE}_keys.json").read_text())


def fates(key: str) -> list[str]:
    name, known = short(key), known_keys()
    same = name in known or name.startswith(tuple(each for each in known if each.endswith(".")))
    translated = any(name in table for table in (ALIASES, INTERPRETED, SAME_AS))
    refused, obsolete = refusal(name) is not None, obsolete_reason(name) is not None
    found = {"translated": translated, "same": same, "refused": refused, "obsolete": obsolete and not refused}
    return [fate for fate, holds in found.items() if holds][:1]


def test_every_key_of_verls_has_a_fate() -> None:
    assert len(LEAVES) == 829 and COMPLETE in (ROOT / "docs" / "verl_keys.md").read_text()
    assert {key: fates(key) for key in LEAVES if not fates(key)} == {}


@pytest.mark.parametrize("key", [key for key in LEAVES if short(key) in ABSENT_FEATURES])
def test_verls_default_of_an_absent_feature_is_taken_and_another_is_refused_by_its_name(key: str) -> None:
    only, default = ABSENT_FEATURES[short(key)], LEAVES[key]
    if not str(default).startswith("${"):
        assert only.value == default
        load_config([f"{key}={json.dumps(default)}"])
    with pytest.raises(ConfigError, match="is refused: ") as caught:
        load_config([f"{key}=any"])
    assert str(caught.value) == f"{key}=any is refused: {only.why.replace('`', '')}"


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("critic.model.lora_adapter_path=there", "a critic's adapter starts at zero"),
        ("actor_rollout_ref.model.lora.rank=16", "adapters of Megatron's; set lora.rank"),
        ("actor_rollout_ref.model.exclude_modules=[q_proj]", "set lora.targets"),
        ("actor_rollout_ref.model.override_config.attn_implementation=eager", "the configuration is that of the model"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.seed=3", "set rollout.engine_options"),
        ("trainer.v1.trainer_mode=separate_async", "set rollout.max_staleness"),
        ("critic.fsdp.qat.enable=True", "no quantized training"),
    ],
)
def test_an_absent_feature_is_named_also_below_its_key_and_in_its_new_place(word: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"is refused: {why}"):
        load_config([word])


def test_rewards_in_their_new_place() -> None:
    new = "reward.custom_reward_function"
    overrides = [f"{new}.path=mine.py", f"{new}.name=score", f"{new}.reward_kwargs.strict=True", "reward.num_workers=3"]
    reward = load_config(overrides).reward
    assert (reward.name, reward.options, reward.num_workers) == ("mine.py:score", {"strict": True}, 3)
    assert load_config([f"{new}.path=mine.py", f"{new}.reward_kwargs={{a: 1}}"]).reward.options == {"a": 1}


def test_agent_loops() -> None:
    key = "actor_rollout_ref.rollout.agent.default_agent_loop"
    assert load_config([f"{key}=tool_agent"]).env.name == "tool"
    assert load_config([f"{key}=single_turn_agent"]).env.name == "single_turn"
    with pytest.raises(ConfigError, match="=mine is an agent loop of veRL"):
        load_config([f"{key}=mine"])


def test_at_most_ten_keys_are_refused_and_the_docs_list_them() -> None:
    text = (ROOT / "docs" / "migration.md").read_text()
    section = text[text.index("## veRL's keys") :].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w.]+)` \| `(\w+)` \| (.+) \|$", section, re.MULTILINE)
    found = {key: (value, why) for key, value, why in rows}
    values = {key: "null" if only.value is None else str(only.value) for key, only in REFUSED.items()}
    assert found == {spelled(key): (values[key], only.why) for key, only in REFUSED.items()}
    assert len(REFUSED) <= 10


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_key_has_its_reason(key: str, caplog: pytest.LogCaptureFixture) -> None:
    load_config([f"{spelled(key)}=null"])
    assert "this is the only supported value" in caplog.text
    with pytest.raises(ConfigError, match=re.escape(f"{spelled(key)}=other is refused: ")):
        load_config([f"{spelled(key)}=other"])


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_the_scripts_accept_verls_overrides(algorithm: str) -> None:
    """As scripts/train.sh lays them out: the recipe, what the machine has, and then the user's overrides."""
    overrides = [f"recipe=toolrl_{algorithm}", "model.path=m", "data.train_files=[a]", "data.val_files=[b]"]
    overrides += ["trainer.nnodes=1", "trainer.n_gpus_per_node=8", "rollout.tensor_model_parallel_size=1"]
    theirs = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2", "actor_rollout_ref.model.path=other"]
    config = load_config([*overrides, *theirs, "+trainer.val_before_train=False"])
    assert (config.rollout.tensor_model_parallel_size, config.model.path) == (2, "other")
    assert not config.trainer.val_before_train
    plain = load_config(overrides)
    same = load_config([*overrides, f"algorithm.adv_estimator={'grpo' if algorithm == 'grpo' else 'gae'}"])
    assert repr(built(same)) == repr(built(plain)) and replace(same, algorithm=plain.algorithm) == plain


def test_every_recipe_sets_the_defaults_it_relies_on() -> None:
    """The defaults may follow veRL's without a recipe's changing."""
    wanted = {
        *("algorithm.name", "rollout.n", "data.train_batch_size", "actor.ppo_mini_batch_size", "actor.optim.lr"),
        *("data.max_prompt_length", "data.max_response_length"),
    }
    for path in RECIPES.glob("*.yaml"):
        written = set(flattened(OmegaConf.to_container(OmegaConf.load(path))))
        assert wanted <= written, path.name
        assert written & {"trainer.total_epochs", "trainer.total_training_steps"}, path.name


def verls_overlong_reward(num_tokens: int, limit: int, length: int, factor: float) -> float:
    """veRL 0.9.1, experimental/reward_loop/reward_manager/dapo.py, line by line."""
    expected_len = limit - length
    exceed_len = num_tokens - expected_len
    return min(-exceed_len / length * factor, 0)


OVERLONG_SETTINGS = {
    "0.9": [
        "reward.reward_manager.name=dapo",
        *("+reward.reward_kwargs.overlong_buffer_cfg.enable=True", "+reward.reward_kwargs.overlong_buffer_cfg.len=40"),
        *("+reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5", "+reward.reward_kwargs.max_resp_len=100"),
        "+reward.reward_kwargs.overlong_buffer_cfg.log=False",
    ],
    "0.7": [
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=40",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5",
    ],
    "recipe/dapo": [
        *("reward_model.reward_manager=dapo", "reward_model.overlong_buffer.enable=True"),
        *("reward_model.overlong_buffer.len=40", "reward_model.overlong_buffer.penalty_factor=0.5"),
    ],
}


@pytest.mark.parametrize("version", OVERLONG_SETTINGS)
def test_verls_overlong_buffer_is_ours_number_by_number(version: str) -> None:
    """By hand: 60 tokens are free, 80 are half of the buffer (-0.25), 100 all of it (-0.5)."""
    penalty = built(load_config([*OVERLONG_SETTINGS[version], "data.max_response_length=100"])).overlong
    assert penalty is not None
    by_hand = {1: 0.0, 60: 0.0, 61: -0.0125, 80: -0.25, 99: -0.4875, 100: -0.5}
    assert {tokens: penalty.penalty(tokens) for tokens in by_hand} == pytest.approx(by_hand)
    for tokens in range(1, 101):
        assert penalty.penalty(tokens) == pytest.approx(verls_overlong_reward(tokens, 100, 40, 0.5))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["len=0"], "overlong_buffer_cfg.len must be a whole number from 1, got 0"),
        (["len=40", "penalty_factor=high"], "penalty_factor must be a number, got 'high'"),
        (["len=200"], "algorithm.overlong_buffer=200 exceeds data.max_response_length=100"),
        ([], "needs reward_model.reward_kwargs.overlong_buffer_cfg.len, in tokens"),
        (["len=40", "lem=3"], "unknown key 'reward.reward_kwargs.overlong_buffer_cfg.lem'; did you mean"),
    ],
)
def test_an_unusable_overlong_buffer_is_an_error_with_the_reason(overrides: list[str], message: str) -> None:
    group = "reward.reward_kwargs.overlong_buffer_cfg"
    manager = ["reward.reward_manager.name=dapo", f"{group}.enable=true", "data.max_response_length=100"]
    with pytest.raises(ConfigError, match=re.escape(message)):
        built(load_config([*manager, *(f"{group}.{each}" for each in overrides)]))


def test_verls_limit_of_the_overlong_buffer_is_that_of_a_response() -> None:
    with pytest.raises(ConfigError, match=r"max_resp_len=99 must equal data.max_response_length"):
        load_config([*OVERLONG_SETTINGS["0.7"], "reward_model.reward_kwargs.max_resp_len=99"])


def test_an_overlong_buffer_that_verl_does_not_apply_is_named(caplog: pytest.LogCaptureFixture) -> None:
    naive = [each.replace("dapo", "naive") for each in OVERLONG_SETTINGS["0.9"]]
    assert built(load_config(naive)).overlong is None
    assert "only veRL's reward manager dapo has an overlong penalty" in caplog.text
    off = [each.replace("enable=True", "enable=False") for each in OVERLONG_SETTINGS["0.7"]]
    assert built(load_config([*off, "algorithm.name=dapo"])).overlong is None  # our preset has one
    assert "the overlong penalty is not enabled" in caplog.text


def test_a_mini_batch_above_the_batch_is_the_batch_where_early_versions_take_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """veRL's check is skipped with use_dynamic_bsz=True, as in ToRL's published command."""
    overrides = [f"{ACTOR}ppo_mini_batch_size=64", "data.train_batch_size=32"]
    assert load_config([*overrides, f"{ACTOR}use_dynamic_bsz=True"]).updates_per_step == 1
    assert "it is above data.train_batch_size" in caplog.text
    with pytest.raises(ConfigError, match=r"above data.train_batch_size"):
        load_config([*overrides, f"{ACTOR}use_dynamic_bsz=False"])


@pytest.mark.parametrize("mini", ["actor_rollout_ref.actor.ppo_mini_batch_size", "actor.ppo_mini_batch_size"])
def test_a_mini_batch_above_the_batch_is_refused_in_both_spellings(mini: str) -> None:
    """As by ActorConfig.validate of veRL 0.9.1."""
    with pytest.raises(ConfigError, match=f"{mini}=64.* above data.train_batch_size"):
        load_config([f"{mini}=64", "data.train_batch_size=32"])
    with pytest.raises(ConfigError, match=r"above data.train_batch_size"):
        load_config(["recipe=mini_grpo", f"{mini}=17"])  # whose batch is 16
    assert load_config([f"{mini}=32", "data.train_batch_size=32"]).actor.ppo_mini_batch_size == 32
    assert load_config(["data.train_batch_size=32"]).updates_per_step == 1  # the default is the batch


MODEL = "actor_rollout_ref.model"


def test_one_rank_covers_policy_and_critic() -> None:
    assert load_config([f"{MODEL}.lora_rank=8", "critic.model.lora_rank=8"]).lora.rank == 8
    with pytest.raises(ConfigError, match=r"critic.model.lora_rank=16 must equal lora.rank=8, which covers both"):
        load_config([f"{MODEL}.lora_rank=8", "critic.model.lora_rank=16"])
    with pytest.raises(ConfigError, match=r"critic.model.lora_rank=16 must equal lora.rank=None"):
        load_config(["critic.model.lora_rank=16"])


@pytest.mark.parametrize(
    ("written", "rank", "alpha", "targets", "path"),
    [
        ([f"{MODEL}.lora_rank=32"], 32, 16, None, None),
        ([f"{MODEL}.lora_rank=32", f"{MODEL}.lora_alpha=64"], 32, 64, None, None),
        ([f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=all-linear"], 8, 16, ["all-linear"], None),
        ([f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[q_proj,v_proj]"], 8, 16, ["q_proj", "v_proj"], None),
        ([f"{MODEL}.lora_adapter_path=there"], None, None, None, "there"),
        ([f"{MODEL}.lora_rank=0", f"{MODEL}.lora_alpha=64", f"{MODEL}.target_modules=all-linear"], 0, None, None, None),
        ([f"{MODEL}.lora_alpha=64"], None, None, None, None),
    ],
)
def test_adapters(written: list[str], rank: int, alpha: float, targets: list[str], path: str) -> None:
    lora = load_config(written).lora
    assert (lora.rank, lora.alpha, lora.targets, lora.path) == (rank, alpha, targets, path)
