"""How a command ends that an error ends."""

from __future__ import annotations

import pytest

from verl.errors import ConfigError, DataError, EngineError, VerlError
from verl.host.exits import write_error


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (ConfigError("no such setting"), 2, "ConfigError: no such setting\n"),
        (DataError("is empty", file="t\x1b[31m.jsonl"), 2, "DataError: t\ufffd[31m.jsonl: is empty\n"),
        (EngineError("it died"), 1, "EngineError: it died\n"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_one_printable_line_and_an_exit_code(
    error: VerlError, code: int, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_error(error) == code
    assert capsys.readouterr().err == output
