"""How a command ends that an error ends: its message and exit code."""

import sys

from verl.errors import ConfigError, DataError, VerlError
from verl.text import printable


def write_error(error: VerlError) -> int:
    """Write the error to stderr. Returns the exit code."""
    sys.stderr.write(f"{type(error).__name__}: {printable(str(error))}\n")
    return exit_code_of(error)


def exit_code_of(error: BaseException) -> int:
    """2 for an error that the user has to fix first, 1 for a failed run."""
    return 2 if isinstance(error, ConfigError | DataError) else 1
