"""Validates the arguments of a call against the tool's schema, with error messages for the policy."""

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, relevance
from referencing import Registry

from verl.errors import ConfigError
from verl.text import shortened
from verl.types import ToolSpec

MAX_PROBLEMS = 3  # reported per call
MAX_PROBLEM_CHARS = 300


class ArgumentChecker:
    """Checks arguments; the validator of each tool is cached."""

    def __init__(self) -> None:
        self._validators: dict[str, tuple[Mapping[str, Any], Draft202012Validator]] = {}

    def problem(self, spec: ToolSpec, arguments: Mapping[str, Any]) -> str:
        """The error message; empty if the arguments are valid. Raises ConfigError for an invalid schema."""
        validator = self._validator(spec)
        try:
            json.dumps(dict(arguments), ensure_ascii=False).encode()
            errors = sorted(validator.iter_errors(dict(arguments)), key=relevance, reverse=True)
        except UnicodeEncodeError:  # JSON can encode half a surrogate pair, which services reject
            return f"Wrong arguments of {spec.name!r}: a text that is not valid Unicode."
        except (RecursionError, ValueError) as odd:  # not even printable: nested too deeply, too many digits
            return f"Wrong arguments of {spec.name!r}: they cannot be read ({odd})."
        problems = [
            f"{shortened(error.message, MAX_PROBLEM_CHARS)}{f' (at {error.json_path})' if error.path else ''}"
            for error in errors[:MAX_PROBLEMS]
        ]
        return f"Wrong arguments of {spec.name!r}: {'; '.join(problems)}." if problems else ""

    def _validator(self, spec: ToolSpec) -> Draft202012Validator:
        """The tool's validator, keyed by name and identity of the schema object."""
        schema, validator = self._validators.get(spec.name, (None, None))
        if schema is not spec.parameters:
            check_schema(spec)
            # an empty registry: references in a schema must not be fetched
            validator = Draft202012Validator(spec.parameters, registry=Registry())
            self._validators[spec.name] = (spec.parameters, validator)
        return validator


def check_schema(spec: ToolSpec) -> None:
    """Raises ConfigError if the parameters of a tool are not a valid JSON schema."""
    try:
        Draft202012Validator.check_schema(spec.parameters)
    except SchemaError as error:
        raise ConfigError(f"tool {spec.name!r}: its parameters are not a JSON schema ({error.message})") from error
