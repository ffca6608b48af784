"""Resume: finds a run's checkpoint and checks that nothing that affects training has changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.checkpoint.checkpoint import CheckpointStore, read_state
from verl.config.commands import Command
from verl.config.load import flattened, known_keys
from verl.config.schema import Config
from verl.errors import ConfigError
from verl.registry import nearest
from verl.utils.reward_score.rlla import TOGGLES

# Groups and keys that may change on resume, because they do not affect training.
_FREE = (
    "trainer.",
    "tracking.",
    "eval.",
    "data.val_files",
    "data.user_code",
    "rollout.val_kwargs",
    "reward.num_workers",
    "actor.max_tokens_per_pack",  # this and the next affect rounding only
    "model.enable_gradient_checkpointing",
    "model.fused_kernels",
    "actor.offload",
    "critic.offload",
    "ref.offload_params",
    "lora.sync",
    "rollout.placement",
    "rollout.num_engines",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.kv_cache_gib",
    "rollout.gpu_memory_utilization",
    "rollout.tensor_model_parallel_size",
    "rollout.speculation",  # keeps the distribution
    "rollout.engine_options.enforce_eager",
)
CHANGES = "allowed_changes.jsonl"  # in a run's folder: what `trainer.allow_changed` let differ, and after which step
_BOUND = ("trainer.seed", "trainer.critic_warmup")


@dataclass(frozen=True, slots=True)
class Saved:
    """The newest complete checkpoint of a run, and the controller's state in it.

    changed: what trainer.allow_changed lets differ from the run so far, as {name: {"before": .., "now": ..}}
    """

    path: Path
    state: dict[str, Any]
    changed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Completed steps."""
        return int(self.state["trainer"]["step"] if "trainer" in self.state else self.state["step"])


def resume_config(config: Config, command: Command) -> dict[str, Any]:
    """{key: value} of the settings that affect training by this command."""
    given = {key: value for key, value in flattened(asdict(config)).items() if value != {}}  # options have a key each
    settings = {key: value for key, value in given.items() if command.has(key)}
    return {key: value for key, value in settings.items() if key in _BOUND or not key.startswith(_FREE)}


def find_saved(
    store: CheckpointStore,
    command: str,
    settings: Mapping[str, Any],
    contents: Mapping[str, Any] | None = None,
    allowed: Sequence[str] = (),
) -> Saved | None:
    """None without a checkpoint. Raises ConfigError if the newest is of another command, settings or contents.

    contents: of what the settings name (verl/checkpoint/contents.py); None: not compared
    allowed: settings and variables that may differ, if they do
    """
    known, open_groups = [*settings, *TOGGLES], tuple(key for key in known_keys() if key.endswith("."))
    for name in allowed:
        is_option = name.startswith(open_groups) and not name.startswith(_FREE)  # perhaps of the saved run only
        if name not in known and not is_option:
            raise ConfigError(f"trainer.allow_changed: {name!r} is not compared on a resume; {nearest(name, known)}")
    path = store.latest(hashes=True)
    if path is None:
        return None
    state = read_state(path)
    anew = "choose another trainer.experiment_name"
    if state["command"] != command:
        raise ConfigError(f"{store.folder} contains a run of {state['command']}, not of {command}; {anew}")
    changed = _changes(state, settings, contents)
    refused = [name for name in changed if name not in allowed]
    if refused:
        shown = "; ".join(text for name in refused for text in _texts(name, **changed[name]))
        way_on = f"trainer.allow_changed=[{','.join({**dict.fromkeys(allowed), **dict.fromkeys(refused)})}]"
        raise ConfigError(
            f"{store.folder} contains a run with different inputs: {shown}. Use the original ones, {anew}, or go on "
            f"with the new ones: {way_on}"
        )
    return Saved(path, state, changed)


def _changes(
    state: Mapping[str, Any], settings: Mapping[str, Any], contents: Mapping[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """{name: {"before": .., "now": ..}} of what differs. What names files is compared by their contents."""
    before, now = dict(state["resume_config"]), dict(settings)
    saved = state.get("contents")  # missing in older checkpoints
    if contents is not None and saved is not None:
        before |= saved
        now |= contents
    names = sorted({*before, *now})
    return {
        name: {"before": before.get(name), "now": now.get(name)} for name in names if before.get(name) != now.get(name)
    }


def _texts(name: str, before: Any, now: Any) -> Iterator[str]:
    """One text for each entry that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _texts(f"{name}: {key}", before.get(key), now.get(key))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, (each, other) in enumerate(zip(before, now, strict=True)):
            yield from _texts(f"{name}[{number}]", each, other)
    elif before != now:
        yield f"{name}={_shown(now)} (originally {_shown(before)})"


def _shown(value: Any) -> str:
    """Digests are shortened to their first digits."""
    return re.sub(r"\b(sha256 )?([0-9a-f]{12})[0-9a-f]{52}\b", r"sha256 \2..", str(value))
