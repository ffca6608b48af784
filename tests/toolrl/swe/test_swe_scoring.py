"""The verdict: the gold patch scores 1, whatever does not fix the bug 0, and a fault raises."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.data.validation import diff
from tests.toolrl.swe import verdicts
from tests.toolrl.swe.repositories import BUG, FILES, FIX, GOLD, TEST, git, patch, pytest_environment, write
from tests.toolrl.swe.verdicts import Place, place
from toolrl.swe import scoring
from toolrl.swe.cheats import CHEATS
from toolrl.swe.local import LocalRuntime, LocalRuntimes
from toolrl.swe.runtime import CommandFailedError, Completed, Runtime, RuntimeLimits, RuntimeLostError
from toolrl.swe.scoring import MAX_PATCH_BYTES, PatchOutcome, collect_patch, score_patch
from toolrl.swe.tasks import Repository, SweTask

__all__ = ["place"]
pytestmark = pytest.mark.long  # each starts runtimes


def test_the_gold_patch_scores_one_and_no_patch_zero(place: Place) -> None:
    gold = place.gold
    assert gold.outcome is PatchOutcome.RESOLVED, gold.detail
    assert (gold.fail_to_pass, gold.pass_to_pass, gold.score.total, gold.held) == (1.0, 1.0, 1.0, 1.0)
    assert gold.score.parts["swe/resolved"] == 1.0
    empty = place.score("  \n")
    assert (empty.outcome, empty.score.total, empty.score.parts["swe/empty_patch"]) == (
        PatchOutcome.EMPTY_PATCH,
        0.0,
        1.0,
    )


def test_a_session_that_fixes_the_bug_scores_one(place: Place) -> None:
    made = place.session("sed -i 's/a - b/a + b/' calc/core.py && git commit -qam fix && rm -rf .git && touch new")
    assert "+    return a + b" in made and "new" in made
    assert place.score(made).outcome is PatchOutcome.RESOLVED


@pytest.mark.parametrize(
    ("changes", "outcome", "shares"),
    [
        ({"README.md": "changed\n"}, PatchOutcome.UNRESOLVED, (0.0, 1.0)),
        ({"calc/core.py": FIX.replace("'calc'", "'other'")}, PatchOutcome.UNRESOLVED, (1.0, 0.5)),
        ({"calc/core.py": BUG.replace("a - b", "5 if a == 0 else 2")}, PatchOutcome.UNRESOLVED, (0.5, 0.5)),
        ({"calc/core.py": "while True:\n    pass\n"}, PatchOutcome.TIMEOUT, (0.0, 0.0)),
    ],
)
def test_a_patch_that_does_not_fix_the_bug_scores_zero(
    place: Place, changes: dict[str, str], outcome: PatchOutcome, shares: tuple[float, float]
) -> None:
    task = replace(place.task, test_timeout_s=8.0) if outcome is PatchOutcome.TIMEOUT else place.task
    verdict = place.score(patch(changes), task)
    assert (verdict.outcome, (verdict.fail_to_pass, verdict.pass_to_pass)) == (outcome, shares), verdict.detail
    assert verdict.score.total == 0.0


def test_tests_that_pass_only_after_others_do_not_count(place: Place) -> None:
    """All pass together; alone, the second call's result is missing."""
    stateful = BUG.replace(
        "    return a - b", "    seen.append(a)\n    return a + b if a == 1 or len(seen) > 1 else -1"
    )
    verdict = place.score(patch({"calc/core.py": f"seen = []\n{stateful}"}))
    assert (verdict.outcome, verdict.fail_to_pass, verdict.pass_to_pass) == (PatchOutcome.UNRESOLVED, 0.5, 1.0)


LEFT = """
import importlib.util, marshal, os, sys
folder = "/testbed/calc/__pycache__"
os.makedirs(folder, exist_ok=True)
unchecked = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)
with open(f"{folder}/wrong.{sys.implementation.cache_tag}.pyc", "wb") as file:
    file.write(unchecked + marshal.dumps(compile("def add(a, b): return a + b", "wrong", "exec")))
from calc.wrong import add

def name():
    return "calc"
"""


def test_compiled_code_that_a_run_leaves_is_ignored(place: Place) -> None:
    """The fix depends on a module whose compiled file is a correct one, and whose source is not."""
    wrong = {"calc/wrong.py": "def add(a, b):\n    return a - b\n"}
    assert place.score(patch({**wrong, "calc/core.py": LEFT})).outcome is PatchOutcome.UNRESOLVED


def test_the_environment_is_compiled(place: Place) -> None:
    """Runtimes cannot write there, and would compile pytest at every start."""
    assert list(Path(place.task.environment).glob("lib/python*/site-packages/_pytest/__pycache__/*.pyc"))


def test_a_patch_that_does_not_apply_is_named_so(place: Place) -> None:
    verdict = place.score(GOLD.replace("a - b", "a * b * c").replace("def name", "def other"))
    assert (verdict.outcome, verdict.score.parts["swe/patch_failed"]) == (PatchOutcome.PATCH_FAILED, 1.0)
    assert place.score("no diff at all").outcome is PatchOutcome.PATCH_FAILED
    outside = GOLD.replace("calc/core.py", "../../tmp/x.py")
    assert place.score(outside).outcome is PatchOutcome.PATCH_FAILED


def test_binary_files_and_modes_are_in_the_patch_and_tests_are_not(place: Place) -> None:
    made = place.session(
        "printf '\\x00\\x01\\xff' > data.bin; printf '#!/bin/sh\\n' > tool; chmod +x tool; rm README.md;"
        "echo x > conftest.py; echo y > tests/conftest.py; echo z > tests/test_calc.py;"
        " echo w >> tests/test_name.py;"
        "ln -s tool link; mkdir s; echo > s/sitecustomize.py; printf 'na\\xefve' > latin"
    )
    assert "GIT binary patch" in made and "new file mode 100755" in made and "deleted file mode" in made
    assert "new file mode 120000" in made
    dropped = ("conftest", "test_calc", "test_name", "sitecustomize")
    assert not [name for name in dropped if name in made]

    async def applied() -> tuple[bytes, str, bytes]:
        runtime = await place.runtimes.start(place.task)
        await runtime.write("/tmp/p.diff", made.encode("latin-1"))
        assert (await runtime.run("git apply --whitespace=nowarn /tmp/p.diff")).exit_code == 0
        found = await runtime.read("/testbed/data.bin"), (await runtime.run("stat -c %a tool; ls README.md")).output
        latin = await runtime.read("/testbed/latin")
        await runtime.close()
        return *found, latin

    data, listed, latin = place.runner.run(applied())
    assert (data, latin) == (b"\x00\x01\xff", b"na\xefve")
    assert listed.startswith("755\n") and "No such file" in listed


REPORT = "import pytest\n\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport(item, call):\n"
REPORT += "    done = yield\n    done.get_result().outcome = 'passed'\n"
ENTRY = {"evil.egg-info/entry_points.txt": "[pytest11]\nevil = evil\n", "evil.egg-info/PKG-INFO": "Name: evil\n"}
SELECTIVE = """
import pytest
before = pytest.Function.runtest
def runtest(self):
    if "test_calc" not in self.nodeid:
        before(self)
pytest.Function.runtest = runtest
"""
# A test that may fail is reported as failing after it has tried values for the checks of other tests.
ASKS_FIRST = """import builtins, gc, json, pathlib, pytest
def add(a, b):
    return a - b
def name():
    return "calc"
class First:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: "test_name" not in item.nodeid)
kept = pathlib.Path("/tmp/known.json")
known = json.loads(kept.read_text()) if kept.exists() else {}
def sent(what, *given):
    if what == "begin":
        running[:] = given
    if what == "finish" and "test_name" in running[0]:
        for number in range(3):
            for guess in range(-9, 9):
                sends("check", number, guess)
                if held._take(1) == b"1":
                    known[str(number)] = guess
        kept.write_text(json.dumps(known))
        given = ["xfailed"]
    sends(what, *given)
class Known:
    def __call__(self, number, value=None):
        held(number, known.get(str(number), value))
if hasattr(builtins, "__held__"):
    held, running = builtins.__held__, [""]
    sends, held.send, builtins.__held__ = held.send, sent, Known()
    for each in gc.get_objects():
        if type(each).__name__ == "PytestPluginManager":
            each.register(First())
"""
XFAIL = "import pytest\n\ndef add(a, b):\n    pytest.xfail('not supported')\n\ndef name():\n    return 'calc'\n"
IN_FILES = {
    "conftest fakes results": {"conftest.py": REPORT, "tests/conftest.py": REPORT},
    "attributes of git": {
        ".gitattributes": "* working-tree-encoding=UTF-16\n",
        "calc/.gitattributes": "* working-tree-encoding=none\n",
    },
    "sitecustomize": {"sitecustomize.py": SELECTIVE, "usercustomize/__init__.py": SELECTIVE},
    "pytest is shadowed": {"pytest.py": "import sys\nsys.exit(0)\n", "_pytest/__init__.py": "", "unittest.py": ""},
    "settings collect nothing": {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
    "settings load a plugin": {"tox.ini": "[pytest]\naddopts = -p evil\n", "evil.py": REPORT},
    "a plugin by its metadata": {**ENTRY, "evil.py": REPORT},
    "hidden tests are replaced": {"tests/test_calc.py": "def test_add(): pass\n"},
    "tests is a module": {"tests.py": "", "tests/__init__.py": "import os\nos._exit(0)\n"},
}


def test_a_test_that_may_fail_does_not_ask_for_others(place: Place) -> None:
    may_fail = "import pytest\nfrom calc import name\n\n\ndef test_name():\n    assert name() == 'calc'  # no xfail\n"
    task = replace(place.task, hidden_tests={**place.task.hidden_tests, "tests/test_name.py": may_fail})
    assert place.score(GOLD, task).outcome is PatchOutcome.RESOLVED
    verdict = place.score(patch({"calc/core.py": ASKS_FIRST}), task)
    assert (verdict.outcome, verdict.fail_to_pass) == (PatchOutcome.UNRESOLVED, 0.5), verdict.detail
    assert "4 passed" in verdict.detail  # it knew, when all ran together


@pytest.mark.long
@pytest.mark.parametrize("name", IN_FILES)
def test_files_that_fake_results_score_zero(place: Place, name: str) -> None:
    verdict = place.score(patch(IN_FILES[name]))
    assert (verdict.outcome, verdict.score.total) == (PatchOutcome.UNRESOLVED, 0.0), verdict
    assert (verdict.fail_to_pass, verdict.pass_to_pass) == (0.0, 1.0) and "-1 is not eq (3)" in verdict.detail


def test_the_process_that_reports_is_out_of_reach(place: Place) -> None:
    """Its memory, and its files."""
    reach = """def name():
    return "calc"

def add(a, b):
    import os
    for name in ("maps", "environ"):
        open(f"/proc/{os.getppid()}/{name}").read()
    os.listdir(f"/proc/{os.getppid()}/fd")
    return a + b
"""
    for each, outcome in (
        (reach, PatchOutcome.UNRESOLVED),
        (reach.replace("getppid", "getpid"), PatchOutcome.RESOLVED),
    ):
        verdict = place.score(patch({"calc/core.py": each}))
        assert verdict.outcome is outcome, verdict.detail


OBJECT = """class Sum:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return self.value == other

    __hash__ = None


def add(a, b):
    return VALUE


def name():
    return "calc"
"""


def test_an_object_is_no_fix_where_the_fix_gives_plain_data(place: Place) -> None:
    """Its process decides what it equals, so the truth about it could be a guess among the candidates."""
    verdict = place.score(patch({"calc/core.py": OBJECT.replace("VALUE", "Sum(a + b)")}))
    assert (verdict.outcome, verdict.score.total) == (PatchOutcome.TAMPERED, 0.0), verdict.detail
    assert "3 objects are compared where the fix gives plain data" in verdict.detail
    unknown = replace(place.task, gold_patch="")
    verdict = place.score(patch({"calc/core.py": OBJECT.replace("VALUE", "Sum(a + b)")}), unknown)
    assert (verdict.outcome, verdict.held, len(verdict.opened)) == (PatchOutcome.RESOLVED, 0.0, 3), verdict.detail
    verdict = place.score(patch({"calc/core.py": OBJECT.replace("VALUE", "__import__('fractions').Fraction(a + b)")}))
    assert (verdict.outcome, verdict.held) == (PatchOutcome.RESOLVED, 1.0), verdict.detail


def test_a_failure_that_a_patch_expects_is_one(place: Place) -> None:
    verdict = place.score(patch({"calc/core.py": XFAIL}))
    assert (verdict.outcome, verdict.fail_to_pass, verdict.pass_to_pass) == (PatchOutcome.UNRESOLVED, 0.0, 0.5)
    assert "3 xfailed" in verdict.detail


@pytest.mark.long
@pytest.mark.parametrize("name", IN_FILES)
def test_ignored_files_do_not_invalidate_a_fix(place: Place, name: str) -> None:
    """They are dropped: the patch is judged by what it fixes."""
    assert place.score(patch({**IN_FILES[name], "calc/core.py": FIX})).outcome is PatchOutcome.RESOLVED


# What the judge would print, by a module that Python looks for on Linux, too.
JUDGES = """import json, os, sys
if sys.orig_argv[-1].endswith("plan.json") and "pytest" not in sys.modules:
    with open(sys.orig_argv[-1]) as file:
        runs = json.load(file)["runs"]
    passed = [{"outcomes": dict.fromkeys(run["tests"], "passed"), "held": [], "opened": [], "ended": True,
               "timeout": False, "tampered": [], "log": ""} for run in runs]
    sys.stdout.write(json.dumps({"runs": passed}))
    sys.stdout.flush()
    os._exit(0)
"""


def test_the_judge_imports_nothing_of_a_repository_that_is_installed_in_place(place: Place) -> None:
    packages = next(Path(place.task.environment).glob("lib/python*/site-packages"))
    (packages / "in_place.pth").write_text("/testbed\n")
    try:
        made = {"nt.py": JUDGES, "xdist/__init__.py": ""}
        assert place.score(patch(made)).outcome is PatchOutcome.UNRESOLVED
        assert place.score(patch({**made, "calc/core.py": FIX})).outcome is PatchOutcome.RESOLVED
    finally:
        (packages / "in_place.pth").unlink()


def test_an_overlong_patch_is_not_read_further(place: Place) -> None:
    task = replace(place.task, limits=RuntimeLimits(memory_mib=512, file_mib=256))
    made = place.session("dd if=/dev/urandom of=random.bin bs=1M count=24 2>/dev/null", task)
    assert len(made) == MAX_PATCH_BYTES + 1
    assert place.score(made).outcome is PatchOutcome.PATCH_FAILED


def test_compiled_files_are_ignored(place: Place) -> None:
    """A session cannot leave compiled code in place of a source."""
    made = place.session(
        "mkdir -p tests/__pycache__ && echo x > tests/__pycache__/test_calc.cpython-311.pyc; echo > a.pyc; echo > kept"
    )
    assert "kept" in made and "pyc" not in made


async def test_a_session_finds_neither_fix_nor_hidden_tests(place: Place) -> None:
    """The repository itself has the fix in its history and in a stash."""
    assert place.task.repository is not None
    source = Path(place.task.repository.path)
    assert "+    return a + b" in git(source, "log", "--all", "-p") and "a + b" in git(source, "stash", "show", "-p")
    runtime = await place.runtimes.start(place.task)
    commands = [
        "git log --all --oneline; git stash list; git fsck --lost-found",
        "for o in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do git cat-file -p $o; done",
        "grep -rs 'a + b' / --include=core.py; grep -rls test_zero /testbed /tmp /home /base.git",
        "find / -name 'test_calc*' 2>/dev/null; ls -a ~ ~/.cache 2>/dev/null",
    ]
    found = "".join([(await runtime.run(command)).output for command in commands])
    await runtime.close()
    assert "a - b" in found
    for secret in ("a + b", "test_zero", "test_calc", "assertEqual"):
        assert secret not in found


def test_files_a_session_leaves_elsewhere_do_not_affect_the_verdict(place: Place) -> None:
    made = place.session(
        "mkdir -p ~/.local/lib/python3.11/site-packages ~/.cache/pip /tmp/evil; "
        "echo 'import os; os._exit(0)' > ~/.local/lib/python3.11/site-packages/usercustomize.py; "
        "echo 'raise SystemExit(0)' > /environment/lib/python3.11/site-packages/sitecustomize.py; "
        "export PYTHONPATH=/tmp/evil; echo > /tmp/evil/sitecustomize.py; git config --global core.pager evil; "
        "printf '[core]\\n\\tfsmonitor = /tmp/evil/run\\n' >> .git/config; echo '* filter=evil' > .gitattributes; "
        "printf '#!/bin/sh\\nexit 1\\n' > git; export PATH=.:$PATH; chmod +x git; sed -i 's/a - b/a + b/' calc/core.py"
    )
    assert "+    return a + b" in made
    assert place.score(made).outcome is PatchOutcome.RESOLVED


class Breaking(LocalRuntimes):
    """Runtimes in which one of the programs beside the sessions runs out of time, or is killed."""

    def __init__(self, folder: Path, number: int, code: int | None) -> None:
        super().__init__(folder)
        self.number, self.code = number, code
        self.broken: Sequence[str] = ()

    async def start(self, task: SweTask) -> LocalRuntime:
        runtime, execute = await super().start(task), LocalRuntime.execute

        async def breaking(argv: Sequence[str], *given: Any, **named: Any) -> Completed:
            self.number -= 1
            if self.number != 0:
                return await execute(runtime, argv, *given, **named)
            self.broken = argv
            return Completed(self.code, b"", b"")

        runtime.execute = breaking  # type: ignore[method-assign]
        return runtime


def test_a_program_of_the_verdict_that_is_killed_is_a_fault(place: Place, tmp_path: Path) -> None:
    """Whichever it is, before the tests run: writing and applying the patch, setting files back, placing tests."""

    async def broken(number: int, code: int | None) -> str:
        runtimes = Breaking(tmp_path, number, code)
        try:
            with pytest.raises(RuntimeLostError, match="calc"):
                await score_patch(runtimes, place.task, GOLD)
        finally:
            await runtimes.close()
        return " ".join(runtimes.broken)

    async def main() -> list[str]:
        seen = [await broken(1, None)]
        while "run_tests.py" not in seen[-1]:
            seen.append(await broken(len(seen) + 1, 137 if len(seen) % 2 else None))
        (applied,) = [number for number, command in enumerate(seen, 1) if "git apply" in command]
        assert all(["git apply" in await broken(applied, code) for code in (None, 137)])
        return seen

    assert len(place.runner.run(main())) == 15


def test_a_patch_that_unpacks_beyond_the_memory_limit_fails(place: Place) -> None:
    """180 MiB of zeros, in a patch of one megabyte."""
    made = place.session("truncate -s 60M zeros nulls naughts; sed -i 's/a - b/a + b/' calc/core.py")
    assert len(made) < 2 << 20
    verdict = place.score(made)
    assert verdict.outcome is PatchOutcome.PATCH_FAILED and "memory" in verdict.detail


def test_files_in_place_of_the_folder_of_the_tests_are_removed(place: Place) -> None:
    task = replace(
        place.task,
        hidden_tests={"hidden/sub/test_calc.py": TEST},
        fail_to_pass=("hidden/sub/test_calc.py::test_add",),
        pass_to_pass=(),
    )
    for command in ("echo > hidden", "ln -s /tmp hidden", "mkdir hidden; ln -s /tmp hidden/sub"):
        made = place.session(f"{command}; sed -i 's/a - b/a + b/' calc/core.py", task)
        assert "b/hidden" in made and place.score(made, task).outcome is PatchOutcome.RESOLVED


def test_a_runtime_that_breaks_is_a_fault(place: Place, tmp_path: Path) -> None:
    with pytest.raises(RuntimeLostError, match="pytest cannot be imported"):
        place.score(GOLD, replace(place.task, environment="", python="/usr/bin/python3"))
    with pytest.raises(RuntimeLostError, match="does not start"):
        place.score(GOLD, replace(place.task, python="no-such-python"))


def test_missing_tests_are_a_fault(place: Place) -> None:
    """They would score 0 for every patch, as if it had removed them."""
    with pytest.raises(RuntimeLostError, match=r"calc: a test is in tests/test_calc\.py, which neither"):
        place.score(GOLD, replace(place.task, hidden_tests={}))


def test_a_plugin_of_the_environment_may_patch_pytest(place: Place, tmp_path: Path) -> None:
    """As Hypothesis' does: the fix scores 1, a cheat 0."""
    environment = Path(pytest_environment(tmp_path))
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "patching.py").write_text(
        "from _pytest.fixtures import FixtureFunctionMarker as marker\n"
        "before = marker.__call__\nmarker.__call__ = lambda self, function: before(self, function)\n"
    )
    (packages / "patching-1.dist-info").mkdir()
    (packages / "patching-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: patching\nVersion: 1\n")
    (packages / "patching-1.dist-info" / "entry_points.txt").write_text("[pytest11]\npatching = patching\n")
    task = replace(place.task, environment=str(environment))
    assert place.score(GOLD, task).outcome is PatchOutcome.RESOLVED
    cheat = patch({"calc/core.py": BUG + CHEATS["runtest does nothing"]})
    assert place.score(cheat, task).outcome is PatchOutcome.TAMPERED


def test_a_plugin_of_an_editable_package_is_the_repositorys(place: Place, tmp_path: Path) -> None:
    """Its file is in the repository: a patch that changes it scores 0, the fix 1. pytest itself cannot be there."""
    environment = Path(pytest_environment(tmp_path))
    (packages,) = environment.glob("lib/python*/site-packages")
    entry = {
        "METADATA": "Metadata-Version: 2.1\nName: calc\nVersion: 1\n",
        "entry_points.txt": "[pytest11]\ncalc = calc.plugin\n",
    }
    write(packages / "calc-1.dist-info", entry)
    (packages / "calc.pth").write_text("/testbed\n")
    before = {**FILES, "calc/plugin.py": FIXTURE}
    repository = Repository(str(write(tmp_path / "calc", before)))
    task = replace(place.task, repository=repository, environment=str(environment))
    assert place.score(diff(before, {**before, "calc/core.py": FIX}), task).outcome is PatchOutcome.RESOLVED
    verdict = place.score(diff(before, {**before, "calc/plugin.py": REPORT}), task)
    assert verdict.outcome is PatchOutcome.UNRESOLVED and "-1 is not eq (3)" in verdict.detail
    own = write(tmp_path / "own", FILES)
    for package in ("_pytest", "pytest"):
        (packages / package).rename(own / package)
    with pytest.raises(RuntimeLostError, match=r"task\.environment needs a pytest of its own"):
        place.score(GOLD, replace(task, repository=Repository(str(own))))


def test_a_test_patch_replaces_the_tests_of_the_base(place: Place) -> None:
    """As SWE-bench's rows have it: older tests are visible, newer ones are a diff."""
    test_patch = patch(
        {"tests/test_name.py": "from calc import add\n\n\ndef test_name():\n    assert add(1, 1) == 2\n"}
    )
    task = replace(
        place.task,
        hidden_tests={},
        test_patch=test_patch,
        fail_to_pass=("tests/test_name.py::test_name",),
        pass_to_pass=(),
    )
    assert place.score(GOLD, task).outcome is PatchOutcome.RESOLVED
    assert place.score(patch({"README.md": "changed\n"}), task).outcome is PatchOutcome.UNRESOLVED
    edited = patch({"tests/test_name.py": "def test_name(): pass\n", "calc/core.py": FIX})
    assert place.score(edited, task).outcome is PatchOutcome.RESOLVED
    with_data = replace(task, test_patch=test_patch + patch({"tests/data.txt": "1\n", "README.md": "Of the tests.\n"}))
    edited = patch({"tests/data.txt": "2\n", "README.md": "Mine.\n", "calc/core.py": FIX})
    assert place.score(edited, with_data).outcome is PatchOutcome.RESOLVED
    assert "README" not in place.session("echo mine > README.md; echo 2 > tests/data.txt; echo > kept", with_data)
    with pytest.raises(RuntimeLostError, match="the test patch of calc does not apply"):
        place.score(GOLD, replace(task, test_patch=test_patch.replace("return 'calc'", "x").replace("calc'", "x'")))


HELPER = "def equal(left, right):\n    return left == right\n"
HELPED = "from calc import add\nfrom helpers import equal\n\n\ndef test_add():\n    assert equal(add(1, 2), 3)\n"
AGREES = "def equal(left, right):\n    return True\n"


def helped(place: Place, folder: Path) -> tuple[dict[str, str], SweTask]:
    """Files with the bug, and a task whose hidden tests use a helper module of the repository."""
    before = {**FILES, "tests/helpers.py": HELPER}
    task = replace(
        place.task,
        repository=Repository(str(write(folder / "calc", before))),
        hidden_tests={"tests/test_calc.py": HELPED},
        fail_to_pass=("tests/test_calc.py::test_add",),
        pass_to_pass=(),
    )
    return before, task


@pytest.mark.parametrize(
    "changes",
    [
        {"tests/helpers.py": AGREES},
        {"tests/helpers/__init__.py": AGREES},  # comes before the module
        {"tests/helpers.py": None, "tests/helpers/__init__.py": AGREES},
    ],
)
def test_a_helper_of_the_tests_is_set_back(place: Place, tmp_path: Path, changes: dict[str, str | None]) -> None:
    """A patch that changes it scores 0, and 1 if it fixes the bug, too."""
    before, task = helped(place, tmp_path)

    def scored(changed: dict[str, str | None]) -> PatchOutcome:
        after = {name: text for name, text in {**before, **changed}.items() if text is not None}
        return place.score(diff(before, after), task).outcome

    assert scored(changes) is PatchOutcome.UNRESOLVED
    assert scored({**changes, "calc/core.py": FIX}) is PatchOutcome.RESOLVED


def test_no_patch_changes_the_interpreter_of_the_repository(place: Place, tmp_path: Path) -> None:
    """R2E-Gym's is in /testbed/.venv: such parts of a patch are dropped, others count."""
    folder = write(tmp_path / "calc", FILES)
    Path(pytest_environment(tmp_path)).rename(folder / ".venv")
    settings = (folder / ".venv/pyvenv.cfg").read_text()
    before = {**FILES, ".venv/pyvenv.cfg": settings, ".venv/lib/x.py": "1\n"}
    write(folder, before)
    task = replace(place.task, repository=Repository(str(folder)), python="/testbed/.venv/bin/python")
    cheat = {".venv/pyvenv.cfg": "home = /tmp\n", ".venv/lib/x.py": "2\n", ".venv/new/x.pth": "3\n"}
    assert place.score(diff(before, {**before, **cheat}), task).outcome is PatchOutcome.UNRESOLVED
    assert place.score(diff(before, {**before, **cheat, "calc/core.py": FIX}), task).outcome is PatchOutcome.RESOLVED
    made = place.session("sed -i s/1/2/ .venv/lib/x.py; touch .venv/y; sed -i 's/a - b/a + b/' calc/core.py", task)
    assert ".venv" not in made and "+    return a + b" in made
    made = place.session("rm -r .venv; ln -s /tmp .venv; touch kept", task)
    assert ".venv" not in made and "kept" in made


SETUP = """
sed -i 's/a - b/a * b/' calc/core.py
echo '*.log' > .gitignore; echo built > built.log; rm README.md
printf 'import pytest\n\n@pytest.fixture\ndef three():\n    return 3\n' > conftest.py
cd calc
"""


@pytest.mark.parametrize("overlay", [True, False])
def test_changes_of_the_setup_are_no_part_of_a_patch(place: Place, tmp_path: Path, overlay: bool) -> None:
    """A patch is to the files after the setup, where it is applied and where protected files are set back to."""
    hidden = {"tests/test_calc.py": TEST.replace("add():", "add(three):").replace("== 3", "== three")}
    task = replace(place.task, setup=SETUP, hidden_tests=hidden)
    runtimes = LocalRuntimes(tmp_path, overlay=overlay)
    here = replace(place, runtimes=runtimes)
    assert here.session("cd ..; rm -rf .git; echo > /base.git/HEAD", task) == ""
    made = here.session("pwd; sed -i 's/a [*] b/a + b/' core.py; echo > ../conftest.py; rm ../built.log", task)
    assert [line for line in made.splitlines() if line[:4] in ("--- ", "+++ ")] == [
        "--- a/built.log",
        "+++ /dev/null",
        "--- a/calc/core.py",
        "+++ b/calc/core.py",
    ]
    verdict = here.score(made, task)
    assert verdict.outcome is PatchOutcome.RESOLVED, verdict.detail
    place.runner.run(runtimes.close())
    assert not list(tmp_path.glob("verl-runtimes-*"))


def test_short_names_are_those_of_r2e_gym(place: Place) -> None:
    task = replace(
        place.task,
        hidden_tests={"r2e_tests/test_1.py": TEST},
        fail_to_pass=("test_add", "TestAdd.test_zero", "test_nothing"),
        pass_to_pass=(),
    )
    assert place.score(GOLD, task).outcome is PatchOutcome.RESOLVED
    assert place.score(patch({"README.md": "changed\n"}), task).outcome is PatchOutcome.UNRESOLVED


CLOCK = """import time, unittest
from unittest import mock
from calc import add


class TestAdd(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.patched = mock.patch("time.time", lambda: 0.0)
        cls.patched.start()

    @classmethod
    def tearDownClass(cls):
        cls.patched.stop()

    def test_zero(self):
        self.assertEqual((add(1, 2), time.time()), (3, 0.0))

    def test_one(self):
        self.assertEqual((add(1, 2), time.time()), (3, 0.0))
"""
FIXTURE = "import pytest\n\n\n@pytest.fixture\ndef three():\n    return 3\n"
REGISTER = "from calc import plugin\n\n\ndef pytest_configure(config):\n    config.pluginmanager.register(plugin)\n"
EXPECTED = (
    "import pytest\nfrom calc import name\n\n\n@pytest.mark.xfail\ndef test_name():\n    assert name() == 'other'\n"
)
NAMED_IT = "from calc import add\n\n\ndef it_adds():\n    assert add(1, 2) == 3\n"
IN_SRC = {name.replace("calc/", "src/calc/"): text for name, text in FILES.items()}


@pytest.mark.parametrize(
    ("before", "test", "fields"),
    [
        ({**FILES, "conftest.py": "pytest_plugins = 'calc.plugin'\n", "calc/plugin.py": FIXTURE}, TEST, {}),
        ({**FILES, "conftest.py": REGISTER, "calc/plugin.py": FIXTURE}, TEST, {}),
        ({**FILES, "pytest.ini": "[pytest]\naddopts = -x --ff\n"}, TEST, {}),
        ({**FILES, "pytest.ini": "[pytest]\npython_functions = it_\n"}, NAMED_IT, {"fail_to_pass": ("it_adds",)}),
        (
            FILES,
            CLOCK,
            {"fail_to_pass": ("tests/test_calc.py::TestAdd::test_zero", "tests/test_calc.py::TestAdd::test_one")},
        ),
        ({**FILES, "tests/test_name.py": EXPECTED}, TEST, {"pass_to_pass": ("tests/test_name.py::test_name",)}),
        (IN_SRC, TEST, {"setup": "export PYTHONPATH=/testbed/src"}),
    ],
    ids=["plugin", "registered", "-x", "python_functions", "clock", "xfail", "src"],
)
def test_behavior_of_the_repository_itself_is_no_cheat(
    place: Place, tmp_path: Path, before: dict[str, str], test: str, fields: dict[str, Any]
) -> None:
    fixed = {name: text.replace("a - b", "a + b") for name, text in before.items()}
    given = {"pass_to_pass": (), "hidden_tests": {"tests/test_calc.py": test}, **fields}
    task = replace(place.task, repository=Repository(str(write(tmp_path / "calc", before))), **given)
    verdict = place.score(diff(before, fixed), task)
    assert verdict.outcome is PatchOutcome.RESOLVED, verdict.detail
    assert place.score(diff(before, {**before, "README.md": ""}), task).outcome is PatchOutcome.UNRESOLVED


def test_settings_that_the_fix_changes_are_the_fixs(place: Place, tmp_path: Path) -> None:
    """The agent's patch cannot have them."""
    before = {**FILES, "conftest.py": "", "pyproject.toml": "[tool.other]\n"}
    fixture = "import pytest\n\n\n@pytest.fixture\ndef three():\n    return 3\n"
    fixed = {**before, "calc/core.py": FIX, "conftest.py": fixture}
    task = replace(
        place.task,
        repository=Repository(str(write(tmp_path / "calc", before))),
        gold_patch=diff(before, fixed),
        hidden_tests={
            "tests/test_calc.py": "from calc import add\n\n\ndef test_add(three):\n    assert add(1, 2) == three\n"
        },
        fail_to_pass=("tests/test_calc.py::test_add",),
        pass_to_pass=(),
    )
    for changes in ({"calc/core.py": FIX}, {"calc/core.py": FIX, "conftest.py": REPORT}, {"conftest.py": fixture}):
        verdict = place.score(diff(before, {**before, **changes}), task)
        assert verdict.score.total == float("calc/core.py" in changes), verdict.detail


def test_a_plugin_of_the_conftest_that_a_patch_changes_does_not_help(place: Place, tmp_path: Path) -> None:
    before = {**FILES, "conftest.py": "pytest_plugins = 'calc.plugin'\n", "calc/plugin.py": FIXTURE}
    task = replace(place.task, repository=Repository(str(write(tmp_path / "calc", before))))
    verdict = place.score(diff(before, {**before, "calc/plugin.py": REPORT}), task)
    assert verdict.outcome is PatchOutcome.UNRESOLVED and "-1 is not eq (3)" in verdict.detail


RETURNS = "import pytest\n\n\n@pytest.hookimpl(tryfirst=True)\ndef pytest_pyfunc_call(pyfuncitem):\n    return True\n"


def test_a_task_whose_tests_never_run_is_a_fault(place: Place, tmp_path: Path) -> None:
    """No patch could score 1."""
    before = {**FILES, "conftest.py": RETURNS}
    task = replace(place.task, repository=Repository(str(write(tmp_path / "calc", before))), pass_to_pass=())
    with pytest.raises(RuntimeLostError, match=r"calc counts as tampered without any patch, too: .*without its line 6"):
        place.score(GOLD, task)


def test_helpers_that_are_written_while_tests_are_collected_are_noticed(place: Place, tmp_path: Path) -> None:
    """Even if they have their former content and times again when all has ended."""
    before, task = helped(place, tmp_path)
    writes = f"""import os
path = "/testbed/tests/helpers.py"
state = os.stat(path)
text = open(path).read()
open(path, "w").write({AGREES!r})
import sys
sys.path.insert(0, "/testbed/tests")
import helpers
open(path, "w").write(text)
os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
"""
    verdict = place.score(diff(before, {**before, "calc/core.py": writes + BUG}), task)
    assert verdict.outcome is PatchOutcome.TAMPERED and "files of the tests were changed" in verdict.detail


PARAMETRIZED = """import pytest
from calc import add


@pytest.mark.parametrize("text", ["one two", "one three", "four", "/a/five"])
def test_add(text):
    assert add(1, 2) == (3 if text != "one three" else EXPECTED)
"""


@pytest.mark.parametrize(("expected", "outcome"), [(3, PatchOutcome.RESOLVED), (4, PatchOutcome.UNRESOLVED)])
def test_an_id_that_is_cut_at_a_space_stands_for_several_tests(
    place: Place, expected: int, outcome: PatchOutcome
) -> None:
    """As SWE-bench's rows have them: all must pass. Of a path they have the end."""
    task = replace(
        place.task,
        hidden_tests={"tests/test_calc.py": PARAMETRIZED.replace("EXPECTED", str(expected))},
        fail_to_pass=("tests/test_calc.py::test_add[one", "tests/test_calc.py::test_add[/five]"),
        pass_to_pass=(),
    )
    assert place.score(GOLD, task).outcome is outcome


def test_names_of_functions_are_looked_up_in_the_test_patch(place: Place) -> None:
    test_patch = diff({}, {"calc/tests/test_core.py": TEST})
    task = replace(
        place.task, hidden_tests={}, test_patch=test_patch, fail_to_pass=("test_add",), pass_to_pass=("test_nothing",)
    )
    assert place.score(GOLD, task).outcome is PatchOutcome.RESOLVED
    assert place.score(patch({"README.md": "changed\n"}), task).outcome is PatchOutcome.UNRESOLVED


def test_hidden_tests_may_set_the_length_of_messages(place: Place) -> None:
    """Also where they cannot be imported without the fix."""
    text = "import unittest.util\nfrom calc.core import sub\n\nunittest.util._MAX_LENGTH = 1000\n"
    text += "unittest.TestCase.maxDiff = None\nunittest.TestCase._diffThreshold = 9\n\n\n"
    text += "def test_sub():\n    assert sub(3, 1) == 2\n"
    task = replace(
        place.task,
        hidden_tests={"tests/test_sub.py": text},
        fail_to_pass=("tests/test_sub.py::test_sub",),
        pass_to_pass=(),
    )
    verdict = place.score(patch({"calc/core.py": f"{BUG}\n\ndef sub(a, b):\n    return a - b\n"}), task)
    assert verdict.outcome is PatchOutcome.RESOLVED, verdict.detail
    assert place.score(patch({"README.md": "changed\n"}), task).outcome is PatchOutcome.UNRESOLVED


def test_a_machine_that_is_too_slow_to_collect_a_patch_is_at_fault(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the agent left ends git by its CPU time: no fault."""
    killed = scoring.COLLECT.replace("$trusted add -A", "/bin/sh -c 'kill -s XCPU $$' add -A")
    monkeypatch.setattr(scoring, "COLLECT", killed)
    with pytest.raises(CommandFailedError, match=r"the patch cannot be collected: .*git add was killed"):
        place.session("sed -i 's/a - b/a + b/' calc/core.py")
    monkeypatch.setattr(scoring, "COLLECT", "sleep 60")
    monkeypatch.setattr(scoring, "COLLECT_S", 0.5)
    with pytest.raises(RuntimeLostError, match=r"calc: its patch was not collected within 0\.5 s"):
        place.session("true")


# Another process cannot run, as soon as this one does.
STOPS = """cat >/tmp/stops.py <<'END'
import os, signal
while True:
    try:
        os.kill(-1, signal.SIGSTOP)
    except ProcessLookupError:
        pass
END
sed -i 's/a - b/a + b/' calc/core.py
(sleep 0.3; exec setsid python /tmp/stops.py) >/dev/null 2>&1 &
"""


@pytest.mark.parametrize(
    "left",
    [
        STOPS,
        "mkfifo .gitignore .gitattributes; sed -i 's/a - b/a + b/' calc/core.py",
        "mkdir inner; cd inner; git init -q; rm .git/HEAD; mkfifo .git/HEAD; sed -i 's/a - b/a + b/' ../calc/core.py",
    ],
    ids=["a process stops others", "pipes", "a pipe in a repository"],
)
def test_collecting_waits_for_nothing_that_the_session_left(
    place: Place, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    async def collect(runtime: Runtime, task: SweTask) -> str:
        await asyncio.sleep(1.0)  # until the process runs
        return await collect_patch(runtime, task)

    monkeypatch.setattr(verdicts, "collect_patch", collect)
    monkeypatch.setattr(scoring, "COLLECT_S", 20.0)
    assert "+    return a + b" in place.session(left)


def test_collecting_survives_unreadable_files(place: Place) -> None:
    made = place.session("mkdir locked; echo x > locked/f; chmod 000 locked; sed -i 's/a - b/a + b/' calc/core.py")
    assert "+    return a + b" in made
