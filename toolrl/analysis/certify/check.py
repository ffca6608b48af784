"""A manifest compared with a run folder, and with its first steps computed again.

The same processor, versions, threads and engine give the same bits. Elsewhere sampled responses soon differ, so mean
rewards are compared, within `TOLERANCE` standard errors of their difference.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from toolrl.analysis.certify.manifest import (
    Manifest,
    Settings,
    inputs_of,
    machine,
    models_of,
    steps_of,
)
from verl.config.load import restored_config
from verl.embedded import with_embedded_paths
from verl.errors import ConfigError, DataError, VerlError
from verl.host.code_version import code_version
from verl.trainer.callbacks import Callback
from verl.utils.reward_score.rlla import TOGGLES, switches

TOLERANCE = 4.0  # standard errors
RUN = "run"  # name of the run that a check makes
_VALIDATED = ("val/", "eval/")  # groups of metrics


class NotComputedError(VerlError, RuntimeError):
    """The training of a check failed."""


class StopAfter(Callback):
    """Ends a run after a step, with the schedules of the whole run."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, step: int, metrics: Mapping[str, float]) -> str | None:
        return f"the first {step} steps are computed" if step >= self._step else None


@dataclass(frozen=True, slots=True)
class Difference:
    """tolerated: within `TOLERANCE`; never of what is not a mean reward"""

    step: int
    what: str
    stated: Any
    found: Any
    tolerated: bool = False


def compare_run(manifest: Manifest, run: Path) -> list[Difference]:
    """What differs between the manifest and the folder that it is of: outcomes of all steps, and models."""
    stated, found = manifest["steps"], steps_of(run)
    steps = sorted({*stated, *found}, key=int)
    differences = [each for step in steps for each in compare_step(int(step), stated.get(step), found.get(step))]
    models = models_of(run)
    return differences + [
        Difference(int(name.removeprefix("step-")), "model", manifest["models"].get(name), models.get(name))
        for name in sorted({*manifest["models"], *models})
        if manifest["models"].get(name) != models.get(name)
    ]


def compare_steps(manifest: Manifest, run: Path, num: int) -> list[Difference]:
    """What differs in the first `num` steps, which `run` has computed again."""
    stated, found = manifest["steps"], steps_of(run)
    steps = sorted({step for step in (*stated, *found) if int(step) <= num}, key=int)
    return [each for step in steps for each in compare_step(int(step), stated.get(step), found.get(step))]


def compare_step(step: int, stated: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> Iterator[Difference]:
    """A validation that the manifest does not have is left out: a check ends with one."""
    if stated is None or found is None:
        yield Difference(step, "step", stated and "there", found and "there")
        return
    closing = "validation" in found and "validation" not in stated
    for name in ("rollouts", *(() if closing else ("validation",))):
        if stated.get(name) != found.get(name):
            yield Difference(step, name, stated.get(name), found.get(name), _is_near(stated.get(name), found.get(name)))
    metrics = [name for name in found["metrics"] if not (closing and name.startswith(_VALIDATED))]
    for name in sorted({*stated["metrics"], *metrics}):
        if stated["metrics"].get(name) != found["metrics"].get(name):
            yield Difference(step, name, stated["metrics"].get(name), found["metrics"].get(name))


def _is_near(stated: Mapping[str, Any] | None, found: Mapping[str, Any] | None) -> bool:
    if stated is None or found is None or stated["num"] != found["num"]:
        return False
    error = math.hypot(stated["stderr"], found["stderr"])
    return bool(abs(stated["reward"] - found["reward"]) <= TOLERANCE * error)


def elsewhere(manifest: Manifest, settings: Settings) -> list[str]:
    """Why the bits may differ: `NAME was A, here B`."""
    stated, here = manifest["made_by"], {**code_version(), **machine(restored_config(settings))}
    names = [name for name in stated if stated[name] != here.get(name)]
    return [f"{name} was {stated[name]}, here {here.get(name)}" for name in names]


def check_inputs(manifest: Manifest, settings: Settings) -> None:
    """Raises DataError for the first model, data file or code of the user's that is not the run's."""
    stated, found = manifest["inputs"], inputs_of(settings)
    for key in sorted({*stated, *found}):
        if stated.get(key) != found.get(key):
            raise DataError(
                f"{key}={settings.get(key)} is not what the run read: {_differing(stated.get(key), found.get(key))}",
                hint=f"Name the right one with {key}=..",
            )


def _differing(stated: Any, found: Any) -> str:
    if isinstance(stated, Mapping) and isinstance(found, Mapping):
        names = [name for name in sorted({*stated, *found}) if stated.get(name) != found.get(name)]
        return f"{', '.join(names)} differ" if names else "it differs"
    return f"{stated}, but {found} is here"


def settings_here(manifest: Manifest, own: Mapping[str, Any]) -> Settings:
    """The run's, on the transformers engine, with the places of its files here. Raises ConfigError for others."""
    settings = {**manifest["settings"], "rollout.name": "hf", "trainer.callbacks": []}
    if unknown := [key for key in own if key not in manifest["inputs"]]:
        files = ", ".join(manifest["inputs"])
        raise ConfigError(f"a check changes no setting but those that name files ({files}), got {', '.join(unknown)}")
    return {key: with_embedded_paths(value) for key, value in {**settings, **own}.items()}


def compute(manifest: Manifest, settings: Settings, num: int, folder: Path, user_code: bool) -> Path:
    """Train the first `num` steps in `folder`. Returns the run's folder. Raises NotComputedError.

    user_code: run the code that the settings name
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "settings.yaml"
    tree = OmegaConf.create()
    for key, value in settings.items():
        OmegaConf.update(tree, key, value)
    OmegaConf.save(tree, file)
    command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config={file}", *(["--user-code"] * user_code)]
    command += [f"trainer.callbacks=[{{name: '{__name__}:{StopAfter.__name__}', step: {num}}}]"]
    command += [f"trainer.default_local_dir={folder}", f"trainer.experiment_name={RUN}", "trainer.save_freq=0"]
    kept = {name: value for name, value in os.environ.items() if name not in TOGGLES}
    if subprocess.run(command, env={**kept, **variables_of(manifest)}).returncode:
        raise NotComputedError("the training failed; its message is above")
    return folder / RUN


def variables_of(manifest: Manifest) -> dict[str, str]:
    """ToolRL's that were on. A manifest may be another's: it sets no other variable."""
    return switches(manifest["variables"])
