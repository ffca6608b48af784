"""The job for KubeRay: every field is one that KubeRay defines, and the training command is one that can run.

rayjob_definition.json: RayJob of KubeRay v1.7.0 (github.com/ray-project/kuberay, commit 59d663a), from
ray-operator/config/crd/bases/ray.io_rayjobs.yaml. Of the objects in the example it has all fields, of others the type.
"""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.conftest import ROOT
from verl.config.load import load_config

DEFINITION = json.loads((Path(__file__).parent / "rayjob_definition.json").read_text())
JOB: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "kuberay" / "rayjob.yaml").read_text())
PINS = (ROOT / "scripts" / "requirements" / "gpu.txt").read_text().split()


def test_every_field_is_defined() -> None:
    jsonschema.validate(JOB, DEFINITION)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "shutdownAfterJobFinished"), True),
        (("spec", "backoffLimit"), "3"),
        (("spec", "rayClusterSpec", "authOptions", "mode"), "secret"),
        (("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "gracePeriod"), 3),
    ],
)
def test_a_wrong_field_is_found(path: tuple[str, ...], value: object) -> None:
    job = copy.deepcopy(JOB)
    place = job
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, DEFINITION)


def test_the_command_fits_the_cluster() -> None:
    program, command, *overrides = shlex.split(JOB["spec"]["entrypoint"])
    trainer = load_config(overrides).trainer
    cluster = JOB["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert (program, command, trainer.save_on_signal) == ("toolrl", "train", True)
    assert trainer.nnodes == sum(group.get("replicas", 1) for group in groups)
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        gpus = {group["rayStartParams"]["num-gpus"], container["resources"]["limits"]["nvidia.com/gpu"]}
        assert gpus == {str(trainer.n_gpus_per_node)}
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in group["template"]["spec"]["volumes"]}
    assert f"ray=={cluster['rayVersion']}" in PINS
