"""These tests have the working folder of those of the runtimes."""

from tests.toolrl.swe.conftest import _working_folder

__all__ = ["_working_folder"]
