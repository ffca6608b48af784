"""The fields of requests as models: any other field, and a value of another type, is an error that names it.

The types of the official SDKs are the reference for the fields that there are. A field that is null is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from toolrl.envs.agent.requests import bad_request

_HINTS = {  # by the name of a refused field
    "previous_response_id": "; send the whole input",
    "chat_template_kwargs": "; set model.chat_template_options",
    "enable_thinking": "; set model.chat_template_options",
}
_PROBLEMS = {
    "missing": "is missing",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a text",
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_too_short": "is empty",
    "too_short": "is empty",
}


class Fields(BaseModel):
    """An object of a request. Fields whose value is never read have no effect on the response."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: each for name, each in value.items() if each is not None} if isinstance(value, Mapping) else value


Model = TypeVar("Model", bound=Fields)


def only(value: object) -> AfterValidator:
    """The one value that is accepted, because it changes nothing."""

    def check(given: Any) -> Any:
        if given != value:
            raise ValueError(f"must be {json.dumps(value)}")
        return given

    return AfterValidator(check)


def _listed(value: Any) -> list[Any]:
    if not isinstance(value, str | list):
        raise ValueError("must be a text, or a list of texts")
    return [value] if isinstance(value, str) else value


Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
First = Field(fail_fast=True)  # of a list of typed entries: an error for each of a million would hold up every thread
Stops = Annotated[list[Text], First, BeforeValidator(_listed)]
No = Annotated[bool, only(False)]
Nothing = Annotated[list[Any], only([])]


def read_fields(model: type[Model], value: Any, field: str = "") -> Model:
    """The object. field: its place in the request. Raises ApiError."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first: Mapping[str, Any] = error.errors(include_url=False, include_input=False)[0]
        place = field
        for part in first["loc"]:
            place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else str(part)
        raise bad_request(_problem(first), place) from error


def _problem(error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "extra_forbidden":
            return f"cannot be used here{_HINTS.get(error['loc'][-1], '')}"
        case "value_error":
            return str(error["ctx"]["error"])
        case kind:
            return _PROBLEMS.get(kind) or str(error["msg"]).replace("Input should be", "must be")


def read_kind(models: Mapping[str, type[Model]], value: Any, field: str, default: str | None = None) -> Model:
    """The object whose `type` names its model. Raises ApiError."""
    kind = value.get("type", default) if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in models:
        problem = f"is of type {kind!r}" if isinstance(value, Mapping) else "is no object"
        raise bad_request(f"{problem}; expected {', '.join(models)}", field)
    return read_fields(models[kind], value, field)
