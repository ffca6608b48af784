"""Software-engineering tasks: a repository, an issue, and the tests that decide whether it is solved.

Our rows, and those of SWE-bench, SWE-Gym, SWE-smith and R2E-Gym as published. A row of theirs has no files: its runtime
is a folder that was prepared before (`prepared`), or an image that a remote runtime runs.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

from toolrl.swe.harbor import HarborTask, read_harbor_task
from toolrl.swe.runtime import TESTBED, RuntimeLimits
from verl.errors import DataError
from verl.host import untrusted_files
from verl.host.task_folders import task_row
from verl.json_values import read_json

# Files that decide what the tests report. They are restored before scoring, wherever they are.
PROTECTED = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml",
    "sitecustomize.py", "usercustomize.py", "sitecustomize/*", "usercustomize/*", "*.pth", "*.pyc", "*.egg-info/*",
    "*.dist-info/*",
)  # fmt: skip
TEST_FOLDERS = {"test", "tests"}  # all of their files belong to the tests
TEST_FILES = ("test_*", "*_test.py", "tests.py")  # of the tests in other folders, beside code
FUNCTION = r"[A-Za-z_]\w*(\.\w+)*"  # a test without its file
OWN_TEXT_COLUMNS = ("environment", "file", "setup", "bug_patch")  # of our rows
R2E_TESTS = "r2e_tests"  # R2E-Gym's folder of hidden tests
R2E_WITHHELD = (  # as its own loader withholds them; some hold the fix
    R2E_TESTS, "run_tests.sh", "syn_issue.json", "expected_test_output.json", "execution_result.json",
    "parsed_commit.json", "modified_files.json", "modified_entities.json",
)  # fmt: skip
R2E_SETUP = f"rm -rf /{R2E_TESTS} {' '.join(f'{TESTBED}/{name}' for name in R2E_WITHHELD)}\n"  # of its images
BENCH_IMAGES = "docker.io/swebench/sweb.eval.x86_64."  # SWE-bench's images, by instance
GYM_IMAGES = "docker.io/xingyaoww/sweb.eval.x86_64."  # SWE-Gym's
GYM_REPOSITORIES = {
    "bokeh/bokeh", "conan-io/conan", "dask/dask", "facebookresearch/hydra", "getmoto/moto", "iterative/dvc",
    "modin-project/modin", "pandas-dev/pandas", "project-monai/monai", "pydantic/pydantic", "python/mypy",
}  # fmt: skip
TEST_TIMEOUT_S = 300.0  # of a run of tests
BENCH_TIMEOUT_S = 1800.0  # of SWE-bench's harness, for one run of tests
MAX_TEST_BYTES = 1 << 24  # of a file of tests
BENCH_PYTHON = "/opt/miniconda3/envs/testbed/bin/python"  # in its images, SWE-Gym's and SWE-smith's


@dataclass(frozen=True, slots=True)
class Repository:
    """path: a folder, a tar file, or a git repository if `revision` is given"""

    path: str
    revision: str = ""


@dataclass(frozen=True, slots=True)
class SweTask:
    """One task.

    repository:   None if a remote runtime has it in its `image`
    python:       the interpreter with pytest, inside
    environment:  folder of the repository's own interpreter (scripts/swe/prepare.py); empty: the system's
    file:         what the agent style `line` edits
    setup:        shell commands after the start of a runtime
    fail_to_pass, pass_to_pass: pytest's node ids, which must all pass after the fix; or, for all, names without files
    hidden_tests: path in the repository -> content; the policy never sees them
    withheld:     other files and folders of the repository that the policy must not see
    test_patch:   the same as a diff
    bug_patch:    applied to the repository first
    image_tests:  hidden tests that the image holds, removed where the policy works
    gold_patch:   the fix, for validation only
    protected:    patterns of files that a patch cannot change, besides the hidden tests
    test_timeout_s: of one run of tests
    workdir:      another path of the repository inside
    harbor:       a task folder, whose tests/test.sh judges instead of tests by name
    """

    id: str
    statement: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    repository: Repository | None = None
    image: str = ""
    base_commit: str = ""
    python: str = "python"
    environment: str = ""
    file: str = ""
    setup: str = ""
    hidden_tests: Mapping[str, str] = field(default_factory=dict)
    withheld: tuple[str, ...] = ()
    test_patch: str = ""
    bug_patch: str = ""
    image_tests: tuple[str, ...] = ()
    gold_patch: str = ""
    protected: tuple[str, ...] = PROTECTED
    test_timeout_s: float = TEST_TIMEOUT_S
    limits: RuntimeLimits = field(default_factory=RuntimeLimits)
    workdir: str = ""
    harbor: HarborTask | None = None

    @property
    def own_interpreter(self) -> str:
        """The folder of the repository with the interpreter, as R2E-Gym's .venv, which no patch changes; or ""."""
        path = PurePosixPath(self.python)
        return path.relative_to(TESTBED).parts[0] if path.is_relative_to(TESTBED) else ""


def read_swe_task(row: Mapping[str, Any], prepared: Path | None = None, *, remote: bool = False) -> SweTask:
    """The task of a row. Raises DataError.

    prepared: folder with `ID` or `OWNER__NAME` (a folder, or a git repository that has the base commit), and the same
              names in `environments`
    remote:   runtimes run the image that the row names
    """
    if "harbor" in row:
        return _of_harbor(row, prepared, remote)
    is_r2e = "expected_output_json" in row
    task = _with_own_columns(_of_r2e(row) if is_r2e else _of_swe(row), row)
    repo, in_image = str(row.get("repo") or row.get("repo_name") or ""), remote and bool(task.image)
    if not task.fail_to_pass:
        raise DataError("names no test", "at least one", field="FAIL_TO_PASS")
    if not is_r2e:
        _check_names(task, repo or task.id, in_image)
    if in_image:
        _refuse_environment(row)
        setup = f"{R2E_SETUP}{task.setup}" if is_r2e else task.setup
        return replace(task, setup=setup, image_tests=() if row.get("bug_patch") else _hidden_by_the_bug(task))
    return task if task.repository is not None else _in_folder(task, repo, prepared, row)


def as_task_row(row: Any) -> Any:
    """For `data.map`: a published row, or one of ours, as a task row of the environment `swe`.

    Of SkyRL-v0's layout the column `instance` is taken, from which the others were made.
    """
    if isinstance(row, Mapping) and isinstance(row.get("instance"), Mapping):
        row = row["instance"]
    if not isinstance(row, Mapping) or not {"problem_statement", "harbor"} & row.keys():
        return row
    if "harbor" in row:
        _text(row, "harbor")
        return task_row(row)
    return {
        "data_source": "swe",
        "prompt": [{"role": "user", "content": row["problem_statement"]}],
        "reward_model": {"ground_truth": "hidden tests"},
        "extra_info": dict(row),
    }


def test_files(task: SweTask) -> list[str]:
    """The files of its tests, each once; with names that lack them those of the hidden tests and the test patch."""
    named = [name.partition("::")[0] for name in (*task.fail_to_pass, *task.pass_to_pass) if "::" in name]
    brought = [*task.hidden_tests, *_patched_files(task.test_patch)]
    return list(dict.fromkeys(named or (path for path in brought if fnmatch(PurePosixPath(path).name, "test*.py"))))


def missing_test_files(task: SweTask, present: Collection[str]) -> list[str]:
    """Files of its tests that neither the repository has nor the tests or the fix bring: a wrong row.

    Other characters than ASCII may be quoted in a diff: such names are not judged.
    """
    brought = {*task.hidden_tests, *_patched_files(task.test_patch), *_patched_files(task.gold_patch)}
    return [name for name in test_files(task) if name.isascii() and name not in present and name not in brought]


def placed_files(task: SweTask) -> list[str]:
    """The files that the tests bring, each once: those of the tests, hidden ones, and all of the test patch."""
    return list(dict.fromkeys([*task.hidden_tests, *test_files(task), *_patched_files(task.test_patch)]))


def restored_files(task: SweTask, changed: Iterable[str]) -> list[str]:
    """Of the files that a patch changed, those that are set back to the base: all that decides what tests report.

    Besides protected files and those that the tests bring: what they may import. That is every file of test folders,
    and files named like tests beside the hidden ones; but none that the task's own fix changes.
    """
    placed = set(placed_files(task))
    decided = placed | {str(each) for name in placed for each in PurePosixPath(name).parents}  # what stands in the way
    beside = {str(PurePosixPath(name).parent) for name in placed}
    fixed = set(_patched_files(task.gold_patch))

    def is_of_tests(name: str) -> bool:
        *folders, last = PurePosixPath(name).parts
        named = str(PurePosixPath(*folders)) in beside and any(fnmatch(last, pattern) for pattern in TEST_FILES)
        return name not in fixed and (named or not TEST_FOLDERS.isdisjoint(folders))

    return [name for name in changed if name in decided or _matches(name, task.protected) or is_of_tests(name)]


def protected_by_fix(task: SweTask) -> list[str]:
    """The protected files that its own fix changes: verdicts have the fix's."""
    placed = set(placed_files(task))
    return [
        name
        for name in dict.fromkeys(_patched_files(task.gold_patch))
        if _matches(name, task.protected) and name not in placed
    ]


def fixed_sources(task: SweTask) -> list[str]:
    """The Python files that its fix changes, or the bug, without those that a verdict sets back."""
    changed = [
        name for name in dict.fromkeys(_patched_files(task.gold_patch or task.bug_patch)) if name.endswith(".py")
    ]
    return [name for name in changed if name not in placed_files(task) and not _matches(name, task.protected)]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a path, or its end after a slash, matches a pattern."""
    return any(fnmatch(name, pattern) or fnmatch(name, f"*/{pattern}") for pattern in patterns)


def _patched_files(patch: str) -> list[str]:
    """Names with characters that git quotes are not found."""
    named = r"^(?:diff --git a/(?P<both>.+) b/(?P=both)|(?:--- a/|\+\+\+ b/|rename from |rename to )(?P<one>.+?)\t?)$"
    return [found[found.lastgroup or 0] for found in re.finditer(named, patch, re.MULTILINE)]


def _of_swe(row: Mapping[str, Any]) -> SweTask:
    """Columns of SWE-bench and SWE-Gym, and of SWE-smith, whose `patch` is the bug."""
    instance, statement = _text(row, "instance_id"), _text(row, "problem_statement")
    fail, passing = (_names(row, name) for name in ("FAIL_TO_PASS", "PASS_TO_PASS"))
    patch = _diff(row, "patch")
    is_bug = "image_name" in row and "base_commit" not in row
    return SweTask(
        id=instance,
        statement=statement,
        fail_to_pass=fail,
        pass_to_pass=passing,
        base_commit=str(row.get("base_commit") or ""),
        image=str(row.get("image_name") or row.get("docker_image") or _published_image(row)),
        python=BENCH_PYTHON,
        test_patch=_diff(row, "test_patch"),
        bug_patch=patch if is_bug else "",
        test_timeout_s=TEST_TIMEOUT_S if "repository" in row else BENCH_TIMEOUT_S,
        gold_patch="" if is_bug else patch,
    )


def _diff(row: Mapping[str, Any], name: str) -> str:
    """A patch, whose last line may have lost its end."""
    text = str(row.get(name) or "")
    return text if not text or text.endswith("\n") else f"{text}\n"


def _published_image(row: Mapping[str, Any]) -> str:
    """As the loaders of SWE-Gym and SWE-bench derive it from the instance."""
    is_gym = str(row.get("repo") or "").lower() in GYM_REPOSITORIES
    images, joint = (GYM_IMAGES, "_s_") if is_gym else (BENCH_IMAGES, "_1776_")
    return f"{images}{_text(row, 'instance_id').replace('__', joint).lower()}"


def _of_r2e(row: Mapping[str, Any]) -> SweTask:
    """Columns of R2E-Gym, whose tests are named without their file."""
    try:
        statuses = {_r2e_name(name): each for name, each in read_json(_text(row, "expected_output_json")).items()}
        executed = read_json(_text(row, "execution_result_content"))
        tests = dict(zip(executed["test_file_names"], executed["test_file_codes"], strict=True))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"cannot be read ({error!r})", "R2E-Gym's JSON", field="execution_result_content") from error
    return SweTask(
        id=f"{_text(row, 'repo_name')}__{_text(row, 'commit_hash')}",
        statement=_text(row, "problem_statement"),
        fail_to_pass=tuple(name for name, status in statuses.items() if name and status == "PASSED"),
        image=_text(row, "docker_image"),
        python=f"{TESTBED}/.venv/bin/python",
        hidden_tests={f"{R2E_TESTS}/{Path(name).name}": code for name, code in tests.items()},
        withheld=R2E_WITHHELD,
    )


def _r2e_name(name: str) -> str:
    """Published names have colors and messages of pytest's summary, which R2E-Gym removes, too."""
    return re.sub(r"\x1b\[\d+m", "", name).split(" - ")[0]


def _of_harbor(row: Mapping[str, Any], prepared: Path | None, remote: bool) -> SweTask:
    """`harbor`: a task folder; `environment` as in our own rows."""
    if unknown := sorted(name for name in row.keys() - {"harbor", "environment"} if row[name]):
        raise DataError("cannot be used with a task folder", "harbor and environment alone", field=unknown[0])
    found = read_harbor_task(Path(_text(row, "harbor")).absolute(), prepared, remote=remote)
    if found.image:
        _refuse_environment(row)
    return SweTask(
        id=found.folder.name,
        statement=found.instruction,
        fail_to_pass=(),
        repository=Repository(str(found.repository)) if found.repository else None,
        image=found.image,
        environment=str(row.get("environment") or found.environment),
        setup=found.setup,
        protected=(),
        test_timeout_s=found.timeout_s,
        limits=found.limits,
        workdir=found.workdir,
        harbor=found,
    )


def _with_own_columns(task: SweTask, row: Mapping[str, Any]) -> SweTask:
    """The columns of our own rows, which those of others may have, too."""
    fields: dict[str, Any] = {name: _text(row, name) for name in OWN_TEXT_COLUMNS if row.get(name)}
    if row.get("test_timeout_s"):
        fields["test_timeout_s"] = _seconds(row["test_timeout_s"])
    if row.get("hidden_tests"):
        fields["hidden_tests"] = {**task.hidden_tests, **_files(row["hidden_tests"])}
    if row.get("limits"):
        try:
            fields["limits"] = RuntimeLimits(**_json(row["limits"]))
        except TypeError as error:
            raise DataError(str(error), "fields of RuntimeLimits", field="limits") from error
    if "repository" in row:
        fields |= {"repository": _repository(row["repository"], task.base_commit), "image": "", "python": "python"}
    return replace(task, **fields)


def _repository(given: Any, base_commit: str) -> Repository:
    if isinstance(given, str):
        given = {"path": given}
    known = {name: value for name, value in given.items() if value is not None} if isinstance(given, Mapping) else {}
    of_text = all(isinstance(value, str) for value in known.values())
    if not of_text or not {"path"} <= known.keys() <= {"path", "revision"}:
        raise DataError(f"{given!r} is not a repository", "a path, or {path, revision}", field="repository")
    return _at_revision(known["path"], known.get("revision") or "", base_commit)


def _at_revision(path: str, revision: str, base_commit: str) -> Repository:
    """The base commit is the revision of a git repository whose revision is not given."""
    is_bare = Path(path, "HEAD").is_file() and Path(path, "objects").is_dir()
    if is_bare or Path(path, ".git").exists():
        revision = revision or base_commit
    if is_bare and not revision:
        problem, hint = f"{path} is a bare git repository, without a revision", "Or use a clone with a work tree"
        raise DataError(problem, "`repository.revision` or `base_commit`", hint, field="repository")
    return Repository(path, revision)


def _refuse_environment(row: Mapping[str, Any]) -> None:
    if row.get("environment"):
        problem = "has no effect with the option `deployment`: the task's image has an interpreter of its own"
        raise DataError(problem, "a row without it", field="environment")


def check_environment(row: Mapping[str, Any], prepared: Path | None) -> None:
    """Of others' rows: runtimes read it, and the interpreter that it names. Raises DataError unless it lies in the
    working folder or in that of prepared repositories.
    """
    if not (given := row.get("environment")) or not isinstance(given, str):
        return
    known = [Path.cwd(), *([prepared.absolute()] if prepared is not None else [])]
    if not any(Path(os.path.normpath(Path(given).absolute())).is_relative_to(each) for each in known):
        problem = f"{given} is neither in the working folder nor in that of prepared repositories"
        hint = "env.options.prepared=FOLDER names the folder that has it"
        raise DataError(problem, "an environment of scripts/swe/prepare.py there", hint, field="environment")


def _check_names(task: SweTask, repo: str, in_image: bool) -> None:
    """Raises DataError if pytest cannot find a test by its name."""
    names = (*task.fail_to_pass, *task.pass_to_pass)
    short = sorted((name for name in names if "::" not in name), key=lambda name: bool(re.fullmatch(FUNCTION, name)))
    if not short:
        return
    problem, expected = f"{repo}: test {short[0]!r}", "pytest's node ids: FILE::TEST"
    if not re.fullmatch(FUNCTION, short[0]) or len(short) < len(names) or not test_files(task):
        hint = "Tests of other runners, such as Django's, are not supported; names of functions need their test files"
        raise DataError(f"{problem} names no file", expected, hint, field="FAIL_TO_PASS")
    if in_image:
        hint = "Prepare its folder, with an environment that has pytest"
        raise DataError(
            f"{problem} is for another runner; its image has no pytest", expected, hint, field="FAIL_TO_PASS"
        )


def _in_folder(task: SweTask, repo: str, prepared: Path | None, row: Mapping[str, Any]) -> SweTask:
    names = [task.id, *([repo.replace("/", "__")] if repo else [])]
    found = [prepared / name for name in names if prepared is not None and (prepared / name).is_dir()]
    if not found:
        where = f"none of {', '.join(names)} in {prepared}" if prepared else "no folder of prepared repositories"
        hint = "Prepare it (scripts/swe/prepare.py), or use a remote runtime that runs its image"
        raise DataError(f"the runtime of {task.id} is missing: {where}", "a folder of that name", hint)
    environments = [prepared / "environments" / name for name in names if prepared is not None]
    environment = str(row.get("environment") or next((each for each in environments if each.is_dir()), ""))
    folder = found[0]
    repository = _at_revision(str(folder), "", task.base_commit)
    task = replace(task, repository=repository, environment=environment, python="python", image="")
    if not task.bug_patch or row.get("bug_patch"):
        return task
    try:
        hidden = {name: _text_of(folder, name) for name in _hidden_by_the_bug(task)}
    except (OSError, DataError) as error:
        raise DataError(f"a test of {task.id} cannot be read: {error}", field="FAIL_TO_PASS") from error
    return replace(task, hidden_tests={**hidden, **task.hidden_tests})


def _text_of(folder: Path, name: str) -> str:
    """A test's file in a repository that was prepared. Raises FileNotFoundError, DataError."""
    return untrusted_files.read(folder, name, MAX_TEST_BYTES, shared=True).decode()


def _hidden_by_the_bug(task: SweTask) -> tuple[str, ...]:
    """SWE-smith hides the files of the tests that its bug breaks."""
    return tuple(test_files(replace(task, pass_to_pass=()))) if task.bug_patch else ()


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise DataError("is missing or not a text", "a text", field=name)
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return float(value)
    raise DataError(f"{value!r} is not a time", "seconds above 0", field="test_timeout_s")


def _names(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list, or its JSON, as SWE-bench writes it. Our rows may write the name in small letters."""
    value = row.get(name, row.get(name.lower()))
    value = [] if value is None else _json(value)
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(each, str) for each in value):
        raise DataError(f"{str(value)[:100]} are not tests", "a list of pytest's node ids: FILE::TEST", field=name)
    return tuple(value)


def _files(value: Any) -> dict[str, str]:
    files = _json(value)
    if isinstance(files, Mapping):
        paths = {name: PurePosixPath(name) for name in files}
        inside = all(path.parts and not path.is_absolute() and ".." not in path.parts for path in paths.values())
        if inside and all(isinstance(text, str) for text in files.values()):
            return dict(files)
    raise DataError("is not a mapping of files", "relative path -> text", field="hidden_tests")


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value.tolist() if hasattr(value, "tolist") else value
    try:
        return read_json(value)
    except ValueError as error:
        raise DataError(f"is not JSON ({error})", "JSON, or the value itself") from error
