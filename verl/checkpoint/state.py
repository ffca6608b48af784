"""Resume: finds a run's checkpoint and checks that the settings that affect training have not changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.checkpoint.checkpoint import CheckpointStore, read_state
from verl.config.commands import Command
from verl.config.load import flattened
from verl.config.schema import Config
from verl.errors import ConfigError

# Groups and keys that may change on resume, because they do not affect training.
_FREE = (
    "trainer.",
    "eval.",
    "data.val_files",
    "rollout.val_kwargs",
    "reward.num_workers",
    "actor.max_tokens_per_pack",  # this and the next affect rounding only
    "model.enable_gradient_checkpointing",
    "model.fused_kernels",
    "actor.offload",
    "critic.offload",
    "ref.offload_params",
    "rollout.placement",
    "rollout.num_engines",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.tensor_model_parallel_size",
    "rollout.speculation",  # keeps the distribution
    "rollout.enforce_eager",
)
_BOUND = ("trainer.seed", "trainer.critic_warmup")


@dataclass(frozen=True, slots=True)
class Saved:
    """The newest complete checkpoint of a run, and the controller's state in it."""

    path: Path
    state: dict[str, Any]


def resume_config(config: Config, command: Command) -> dict[str, Any]:
    """{key: value} of the settings that affect training by this command."""
    settings = {key: value for key, value in flattened(asdict(config)).items() if command.has(key)}
    return {key: value for key, value in settings.items() if key in _BOUND or not key.startswith(_FREE)}


def find_saved(store: CheckpointStore, command: str, settings: Mapping[str, Any]) -> Saved | None:
    """None without a checkpoint. Raises ConfigError if the newest is of another command or of other settings."""
    path = store.latest(hashes=True)
    if path is None:
        return None
    state = read_state(path)
    hint = "use the original settings, or choose another trainer.experiment_name"
    if state["command"] != command:
        raise ConfigError(f"{store.folder} contains a run of {state['command']}, not of {command}; {hint}")
    before = state["resume_config"]
    changed = [key for key in sorted({*before, *settings}) if before.get(key) != settings.get(key)]
    if changed:
        shown = "; ".join(f"{key}={settings.get(key)} (originally {before.get(key)})" for key in changed)
        raise ConfigError(f"{store.folder} contains a run with different settings: {shown}; {hint}")
    return Saved(path, state)
