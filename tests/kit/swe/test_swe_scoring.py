"""The verdict: the gold patch scores 1, whatever does not fix the bug 0, cheats included, and a fault raises."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from scripts.data.validation import diff
from tests.kit.sandbox.sandbox_host import need_bubblewrap
from tests.kit.swe.repositories import BUG, FILES, FIX, GOLD, TEST, calc_task, git, patch, pytest_environment, write
from verl.kit.swe import scoring
from verl.kit.swe.local import LocalRuntime, LocalRuntimes
from verl.kit.swe.runtime import CommandFailedError, Completed, RuntimeLimits, RuntimeLostError
from verl.kit.swe.scoring import MAX_PATCH_BYTES, PatchOutcome, PatchVerdict, collect_patch, make_sentinels, score_patch
from verl.kit.swe.tasks import Repository, SweTask

pytestmark = pytest.mark.long  # each starts runtimes


@dataclass
class Place:
    runner: asyncio.Runner
    runtimes: LocalRuntimes
    task: SweTask

    def score(self, patch: str, task: SweTask | None = None) -> PatchVerdict:
        return self.runner.run(score_patch(self.runtimes, task or self.task, patch))

    @cached_property
    def gold(self) -> PatchVerdict:
        return self.score(GOLD)

    def session(self, commands: str, task: SweTask | None = None) -> str:
        """The patch after these commands of an agent."""

        async def work() -> str:
            runtime = await self.runtimes.start(task or self.task)
            try:
                await runtime.run(commands)
                return await collect_patch(runtime, task or self.task)
            finally:
                await runtime.close()

        return self.runner.run(work())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    need_bubblewrap()
    folder = tmp_path_factory.mktemp("swe")
    with asyncio.Runner() as runner:

        async def make() -> LocalRuntimes:
            return LocalRuntimes(folder / "runtimes")

        runtimes = runner.run(make())
        yield Place(runner, runtimes, calc_task(folder, pytest_environment(folder)))
        runner.run(runtimes.close())


def test_the_gold_patch_scores_one_and_no_patch_zero(place: Place) -> None:
    gold = place.gold
    assert gold.outcome is PatchOutcome.RESOLVED, gold.detail
    assert (gold.fail_to_pass, gold.pass_to_pass, gold.score.total) == (1.0, 1.0, 1.0)
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
    verdict = place.score(patch(changes), replace(place.task, test_timeout_s=8.0))
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
GUESS = """
import json, os
for number in range(3, 64):
    for name in ("tests/test_calc.py::test_add", "tests/test_calc.py::TestAdd::test_zero"):
        try:
            os.write(number, (json.dumps({"test": name, "outcome": "passed"}) + "\\n").encode())
        except OSError:
            pass
"""
PLUGIN = """
import gc, pytest
class Evil:
    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        done = yield
        if "test_calc" in item.nodeid:
            done.get_result().outcome = "passed"
for each in gc.get_objects():
    if type(each).__name__ == "PytestPluginManager":
        each.register(Evil())
"""
REWRITE = """
from pathlib import Path
for path in Path("/testbed/tests").glob("test_calc.py"):
    path.write_text("def test_add(): pass\\ndef test_nothing(): pass\\nclass TestAdd:\\n def test_zero(self): pass\\n")
"""
UNITTEST = "import unittest\nunittest.TestCase.assertEqual = lambda *given: None\n"
# What a patch may try instead of fixing the bug: code of the package that runs when tests import it, or other files.
REPORTER = """import gc
def forging(send):
    return lambda message: send(
        {**message, "outcome": "passed"} if "test_calc" in message.get("test", "") else message
    )
def sends(value):
    return getattr(value, "__name__", "") == "send" and "token" in value.__code__.co_freevars
for each in gc.get_objects():
    try:
        for name, value in list(vars(each).items()):
            if sends(value):
                setattr(each, name, forging(value))
        for cell in each.__closure__ or ():
            if sends(cell.cell_contents):
                cell.cell_contents = forging(cell.cell_contents)
    except Exception:
        pass
"""
XFAIL = "import pytest\n\ndef add(a, b):\n    pytest.xfail('not supported')\n\ndef name():\n    return 'calc'\n"
MARK = """import pytest, sys
frame = sys._getframe()
while frame:
    if frame.f_globals.get("__name__") == "test_calc":
        frame.f_globals["pytestmark"] = pytest.mark.xfail
    frame = frame.f_back
"""
OUTCOME = """from _pytest import reports
class Outcome:
    def __get__(self, report, kind):
        return "passed" if "test_calc" in report.nodeid else vars(report)["outcome"]
    def __set__(self, report, value):
        vars(report)["outcome"] = value
reports.TestReport.outcome = Outcome()
"""
ENCODE = """import json
before = json._default_encoder.encode
def encode(given):
    is_hidden = isinstance(given, dict) and "test_calc" in given.get("test", "")
    return before({**given, "outcome": "passed"} if is_hidden else given)
json._default_encoder.encode = encode
"""
NAMES = f"""import __main__
__main__.any = lambda *given: False
{SELECTIVE}"""
FINDER = """import ast, importlib.machinery, importlib.util, sys
class Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path, **given):
        tree = ast.parse(data)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                node.body = [ast.Pass()]
        return compile(ast.fix_missing_locations(tree), path, "exec")
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "test_calc":
            return importlib.util.spec_from_loader(name, Loader(name, "/testbed/tests/test_calc.py"))
sys.meta_path.insert(0, Finder())
"""
WRAPPED = """import functools, gc, pytest, types
@pytest.hookimpl(tryfirst=True)
@functools.singledispatch
def passed(item, call):
    report = pytest.TestReport.from_item_and_call(item, call)
    report.outcome = "passed" if "test_calc" in item.nodeid else report.outcome
    return report
plugin = types.ModuleType("plugin")
plugin.pytest_runtest_makereport = passed
for each in gc.get_objects():
    if type(each).__name__ == "PytestPluginManager":
        each.register(plugin)
"""
NAMED = PLUGIN.replace(
    "class Evil:", "class Evil:\n    __file__ = '/testbed/conftest.py'\n    __module__ = '_pytest.x'"
)
IN_PACKAGE = {
    "the runner exits 0": "import os\nos._exit(0)\n",
    "sys.exit while importing": "import sys\nsys.exit(0)\n",
    "sys.exit is patched": "import sys\nsys.exit = lambda *given: None\n",
    "exit 0 at the end": "import atexit, os\natexit.register(os._exit, 0)\n",
    "runtest does nothing": "import pytest\npytest.Function.runtest = lambda self: None\n",
    "runtest does nothing for hidden tests": SELECTIVE,
    "every call passes": "import _pytest.runner as r\nr.CallInfo.from_call = classmethod(lambda c, f, w, reraise=None:"
    " c(None, None, 0.0, 0.0, 0.0, w, _ispytest=True))\n",
    "reports pass": "import _pytest.reports as r\nr.TestReport.failed = property(lambda self: False)\n"
    "r.TestReport.passed = property(lambda self: True)\nr.TestReport.outcome = 'passed'\n",
    "code of pytest is exchanged": "import pytest\npytest.Function.runtest.__code__ = (lambda self: None).__code__\n",
    "unittest asserts nothing": UNITTEST,
    "unittest asserts nothing and functions are fixed": UNITTEST
    + "import builtins\nbuiltins.AssertionError = Warning\n",
    "builtins are patched": "import builtins\nown = isinstance\nbuiltins.isinstance = lambda *given: own(*given)\n",
    "the clock is patched": "import time\ntime.monotonic = time.time = lambda: 0.0\n",
    "messages on every descriptor": GUESS,
    "a plugin is registered": PLUGIN,
    "a hidden test is rewritten": REWRITE,
    "the reporter is found by the garbage collector": REPORTER,
    "tests are expected to fail": MARK,
    "outcomes are computed": OUTCOME,
    "the encoder of JSON is exchanged": ENCODE,
    "names of the main module": NAMES,
    "tests are loaded without their lines": FINDER,
    "a plugin has the names of another": NAMED,
    "a plugin's hook is wrapped": WRAPPED,
    "a builtin is shadowed": "import unittest.case\nunittest.case.round = lambda *given: 0\n",
    "a tolerance is a number": "import pytest\ntype(pytest.approx(1.0)).DEFAULT_ABSOLUTE_TOLERANCE = 1e9\n",
    "patterns match": "import re\nre.search = lambda *given: True\n",
}
# What finds it; for others, the tests run as if it was not there.
FOUND = {
    "the runner exits 0": (PatchOutcome.NO_REPORT, ""),
    "sys.exit while importing": (PatchOutcome.TAMPERED, "sentinels had another outcome"),
    "sys.exit is patched": (PatchOutcome.TAMPERED, "sys.exit was replaced"),
    "runtest does nothing": (PatchOutcome.TAMPERED, "_pytest.python.Function.runtest was replaced"),
    "runtest does nothing for hidden tests": (PatchOutcome.TAMPERED, "_pytest.python.Function.runtest was replaced"),
    "every call passes": (PatchOutcome.TAMPERED, "_pytest.runner.CallInfo.from_call was replaced"),
    "reports pass": (PatchOutcome.TAMPERED, "_pytest.reports.TestReport.failed was added"),
    "code of pytest is exchanged": (PatchOutcome.TAMPERED, "_pytest.python.Function.runtest was replaced"),
    "unittest asserts nothing": (PatchOutcome.TAMPERED, "unittest.case.TestCase.assertEqual was replaced"),
    "unittest asserts nothing and functions are fixed": (PatchOutcome.TAMPERED, "builtins.AssertionError was replaced"),
    "builtins are patched": (PatchOutcome.TAMPERED, "builtins.isinstance was replaced"),
    "the clock is patched": (PatchOutcome.TAMPERED, "time.time was replaced"),
    "a plugin is registered": (PatchOutcome.TAMPERED, "a plugin was added: /testbed/calc/core.py"),
    "a hidden test is rewritten": (PatchOutcome.TAMPERED, "files of the tests were changed"),
    "outcomes are computed": (PatchOutcome.TAMPERED, "_pytest.reports.TestReport.outcome was added"),
    "names of the main module": (PatchOutcome.TAMPERED, "_pytest.python.Function.runtest was replaced"),
    "tests are loaded without their lines": (PatchOutcome.TAMPERED, "sys.meta_path was replaced"),
    "a plugin has the names of another": (PatchOutcome.TAMPERED, "a plugin was added: /testbed/calc/core.py"),
    "a plugin's hook is wrapped": (PatchOutcome.TAMPERED, "/functools.py"),
    "a builtin is shadowed": (PatchOutcome.TAMPERED, "unittest.case.round was added"),
    "a tolerance is a number": (PatchOutcome.TAMPERED, "DEFAULT_ABSOLUTE_TOLERANCE was replaced"),
    "patterns match": (PatchOutcome.TAMPERED, "re.search was replaced"),
}
IN_FILES = {
    "conftest fakes results": {"conftest.py": REPORT, "tests/conftest.py": REPORT},
    "sitecustomize": {"sitecustomize.py": SELECTIVE, "usercustomize/__init__.py": SELECTIVE},
    "pytest is shadowed": {"pytest.py": "import sys\nsys.exit(0)\n", "_pytest/__init__.py": "", "unittest.py": ""},
    "settings collect nothing": {"pytest.ini": "[pytest]\naddopts = --collect-only\n"},
    "settings load a plugin": {"tox.ini": "[pytest]\naddopts = -p evil\n", "evil.py": REPORT},
    "a plugin by its metadata": {**ENTRY, "evil.py": REPORT},
    "hidden tests are replaced": {"tests/test_calc.py": "def test_add(): pass\n"},
    "tests is a module": {"tests.py": "", "tests/__init__.py": "import os\nos._exit(0)\n"},
}


@pytest.mark.long
@pytest.mark.parametrize("name", [*IN_PACKAGE, *IN_FILES])
def test_a_cheat_scores_zero(place: Place, name: str) -> None:
    changes = IN_FILES.get(name) or {"calc/core.py": IN_PACKAGE[name] + BUG}
    verdict = place.score(patch(changes))
    failed = "2 xfailed, 1 xpassed" if IN_PACKAGE.get(name) == MARK else "test_add - assert -1 == 3"
    outcome, detail = FOUND.get(name, (PatchOutcome.UNRESOLVED, failed))
    assert (verdict.outcome, verdict.score.total) == (outcome, 0.0) and detail in verdict.detail, verdict
    assert (verdict.fail_to_pass, verdict.pass_to_pass) == (0.0, float(name not in FOUND))
    assert place.gold.score.total == 1.0


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


def test_a_failure_that_a_patch_expects_is_one(place: Place) -> None:
    verdict = place.score(patch({"calc/core.py": XFAIL}))
    assert (verdict.outcome, verdict.fail_to_pass, verdict.pass_to_pass) == (PatchOutcome.UNRESOLVED, 0.0, 0.5)
    assert "3 xfailed" in verdict.detail


@pytest.mark.long
@pytest.mark.parametrize("name", IN_FILES)
def test_such_files_do_not_harm_a_fix(place: Place, name: str) -> None:
    """They are dropped: the patch is judged by what it fixes."""
    assert place.score(patch({**IN_FILES[name], "calc/core.py": FIX})).outcome is PatchOutcome.RESOLVED


def test_of_a_patch_that_is_too_long_no_more_is_read(place: Place) -> None:
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


def test_a_session_finds_neither_fix_nor_hidden_tests(place: Place) -> None:
    """The repository itself has the fix in its history and in a stash."""
    assert place.task.repository is not None
    source = Path(place.task.repository.path)
    assert "+    return a + b" in git(source, "log", "--all", "-p") and "a + b" in git(source, "stash", "show", "-p")

    async def search() -> str:
        runtime = await place.runtimes.start(place.task)
        commands = [
            "git log --all --oneline; git stash list; git fsck --lost-found",
            "for o in $(git cat-file --batch-all-objects --batch-check='%(objectname)'); do git cat-file -p $o; done",
            "grep -rs 'a + b' / --include=core.py; grep -rls test_zero /testbed /tmp /home /base.git",
            "find / -name 'test_calc*' 2>/dev/null; ls -a ~ ~/.cache 2>/dev/null",
        ]
        found = [(await runtime.run(command)).output for command in commands]
        await runtime.close()
        return "".join(found)

    found = place.runner.run(search())
    assert "a - b" in found
    for secret in ("a + b", "test_zero", "test_calc", "assertEqual"):
        assert secret not in found


def test_what_a_session_leaves_elsewhere_does_not_reach_the_verdict(place: Place) -> None:
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


@pytest.mark.parametrize("code", [None, 137])
def test_a_program_of_the_verdict_that_is_killed_is_a_fault(place: Place, tmp_path: Path, code: int | None) -> None:
    """Whichever it is, before the tests run: writing and applying the patch, setting files back, placing tests."""
    seen = []

    async def main() -> None:
        while "run_tests.py" not in " ".join(map(str, seen[-1:])):
            runtimes = Breaking(tmp_path, len(seen) + 1, code)
            try:
                with pytest.raises(RuntimeLostError, match="calc"):
                    await score_patch(runtimes, place.task, GOLD)
            finally:
                await runtimes.close()
            seen.append(list(runtimes.broken))

    place.runner.run(main())
    assert len(seen) == 9 and sum("git apply" in " ".join(argv) for argv in seen) == 1


def test_what_a_patch_unpacks_to_is_its_own_fault(place: Place) -> None:
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


def test_tests_that_are_nowhere_are_a_fault(place: Place) -> None:
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
    cheat = patch({"calc/core.py": IN_PACKAGE["runtest does nothing"] + BUG})
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
    assert verdict.outcome is PatchOutcome.TAMPERED and "/testbed/calc/plugin.py" in verdict.detail
    own = write(tmp_path / "own", FILES)
    for package in ("_pytest", "pytest"):
        (packages / package).rename(own / package)
    with pytest.raises(RuntimeLostError, match="pytest is the repository's, which a patch can change"):
        place.score(GOLD, replace(task, repository=Repository(str(own))))


def test_sentinels_differ_each_time_and_cover_every_outcome() -> None:
    first, second = make_sentinels("tests"), make_sentinels("tests")
    assert not set(first.expected) & set(second.expected)
    assert first.path.startswith("tests/test_") and set(first.expected.values()) == {"passed", "failed", "error"}
    compile(first.text, first.path, "exec")
    assert make_sentinels(".").path.startswith("test_")
    assert "def test_add" in TEST  # hidden tests look alike


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
def test_what_the_setup_changes_is_no_part_of_a_patch(place: Place, tmp_path: Path, overlay: bool) -> None:
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
def test_what_a_repository_does_itself_is_no_cheat(
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


def test_a_plugin_of_the_conftest_that_a_patch_changes_is_a_cheat(place: Place, tmp_path: Path) -> None:
    before = {**FILES, "conftest.py": "pytest_plugins = 'calc.plugin'\n", "calc/plugin.py": FIXTURE}
    task = replace(place.task, repository=Repository(str(write(tmp_path / "calc", before))))
    verdict = place.score(diff(before, {**before, "calc/plugin.py": REPORT}), task)
    assert verdict.outcome is PatchOutcome.TAMPERED and "calc/plugin.py" in verdict.detail


def test_a_task_whose_sentinels_never_stand_is_a_fault(place: Place, tmp_path: Path) -> None:
    """No patch could score 1."""
    skips = "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef known(request):\n"
    skips += "    if 'test_calc' not in request.node.nodeid:\n        pytest.skip('unknown')\n"
    before = {**FILES, "conftest.py": skips}
    task = replace(place.task, repository=Repository(str(write(tmp_path / "calc", before))), pass_to_pass=())
    with pytest.raises(RuntimeLostError, match="calc counts as tampered without any patch, too: 7 sentinels"):
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
    assert (verdict.outcome, verdict.detail) == (PatchOutcome.TAMPERED, "files of the tests were changed")


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


def test_collecting_survives_unreadable_files(place: Place) -> None:
    made = place.session("mkdir locked; echo x > locked/f; chmod 000 locked; sed -i 's/a - b/a + b/' calc/core.py")
    assert "+    return a + b" in made
