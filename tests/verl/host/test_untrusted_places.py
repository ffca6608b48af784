"""What can lie at a path, at each place that opens what others left: the right answer or one fault, in time.

Nothing of the host is read, changed or waited for. A program's folder, archives and the runtime server have tests of
their own (tests/toolrl/envs/agent, test_unpacking.py, tests/toolrl/swe/test_runtime_server_doors.py).
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.at_a_path import DIGITS, KINDS, SECRET, host_file
from tests.toolrl.swe.repositories import FILES, calc_task, write
from toolrl.analysis.report.folder import read_run
from toolrl.analysis.samples.sample_files import read_samples, samples_path
from toolrl.envs.agent.inside import puller
from toolrl.envs.agent.launcher import output_end, read_reward_file
from toolrl.serve.export.folder import copy_model
from toolrl.serve.openai_server.served_model import find_model
from toolrl.swe import runtime, tasks
from toolrl.swe.image import prepare_image
from toolrl.swe.local import _base_prefix
from toolrl.swe.tasks import Repository
from verl.checkpoint.checkpoint import read_state
from verl.checkpoint.manifest import fingerprints, verify, write_json
from verl.config.load import named_model
from verl.embedded import embedded_path
from verl.errors import DataError, VerlError
from verl.host.task_folders import read_instruction
from verl.host.untrusted_files import UNPRIVILEGED_UID
from verl.host.watcher import remove_tree
from verl.pretrained import check_weights, read_model_config, read_tokenizer
from verl.workers.export import copy_files

pytestmark = pytest.mark.long
TASK_TOML = "[environment]\n"


def _model(folder: Path) -> None:
    for each in Path(embedded_path(named_model("embedded:model"))).iterdir():
        if each.is_file():
            shutil.copy(each, folder / each.name)
    (folder / "README.md").write_text("a card")


def _harbor(folder: Path) -> None:
    write(folder, {"instruction.md": "Do it.", "task.toml": TASK_TOML, "tests/test.sh": "", "environment/a": "1"})


def _exported(folder: Path) -> None:
    chosen = argparse.Namespace(
        model=str(folder), checkpoint="latest", tool_call_format=None, prompt_template=None, results=[]
    )
    (folder.parent / "made").mkdir()
    copy_model(chosen, folder.parent / "made")


def _imaged(folder: Path) -> object:
    task = calc_task(folder.parent, repository=Repository(str(folder)))
    return prepare_image(task, folder.parent / "made")


def _imaged_tar(folder: Path) -> object:
    task = calc_task(folder.parent, repository=Repository(str(folder / "packed.tar")))
    return prepare_image(task, folder.parent / "made")


def _run(folder: Path) -> None:
    for name in ("transcripts", "validation", "samples", "logs"):
        (folder / name).mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')


def _notes(folder: Path, name: str) -> object:
    """Raises DataError with what the report notes of a file."""
    run = read_run(folder)
    if found := [note for note in run.notes if name in note and "cannot be read" in note]:
        raise DataError(found[0])
    return run.settings, run.alarms, run.notes


def _transcript(folder: Path) -> object:
    run = read_run(folder)
    lines = list(run.transcript(1))
    if found := [note for note in run.notes if "of transcripts cannot be read" in note]:
        raise DataError(found[0])
    return lines


def _checkpoint(folder: Path) -> None:
    step = folder / "step-000001"
    step.mkdir()
    (step / "model.pt").write_bytes(bytes(100))
    fields = {"format": 1, "step": 1, "number": 1, "score": None, "files": fingerprints(step)}
    write_json(step / "manifest.json", fields)


def _verify(folder: Path) -> object:
    return verify(folder / "step-000001", hashes=True)


# place -> (what makes its folder, the name of the file there, what opens it)
Place = tuple[Callable[[Path], object], str, Callable[[Path], Any]]
PLACES: dict[str, Place] = {
    "reward of an agent": (lambda _: None, "reward.json", read_reward_file),
    "output of an agent": (lambda _: None, "output.txt", output_end),
    "report of a puller": (lambda _: None, "reward.json", lambda folder: puller.report(folder, 0)),
    "state of a checkpoint": (lambda _: None, "state.json", read_state),
    "pointer of a run": (
        lambda folder: (folder / "checkpoints").mkdir(), "checkpoints/latest.json",
        lambda folder: find_model(str(folder)),
    ),
    "instruction of a task": (_harbor, "instruction.md", read_instruction),
    "settings of a task": (_harbor, "task.toml", lambda folder: tasks.read_harbor_task(folder)),
    "tests of a prepared task": (lambda _: None, "test_a.py", lambda folder: tasks._text_of(folder, "test_a.py")),
    "environment's settings": (lambda _: None, "pyvenv.cfg", lambda folder: _base_prefix(str(folder))),
    "folder that is uploaded": (lambda _: None, "a.json", lambda folder: runtime._packed(folder, "x")),
    "file that is uploaded": (lambda _: None, "a.json", lambda folder: runtime._packed(folder / "a.json", "x")),
    "repository": (lambda folder: write(folder, FILES), "data.json", _imaged),
    "tar of a repository": (lambda _: None, "packed.tar", _imaged_tar),
    "exported model": (_model, "notes.json", _exported),
    "config of a model": (_model, "config.json", lambda folder: read_model_config(str(folder))),
    "tokenizer of a model": (_model, "tokenizer.json", lambda folder: read_tokenizer(str(folder))),
    "weights of a model": (_model, "model.safetensors", lambda folder: check_weights(str(folder))),
    "alarms of a run": (_run, "collapses.jsonl", lambda folder: _notes(folder, "collapses.jsonl")),
    "settings of a run": (_run, "config.yaml", lambda folder: _notes(folder, "config.yaml")),
    "crash of a run": (_run, "logs/crash-1.txt", lambda folder: _notes(folder, "crash")),
    "transcript of a run": (_run, "transcripts/step-000001.jsonl", _transcript),
    "samples of a run": (_run, "samples/step-000001.npz", lambda folder: read_samples(samples_path(folder, 1))),
    "manifest of a checkpoint": (_checkpoint, "step-000001/manifest.json", _verify),
    "file of a checkpoint": (_checkpoint, "step-000001/model.pt", _verify),
    "tokenizer that is saved": (
        _model, "tokenizer.json", lambda folder: copy_files(str(folder), ["tokenizer.json"], folder.parent),
    ),
}  # fmt: skip
# what is no fault: links as text, folders among others, what is not there
RIGHT = {
    "repository": {kind for kind in KINDS if "link" in kind} | {"loop", "folder", "hard link out"},
    "folder that is uploaded": {kind for kind in KINDS if "link" in kind} | {"loop", "folder", "deep, long names"},
    "tar of a repository": {"folder"},  # which is a repository, too
    "exported model": {"folder", "hard link out"},
    "file that is uploaded": {"folder", "deep, long names"},
    "weights of a model": {"giant", "folder", "deep", "deep, long names", "dangling link"},
    "config of a model": {"hard link out"},
    "tokenizer that is saved": set(KINDS),  # transformers finds no file, and refuses what is none
    "report of a puller": set(KINDS),  # the fault is its answer
    "output of an agent": set(KINDS),
    "alarms of a run": {"dangling link", "loop"},  # there are none
    "crash of a run": {"giant"},  # of which the first line is shown
}
NOT_FOUND = {"weights of a model"}  # transformers reports that there are none
UNREADABLE_IS_RIGHT = {"output of an agent", "report of a puller"}  # whose answer has the fault
SHARED = {"hard link out"}  # of one owner, in folders that are handed on: it looks like one within


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_each_place_has_the_right_answer_or_one_fault_in_time(tmp_path: Path, place: str, kind: str) -> None:
    make, name, opens = PLACES[place]
    host, folder = host_file(tmp_path / "host"), tmp_path / "theirs"
    folder.mkdir()
    make(folder)
    (folder / name).unlink(missing_ok=True)
    KINDS[kind](folder / name, host)
    started, found, fault = time.monotonic(), None, ""
    try:
        found = opens(folder)
    except (VerlError, FileNotFoundError) as error:
        fault = str(error)
    took = time.monotonic() - started
    made = [path for path in (tmp_path / "made").rglob("*") if path.is_file() and not path.is_symlink()]
    small = [path.read_text(errors="replace") for path in made if path.stat().st_size < 100]
    for each in (folder, tmp_path / "made"):
        remove_tree(each)
    if not fault:
        nothing = found is None and kind == "dangling link"
        assert nothing or kind in RIGHT.get(place, set()) or kind in SHARED, found
    assert len(fault) < 3000 and "Traceback" not in fault
    if kind not in SHARED:
        assert DIGITS not in f"{found}{fault}" and SECRET not in small
    now = host.stat()
    assert host.read_text() == SECRET and (now.st_mode & 0o777, now.st_uid) == (0o600, os.geteuid())
    assert took < 60, took  # what waits here waits for ever


@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_may_not_be_read_is_a_fault(place: str) -> None:
    """In a fork that is no longer root, which may read every file."""
    make, name, opens = PLACES[place]
    with tempfile.TemporaryDirectory() as top:
        folder = Path(top, "theirs")
        folder.mkdir()
        make(folder)
        (folder / name).write_text("{}")
        (folder / name).chmod(0)
        for each in (Path(top), *Path(top).rglob("*")):
            os.chown(each, *([UNPRIVILEGED_UID] * 2 if os.geteuid() == 0 else [-1, -1]))
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _answer_unprivileged(lambda: opens(folder), theirs)
        os.close(theirs)
        with os.fdopen(ours, "rb") as pipe:
            text = pipe.read().decode()
        os.waitpid(pid, 0)
    right = place in UNREADABLE_IS_RIGHT and "fault" not in text
    assert right or ("fault" in text and ("ermission" in text or place in NOT_FOUND)), text


def _answer_unprivileged(opens: Callable[[], Any], descriptor: int) -> None:
    try:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(UNPRIVILEGED_UID)
            os.setuid(UNPRIVILEGED_UID)
        text = f"found {opens()}"
    except VerlError as error:
        text = f"fault {error}"
    except BaseException as error:  # noqa: BLE001  shown by the test
        text = f"other {error!r}"
    os.write(descriptor, text.encode()[:4000])
    os._exit(0)


@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_vanishes_and_grows_meanwhile_has_one_answer(tmp_path: Path, place: str) -> None:
    make, name, opens = PLACES[place]
    host, folder, over = host_file(tmp_path / "host"), tmp_path / "theirs", threading.Event()
    folder.mkdir()
    make(folder)
    path = folder / name
    content = path.read_bytes() if path.exists() else b"{}"

    def change() -> None:
        while not over.is_set():
            for kind in ("pipe", "link out", "link to a device"):
                path.write_bytes(content)
                with path.open("ab") as file:
                    file.write(content[:1000] + b"\n")
                path.unlink()
                KINDS[kind](path, host)
                path.unlink()

    path.unlink(missing_ok=True)
    changing = threading.Thread(target=change)
    changing.start()
    try:
        until, tries = time.monotonic() + 0.5, 0
        while time.monotonic() < until or tries < 3:
            tries += 1
            with suppress(VerlError, FileNotFoundError):
                assert DIGITS not in str(opens(folder))
            remove_tree(tmp_path / "made")
    finally:
        over.set()
        changing.join()
    assert host.read_text() == SECRET


def test_a_row_reads_no_file_outside_of_its_repository(tmp_path: Path) -> None:
    """The names of tests come from the row: their files are read where a bug is injected."""
    host = host_file(tmp_path / "host")
    write(tmp_path / "owner__calc", FILES)
    for name in ("../host/host.json", str(host), "tests/../../host/host.json"):
        with pytest.raises(VerlError):
            tasks._text_of(tmp_path / "owner__calc", name)


def test_a_patch_of_a_row_lets_no_file_outside_be_removed(tmp_path: Path) -> None:
    """The bug is a link out, and the hidden test's path leads through it to a file with this content."""
    host = host_file(tmp_path / "host")
    bug = f"diff --git a/out b/out\nnew file mode 120000\n--- /dev/null\n+++ b/out\n@@ -0,0 +1 @@\n+{host.parent}\n"
    bug += "\\ No newline at end of file\n"
    folder = write(tmp_path / "calc2", FILES)
    (host.parent / "x").mkdir()
    for hidden, withheld in (({"out/host.json": SECRET}, ()), ({}, ("out/x",))):
        fields = {"bug_patch": bug, "hidden_tests": hidden, "withheld": withheld}
        task = calc_task(tmp_path, repository=Repository(str(folder)), **fields)
        with suppress(VerlError):
            image = prepare_image(task, tmp_path / "made")
            assert (image / "out").is_symlink()
        assert host.read_text() == SECRET and (host.parent / "x").is_dir()
