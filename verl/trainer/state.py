"""What a run was made with: a resumed run must be the same run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.load import flattened
from verl.errors import ConfigError
from verl.trainer.checkpoint import CheckpointStore, read_state

# groups and keys that may differ from one start to the next, because they do not change what is learned
_FREE = (
    "trainer.",
    "data.val_files",
    "rollout.val_kwargs",
    "reward.num_workers",
    "actor.max_tokens_per_pack",  # this and the next two change rounding alone
    "actor.share_prefix",
    "model.enable_gradient_checkpointing",
    "actor.offload_",
    "critic.offload_",
    "ref.offload_",
    "rollout.bucket_mib",
    "rollout.placement",
    "rollout.num_engines",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.tensor_model_parallel_size",
)
_BOUND = ("trainer.seed", "trainer.critic_warmup")


@dataclass(frozen=True, slots=True)
class Saved:
    """The newest whole checkpoint of a run, and the controller's state in it."""

    path: Path
    state: dict[str, Any]


def resume_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """{key: value} of the settings that decide what is learned, of a configuration as nested mappings."""
    settings = flattened(config)
    return {key: value for key, value in settings.items() if key in _BOUND or not key.startswith(_FREE)}


def find_saved(store: CheckpointStore, command: str, settings: Mapping[str, Any]) -> Saved | None:
    """Where the run of this folder stands, None if it has not begun.

    Raises ConfigError if another command made it, or the same with settings that teach something else.
    """
    path = store.latest(hashes=True)
    if path is None:
        return None
    state = read_state(path)
    hint = "use what it was made with, or choose another trainer.experiment_name"
    if state["command"] != command:
        raise ConfigError(f"{store.folder} holds a run of {state['command']}, not of {command}; {hint}")
    before = state["resume_config"]
    changed = [
        f"{key}={settings.get(key)} (it was made with {before.get(key)})"
        for key in sorted({*before, *settings})
        if before.get(key) != settings.get(key)
    ]
    if changed:
        raise ConfigError(f"{store.folder} holds a run that differs in {'; '.join(changed)}; {hint}")
    return Saved(path, state)
