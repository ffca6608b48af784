"""Bash as a tool, in a sandbox, with one working folder per episode that is kept between calls.

A sandbox keeps no state between executions. So the folder is passed in and out of each execution as a tar file, which
is never unpacked on this side.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from toolrl.sandbox.python_tool import answer, parse_limits
from verl.envs.sandbox import Limits, Sandbox, Status
from verl.envs.tools.base import ToolError
from verl.errors import DataError
from verl.types import Task, ToolSpec

# The exit code is the command's, even if archiving fails; a partial tar file is removed.
SCRIPT = """
mkdir workspace && tar -xf before.tar --no-same-owner -C workspace && cd workspace || exit
bash ../command.sh < /dev/null
ended=$?
tar -cf ../after.tar . || rm -f ../after.tar
exit $ended
"""


class ShellTool:
    """Bash in a per-episode folder, which starts with the files of the task (`extra["files"]`: path -> text).

    limits: fields of verl.envs.sandbox.Limits; default: the sandbox's. `file_mib` must hold the folder twice
    """

    def __init__(self, sandbox: Sandbox, limits: Mapping[str, Any] | None = None) -> None:
        kept = "Files are kept between calls; variables and `cd` are not."
        command = {"type": "string", "description": "A command or a script."}
        schema = {"type": "object", "properties": {"command": command}, "required": ["command"]}
        summary = f"Runs a bash command in your working folder. {kept}"
        self.spec = ToolSpec("shell", summary, {**schema, "additionalProperties": False})
        self._sandbox = sandbox
        self._limits = parse_limits(limits)

    async def open(self, task: Task) -> Shell:
        """Raises DataError for invalid files of the task."""
        return Shell(self.spec, self._sandbox, self._limits, packed(task))

    async def close(self) -> None:
        """No-op: the sandbox belongs to the run."""


class Shell:
    def __init__(self, spec: ToolSpec, sandbox: Sandbox, limits: Limits | None, folder: bytes) -> None:
        self.spec = spec
        self.folder = folder  # a tar file
        self._sandbox = sandbox
        self._limits = limits

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The command's output, and its exit code if nonzero, which is not an error of the call."""
        files = {"before.tar": self.folder, "command.sh": arguments["command"].encode(errors="replace")}
        try:
            execution = await self._sandbox.run(SCRIPT, "bash", files=files, fetch=("after.tar",), limits=self._limits)
        except DataError as error:  # the policy wrote the contents; the file names are ours
            raise ToolError(f"The command could not be run in its folder: {error.problem}.") from error
        if "after.tar" not in execution.files:
            lost = "\nFiles are as they were before this command."
            try:
                answer(execution)
            except ToolError as error:
                raise type(error)(f"{error}{lost}") from error
            raise ToolError(f"The folder could not be kept: it has too much in it.{lost}")
        self.folder = execution.files["after.tar"]
        exit_note = "" if execution.status is Status.FINISHED else f"[exit code {execution.return_code}]"
        return "\n".join(part for part in (execution.stdout.rstrip(), execution.stderr.rstrip(), exit_note) if part)

    async def close(self) -> None:
        """No-op: no process outlives its command."""


def packed(task: Task) -> bytes:
    """The files of a task as a tar file. Raises DataError for paths outside of the folder."""
    files: Mapping[str, str] = task.extra.get("files", {})
    folder = io.BytesIO()
    with tarfile.open(fileobj=folder, mode="w") as tar:
        for path, text in files.items():
            pure = PurePosixPath(path)
            if pure.is_absolute() or ".." in pure.parts or not isinstance(text, str):
                expected = "a relative path without '..' and a text"
                raise DataError(f"task {task.id}: file {path!r}", expected, field="extra.files")
            entry = tarfile.TarInfo(path)
            content = text.encode()
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return folder.getvalue()
