"""The archives that bench/gpu/stage.py built, in an environment like the image of the machine that they are for.

STAGE names their folder, default outputs/stage. Folder image in it is that environment: see bench/gpu/image.txt.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from bench.gpu import stage
from tests.conftest import ROOT

pytestmark = pytest.mark.gpuset
STAGE = Path(os.environ.get("STAGE", ROOT / "outputs/stage"))
NAMES = ["packages", "vllm"]
PIECE_MIB = 50
# Modules that a training run, the measurements and vLLM's processes import, here or later.
WITHOUT_VLLM = """
ray hydra omegaconf jsonschema docstring_parser math_verify liger_kernel.transformers trl datasets
verl.trainer.main_ppo verl.build.run toolrl.check.plan.plan verl.workers.rank verl.workers.fused
verl.workers.loss_kernels verl.workers.logprobs verl.transfer.gpu verl.single_controller.ray verl.rollout.hf_engine
"""
WITH_VLLM = """
vllm vllm._C_stable_libtorch vllm.vllm_flash_attn._vllm_fa3_C vllm.vllm_flash_attn vllm.v1.attention.backends.flash_attn
vllm.v1.engine.async_llm vllm.v1.engine.core vllm.v1.worker.gpu_worker vllm.v1.worker.gpu_model_runner
vllm.v1.executor.uniproc_executor vllm.v1.executor.multiproc_executor vllm.v1.structured_output.backend_xgrammar
vllm.model_executor.models.qwen2 vllm.model_executor.models.qwen3 vllm.model_executor.models.llama
verl.rollout.vllm_engine verl.rollout.vllm_extension trl.generation.vllm_generation
"""
IMPORT = """
import importlib, json, sys
from contextlib import nullcontext
names = sys.argv[2:]
context = nullcontext()
if sys.argv[1] == "card":
    from tests.gpuset.cards import H200, pretend
    context = pretend(H200)
failed = {}
with context:
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            failed[name] = repr(error)
print(json.dumps({"failed": failed, "modules": len(sys.modules)}))
"""
UNPACK = """
import sys
from pathlib import Path
from bench.gpu.tree import Tree
tree = Tree(Path(sys.argv[1]))
tree.take_in(Path(sys.argv[2]))
print(*(path.name for path in tree.paths()))
"""
TRAIN = """
import ray
ray.init(num_cpus=1, include_dashboard=False)
print(ray.get(ray.remote(lambda: 6 * 7).remote()))
"""


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if not (STAGE / stage.SUMS).exists():
        pytest.skip(f"no archives in {STAGE}; build them with python bench/gpu/stage.py, or set STAGE")


@pytest.fixture(scope="module")
def image() -> Path:
    python = STAGE / "image/bin/python"
    if not python.exists():
        pytest.skip(f"no {python}; bench/gpu/image.txt has the commands that make it")
    return python


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, image: Path) -> Path:
    """The folders of the archives, unpacked as the driver does it on the machine."""
    folder = tmp_path_factory.mktemp("site")
    assert run(image, UNPACK, [str(folder), str(STAGE)], folder) == " ".join(NAMES)
    return folder


def run(python: Path, code: str, arguments: Sequence[str], *folders: Path) -> str:
    """Its last line, with the checkout and these folders alone beside the image's packages."""
    path = os.pathsep.join(map(str, [ROOT, *folders]))
    environment = {**os.environ, "PYTHONPATH": path, "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    command = [python, "-c", code, *arguments]
    done = subprocess.run(command, cwd=folders[0], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
    return done.stdout.splitlines()[-1]


def test_two_archives_fit_two_calls() -> None:
    archives = sorted(STAGE.glob("*.tar.xz"))
    assert [path.name.removesuffix(".tar.xz") for path in archives] == NAMES
    assert all(stage.mib([path]) <= PIECE_MIB for path in archives)
    assert stage.repository_mib() + PIECE_MIB <= 64


def test_sums_find_a_flipped_bit(tmp_path: Path) -> None:
    for name in (stage.SUMS, *(f"{name}.tar.xz" for name in NAMES)):
        shutil.copyfile(STAGE / name, tmp_path / name)
    check = ["sha256sum", "--check", "--strict", "--quiet", stage.SUMS]
    assert subprocess.run(check, cwd=tmp_path).returncode == 0
    with (tmp_path / "vllm.tar.xz").open("r+b") as file:
        file.seek(20_000_000)
        (byte,) = file.read(1)
        file.seek(20_000_000)
        file.write(bytes([byte ^ 1]))
    found = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 1 and found.stdout.startswith("vllm.tar.xz: FAILED")


def test_nothing_is_there_twice(site: Path, image: Path) -> None:
    installed = next((image.parent.parent / "lib").glob("python3.*")) / "site-packages"
    tops: dict[str, Path] = {}
    distributions: dict[str, Path] = {}
    for folder in (installed, *(site / name for name in NAMES)):
        for entry in folder.iterdir():
            if entry.suffix == ".dist-info":
                name = PathDistribution(entry).metadata["Name"].lower().replace("_", "-")
                assert name not in distributions, (entry, distributions[name])
                distributions[name] = entry
            elif entry.name != "__pycache__":
                assert entry.name not in tops, (entry, tops[entry.name])
                tops[entry.name] = entry
    assert {"vllm", "ray", "torch"} <= distributions.keys()


@pytest.mark.parametrize(
    ("names", "modules", "card"), [(NAMES[:1], WITHOUT_VLLM, "none"), (NAMES, WITH_VLLM, "card")], ids=["first", "both"]
)
def test_modules_are_imported(image: Path, site: Path, names: list[str], modules: str, card: str) -> None:
    answer = json.loads(run(image, IMPORT, [card, *modules.split()], *(site / name for name in names)))
    print(answer)
    assert not answer["failed"]


def test_ray_runs(image: Path, site: Path) -> None:
    assert run(image, TRAIN, [], site / "packages") == "42"


def test_hopper_code_is_what_vllm_was_built_with(site: Path, tmp_path: Path) -> None:
    """As cuobjdump reads it: the same kernels for 9.0 and 9.0a, and one of each file that has none for Hopper."""
    import triton.backends.nvidia

    cuobjdump = Path(triton.backends.nvidia.__file__).with_name("bin") / "cuobjdump"
    (wheel,) = stage.find_wheel(STAGE / "wheels", *stage.VLLM)
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(stage.DEVICE_CODE, tmp_path)
    kernels = []
    for number, library in enumerate((tmp_path / stage.DEVICE_CODE, site / "vllm" / stage.DEVICE_CODE)):
        (folder := tmp_path / str(number)).mkdir()
        command = [cuobjdump, "--gpu-architecture", "sm_90", "--extract-elf", "all", library]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        kernels.append(sorted(path.read_bytes() for path in folder.glob("*.cubin")))
    assert len(kernels[0]) == 75
    assert kernels[0] == kernels[1]
    listed = subprocess.run([cuobjdump, "--list-elf", library], check=True, capture_output=True, text=True).stdout
    assert len(listed.splitlines()) < 110  # of 428
