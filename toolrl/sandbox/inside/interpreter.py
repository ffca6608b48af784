"""Runs Python code in a forked interpreter that behaves like a fresh one."""

import ast
import atexit
import contextlib
import gc
import linecache
import os
import socket
import sys
import threading
import traceback
from types import CodeType, ModuleType
from typing import Any, Never, TextIO

from . import frames

PROGRAM = "main.py"  # the file name in tracebacks


def run_program(code: str) -> int:
    """Run code as `python main.py` does; returns the exit code."""
    namespace = _fresh_main()
    exit_code = _run_guarded(lambda: _execute(_compile(code, PROGRAM), namespace))
    exit_code = max(exit_code, _run_guarded(_wind_up))
    return max(exit_code, _run_guarded(_flush)) & 0xFF


def run_cells(channel: socket.socket) -> Never:
    """Run cells in one namespace; answers each with its token and exit code."""
    namespace = _fresh_main()
    number = 0
    while request := frames.receive(channel)[0]:
        number += 1
        code, name = request["code"], f"cell {number}"
        exit_code = _run_guarded(lambda code=code, name=name: _run_cell(code, name, namespace))
        exit_code = max(exit_code, _run_guarded(_flush))
        channel.send(request["token"].encode() + bytes([exit_code & 0xFF]))
    os._exit(0)


def _fresh_main() -> dict[str, Any]:
    """The namespace of a new `__main__`, with reset state that forks must not share."""
    gc.enable()
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    sys.argv = [PROGRAM]
    sys.path.insert(0, "")
    reader = open(0, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    for name, stream in (("stdin", reader), ("stdout", _writer(1)), ("stderr", _writer(2))):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "numpy.random" in sys.modules:  # Python's own generator reseeds itself after a fork
        sys.modules["numpy.random"].seed(int.from_bytes(os.urandom(4), "little"))
    return main.__dict__


def _writer(descriptor: int) -> TextIO:
    """Line-buffered, so that output survives a kill."""
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _compile(code: str, name: str) -> CodeType:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    return compile(code, name, "exec", dont_inherit=True)


def _execute(compiled: CodeType, namespace: dict[str, Any]) -> None:
    exec(compiled, namespace)  # noqa: S102  the purpose of the sandbox


def _run_cell(code: str, name: str, namespace: dict[str, Any]) -> None:
    """Run a cell as a notebook does: the value of a final expression is shown."""
    _compile(code, name)
    tree = ast.parse(code, name)
    shown = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
    _execute(compile(tree, name, "exec", dont_inherit=True), namespace)
    if shown:
        _execute(compile(ast.Interactive(list(shown)), name, "single", dont_inherit=True), namespace)


def _run_guarded(action: Any) -> int:
    """The exit code that a Python process would end with if it did this."""
    try:
        action()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return int(end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)  # noqa: T201  what Python does
        return 1
    except BaseException as error:  # noqa: BLE001  whatever untrusted code raises
        _explain(error)
        return 1
    return 0


def _explain(error: BaseException) -> None:
    """Print the traceback, starting at the untrusted code."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename == __file__:
        frame = frame.tb_next
    try:
        traceback.print_exception(type(error), error, frame)
    except BaseException:  # noqa: BLE001  an exception that cannot be printed, a closed stream, no memory
        os.write(2, f"{type(error).__name__}\n".encode())


def _wind_up() -> None:
    """Interpreter shutdown: join threads, then run atexit functions."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(ValueError, AttributeError):  # the code closed or replaced it
            stream.flush()  # type: ignore[union-attr]
