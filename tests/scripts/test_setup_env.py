"""setup_env.sh, with a stand-in for Python and pip so that nothing is installed. A real install is `-m slow`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.every import every

ROOT = Path(__file__).parents[2]
# Answers as python, `python -m venv`, `python -m pip` and `python -m toolrl.check.doctor`; writes each call to $CALLS.
# FIT: whether the python on PATH has all that is needed; the one in .venv is fit unless SPOILT is set.
FAKE_PYTHON = r"""#!/bin/bash
echo "$*" >> "$CALLS"
here="$(cd "$(dirname "$0")" && pwd)"
case "$*" in
    "-m toolrl.check.doctor"*)
        if [[ "$here" == */.venv/bin ]]; then
            [[ -z "$SPOILT" ]] || { echo "torchvision: spoilt"; exit 1; }
        else
            [[ -n "$FIT" ]] || { echo "missing: torch"; exit 1; }
        fi
        ;;
    "-m venv "*)
        mkdir -p "$3/bin" "$3/site/torch"
        for name in python python3 python3.11; do cp "$0" "$3/bin/$name"; done
        echo "export VIRTUAL_ENV='$3'" > "$3/bin/activate"
        ;;
    *"-m pip install"*)
        if [[ -n "$PIP_PRINTS" ]]; then echo "Collecting x"; echo "$PIP_PRINTS"; echo "WARNING: noise"; exit 1; fi
        [[ -z "$PIP_SLEEPS" ]] || exec sleep "$PIP_SLEEPS"
        echo "cuda: Optional[str] = $CUDA" > "$here/../site/torch/version.py"
        ;;
    *sysconfig*) echo "$here/../site" ;;
esac
"""


class Checkout:
    """A copy of the script and small requirement files, with the stand-in first on PATH."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.venv = self.root / ".venv"
        self.calls_file = folder / "calls"
        locks = self.root / "scripts" / "requirements"
        locks.mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "setup_env.sh", self.root / "scripts")
        for name in ("cpu", "cpu-nodeps", "gpu", "dev", "dev-nodeps", "gguf"):
            (locks / f"{name}.txt").write_text(f"{name}-package==1.0\n")
        bin_folder = folder / "bin"
        bin_folder.mkdir()
        for name in ("python", "python3", "python3.11"):
            (bin_folder / name).write_text(FAKE_PYTHON)
            (bin_folder / name).chmod(0o755)
        self.environment = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "HOME": str(folder),
            "CALLS": str(self.calls_file),
            "CUDA": "None",
            "VERL_DEVICE": "cpu",
        }

    def start(self, **settings: str) -> subprocess.Popen[str]:
        """The script as a process in a session of its own, as a terminal would start it."""
        self.calls_file.write_text("")
        return subprocess.Popen(
            ["bash", str(self.root / "scripts" / "setup_env.sh"), "--print-python"],
            env=self.environment | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_default_signals,
        )

    def run(self, **settings: str) -> subprocess.CompletedProcess[str]:
        process = self.start(**settings)
        output, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def installs(self) -> list[str]:
        """What pip was asked for in the last run, one entry per call."""
        marker = "--progress-bar off "
        return [line.partition(marker)[2] for line in self.calls_file.read_text().splitlines() if marker in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def built(checkout: Checkout) -> Checkout:
    """A checkout whose .venv is complete."""
    assert checkout.run().returncode == 0
    return checkout


def assert_complete(checkout: Checkout) -> None:
    assert (checkout.venv / ".toolrl-complete").is_file()
    assert not (checkout.venv / ".toolrl-incomplete").exists()


def test_a_fit_active_environment_is_used_as_it_is(checkout: Checkout) -> None:
    result = checkout.run(FIT="1")
    assert result.returncode == 0
    assert result.stdout.strip().endswith("bin/python3")
    assert checkout.installs() == []
    assert not checkout.venv.exists()


def test_a_fresh_build_installs_every_set_in_order(checkout: Checkout) -> None:
    result = checkout.run()
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(checkout.venv / "bin" / "python")
    locks = checkout.root / "scripts" / "requirements"
    assert checkout.installs() == [
        "torch==2.13.0",
        f"-r {locks}/cpu.txt",
        f"--no-deps -r {locks}/cpu-nodeps.txt",
        f"-r {locks}/dev.txt -r {locks}/gguf.txt -r {locks}/nf4.txt",
        f"--no-deps -r {locks}/dev-nodeps.txt",
        f"--no-deps --no-build-isolation -e {checkout.root}",
    ]
    assert_complete(checkout)


def test_the_index_for_torch_is_used_for_torch_alone(checkout: Checkout) -> None:
    checkout.run(TORCH_INDEX="https://index.example/cpu")
    assert checkout.installs()[0] == "--index-url https://index.example/cpu torch==2.13.0"
    assert every("index.example" not in call for call in checkout.installs()[1:])


def test_a_gpu_machine_gets_the_gpu_set(checkout: Checkout) -> None:
    assert checkout.run(VERL_DEVICE="gpu").returncode == 0
    assert checkout.installs()[0].endswith("/gpu.txt")
    assert not any("cpu" in call for call in checkout.installs())


def test_an_unknown_device_is_refused(checkout: Checkout) -> None:
    result = checkout.run(VERL_DEVICE="tpu")
    assert result.returncode != 0
    assert "expected cpu or gpu" in result.stderr


def test_a_complete_environment_is_used_again(built: Checkout) -> None:
    assert built.run().returncode == 0
    assert built.installs() == []


def make_incomplete(checkout: Checkout) -> None:
    (checkout.venv / ".toolrl-complete").rename(checkout.venv / ".toolrl-incomplete")


def change_requirements(checkout: Checkout) -> None:
    (checkout.root / "scripts" / "requirements" / "cpu.txt").write_text("cpu-package==2.0\n")


def break_python(checkout: Checkout) -> None:
    (checkout.venv / "bin" / "python").unlink()


def move_checkout(checkout: Checkout) -> None:
    elsewhere = checkout.root.with_name("elsewhere")
    checkout.root.rename(elsewhere)
    checkout.root, checkout.venv = elsewhere, elsewhere / ".venv"


@pytest.mark.parametrize("spoil", [make_incomplete, change_requirements, break_python, move_checkout])
def test_partial_or_outdated_builds_are_rebuilt(built: Checkout, spoil: Callable[[Checkout], None]) -> None:
    (built.venv / "leftover").touch()
    spoil(built)
    assert built.run().returncode == 0
    assert len(built.installs()) == 6
    assert not (built.venv / "leftover").exists()
    assert_complete(built)


def test_another_environment_is_built_beside_the_first_and_found_again(built: Checkout) -> None:
    other = built.root / ".venv-3.12"
    settings = {"VERL_VENV": str(other), "FIT": "1"}  # what is active would do, and is not asked
    first = built.run(**settings)
    assert first.stdout.strip() == str(other / "bin" / "python"), first.stderr
    assert (other / ".toolrl-complete").is_file()
    again = built.run(**settings)
    assert (again.stdout, built.installs()) == (first.stdout, [])
    assert_complete(built)


def test_the_python_to_build_with_is_the_one_asked_for(checkout: Checkout, tmp_path: Path) -> None:
    asked = tmp_path / "my python"
    shutil.copy(tmp_path / "bin" / "python", asked)
    assert f"new environment in {checkout.venv} with {asked}" in checkout.run(VERL_BASE_PYTHON=str(asked)).stderr
    assert_complete(checkout)
    (tmp_path / "second").mkdir()
    refused = Checkout(tmp_path / "second")
    result = refused.run(VERL_BASE_PYTHON="python3.99")
    assert result.returncode != 0
    assert "VERL_BASE_PYTHON: no Python 3.11 or 3.12 called python3.99" in result.stderr
    assert not (refused.venv / "bin").exists()


def test_its_own_environment_is_never_the_base_of_its_rebuild(built: Checkout) -> None:
    """As after `git pull` in a shell that has .venv active: its python comes first, and is about to be deleted."""
    (built.root / "scripts" / "requirements" / "cpu.txt").write_text("newer==2.0\n")
    active = f"{built.venv}/bin:{built.environment['PATH']}"
    assert built.run(PATH=active).returncode == 0
    assert_complete(built)


def test_a_complete_environment_outlives_a_driver_that_does_not_answer(built: Checkout) -> None:
    result = built.run(VERL_DEVICE="gpu")
    assert result.returncode != 0 and "was built for cpu, and now this machine asks for gpu" in result.stderr
    assert built.run().returncode == 0
    assert built.installs() == []


def test_an_active_environment_of_ones_own_in_the_same_place_is_used(checkout: Checkout) -> None:
    (checkout.venv / "bin").mkdir(parents=True)
    own = checkout.venv / "bin" / "python3"
    own.write_text("#!/bin/bash\necho fit\n")
    own.chmod(0o755)
    result = checkout.run(PATH=f"{own.parent}:{checkout.environment['PATH']}")
    assert result.returncode == 0 and result.stdout.strip() == str(own)


def test_a_read_only_checkout_uses_what_is_there(built: Checkout) -> None:
    (built.root / ".venv.lock").unlink()
    (built.root / ".venv.lock").mkdir()  # cannot be opened for writing, even by root
    assert built.run().returncode == 0
    shutil.rmtree(built.venv)
    result = built.run()
    assert result.returncode != 0 and "cannot write to" in result.stderr


def test_an_exported_cdpath_does_no_harm(checkout: Checkout) -> None:
    environment = checkout.environment | {"CDPATH": ".:/tmp"}  # matters where the script is named by a relative path
    command = ["bash", "scripts/setup_env.sh", "--print-python"]
    result = subprocess.run(command, cwd=checkout.root, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0 and result.stdout.strip() == str(checkout.venv / "bin" / "python")


def test_another_shell_is_refused_with_a_message(checkout: Checkout) -> None:
    script = str(checkout.root / "scripts" / "setup_env.sh")
    result = subprocess.run(["dash", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1 and "needs bash" in result.stderr


def test_an_environment_of_another_tool_is_left_alone(checkout: Checkout) -> None:
    checkout.venv.mkdir()
    (checkout.venv / "precious").touch()
    result = checkout.run()
    assert result.returncode != 0
    assert "was not created by this script" in result.stderr
    assert [path.name for path in checkout.venv.iterdir()] == ["precious"]


def test_an_outdated_environment_of_another_checkout_is_left_alone(built: Checkout, tmp_path: Path) -> None:
    other = Checkout(tmp_path / "other")
    other.venv.symlink_to(built.venv)
    assert other.run().returncode == 0 and other.installs() == []
    (other.root / "scripts" / "requirements" / "dev.txt").write_text("dev-package==2.0\n")
    done = other.run()
    assert done.returncode == 1 and "is a link to" in done.stderr and other.installs() == []
    assert_complete(built)


def test_an_environment_changed_by_hand_is_named_and_kept(built: Checkout) -> None:
    result = built.run(SPOILT="1")
    assert result.returncode != 0
    assert "torchvision: spoilt" in result.stderr
    assert_complete(built)


@pytest.mark.parametrize(
    ("printed", "advice"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError'\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "check the network",
        ),
        ("ERROR: No matching distribution found for torch==2.13.0", "no such version"),
        ("ERROR: something else", "fix the error above"),
    ],
)
def test_a_failing_pip_is_reported_and_the_next_run_repairs_it(checkout: Checkout, printed: str, advice: str) -> None:
    result = checkout.run(PIP_PRINTS=printed)
    assert result.returncode != 0
    assert result.stdout == ""
    assert printed.splitlines()[-1] in result.stderr
    assert "noise" not in result.stderr
    assert advice in result.stderr
    assert str(checkout.venv / "setup.log") in result.stderr
    assert (checkout.venv / ".toolrl-incomplete").exists()
    assert checkout.run().returncode == 0
    assert_complete(checkout)


def _default_signals() -> None:
    """A test run in the background ignores Ctrl-C, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait_for_pip(checkout: Checkout) -> None:
    deadline = time.monotonic() + 120
    while not checkout.installs():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_build_is_repaired_by_the_next_run(checkout: Checkout, signal_number: int) -> None:
    process = checkout.start(PIP_SLEEPS="8")
    wait_for_pip(checkout)
    if signal_number == signal.SIGINT:
        os.killpg(process.pid, signal_number)  # as Ctrl-C in a terminal does
    else:
        process.send_signal(signal_number)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert (checkout.venv / ".toolrl-incomplete").exists()
    assert checkout.run().returncode == 0
    assert_complete(checkout)


@pytest.mark.long
def test_two_concurrent_runs_build_the_environment_once(checkout: Checkout) -> None:
    first = checkout.start(PIP_SLEEPS="3")  # time for the second to come to the lock, on a busy machine too
    wait_for_pip(checkout)
    second = checkout.run()
    first.communicate(timeout=120)
    assert first.returncode == second.returncode == 0
    assert "waiting" in second.stderr
    assert checkout.calls_file.read_text().count("-m venv") == 0  # noted since the second run began


@pytest.mark.parametrize(("cuda", "reported"), [("'13.0'", True), ("None", False)])
def test_a_cuda_build_on_a_cpu_machine_is_reported(checkout: Checkout, cuda: str, reported: bool) -> None:
    result = checkout.run(CUDA=cuda)
    assert result.returncode == 0
    assert ("set TORCH_INDEX" in result.stderr) == reported
    assert ("MB on disk" in result.stderr) == reported


def test_sourcing_leaves_the_callers_shell_as_it_was(built: Checkout, tmp_path: Path) -> None:
    code = 'set +e -u; before="$-"; source "$1"; echo "$?" "$VIRTUAL_ENV" "$PWD"; [[ "$-" == "$before" ]]; echo "$?"'
    result = subprocess.run(
        ["bash", "-c", code, "bash", str(built.root / "scripts" / "setup_env.sh")],
        env=built.environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines() == [f"0 {built.venv} {tmp_path}", "0"]


def test_sourcing_reports_failure(checkout: Checkout, tmp_path: Path) -> None:
    code = 'source "$1" 2>/dev/null; echo "$? ${VERL_PYTHON:-unset}"'
    result = subprocess.run(
        ["bash", "-c", code, "bash", str(checkout.root / "scripts" / "setup_env.sh")],
        env=checkout.environment | {"PIP_PRINTS": "ERROR: no"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == "1 unset"


@pytest.mark.slow
def test_a_real_environment_trains(tmp_path: Path) -> None:
    """Installs everything for the CPU from the package index and starts vLLM; needs 4 GB and a few minutes."""
    copy = tmp_path / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv*", ".git", "outputs"))
    environment = os.environ | {"VERL_DEVICE": "cpu", "PATH": "/usr/local/bin:/usr/bin:/bin"}
    command = "source scripts/setup_env.sh && cd / && python -m toolrl.check.doctor"
    subprocess.run(["bash", "-c", command], cwd=copy, env=environment, check=True, timeout=3600)
