"""Rows of SWE-bench, SWE-Gym, SWE-smith and R2E-Gym, and our own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO
from unittest.mock import Mock

import pytest
from fastapi import HTTPException

from tests.toolrl.swe.repositories import BUG, FILES, FIX, GOLD, TEST, calc_task, git, patch, with_history, write
from toolrl.swe import image, remote, routes, wire
from toolrl.swe.image import ImageStore, prepare_image
from toolrl.swe.local import _base_prefix
from toolrl.swe.runtime import RuntimeLostError
from toolrl.swe.tasks import Repository, as_task_row, check_environment, read_swe_task, restored_files
from toolrl.swe.tasks import test_files as files_of_tests
from verl.errors import DataError
from verl.host import untrusted_files

BENCH = {
    "instance_id": "owner__calc-1",
    "repo": "owner/calc",
    "base_commit": "a" * 40,
    "patch": "the fix",
    "test_patch": "the tests",
    "problem_statement": "add subtracts",
    "hints_text": "",
    "version": "1.0",
    "FAIL_TO_PASS": '["tests/test_calc.py::test_add"]',
    "PASS_TO_PASS": '["tests/test_name.py::test_name"]',
    "environment_setup_commit": "b" * 40,
}
GYM = {**BENCH, "FAIL_TO_PASS": ["tests/test_calc.py::test_add"], "PASS_TO_PASS": []}
SMITH = {
    "instance_id": "owner__calc.12345678.func_1",
    "patch": patch({"calc/core.py": FIX}),  # the "bug": it is applied
    "FAIL_TO_PASS": ["tests/test_name.py::test_name"],
    "PASS_TO_PASS": [],
    "image_name": "swebench/swesmith.x86_64.owner_1776_calc.12345678",
    "repo": "swesmith/owner__calc.12345678",
    "problem_statement": "name is wrong",
}
R2E = {
    "repo_name": "calc",
    "docker_image": "namanjain12/calc_final:abc",
    "commit_hash": "abc",
    "problem_statement": "add subtracts",
    "execution_result_content": json.dumps({"test_file_names": ["test_1.py"], "test_file_codes": [TEST]}),
    "expected_output_json": json.dumps(
        {"\x1b[1mtest_add\x1b[0m": "PASSED", "TestAdd.test_zero - x": "PASSED", "test_bad": "FAILED"}
    ),
}


def test_rows_of_a_remote_runtime_name_their_image() -> None:
    bench = read_swe_task(BENCH, remote=True)
    assert bench.fail_to_pass == ("tests/test_calc.py::test_add",)
    assert bench.pass_to_pass == ("tests/test_name.py::test_name",)
    assert (bench.base_commit, bench.test_patch, bench.gold_patch) == ("a" * 40, "the tests\n", "the fix\n")
    assert bench.image == "docker.io/swebench/sweb.eval.x86_64.owner_1776_calc-1"
    assert read_swe_task(GYM, remote=True).pass_to_pass == ()
    smith = read_swe_task(SMITH, remote=True)
    assert (smith.image, smith.bug_patch, smith.gold_patch) == (SMITH["image_name"], SMITH["patch"], "")
    assert smith.image_tests == ("tests/test_name.py",) and smith.hidden_tests == {}
    r2e = read_swe_task(R2E, remote=True)
    assert r2e.fail_to_pass == ("test_add", "TestAdd.test_zero") and r2e.hidden_tests == {"r2e_tests/test_1.py": TEST}
    assert (r2e.id, r2e.image) == ("calc__abc", "namanjain12/calc_final:abc") and "/r2e_tests" in r2e.setup


def test_names_of_functions_are_those_of_the_test_patch(tmp_path: Path) -> None:
    """As in sympy's rows; their images have no pytest."""
    files = "--- a/sympy/tests/test_a.py\n+++ b/sympy/tests/test_a.py\n--- a/sympy/tests/data.py\n"
    row = BENCH | {"FAIL_TO_PASS": '["test_x"]', "PASS_TO_PASS": '["test_y", "TestZ.test_z"]', "test_patch": files}
    write(tmp_path / "owner__calc", FILES)
    assert files_of_tests(read_swe_task(row, tmp_path)) == ["sympy/tests/test_a.py"]
    with pytest.raises(DataError, match=r"owner/calc: test 'test_x' .*its image has no pytest"):
        read_swe_task(row, remote=True)


def test_names_of_r2e_gym_lose_colors_and_messages() -> None:
    """As in its own loader."""
    statuses = json.dumps({"\x1b[1mtest_add\x1b[0m - assert 3": "PASSED"})
    assert read_swe_task(R2E | {"expected_output_json": statuses}, remote=True).fail_to_pass == ("test_add",)


def test_published_rows_may_have_columns_of_our_own(tmp_path: Path) -> None:
    write(tmp_path / "owner__calc", FILES)
    own = {"test_timeout_s": 60, "limits": {"memory_mib": 8192}, "setup": "make", "file": "a.py", "bug_patch": "b"}
    task = read_swe_task({**GYM, **own, "hidden_tests": {"tests/test_b.py": TEST}}, tmp_path)
    assert (task.test_timeout_s, task.limits.memory_mib, task.setup) == (60.0, 8192, "make")
    assert (task.file, task.bug_patch, dict(task.hidden_tests)) == ("a.py", "b", {"tests/test_b.py": TEST})
    assert read_swe_task(GYM, tmp_path).test_timeout_s == 1800.0  # as in SWE-bench's harness
    assert read_swe_task({**GYM, "repository": "calc"}).test_timeout_s == 300.0
    image = read_swe_task({**R2E, "setup": "make"}, remote=True)
    assert image.setup.startswith("rm -rf /r2e_tests") and image.setup.endswith("\nmake")
    bench = read_swe_task({**GYM, **own}, remote=True)
    assert (bench.bug_patch, bench.image_tests) == ("b", ())


def test_the_base_commit_is_the_revision_of_a_git_repository(tmp_path: Path) -> None:
    source = with_history(tmp_path / "calc")
    assert read_swe_task({**GYM, "repository": str(source)}).repository == Repository(str(source), "a" * 40)
    named = {"path": str(source), "revision": "HEAD"}
    assert read_swe_task({**GYM, "repository": named}).repository == Repository(str(source), "HEAD")
    bare = tmp_path / "calc.git"
    git(tmp_path, "clone", "-q", "--bare", str(source), str(bare))
    assert read_swe_task({**GYM, "repository": str(bare)}).repository == Repository(str(bare), "a" * 40)
    of_head = {**GYM, "base_commit": "", "repository": {"path": str(bare), "revision": "HEAD"}}
    assert read_swe_task(of_head).repository == Repository(str(bare), "HEAD")
    (tmp_path / "swesmith__owner__calc.12345678").symlink_to(bare)  # a prepared one
    for row, prepared in (({**of_head, "repository": str(bare)}, None), (SMITH, tmp_path)):
        with pytest.raises(DataError, match=r"is a bare git repository, without a revision; expected `repository.rev"):
            read_swe_task(row, prepared)
    head = git(source, "rev-parse", "HEAD").strip()
    image = prepare_image(calc_task(tmp_path, repository=Repository(str(bare), head)), tmp_path / "images")
    assert (image / "calc" / "core.py").read_text() == BUG and not (image / "objects").exists()
    folder = write(tmp_path / "folder", FILES)
    assert read_swe_task({**GYM, "repository": str(folder)}).repository == Repository(str(folder))


def test_a_revision_has_all_files_of_its_commit(tmp_path: Path) -> None:
    """Also what `git archive` leaves out or rewrites, and links that lead outside."""
    source = with_history(tmp_path / "calc")
    write(source, {".gitattributes": "*.csv export-ignore\n*.v export-subst\n", "a.csv": "1", "a.v": "$Format:%d$"})
    (source / "outside").symlink_to("/usr/lib")
    git(source, "add", "-A")
    git(source, "-c", "user.name=a", "-c", "user.email=a@localhost", "commit", "-q", "-m", "data")
    (source / "later.py").touch()
    image = prepare_image(calc_task(tmp_path, repository=Repository(str(source), "HEAD")), tmp_path / "images")
    assert (image / "a.csv").read_text() == "1" and (image / "a.v").read_text() == "$Format:%d$"
    assert (image / "outside").readlink() == Path("/usr/lib") and not (image / "later.py").exists()


def test_a_revision_of_a_folder_has_its_files_as_they_were_committed(tmp_path: Path) -> None:
    source = with_history(tmp_path / "calc")
    git(source, "config", "core.autocrlf", "true")
    image = prepare_image(calc_task(tmp_path, repository=Repository(str(source / "calc"), "HEAD")), tmp_path / "images")
    assert {path.name for path in image.iterdir()} == {".git", *(path.name for path in (source / "calc").iterdir())}
    assert (image / "core.py").read_bytes() == (source / "calc" / "core.py").read_bytes()


def test_files_withheld_by_r2e_gym_are_in_no_image(tmp_path: Path) -> None:
    withheld = {"r2e_tests/test_1.py": f"{TEST} ", "run_tests.sh": "", "parsed_commit.json": "the fix"}
    write(tmp_path / "calc__abc", FILES | withheld)
    image = prepare_image(read_swe_task(R2E, tmp_path), tmp_path / "images")
    assert not withheld.keys() & {str(path.relative_to(image)) for path in image.rglob("*")}
    assert (image / "calc" / "core.py").exists()


@pytest.mark.parametrize("revision", ["-o/tmp/written", "--help", "HEAD:calc", "absent"])
def test_a_revision_is_a_commit(tmp_path: Path, revision: str) -> None:
    source = with_history(tmp_path / "calc")
    with pytest.raises(DataError, match=f"calc at {revision}: git: .*expected a git repository with this revision"):
        prepare_image(calc_task(tmp_path, repository=Repository(str(source), revision)), tmp_path / "images")
    assert not Path("/tmp/written").exists()


def test_an_environment_is_used_or_refused(tmp_path: Path) -> None:
    write(tmp_path / "owner__calc", FILES)
    assert read_swe_task(GYM | {"environment": "own"}, tmp_path).environment == "own"
    for row in (GYM, R2E):
        with pytest.raises(DataError, match="'environment': has no effect with the option `deployment`"):
            read_swe_task({**row, "environment": "own"}, remote=True)


def test_a_prepared_folder_is_the_runtime_of_a_row(tmp_path: Path) -> None:
    write(tmp_path / "owner__calc", FILES)
    (tmp_path / "environments" / "owner__calc").mkdir(parents=True)
    task = read_swe_task(GYM, tmp_path)
    assert task.repository == Repository(str(tmp_path / "owner__calc")) and task.python == "python"
    assert task.environment == str(tmp_path / "environments" / "owner__calc") and task.image == ""


def test_the_bug_of_swe_smith_is_applied_and_its_tests_are_hidden(tmp_path: Path) -> None:
    write(tmp_path / "prepared" / "swesmith__owner__calc.12345678", FILES)
    task = read_swe_task(SMITH, tmp_path / "prepared")
    assert task.hidden_tests == {"tests/test_name.py": FILES["tests/test_name.py"]} and task.setup == ""
    image = prepare_image(task, tmp_path / "images")
    assert (image / "calc" / "core.py").read_text() == FIX != BUG
    assert not (image / "tests" / "test_name.py").exists()
    assert prepare_image(task, tmp_path / "images") == image  # the same content has the same name


def test_histories_of_repositories_inside_are_removed_and_their_files_kept(tmp_path: Path) -> None:
    """As a folder, and as the file of a submodule."""
    source = with_history(tmp_path / "calc")
    with_history(source / "vendor" / "inner")
    write(source / "module", {".git": "gitdir: ../.git/modules/module\n", "code.py": "x = 1\n"})
    image = prepare_image(calc_task(tmp_path), tmp_path / "images")
    assert [str(path.relative_to(image)) for path in image.rglob(".git")] == [".git"]
    tracked = git(image, "-c", "safe.directory=*", "ls-files").split()
    assert {"vendor/inner/calc/core.py", "module/code.py", "calc/core.py"} <= set(tracked)


def test_a_bug_is_applied_in_a_store_inside_another_repository(tmp_path: Path) -> None:
    """There git looks for the files of a patch in that repository, and skips those that it does not find."""
    git(tmp_path, "init", "-q")
    source = write(tmp_path / "source", FILES)
    task = calc_task(tmp_path, repository=Repository(str(source)), bug_patch=GOLD)
    image = prepare_image(task, tmp_path / "images")
    assert (image / "calc" / "core.py").read_text() == FIX


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, "runtime of owner__calc-1 is missing: none of owner__calc-1, owner__calc in"),
        ({"instance_id": None}, "'instance_id': is missing"),
        ({"problem_statement": " "}, "'problem_statement': is missing"),
        ({"FAIL_TO_PASS": []}, "'FAIL_TO_PASS': names no test"),
        ({"FAIL_TO_PASS": "[a"}, "is not JSON"),
        ({"FAIL_TO_PASS": ["test_x (module.Class)"]}, r"'FAIL_TO_PASS': owner/calc: test 'test_x \(module.*node ids"),
        ({"FAIL_TO_PASS": ["Adds numbers."], "PASS_TO_PASS": ["test_x"]}, "owner/calc: test 'Adds numbers.' names no"),
        ({"FAIL_TO_PASS": ["test_x"]}, "owner/calc: test 'test_x' names no file"),
        ({"FAIL_TO_PASS": ["test_x"], "PASS_TO_PASS": []}, "owner/calc: test 'test_x' names no file"),
        ({"FAIL_TO_PASS": "test_x"}, "is not JSON"),
        ({"FAIL_TO_PASS": '"test_x"'}, "test_x are not tests"),
        ({"repository": 3}, "'repository': 3 is not a repository"),
        ({"repository": {"path": "x", "rev": "HEAD"}}, r"'rev': 'HEAD'} is not a repository; .*{path, rev"),
        ({"repository": "x", "test_timeout_s": True}, "'test_timeout_s': True is not a time"),
        ({"limits": {"speed": 3}}, "'limits'.*speed"),
        ({"repository": "x", "hidden_tests": {"../a.py": ""}}, "'hidden_tests'"),
        ({"repository": "x", "limits": {"speed": 3}}, "'limits'.*speed"),
        (
            {"repository": "x", "test_timeout_s": "soon"},
            "'test_timeout_s': 'soon' is not a time; expected seconds above 0",
        ),
        ({"repository": "x", "test_timeout_s": -1}, "'test_timeout_s': -1 is not a time"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_clear_error(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        read_swe_task(BENCH | change, tmp_path)


def test_images_that_were_used_least_recently_are_removed_first(tmp_path: Path) -> None:
    images, trash = tmp_path / "images", tmp_path / "trash"
    trash.mkdir()

    def add(name: str) -> None:
        write(images / name, {"file": name * (1 << 20)})
        asyncio.run(store.make_room(name))

    def kept() -> str:
        return "".join(sorted(path.name for path in images.iterdir()))

    write(images / "a", {"file": "a" * (1 << 20)})
    store = ImageStore(images, trash, 3.5 / 1024)
    add("b")
    add("c")
    with store.used("a"):
        pass
    add("d")
    assert kept() == "acd"
    with store.used("c"):
        add("e")
        assert kept() == "cde"
        add("f")
        assert kept() == "cef"
    assert list(trash.iterdir()) == []
    with store.used("f"):
        for each in "gh":
            write(images / each, {"file": each * (1 << 20)})

        async def both() -> None:
            await asyncio.gather(store.make_room("g"), store.make_room("h"))

        asyncio.run(both())
    assert "f" in kept()


async def test_two_images_that_arrive_together_make_room(tmp_path: Path) -> None:
    (tmp_path / "trash").mkdir()
    store = ImageStore(tmp_path / "images", tmp_path / "trash", 1.5 / 1024)
    for names in ("ab", "cd"):
        for name in names:
            write(tmp_path / "images" / name, {"file": name * (1 << 20)})
        await asyncio.gather(*map(store.make_room, names))
    assert len(list((tmp_path / "images").iterdir())) == 1


def file_of(data: bytes) -> BinaryIO:
    """A file of the operating system."""
    made = TemporaryFile()  # noqa: SIM115
    made.write(data)
    return made


def test_on_a_full_disk_the_runtime_is_lost_and_the_row_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a server, too: its answer lets the client ask others."""
    task = calc_task(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(untrusted_files, "give", full)
    with pytest.raises(OSError, match="No space"):
        prepare_image(task, tmp_path / "images")
    monkeypatch.setattr(image, "has_room", lambda _: False)
    with pytest.raises(RuntimeLostError, match=r"the disk of .*images is full \(.*No space"):
        prepare_image(task, tmp_path / "images")
    assert list((tmp_path / "images").iterdir()) == []
    monkeypatch.setattr(image.tempfile, "TemporaryDirectory", full)
    with pytest.raises(RuntimeLostError, match=r"the disk of .*images is full \(.*No space"):
        prepare_image(task, tmp_path / "images")
    monkeypatch.undo()
    packed = remote._pack(with_history(tmp_path / "sent"))
    for error in (OSError(28, "No space left on device"), FileNotFoundError(2, "No such file or directory")):
        monkeypatch.setattr(untrusted_files, "unpack", Mock(side_effect=error))
        with pytest.raises(HTTPException) as caught:
            routes._unpack_image(file_of(packed), tmp_path / "x", tmp_path, 100)
        assert (caught.value.status_code, str(error) in caught.value.detail) == (507, True)
    monkeypatch.undo()
    for packed in (b"no tar", remote._pack(tmp_path / "images")):
        with pytest.raises(HTTPException) as caught:
            routes._unpack_image(file_of(packed), tmp_path / "x", tmp_path, 100)
        assert caught.value.status_code == wire.REFUSED


def test_a_repository_that_cannot_be_read_is_a_data_error(tmp_path: Path) -> None:
    task = read_swe_task(GYM | {"repository": {"path": str(tmp_path / "absent.tar")}})
    with pytest.raises(DataError, match=r"absent\.tar"):
        prepare_image(task, tmp_path / "images")
    task = read_swe_task(GYM | {"repository": {"path": str(tmp_path / "absent"), "revision": "main"}})
    with pytest.raises(DataError, match=r"absent at main: .*expected a git repository with this revision"):
        prepare_image(task, tmp_path / "images")
    assert list((tmp_path / "images").iterdir()) == []


@pytest.mark.parametrize(
    ("repo", "instance", "image"),
    [
        ("astropy/astropy", "astropy__astropy-12907", "swebench/sweb.eval.x86_64.astropy_1776_astropy-12907"),
        ("getmoto/moto", "getmoto__moto-7365", "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-7365"),
        ("Project-MONAI/MONAI", "Project-MONAI__MONAI-6975", "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-6975"),
    ],
)
def test_images_have_their_publishers_names(repo: str, instance: str, image: str) -> None:
    task = read_swe_task(GYM | {"repo": repo, "instance_id": instance}, remote=True)
    assert task.image == f"docker.io/{image}"
    named = read_swe_task(GYM | {"repo": repo, "instance_id": instance, "image_name": "own/image"}, remote=True)
    assert named.image == "own/image"


@pytest.mark.parametrize(
    ("changed", "restored"),
    [
        ("tests/helpers.py tests/data/a.json calc/core.py", "tests/helpers.py tests/data/a.json"),
        ("calc/test/util.py other/tests/__init__.py latest/x.py", "calc/test/util.py other/tests/__init__.py"),
        ("calc/core.py calc/test_core.py calc/test_util.py calc/util_test.py", "calc/test_core.py calc/test_util.py"
         " calc/util_test.py"),
        ("calc/testing.py other/test_x.py calc/tests.py", "calc/tests.py"),
        ("calc tests deep/er deep", "calc tests"),  # a file in place of the tests' folder
        ("conftest.py deep/conftest.py deep/setup.cfg", "conftest.py deep/conftest.py deep/setup.cfg"),
        ("tests/fixed.py tests/new.png old.py moved.py", "tests/new.png moved.py old.py"),
    ],
)  # fmt: skip
def test_modules_that_hidden_tests_may_import_are_restored(changed: str, restored: str) -> None:
    """Not what the fix itself changes, nor code beside the tests."""
    test_patch = (
        "diff --git a/tests/new.png b/tests/new.png\nGIT binary patch\nrename from old.py\nrename to moved.py\n"
    )
    tests = ["calc/test_core.py::test_a", "tests/test_calc.py::test_b"]
    row = GYM | {"FAIL_TO_PASS": tests, "repository": "x", "test_patch": test_patch, "patch": "--- a/tests/fixed.py\n"}
    assert sorted(restored_files(read_swe_task(row), changed.split())) == sorted(restored.split())


def test_the_layout_of_skyrl_v0_is_its_instance() -> None:
    chat = [{"role": "user", "content": "an earlier rendering of the issue"}]
    row = {"data_source": "swe-gym", "prompt": chat, "instance": GYM}
    assert as_task_row(row) == as_task_row(GYM)
    assert as_task_row(row)["prompt"] == [{"role": "user", "content": "add subtracts"}]


@pytest.mark.parametrize("given", ["/etc", "../x", "/", "envs/../../x"])
def test_an_environment_of_a_row_lies_where_the_user_has_named(given: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither in the working folder nor in that of prepared"):
        check_environment({"environment": given}, tmp_path / "prepared")
    for right in ("environments/a", str(tmp_path / "prepared" / "a")):
        check_environment({"environment": right}, tmp_path / "prepared")


@pytest.mark.parametrize("home", ["", "bin", "/home/me", "/proc/self/fd", "../../bin"])
def test_the_interpreter_of_an_environment_is_a_python(home: str, tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text(f"home = {home}\n")
    with pytest.raises(DataError, match="as the folder of its interpreter"):
        _base_prefix(str(tmp_path))


@pytest.mark.parametrize("home", ["/bin", "/root/../root", "/", "//bin"])
def test_no_interpreter_shows_the_root_folder(home: str, tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text(f"home = {home}\n")
    assert _base_prefix(str(tmp_path)) == Path("/usr")
