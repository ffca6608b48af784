"""Code and programs that a file of settings names: it may be of another author, so they need the command's leave."""

from collections.abc import Iterator, Mapping
from typing import Any

from verl.embedded import PREFIX
from verl.registry import names_code
from verl.verl_compat.verl_keys import short

_PROGRAMS = ("command", "python", "custom_reward_function.path")  # last parts of keys whose value is one
_AGENT = "agent"  # file.py:function, or a known name
_ENGINE = "rollout.engine_options."  # vLLM's own, among them classes to import
_PLAIN = ("data.", "model.", "critic.path", "teacher.path", "eval.compare")  # files and names of data and models
USER_CODE = "data.user_code"


def named_code(key: str, value: Any) -> Iterator[str]:
    """`key=value` for every entry of a setting that names code, starts a program, or lets rows do so. Runs nothing."""
    name = short(key)
    if _is_code(name, value):
        yield f"{key}={value}"
    elif isinstance(value, Mapping):
        for part, each in value.items():
            yield from named_code(f"{key}.{part}", each)
    elif isinstance(value, list):
        for each in value:
            yield from named_code(key, each)


def _is_code(key: str, value: Any) -> bool:
    last = key.rpartition(".")[2]
    if key == USER_CODE:
        return value not in (None, False)
    if last in _PROGRAMS or key in _PROGRAMS:
        return value is not None
    if key.startswith(_ENGINE):
        return last == "trust_remote_code" or isinstance(value, str)
    if not isinstance(value, str) or (key.startswith(_PLAIN) and key != "data.map") or value.startswith(PREFIX):
        return False
    return names_code(value) or (last == _AGENT and ":" in value)
