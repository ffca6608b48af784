"""Commands in this process, which has imported what a new one would take eight seconds of a processor for."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout

import pytest

from verl.host.timer import raising_after

LIMIT_S = 400.0


def printed(main: Callable[[Sequence[str]], int], argv: Sequence[str], expected: int = 0, **environment: str) -> str:
    """What the command prints, which must end with this exit code."""
    output = io.StringIO()
    overdue = raising_after(LIMIT_S, lambda: TimeoutError(f"no end after {LIMIT_S:.0f} s: {output.getvalue()}"))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), overdue:
        for name, value in environment.items():
            patch.setenv(name, value)
        try:
            code: object = main(argv)
        except SystemExit as end:  # as those of `toolrl` end
            code = end.code
    assert code == expected, output.getvalue()
    return output.getvalue()
