"""Task folders of Harbor, the format of Terminal-Bench from 2 on (harborframework.com/docs/tasks).

    instruction.md  task.toml  environment/  tests/test.sh  solution/solve.sh

The policy gets the instruction and the files of environment/ in its working folder. The verdict is what tests/test.sh
writes to /logs/verifier/reward.txt or reward.json, in a fresh runtime with the working folder that the policy left.
"""

from __future__ import annotations

import math
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolrl.swe.runtime import CommandFailedError, Runtime, RuntimeLimits, checked
from verl.errors import DataError
from verl.host.task_folders import SETTINGS, read_instruction, read_task_file
from verl.json_values import read_json

WORKDIR = "/app"  # Harbor's own tasks work there
LINKED = "/tmp"  # what /tests, /solution and /logs of a runtime lead to
LATE = "test.sh did not end within"
FREE_ROOTS = ("app", "project", "repo", "src", "task", "testbed", "work", "workdir", "workspace")
BUILD_FILES = ("Dockerfile", "docker-compose.yaml", "docker-compose.yml")
BUILD = "Build it (docker build -t IMAGE environment/), and name it in task.toml: docker_image = IMAGE"
RUN = "Run it with the option `deployment`"
# In a container: the working folder, and the folders of the verifier.
IN_IMAGE = """set -e
mkdir -p {workdir}
[ -e /testbed ] || ln -s {workdir} /testbed
for name in tests solution logs; do rm -rf /$name; mkdir -p {linked}/$name; ln -s {linked}/$name /$name; done
set +e
"""
MAX_PACKED_MIB = 90  # of a working folder: in base64 as much as a program may print (runtime.MAX_OUTPUT_MIB)
# Ignored files, empty folders, modes and histories count, which a patch of git does not have. $0: limit of disk in KiB,
# empty for none.
PACK = f"""
[ -z "$0" ] || [ "$(du -sk . | cut -f 1)" -le "$0" ] ||
  {{ echo "the working folder has more than $0 KiB" >&2; exit 1; }}
tar -czSf - . 2>/dev/null | {{ head -c {MAX_PACKED_MIB << 20}; [ "$(head -c 1 | wc -c)" = 0 ]; }}
codes=("${{PIPESTATUS[@]}}")
[ ${{codes[1]}} = 0 ] || {{ echo "the working folder packs to more than {MAX_PACKED_MIB} MiB" >&2; exit 1; }}
[ ${{codes[0]}} -le 1 ] || {{ echo "tar ended with ${{codes[0]}}" >&2; exit 1; }}  # 1: a file changed meanwhile
"""
UNPACK = "find . -mindepth 1 -delete && tar -xzpf -"
TEST = "chmod +x /tests/test.sh && exec /bin/bash -c /tests/test.sh"  # by its first line, else in bash
# Keys of task.toml: what is used, and what has no meaning here (limits of agents are those of `env`).
USED: dict[str, set[str]] = {
    "verifier": {"timeout_sec", "env"},
    "agent": set(),
    "environment": {"docker_image", "workdir", "env", "memory_mb", "memory", "storage_mb", "storage"},
    "solution": {"env"},
}
IGNORED = {"agent": {"timeout_sec"}, "environment": {"build_timeout_sec", "cpus", "allow_internet", "os"}}
FREE_TABLES = {"version", "schema_version", "task", "metadata", "source"}
NOTHING: tuple[Any, ...] = (None, 0, "", [], {}, False)


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task folder as read.

    repository:  folder with the files of the working folder; None: in the image
    image:       that a deployment runs, or ""
    environment: of the interpreter; "": the system's
    env, verifier_env, solution_env: variables of all commands, of test.sh and of solve.sh
    timeout_s:   of test.sh
    """

    folder: Path
    instruction: str
    repository: Path | None
    image: str
    environment: str
    workdir: str
    env: Mapping[str, str]
    verifier_env: Mapping[str, str]
    solution_env: Mapping[str, str]
    timeout_s: float
    limits: RuntimeLimits

    @property
    def setup(self) -> str:
        """Shell commands that a runtime starts with."""
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in self.env.items())
        prepared = IN_IMAGE.format(workdir=self.workdir, linked=LINKED) if self.image else ""
        return f"{prepared}{exports}cd {self.workdir}"


def read_harbor_task(folder: Path, prepared: Path | None = None, *, remote: bool = False) -> HarborTask:
    """Raises DataError, also if the environment must be built from a Dockerfile.

    prepared: folder with `NAME`, the working folder of a built image, and with `environments/NAME`
    remote:   deployments run the image that the task names
    """
    instruction, settings = read_instruction(folder), _settings(folder)
    if not (folder / "tests" / "test.sh").is_file():
        raise DataError(f"{folder} has no tests/test.sh", "the folder of a Harbor task", field="harbor")
    given, usual = settings["environment"], RuntimeLimits()
    workdir = str(given.get("workdir") or WORKDIR)
    if not re.fullmatch(r"(/[A-Za-z0-9_][\w.-]*)+", workdir) or workdir.split("/")[1] not in FREE_ROOTS:
        raise DataError(f"workdir {workdir!r} cannot be used", f"below one of {', '.join(FREE_ROOTS)}", field="harbor")
    interpreter = prepared and prepared / "environments" / folder.name
    image = str(given.get("docker_image") or "") if remote else ""
    return HarborTask(
        folder=folder,
        instruction=instruction,
        repository=None if image else _work_folder(folder, given, prepared, remote),
        image=image,
        environment=str(interpreter) if interpreter and interpreter.is_dir() else "",
        workdir=workdir,
        env=_env(given),
        verifier_env=_env(given) | _env(settings["verifier"]),
        solution_env=_env(given) | _env(settings["solution"]),
        timeout_s=_number(settings["verifier"], "timeout_sec", 600.0),
        limits=RuntimeLimits(
            memory_mib=_mib(given, "memory", usual.memory_mib), file_mib=_mib(given, "storage", usual.file_mib)
        ),
    )


async def solve(runtime: Runtime, task: HarborTask) -> None:
    """Run solution/solve.sh. Raises CommandFailedError."""
    await runtime.upload(task.folder / "solution", f"{LINKED}/solution")
    done = await runtime.execute(["/bin/bash", "/solution/solve.sh"], b"", task.workdir, task.solution_env)
    if done.exit_code != 0:
        raise CommandFailedError(f"{task.folder}: solve.sh: {done.stderr.decode(errors='replace')[-500:]}")


def pack_command(limits: RuntimeLimits, in_image: bool) -> list[str]:
    """Prints all that the working folder holds, and fails if that is too much. A container's disk has its own limit."""
    return ["/bin/bash", "-c", PACK, "" if in_image else str(limits.file_mib << 10)]


async def unpack(runtime: Runtime, task: HarborTask, packed: bytes) -> None:
    """Replace the working folder. Raises CommandFailedError."""
    await checked(runtime, ["/bin/sh", "-c", UNPACK], packed, cwd=task.workdir)


async def run_verifier(runtime: Runtime, task: HarborTask) -> tuple[float | None, str]:
    """(reward, log) of tests/test.sh; None if it wrote none, or ran out of time. Raises RuntimeLostError."""
    for folder in ("tests", "logs"):  # the patch cannot have any, but the setup can
        await runtime.execute(["/bin/rm", "-rf", f"{LINKED}/{folder}"])
    await runtime.upload(task.folder / "tests", f"{LINKED}/tests")
    await runtime.execute(["/bin/mkdir", "-p", "/tmp/logs/verifier", "/tmp/logs/agent"])
    command = ["/bin/bash", "-c", TEST]
    done = await runtime.execute(command, b"", task.workdir, task.verifier_env, task.timeout_s)
    log = (done.stdout + done.stderr).decode(errors="replace")[-4000:]
    if done.exit_code is None:
        return None, f"{LATE} {task.timeout_s:g} s\n{log}"
    for name in ("reward.txt", "reward.json"):
        try:
            text = (await runtime.read(f"/logs/verifier/{name}")).decode(errors="replace")
        except CommandFailedError:
            continue
        try:
            return _reward(text), log
        except (ValueError, TypeError, KeyError) as error:
            return None, f"{name} has no reward ({error!r}): {text[:200]}\n{log}"
    return None, f"test.sh wrote no reward\n{log}"


def _reward(text: str) -> float:
    value = read_json(text)
    if isinstance(value, dict):
        value = value["reward"] if "reward" in value or len(value) != 1 else next(iter(value.values()))
    if isinstance(value, bool) or not math.isfinite(float(value)):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _settings(folder: Path) -> dict[str, dict[str, Any]]:
    """The tables that are used. Raises DataError for what is neither used nor without a meaning here."""
    try:
        given = tomllib.loads(read_task_file(folder, SETTINGS))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder}/task.toml cannot be read: {error}", "Harbor's settings", field="harbor") from error
    tables = {name: _table(given.pop(name, {}), name, folder) for name in USED}
    refused = [name for name, value in given.items() if name not in FREE_TABLES and value not in NOTHING]
    for name, table in tables.items():
        known = USED[name] | IGNORED.get(name, set())
        refused += [f"{name}.{key}" for key, value in table.items() if key not in known and value not in NOTHING]
    if refused:
        problem = f"{folder}/task.toml: {', '.join(refused)} not supported"
        raise DataError(problem, "a single step in one container, with one user", field="harbor")
    return tables


def _table(given: Any, name: str, folder: Path) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise DataError(f"{folder}/task.toml: {name} = {given!r} is not a table", f"[{name}]", field="harbor")
    return dict(given)


def _work_folder(folder: Path, given: Mapping[str, Any], prepared: Path | None, remote: bool) -> Path:
    """Where the files of the working folder are. Raises DataError if an image must be built or run first."""
    if prepared is not None and (prepared / folder.name).is_dir():
        return prepared / folder.name
    built = [name for name in BUILD_FILES if (folder / "environment" / name).exists()]
    if built or given.get("docker_image"):
        problem = f"the environment of {folder.name} is an image ({given.get('docker_image') or built[0]})"
        hint = BUILD if remote else f"{RUN}, or copy its working folder to {folder.name} in the folder of `prepared`"
        raise DataError(problem, "environment.docker_image, a prepared folder, or files alone", hint, field="harbor")
    if not (folder / "environment").is_dir():
        raise DataError(f"{folder} has no environment/", "the folder of a Harbor task", field="harbor")
    return folder / "environment"


def _env(table: Mapping[str, Any]) -> dict[str, str]:
    found = {str(name): str(value) for name, value in dict(table.get("env") or {}).items()}
    for name, value in found.items():
        if "${" in value or not re.fullmatch(r"[A-Za-z_]\w*", name):
            problem = f"env: {name}={value!r} cannot be used"
            raise DataError(problem, "a constant, no variable of the host", field="harbor")
    return found


def _mib(table: Mapping[str, Any], name: str, default: int) -> int:
    """`memory_mb = 2048`, or the older `memory = "2G"`. Raises DataError."""
    if table.get(f"{name}_mb"):
        return max(1, int(_number(table, f"{name}_mb", 0)))
    text = str(table.get(name) or f"{default}M")
    found = re.fullmatch(r"(\d+)\s*([KMG])i?B?", text, re.IGNORECASE)
    if not found:
        raise DataError(f"{name} = {text!r} is not a size", "such as 2G", field="harbor")
    return max(1, int(found[1]) * {"K": 1, "M": 1 << 10, "G": 1 << 20}[found[2].upper()] >> 10)


def _number(table: Mapping[str, Any], name: str, default: float) -> float:
    value = table.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DataError(f"{name} = {value!r} cannot be used", "a number above 0", field="harbor")
    return float(value)
