"""Bash as a tool, over a sandbox, in a folder of the episode's own that is kept between calls.

A sandbox forgets everything between executions. So the folder travels as a tar file: into each execution, and out of it
again. Nobody opens it on this side.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from verl.envs.tools.base import ToolError
from verl.envs.tools.python import answer, limits_of
from verl.errors import DataError
from verl.sandbox.base import Limits, Sandbox, Status
from verl.types import Task, ToolSpec

# The command's own end is the script's, whatever becomes of the folder; half a tar file is none.
SCRIPT = """
mkdir workspace && tar -xf before.tar --no-same-owner -C workspace && cd workspace || exit
bash ../command.sh < /dev/null
ended=$?
tar -cf ../after.tar . || rm -f ../after.tar
exit $ended
"""


class ShellTool:
    """Bash in a folder that an episode keeps. It opens with the files of the task (`extra["files"]`: path -> text).

    limits: fields of verl.sandbox.base.Limits, the sandbox's own if left out; `file_mib` must hold the folder twice

    Raises ConfigError for unknown limits.
    """

    def __init__(self, sandbox: Sandbox, limits: Mapping[str, Any] | None = None) -> None:
        told = "Runs a bash command in your working folder. Files are kept between calls; variables and `cd` are not."
        command = {"type": "string", "description": "A command or a script."}
        schema = {"type": "object", "properties": {"command": command}, "required": ["command"]}
        self.spec = ToolSpec("shell", told, {**schema, "additionalProperties": False})
        self._sandbox = sandbox
        self._limits = limits_of(limits)

    async def open(self, task: Task) -> Shell:
        """Raises DataError for files of the task that cannot be."""
        return Shell(self.spec, self._sandbox, self._limits, packed(task))

    async def close(self) -> None:
        """Nothing to end: the sandbox is the run's."""


class Shell:
    """One episode's folder and the commands in it."""

    def __init__(self, spec: ToolSpec, sandbox: Sandbox, limits: Limits | None, folder: bytes) -> None:
        self.spec = spec
        self.folder = folder  # a tar file
        self._sandbox = sandbox
        self._limits = limits

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """What the command wrote, and its exit code if that is not 0, which is no error of the call."""
        files = {"before.tar": self.folder, "command.sh": arguments["command"].encode(errors="replace")}
        try:
            execution = await self._sandbox.run(SCRIPT, "bash", files=files, fetch=("after.tar",), limits=self._limits)
        except DataError as error:  # the policy wrote both; their names are ours
            raise ToolError(f"The command could not be run in its folder: {error.problem}.") from error
        if "after.tar" not in execution.files:
            lost = "\nFiles are as they were before this command."
            try:
                answer(execution)
            except ToolError as error:
                raise type(error)(f"{error}{lost}") from error
            raise ToolError(f"The folder could not be kept: it has too much in it.{lost}")
        self.folder = execution.files["after.tar"]
        ended = "" if execution.status is Status.FINISHED else f"[exit code {execution.return_code}]"
        return "\n".join(part for part in (execution.stdout.rstrip(), execution.stderr.rstrip(), ended) if part)

    async def close(self) -> None:
        """Nothing to end: no process outlives its command."""


def packed(task: Task) -> bytes:
    """The files of a task as a tar file. Raises DataError for paths that lead out of the folder."""
    files: Mapping[str, str] = task.extra.get("files", {})
    folder = io.BytesIO()
    with tarfile.open(fileobj=folder, mode="w") as tar:
        for path, text in files.items():
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or not isinstance(text, str):
                raise DataError(
                    f"task {task.id}: file {path!r}", "a relative path without '..' and a text", field="extra.files"
                )
            entry = tarfile.TarInfo(path)
            content = text.encode()
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return folder.getvalue()
