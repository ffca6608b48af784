"""A module's forward with other functions in place of some that it calls."""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any


def with_functions(forward: FunctionType, functions: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A copy of a forward that finds these among its globals. Its module and its class stay as they are."""
    changed = {**forward.__globals__, **functions}
    copy = FunctionType(forward.__code__, changed, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
