"""The verdict on a patch: hidden tests in a fresh runtime, without anything else of the session that made it.

    collect_patch: the session's work tree as a diff
    score_patch:   fresh runtime, the diff, protected files restored, hidden tests without what they expect, tests

What the tests expect stays with the process that judges (inside/run_tests.py); the patch runs in another one. Each test
that the fix must heal also runs alone, in a fork of an interpreter that has not imported the repository.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from time import perf_counter
from typing import Any
from weakref import WeakValueDictionary

from toolrl.swe.harbor import LATE, HarborTask, pack_command, run_verifier, unpack
from toolrl.swe.held import HeldTests, hold_tests
from toolrl.swe.runtime import (
    BASE_GIT,
    TESTBED,
    CommandFailedError,
    Completed,
    Runtime,
    RuntimeLostError,
    Runtimes,
    TaskFaultError,
    checked,
)
from toolrl.swe.tasks import (
    SweTask,
    missing_test_files,
    placed_files,
    protected_by_fix,
    restored_files,
    test_files,
)
from verl.envs.clock import paused
from verl.types import Score

MAX_PATCH_BYTES = 16 << 20
LEAST_APPLY_MIB = 128  # of memory for git, which reads all of a patch
MOST_KEPT = 4096  # verdicts on patches that may come again
SLACK_S = 60.0  # for starting the interpreter, beyond the limits of its runs
APPLY_CPU_S, COLLECT_CPU_S = 60, 120
COLLECT_S = 600.0  # beyond which the machine is at fault: git has a limit of CPU time, packing one of size
TRUSTED = f"""
rest=$(mktemp -d); mkdir $rest/objects
export GIT_DIR={BASE_GIT} GIT_WORK_TREE=$PWD GIT_INDEX_FILE=$rest/index GIT_OBJECT_DIRECTORY=$rest/objects
export GIT_ALTERNATE_OBJECT_DIRECTORIES={BASE_GIT}/objects GIT_CONFIG_NOSYSTEM=1 HOME=$rest
trusted="git -c core.fsmonitor=false -c core.hooksPath=/dev/null -c core.autocrlf=false -c safe.directory=*"
"""
# Without pipes, which git would wait for. $0 is the folder of the interpreter, if the repository holds it.
COLLECT = f"""{TRUSTED}
ulimit -S -t {COLLECT_CPU_S}
find . ! -type f ! -type d ! -type l -delete 2>/dev/null
$trusted read-tree HEAD && $trusted add -A --ignore-errors -- . ${{0:+":(exclude)$0"}} 2>/dev/null
code=$?; [ $code -le 128 ] || {{ echo "git add was killed" >&2; rm -rf $rest; exit $code; }}
$trusted diff --cached --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames HEAD -- . "$@" \\
  >$rest/diff
code=$?; head -c {MAX_PATCH_BYTES + 1} $rest/diff; rm -rf $rest; exit $code
"""
CHANGED = f"""{TRUSTED}
$trusted read-tree HEAD && $trusted add -A -f -- . ${{0:+":(exclude)$0"}} &&
  $trusted diff --cached --name-only --no-renames -z HEAD
code=$?; rm -rf $rest; exit $code
"""
SET_BACK = f"""{TRUSTED}
$trusted read-tree HEAD && $trusted checkout-index -f -z --stdin
code=$?; rm -rf $rest; exit $code
"""
# What a patch can cause ends git by itself: its CPU time and its memory, where its unpacked files are, have limits. Its
# attributes would decide in which encoding git writes tests, and whether it can read files at all.
APPLY = f"""
export GIT_DIR={BASE_GIT} GIT_WORK_TREE=$PWD GIT_CONFIG_NOSYSTEM=1 HOME=/nonexistent
ulimit -S -t {APPLY_CPU_S}; ulimit -S -v $1
interpreter=$2; shift 2
git apply --whitespace=nowarn --exclude=.gitattributes '--exclude=*/.gitattributes' \\
  ${{interpreter:+"--exclude=$interpreter/*"}} "$@" "$0" 2>"$0.log"
code=$?; tail -c 400 "$0.log" >&2; rm -f "$0" "$0.log"; exit $code
"""
PRESENT = """for name; do [ ! -f "$name" ] || printf '%s\\0' "$name"; done"""  # without the fix some are not
NOT_BY_ITSELF = (None, 126, 127, 137, 143)  # out of time, did not start, or was killed


class PatchOutcome(StrEnum):
    """Why a patch scores what it scores."""

    RESOLVED = "resolved"
    UNRESOLVED = "unresolved"  # tests ran, and not all passed
    EMPTY_PATCH = "empty_patch"
    PATCH_FAILED = "patch_failed"  # it does not apply
    TIMEOUT = "timeout"
    TAMPERED = "tampered"  # a test passed without its assertions, or an object equals everything
    NO_REPORT = "no_report"  # the tests did not end regularly


@dataclass(frozen=True, slots=True)
class PatchVerdict:
    """detail: for people, and never for the policy: it may quote hidden tests. passed: empty without a report

    held:   share of fail_to_pass that passes by a value that the judge alone compared
    opened: assertions whose object the process with the patch compared, because it is no plain data
    """

    outcome: PatchOutcome
    fail_to_pass: float = 0.0  # share that passes
    pass_to_pass: float = 0.0
    detail: str = ""
    passed: frozenset[str] = frozenset()
    reward: float | None = None  # of a task folder's own tests
    held: float = 0.0
    opened: frozenset[int] = frozenset()

    @property
    def score(self) -> Score:
        """The reward of the task's own tests; without one 1 if resolved, else 0. The parts name the outcome."""
        parts = {f"swe/{each}": float(each is self.outcome) for each in PatchOutcome}
        parts |= {"swe/fail_to_pass": self.fail_to_pass, "swe/pass_to_pass": self.pass_to_pass}
        parts |= {"swe/held": self.held, "swe/opened": float(len(self.opened))}
        return Score(float(self.outcome is PatchOutcome.RESOLVED) if self.reward is None else self.reward, parts)


class SharedVerdicts:
    """Equal patches of one task are scored once. A time-out or a missing report, which load can cause, is not kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], PatchVerdict] = {}
        self._scoring: WeakValueDictionary[tuple[str, ...], asyncio.Lock] = WeakValueDictionary()

    async def get(self, task: SweTask, patch: str, score: Callable[[], Awaitable[PatchVerdict]]) -> PatchVerdict:
        """Wait for the episode that scores this patch, if there is one; else call `score`, which may raise."""
        key = tuple(hashlib.sha256(text.encode(errors="replace")).hexdigest() for text in (repr(task), patch))
        lock = self._scoring.setdefault(key, asyncio.Lock())
        async with paused():
            await lock.acquire()
        try:
            if key in self._kept:
                return self._kept[key]
            verdict = await score()
            if verdict.outcome not in (PatchOutcome.TIMEOUT, PatchOutcome.NO_REPORT):
                self._kept[key] = verdict
            if len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            return verdict
        finally:
            lock.release()


async def collect_patch(runtime: Runtime, task: SweTask) -> str:
    """The changes of the work tree: binary files and modes included, protected files and tests excluded.

    Neither commits of the session, its git settings nor its .git folder matter. Latin-1 text stands for the bytes. Of a
    task folder all of the working folder is taken. Raises RuntimeLostError; CommandFailedError if git cannot read it.
    """
    if task.harbor is not None:
        command, folder = pack_command(task.limits, in_image=bool(task.image)), task.harbor.workdir
    else:
        excluded = [f":(exclude,glob)**/{pattern}" for pattern in task.protected]
        excluded += [f":(exclude,literal){name}" for name in placed_files(task)]
        command, folder = ["/bin/sh", "-c", COLLECT, task.own_interpreter, *excluded], TESTBED
    async with paused():
        await runtime.end_processes()  # they could stop those that collect, and change what these write
        began = perf_counter()
        done = await runtime.execute(command, cwd=folder, timeout_s=COLLECT_S)
    if done.exit_code is None and perf_counter() - began >= COLLECT_S:
        raise RuntimeLostError(f"{task.id}: its patch was not collected within {COLLECT_S:g} s")
    if done.exit_code != 0:
        limits = f"{task.limits.memory_mib} MiB of memory, {task.limits.file_mib} MiB of disk"
        ended = f"killed (limits: {limits})" if done.exit_code is None else f"exit code {done.exit_code}"
        problem = done.stderr.decode(errors="replace")[-500:] or ended
        raise CommandFailedError(f"the patch cannot be collected: {problem}")
    return done.stdout.decode("latin-1")


async def score_patch(runtimes: Runtimes, task: SweTask, patch: str, compiled: Path | None = None) -> PatchVerdict:
    """Apply a patch to a fresh runtime and run the tests. Raises RuntimeLostError: a fault, never a zero.

    compiled: of the repository without its bug, for patches that are trusted: what they run can write into the copy
    """
    if not patch.strip():
        return PatchVerdict(PatchOutcome.EMPTY_PATCH)
    if task.harbor is None and len(patch) > MAX_PATCH_BYTES:
        return PatchVerdict(PatchOutcome.PATCH_FAILED, detail=f"more than {MAX_PATCH_BYTES} bytes")
    async with paused():  # it has limits of its own
        verdict = await _score(runtimes, task, patch, compiled)
        if verdict.outcome is PatchOutcome.TAMPERED:
            base = await _score(runtimes, task, "", compiled)
            if base.outcome is PatchOutcome.TAMPERED:  # no patch could be judged
                raise TaskFaultError(f"{task.id} counts as tampered without any patch, too: {base.detail}")
        if verdict.outcome is PatchOutcome.RESOLVED and verdict.opened and patch != task.gold_patch:
            return await _as_plain_as_the_fix(runtimes, task, verdict)
        return verdict


async def _as_plain_as_the_fix(runtimes: Runtimes, task: SweTask, verdict: PatchVerdict) -> PatchVerdict:
    """Where the task's fix gives plain data a patch must, too: what an object equals, its own process reports."""
    fixed = await _score(runtimes, task, task.gold_patch, None) if task.gold_patch else verdict
    if fixed.outcome is PatchOutcome.RESOLVED and (more := verdict.opened - fixed.opened):
        detail = f"{len(more)} objects are compared where the fix gives plain data\n{verdict.detail}"
        return replace(verdict, outcome=PatchOutcome.TAMPERED, detail=detail)
    return verdict


async def _score(runtimes: Runtimes, task: SweTask, patch: str, compiled: Path | None) -> PatchVerdict:
    """patch: empty for the repository as it is"""
    runtime = await runtimes.start(replace(task, image_tests=()))  # which stay here
    try:
        if task.harbor is not None:
            await unpack(runtime, task.harbor, patch.encode("latin-1"))
            return await _rewarded(runtime, task.harbor)
        if patch.strip() and (problem := await _apply(runtime, task, patch.encode("latin-1", errors="replace"))):
            return PatchVerdict(PatchOutcome.PATCH_FAILED, detail=problem)
        return await judge_runtime(runtime, task, compiled)
    except CommandFailedError as error:  # of ours, in a runtime that only the patch has changed
        raise RuntimeLostError(f"{task.id}: {error}") from error
    finally:
        await runtime.close()


async def judge_runtime(runtime: Runtime, task: SweTask, compiled: Path | None = None) -> PatchVerdict:
    """The tests on what a runtime holds, after what decides about them is set back. Raises RuntimeLostError."""
    return await _judge(runtime, task, await _restore(runtime, task), compiled)


async def _apply(runtime: Runtime, task: SweTask, patch: bytes, *options: str) -> str:
    """Why git refuses the patch; empty if it does not. Raises RuntimeLostError if git did not end by itself."""
    name = f"/tmp/{secrets.token_hex(8)}.diff"
    await runtime.write(name, patch)
    memory_kib = max(LEAST_APPLY_MIB, min(task.limits.memory_mib, task.limits.file_mib) // 2) << 10
    done = await runtime.execute(["/bin/sh", "-c", APPLY, name, str(memory_kib), task.own_interpreter, *options])
    problem = done.stderr.decode(errors="replace").strip()
    if done.exit_code in NOT_BY_ITSELF:
        raise RuntimeLostError(f"{task.id}: git apply did not end by itself ({done.exit_code}): {problem}")
    return "" if done.exit_code == 0 else problem or f"git apply: exit code {done.exit_code}"


async def _restore(runtime: Runtime, task: SweTask) -> list[str]:
    """Undo changes to protected files and tests, then place the hidden tests. Returns Python files that tests use."""
    listed = await checked(runtime, ["/bin/sh", "-c", CHANGED, task.own_interpreter])
    base = await checked(runtime, ["git", f"--git-dir={BASE_GIT}", "ls-tree", "-r", "-z", "--name-only", "HEAD"])
    known = frozenset(_names(base))
    # A large repository has more files than the event loop may wait for.
    names = await asyncio.to_thread(restored_files, task, _names(listed))
    if missing := missing_test_files(task, known):
        raise RuntimeLostError(
            f"{task.id}: a test is in {missing[0]}, which neither the repository nor its tests bring"
        )
    await checked(runtime, ["xargs", "-0", "rm", "-rf", "--"], _listed([*names, *task.hidden_tests]))
    await checked(runtime, ["/bin/sh", "-c", SET_BACK], _listed(name for name in names if name in known))
    if settings := protected_by_fix(task):  # which the fix may need, and the agent's patch cannot have
        options = [f"--include={name}" for name in settings]
        if problem := await _apply(runtime, task, task.gold_patch.encode(), *options):
            raise TaskFaultError(f"the fix of {task.id} does not apply to {', '.join(settings)}: {problem}")
    for name, text in task.hidden_tests.items():
        await runtime.write(f"{TESTBED}/{name}", text.encode())
    if task.test_patch and (problem := await _apply(runtime, task, task.test_patch.encode())):
        # The task's fault, as its files are those of the base.
        raise TaskFaultError(f"the test patch of {task.id} does not apply: {problem}")
    guarded = {*placed_files(task), *await asyncio.to_thread(restored_files, task, known)}
    return sorted(name for name in guarded if name.endswith(".py"))


def _names(listed: bytes) -> list[str]:
    return [os.fsdecode(name) for name in listed.split(b"\0")[:-1]]


def _listed(names: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(name) + b"\0" for name in names)


async def _rewarded(runtime: Runtime, task: HarborTask) -> PatchVerdict:
    reward, log = await run_verifier(runtime, task)
    if reward is None:
        return PatchVerdict(PatchOutcome.TIMEOUT if log.startswith(LATE) else PatchOutcome.NO_REPORT, detail=log)
    resolved = PatchOutcome.RESOLVED if reward >= 1 else PatchOutcome.UNRESOLVED
    return PatchVerdict(resolved, reward, 1.0, log, reward=reward)


async def _hold(runtime: Runtime, task: SweTask) -> HeldTests:
    """Take out of the files of the tests what they expect."""
    sources: dict[str, str] = {}
    others: dict[str, dict[str, Sequence[int]]] = {}
    for name in _names(await checked(runtime, ["/bin/sh", "-c", PRESENT, "sh", *test_files(task)])):
        try:
            sources[name] = (await runtime.read(f"{TESTBED}/{name}")).decode()
        except UnicodeDecodeError:
            others[name] = {}
    held = await asyncio.to_thread(hold_tests, sources, (*task.fail_to_pass, *task.pass_to_pass))
    held.plan["needed"] |= others
    for name, source in held.sources.items():
        if source != sources[name]:
            await runtime.write(f"{TESTBED}/{name}", source.encode())
    return held


async def _judge(runtime: Runtime, task: SweTask, guarded: Sequence[str], compiled: Path | None) -> PatchVerdict:
    """All tests in one run; before it, if they are several, each that the fix must heal alone, up to one that fails."""
    tests = (*task.fail_to_pass, *task.pass_to_pass)
    runs = [tests, *((name,) for name in task.fail_to_pass if len(tests) > 1)]
    own = f"/tmp/{secrets.token_hex(8)}"
    held = await _hold(runtime, task)
    request = {
        "root": TESTBED,
        "compiled": f"{own}/compiled" if compiled else "",
        "files": [f"{TESTBED}/{name}" for name in test_files(task)],
    }
    plan = {
        **held.plan,
        "guarded": [f"{TESTBED}/{name}" for name in guarded],
        "runs": [
            {
                "args": _alone(names[0], task) if number else _files_of(names, task),
                "tests": [held.renamed.get(name, name) for name in names],
                "may_fail": [] if number else [held.renamed.get(name, name) for name in task.pass_to_pass],
                "timeout_s": task.test_timeout_s,
            }
            for number, names in enumerate(runs)
        ],
    }
    if compiled:
        await runtime.upload(compiled, f"{own}/compiled")
    await runtime.write(f"{own}/request.json", json.dumps(request).encode())
    await runtime.write(f"{own}/plan.json", json.dumps(plan).encode())
    await runtime.write(f"{own}/run_tests.py", files("toolrl.swe.inside").joinpath("run_tests.py").read_bytes())
    command = [task.python, "-I", "-S", f"{own}/run_tests.py", f"{own}/request.json", f"{own}/plan.json"]
    variables = await _variables(runtime) if task.setup else {}
    done = await runtime.execute(command, env=variables, timeout_s=len(runs) * task.test_timeout_s + SLACK_S)
    return _verdict(task, runs, held.renamed, done)


async def _variables(runtime: Runtime) -> dict[str, str]:
    """What the setup exports, which the agent's shell has, too."""
    name = f"/tmp/{secrets.token_hex(8)}.env"
    await runtime.run(f"env -0 >{name}")
    return dict(pair.split("=", 1) for pair in (await runtime.read(name)).decode().split("\0") if "=" in pair)


def _files_of(names: Sequence[str], task: SweTask) -> list[str]:
    named = dict.fromkeys(name.partition("::")[0] for name in names if "::" in name)
    return list(named) or test_files(task)


def _alone(name: str, task: SweTask) -> list[str]:
    """The test with all of its parameters, whose ids may contain what pytest splits at: no other is collected."""
    return [name.partition("[")[0]] if "::" in name else test_files(task)


def _verdict(task: SweTask, runs: Sequence[Sequence[str]], renamed: Mapping[str, str], done: Completed) -> PatchVerdict:
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        printed = done.stderr.decode(errors="replace")[-1000:]
        if done.exit_code in (126, 127):
            raise RuntimeLostError(f"{task.id}: {task.python} does not start: {printed}") from None
        return PatchVerdict(PatchOutcome.NO_REPORT, detail=printed)
    if "problem" in report:
        raise TaskFaultError(f"{task.id}: {report['problem']}; task.environment needs a pytest of its own")
    passed: list[set[str]] = []
    for names, run in zip(runs, report["runs"], strict=False):  # without those after the first that failed alone
        if run["tampered"]:
            return PatchVerdict(PatchOutcome.TAMPERED, detail=f"{run['tampered'][0]}\n{run['log']}")
        if run["timeout"] or not run["ended"]:
            return PatchVerdict(PatchOutcome.TIMEOUT if run["timeout"] else PatchOutcome.NO_REPORT, detail=run["log"])
        passed.append({name for name in names if run["outcomes"].get(renamed.get(name, name)) == "passed"})
    first, alone = passed[0], passed[1:]
    healed = first - {name for names, each in zip(runs[1:], alone, strict=False) for name in names if name not in each}
    by_value = {name for run in report["runs"] for name in run["held"]}
    resolved = len(passed) == len(runs) and healed >= {*task.fail_to_pass, *task.pass_to_pass}
    outcome = PatchOutcome.RESOLVED if resolved else PatchOutcome.UNRESOLVED
    return PatchVerdict(
        outcome,
        fail_to_pass=_share(task.fail_to_pass, healed),
        pass_to_pass=_share(task.pass_to_pass, first),
        detail=report["runs"][0]["log"],
        passed=frozenset(first - (set(task.fail_to_pass) - healed)),
        held=_share(task.fail_to_pass, {name for name in healed if renamed.get(name, name) in by_value}),
        opened=frozenset(number for run in report["runs"] for number in run["opened"]),
    )


def _share(names: Sequence[str], passed: set[str]) -> float:
    return sum(name in passed for name in names) / len(names) if names else 1.0
