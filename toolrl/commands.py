"""The commands that look at a model, a reward or a run before it starts: what each uses of the configuration."""

from __future__ import annotations

from verl.config.commands import TRAIN, Command, all_but, check_verdicts, keys_of
from verl.config.schema import Config, EnvConfig
from verl.errors import ConfigError

_DEFAULTS = Config()
_MAX_RESPONSES = 256  # per prompt, so that seeds of tasks do not overlap


def _check_probe(config: Config) -> None:
    n, temperature = config.rollout.n, config.rollout.temperature
    if not 2 <= n <= _MAX_RESPONSES:
        raise ConfigError(f"rollout.n must be from 2 (advantages are group-relative) to {_MAX_RESPONSES}, got {n}")
    if temperature == 0:
        raise ConfigError(f"rollout.temperature must be positive, as in training, got {temperature}")
    check_verdicts(config)


def _check_eval(config: Config) -> None:
    n, temperature = config.rollout.n, config.rollout.temperature
    if n > _MAX_RESPONSES:
        raise ConfigError(f"rollout.n must be at most {_MAX_RESPONSES}, got {n}")
    if n > 1 and temperature == 0:
        raise ConfigError(f"rollout.n={n} greedy responses are identical; set rollout.temperature, or rollout.n=1")
    chosen, own = config.eval.handler, config.env.tool_call_format
    if own is not None and chosen not in (_DEFAULTS.eval.handler, own):
        raise ConfigError(f"eval.handler={chosen} and env.tool_call_format={own} differ: leave eval.handler out")
    check_verdicts(config)


def _check_generate(config: Config) -> None:
    if not config.eval.output.endswith(".jsonl"):
        raise ConfigError(f"eval.output must end in .jsonl, the form of the transcripts, got {config.eval.output!r}")
    check_verdicts(config)


_ROWS = keys_of("data", "columns map split_turns prompt_template truncation max_bad_share user_code")
# Sampling from an engine without a trainer.
_ENGINE = (
    *keys_of("data", "max_prompt_length max_response_length"),
    *keys_of("model", "path tokenizer_path chat_template_options compute_dtype"),
    *keys_of(
        "rollout", "name temperature top_p top_k repetition_penalty dtype tensor_model_parallel_size max_num_seqs"
    ),
    *keys_of("rollout", "max_num_batched_tokens gpu_memory_utilization kv_cache_gib speculation engine_options"),
    *keys_of("trainer", "device num_threads health_timeout_s seed"),
)
_ENGINE_DEFAULTS = {
    "data.max_prompt_length": 2048,
    "data.max_response_length": 1024,
}
_GREEDY = {**_ENGINE_DEFAULTS, "rollout.temperature": 0.0}
_EPISODES = (
    *_ENGINE,
    "rollout.n",
    *_ROWS,
    *all_but("env", EnvConfig, "train_on_observations", "turn_schedule"),
    "sandbox",
    "reward",
    *keys_of("eval", "limit output"),
)
PLAN = Command(name="plan", uses=TRAIN.uses, from_recipe=TRAIN.from_recipe, check=TRAIN.check)
EVAL = Command(
    name="eval",
    uses=(
        *_ENGINE,
        "rollout.n",
        *keys_of("data", "columns map split_turns prompt_template user_code"),
        *all_but("env", EnvConfig, "train_on_observations", "turn_schedule"),
        "sandbox",
        "reward",
        "eval",
    ),
    defaults={**_GREEDY, "reward.timeout_s": 120.0},
    check=_check_eval,
)
GENERATE = Command(
    name="generate",
    uses=(*_EPISODES, "data.val_files"),
    defaults={**_GREEDY, "eval.output": "transcripts.jsonl"},
    check=_check_generate,
)
LAB = Command(
    name="lab",
    uses=(
        *keys_of("data", "train_files columns map split_turns user_code"),
        *keys_of("model", "path tokenizer_path chat_template_options"),
        *keys_of("env", "name options tool_call_format tool_call_format_options"),
        *keys_of("reward", "name options"),
        "eval.limit",
    ),
    defaults={"env.tool_call_format": "auto"},
)
_CHAT_ENV = "tools tool_call_format tool_call_format_options max_turn_tokens max_observation_tokens observation_cut"
CHAT = Command(
    name="chat",
    uses=(*_ENGINE, *keys_of("env", f"{_CHAT_ENV} tool_timeout_s max_concurrent_calls"), "sandbox"),
    defaults=_GREEDY,
)
PROBE = Command(
    name="probe",
    uses=(*_EPISODES, "data.train_files"),
    defaults={**_ENGINE_DEFAULTS, "rollout.n": 8, "eval.limit": 64, "eval.output": "outputs/probe"},
    from_recipe=(
        *keys_of("data", "train_files max_prompt_length max_response_length"),
        *_ROWS,
        *keys_of("model", "path tokenizer_path compute_dtype"),
        *keys_of("rollout", "name n temperature top_p top_k repetition_penalty"),
        *("env", "sandbox", "reward"),
    ),
    needs_groups=True,
    check=_check_probe,
)
