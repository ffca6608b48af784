"""The tools of an agent: a persistent shell, an editor and a search, in the runtime of its episode.

Names and behavior are those of OpenHands and SWE-agent, whose agents are trained with them.
"""

from __future__ import annotations

import posixpath
import re
import signal
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from time import perf_counter
from typing import Literal, TypeVar

from toolrl.swe.runtime import TESTBED, CommandResult, CommandStatus, Completed, Runtime
from verl.envs.tools.base import ToolError, ToolTimeoutError
from verl.text import utf8

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"  # as the first line of an output: mini-swe-agent's way to finish
MAX_FILE_BYTES = 1 << 20  # of a file that the editor reads
MAX_ENTRIES = 500  # of a listed folder
MAX_MATCHES = 100
SNIPPET_LINES = 4  # shown around an edit
INTERRUPT = "C-c"  # as a command, while another one runs
WAIT_OR_INTERRUPT = f"Send an empty command to wait for it, or {INTERRUPT} to interrupt it."
LIST = (
    f'[ -d "$0" ] && find "$0" -maxdepth 2 -not -path "$0/*/.*" -not -path "$0/.*" | sort | head -n {MAX_ENTRIES + 1}'
)
READ = f'head -c {MAX_FILE_BYTES + 1} -- "$0"'
SEARCH = f'grep -rnIE --exclude-dir=.git -e "$1" -- "$0" | cut -c 1-300 | head -n {MAX_MATCHES + 1}'
T = TypeVar("T")
Edit = Literal["view", "create", "str_replace", "insert", "undo_edit"]


class AgentTools:
    """The tools of one episode. Raise ToolError for the policy's errors, RuntimeLostError for a fault."""

    def __init__(
        self,
        runtime: Runtime,
        command_timeout_s: float,
        soft_timeout_s: float | None = None,
        *,
        may_submit: bool = False,
        file: str = "",
    ) -> None:
        self.finished = False
        self._file = file  # of `edit_line`
        self._runtime, self._may_submit = runtime, may_submit
        self._command_timeout_s, self._soft_timeout_s = command_timeout_s, soft_timeout_s
        self._running = False  # a command, since a soft time-out
        self._left_s = command_timeout_s  # of the running command; the time of the engine does not count
        self._shown = ""  # of its output
        self._undo: defaultdict[str, list[str | None]] = defaultdict(list)  # earlier contents; None: no file

    async def bash(self, command: str) -> str:
        """Run a command in a persistent bash: folder, variables and functions are kept. It cannot ask for input.

        Args:
            command: the command, or several lines of them
        """
        result = await self._run(command)
        if result.status is CommandStatus.TIMEOUT:
            stopped = f"[stopped after {self._command_timeout_s:g} s]"
            raise ToolTimeoutError(f"{_shown(result)}\n{stopped}".lstrip())
        first_line = result.output.lstrip().partition("\n")[0]
        self.finished = self._may_submit and result.exit_code == 0 and first_line.strip() == SUBMIT
        return _shown(result)

    async def execute_bash(self, command: str, is_input: Literal["true", "false"] = "false") -> str:
        """Run a command in a persistent bash: folder, variables and functions are kept. It cannot ask for input.

        Args:
            command: the command, or several of them, chained
            is_input: whether the command is sent to the running one: empty to wait for it, C-c to interrupt it
        """
        if is_input == "true" and command.strip() not in ("", INTERRUPT):
            raise ToolError(f"A running command reads no input. {WAIT_OR_INTERRUPT}")
        return await self.bash(command)

    async def str_replace_editor(
        self,
        command: Edit,
        path: str,
        file_text: str | None = None,
        old_str: str | None = None,
        new_str: str | None = None,
        insert_line: int | None = None,
        view_range: list[int] | None = None,
    ) -> str:
        """View, create and edit text files. `view` numbers the lines of a file, and lists a folder two levels deep.

        Args:
            command: what to do; `undo_edit` reverts the last edit of the file
            path: of the file or folder
            file_text: for `create`: the text of the new file
            old_str: for `str_replace`: the text to replace, which must occur exactly once
            new_str: for `str_replace` and `insert`: the new text
            insert_line: for `insert`: the number of the line after which to insert; 0 for the beginning
            view_range: for `view`: first and last line; -1 for the end of the file
        """
        path = _path(path)
        match command:
            case "view":
                return await self._view(path, view_range)
            case "create":
                return await self._create(path, _given(file_text, "file_text", command))
            case "str_replace":
                old = _given(old_str, "old_str", command)
                return await self._edit(path, lambda text: _replaced(text, old, new_str or ""))
            case "insert":
                line, new = _given(insert_line, "insert_line", command), _given(new_str, "new_str", command)
                return await self._edit(path, lambda text: _inserted(text, line, new))
            case "undo_edit":
                return await self._revert(path)

    async def search(self, query: str, path: str = ".") -> str:
        """Search files for lines that match an extended regular expression.

        Args:
            query: the expression
            path: a file or folder
        """
        done = await self._script(SEARCH, _path(path), _plain(query))
        if done.stderr and not done.stdout:
            raise ToolError(done.stderr.decode(errors="replace")[:500])
        return _first(done.stdout, MAX_MATCHES) or "No line matches."

    async def finish(self, message: str = "", task_completed: Literal["true", "false", "partial"] = "true") -> str:
        """End the session: the issue is solved, or you cannot get any further.

        Args:
            message: a summary
            task_completed: whether the issue is solved
        """
        await self._script("true")  # a lost runtime is noticed while the episode can start again
        self.finished = True
        return "Finished."

    async def edit_line(self, line: int, text: str) -> str:
        """Replace one line of the file.

        Args:
            line: its number, from 1 on
            text: the new line, with its indentation
        """
        path = _path(self._file)
        lines = _lines(await self._read(path))
        if not 1 <= line <= len(lines):
            raise ToolError(f"`line` must be between 1 and {len(lines)}.")
        end = "\r" if lines[line - 1].endswith("\r") else ""
        lines[line - 1] = f"{text}{end}"
        await self._write(path, "".join(f"{each}\n" for each in lines))
        self.finished = True
        return f"Line {line} is replaced."

    async def _run(self, command: str) -> CommandResult:
        """Start a command, wait for the running one (an empty command), or interrupt it (C-c)."""
        soft_s = self._soft_timeout_s
        if soft_s is None:
            return await self._runtime.run(command, self._command_timeout_s)
        key = command.strip()
        if self._running and key not in ("", INTERRUPT):
            raise ToolError(f"The last command is still running. {WAIT_OR_INTERRUPT}")
        if not self._running:
            if key == INTERRUPT:
                raise ToolError("No command is running.")
            self._left_s, self._shown = self._command_timeout_s, ""
        start = perf_counter()
        if key == INTERRUPT:
            result = await self._runtime.interrupt()
        else:
            result = await self._runtime.run(command, self._left_s, soft_s if soft_s < self._left_s else None)
        self._left_s = max(0.0, self._left_s - (perf_counter() - start))
        self._running = result.status is CommandStatus.RUNNING
        new = result.output.removeprefix(self._shown)
        self._shown = result.output
        return replace(result, output=new)

    async def _view(self, path: str, view_range: list[int] | None) -> str:
        listed = await self._script(LIST, path)
        if listed.stdout:
            return _first(listed.stdout, MAX_ENTRIES)
        lines = _lines(await self._read(path))
        first, last = _range(view_range, len(lines))
        return _numbered(lines[first - 1 : last], first)

    async def _create(self, path: str, text: str) -> str:
        if (await self._script('[ -e "$0" ]', path)).exit_code == 0:
            raise ToolError(f"{path} exists: edit it, or choose another path.")
        await self._write(path, text)
        self._undo[path].append(None)
        return f"Created {path}."

    async def _edit(self, path: str, change: Callable[[str], tuple[str, int]]) -> str:
        """change: the new text, and the number of the first changed line"""
        before = await self._read(path)
        own_end = "\r\n" if "\n" in before and before.count("\n") == before.count("\r\n") else "\n"
        shown = before.replace(own_end, "\n")
        after, line = change(shown)
        await self._write(path, after if own_end == "\n" else after.replace("\r\n", "\n").replace("\n", own_end))
        self._undo[path].append(before)
        first = max(1, line - SNIPPET_LINES)
        lines = _lines(after)
        snippet = lines[first - 1 : line + max(0, len(lines) - len(_lines(shown))) + SNIPPET_LINES]
        return f"Edited {path}:\n{_numbered(snippet, first)}"

    async def _revert(self, path: str) -> str:
        if not self._undo[path]:
            raise ToolError(f"There is no edit of {path} to undo.")
        before = self._undo[path].pop()
        if before is None:
            await self._script('rm -f -- "$0"', path)
        else:
            await self._write(path, before)
        return f"Reverted the last edit of {path}."

    async def _read(self, path: str) -> str:
        done = await self._script(READ, path)
        if done.exit_code != 0:
            raise ToolError(done.stderr.decode(errors="replace").strip()[:500] or f"{path} cannot be read.")
        if len(done.stdout) > MAX_FILE_BYTES:
            raise ToolError(f"{path} has more than {MAX_FILE_BYTES} bytes: use bash.")
        try:
            return done.stdout.decode()
        except UnicodeDecodeError as error:
            raise ToolError(f"{path} is not text in UTF-8 ({error}): use bash.") from error

    async def _write(self, path: str, text: str) -> None:
        await self._runtime.write(path, utf8(text).encode())

    async def _script(self, script: str, *arguments: str) -> Completed:
        done = await self._runtime.execute(
            ["/bin/sh", "-c", script, *arguments], timeout_s=self._command_timeout_s, cwd="/"
        )
        if done.exit_code is None:
            raise ToolTimeoutError(f"Stopped after {self._command_timeout_s:g} s.")
        return done


def _shown(result: CommandResult) -> str:
    notes = [result.output.rstrip()]
    if result.exit_code:
        notes.append(f"[exit code {result.exit_code}{_signal(result.exit_code - 128)}]")
    if result.status is CommandStatus.RUNNING:
        notes.append(f"[still running. {WAIT_OR_INTERRUPT}]")
    if result.status is CommandStatus.KILLED:
        notes.append(f"[killed: {result.reason}]")
    if result.shell_restarted:
        notes.append("[a new shell is used from now on: variables are lost]")
    return "\n".join(note for note in notes if note)


def _signal(number: int) -> str:
    """Its name, as of the exit code of a program that it ended."""
    return f": {signal.Signals(number).name}" if number in set(signal.Signals) else ""


def _plain(text: str) -> str:
    """An argument of a program: without null characters and lone surrogates."""
    return utf8(text).replace("\0", "")


def _path(path: str) -> str:
    """Absolute; relative paths are those of the repository."""
    if len(path) > 4096:
        raise ToolError("A path has at most 4096 characters.")
    return posixpath.normpath(posixpath.join(TESTBED, _plain(path).strip()))


def _given(value: T | None, name: str, command: str) -> T:
    if value is None:
        raise ToolError(f"`{command}` needs `{name}`.")
    return value


def _range(view_range: list[int] | None, length: int) -> tuple[int, int]:
    """First and last line, from 1 on."""
    if view_range is None:
        return 1, length
    if len(view_range) != 2:
        raise ToolError("`view_range` has two numbers: the first and the last line.")
    first, last = view_range
    last = length if last == -1 else min(last, length)
    if not 1 <= first <= max(1, last) or last < 0:
        raise ToolError(f"`view_range` {view_range} is outside of the file, which has {length} lines.")
    return first, last


def _first(output: bytes, most: int) -> str:
    """Its lines, at most so many."""
    text = output.decode(errors="replace")
    lines = _lines(text)
    return text if len(lines) <= most else "\n".join([*lines[:most], f"[only the first {most} are shown]"])


def _lines(text: str) -> list[str]:
    """Without their ends. Form feeds and other marks at which `splitlines` breaks are part of a line."""
    return text.removesuffix("\n").split("\n") if text else []


def _numbered(lines: list[str], first: int) -> str:
    return "\n".join(f"{number:6}\t{line.removesuffix(chr(13))}" for number, line in enumerate(lines, first))


def _replaced(text: str, old: str, new: str) -> tuple[str, int]:
    """text: with the line ends that `view` shows, so that `old` must have them, too"""
    if "\r\n" not in text:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    found = text.count(old) if old else 0
    if found != 1:
        raise ToolError(
            f"`old_str` must occur exactly once in the file, but it occurs {found} times{_where(text, old)}."
        )
    if new == old:
        raise ToolError("`old_str` and `new_str` are equal: nothing would change.")
    before, _, after = text.partition(old)
    return f"{before}{new}{after}", before.count("\n") + 1


def _where(text: str, old: str) -> str:
    """The first lines at which it begins."""
    begins = [text.count("\n", 0, found.start()) + 1 for found in islice(re.finditer(re.escape(old), text), 5)]
    return f": in lines {', '.join(map(str, begins))}" if old and begins else ""


def _inserted(text: str, line: int, new: str) -> tuple[str, int]:
    lines = [f"{each}\n" for each in _lines(text)]
    if lines and not text.endswith("\n"):
        lines[-1] = lines[-1][:-1]
    if not 0 <= line <= len(lines):
        raise ToolError(f"`insert_line` must be between 0 and {len(lines)}.")
    if line and not lines[line - 1].endswith("\n"):
        lines[line - 1] += "\n"
    return "".join([*lines[:line], new if new.endswith("\n") else f"{new}\n", *lines[line:]]), line + 1
