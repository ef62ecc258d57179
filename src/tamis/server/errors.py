"""What went wrong, as HTTP: a status and OpenAI's error object."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tamis.errors import (
    EmptyPromptError,
    EngineClosedError,
    EngineDeadError,
    GrammarError,
    LogitsError,
    NeverFitsError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    SamplingError,
    SessionError,
    SessionNotFoundError,
    TamisError,
    TierError,
    TokenizerError,
    TokenRangeError,
)
from tamis.errors.hint import hint_for
from tamis.units import show

INVALID = "invalid_request_error"
SERVER = "server_error"
MAX_MESSAGE = 1000
"""Characters of a message: what a client sent may be long, and so may what a library says of it."""
_PATH = r"[a-z_]+(?:\[\d+\]|\.[a-z_]+)*"
_PARAMETER = re.compile(
    rf"(?:prompt \d+: )?({_PATH}(?==| holds | has | of | is | must | names )|(?:messages|tools)\S*(?=: ))"
)
"""How messages of RequestError begin where they are about one field."""
_RETRY_AFTER = "1"
"""Seconds; a place in the queue is free again as soon as a request ends."""


class ApiError(TamisError):
    """An answer other than 200, raised where a request is handled. `code` is a stable slug for programs.

    `cause` is the error that it tells of, where it is not itself the first to say what is wrong.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
        cause: Exception | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.kind = status, code, kind
        self.param = None if param is None else _cut(param, MAX_MESSAGE // 4)
        self.headers = dict(headers or {})
        self.cause = cause

    def __str__(self) -> str:
        return _cut(super().__str__(), MAX_MESSAGE)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object, and the command that explains the error, where the catalogue has it."""
        told = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": told | {"explain": hint_for(self.cause or self)}}

    def response(self) -> JSONResponse:
        """The whole answer."""
        return JSONResponse(self.body(), self.status, self.headers)


@dataclass(frozen=True)
class _Rule:
    status: int
    code: str
    kind: str = INVALID
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


# The first class that fits counts: kinds come before what they are kinds of.
_RULES: dict[type[TamisError], _Rule] = {
    PromptTooLongError: _Rule(400, "context_length_exceeded", param="prompt"),
    NeverFitsError: _Rule(400, "kv_pool_exceeded", param="prompt"),
    EmptyPromptError: _Rule(400, "empty_prompt", param="prompt"),
    TokenRangeError: _Rule(400, "token_out_of_range", param="prompt"),
    SamplingError: _Rule(400, "invalid_value"),
    GrammarError: _Rule(400, "invalid_schema", param="response_format"),
    SessionNotFoundError: _Rule(404, "session_not_found"),
    SessionError: _Rule(400, "invalid_session"),
    RequestError: _Rule(400, "invalid_request"),
    TokenizerError: _Rule(400, "not_supported_by_model"),
    QueueFullError: _Rule(503, "queue_full", "overloaded_error", headers={"Retry-After": _RETRY_AFTER}),
    TierError: _Rule(503, "kv_tier_failed", SERVER, headers={"Retry-After": _RETRY_AFTER}),
    EngineDeadError: _Rule(503, "engine_dead", SERVER),
    EngineClosedError: _Rule(503, "shutting_down", SERVER, headers={"Retry-After": _RETRY_AFTER}),
    LogitsError: _Rule(500, "broken_logits", SERVER),
}


def to_api_error(error: Exception) -> ApiError:
    """`error` as an answer. What nobody planned for becomes a 500 that does not show what it says."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid_body(error.errors(), error.body)
    if isinstance(error, HTTPException):
        return _http_error(error)
    for kind, rule in _RULES.items():
        if isinstance(error, kind):
            match = _PARAMETER.match(str(error)) if isinstance(error, RequestError) else None
            param = match[1] if match else rule.param
            return ApiError(
                rule.status, rule.code, str(error), param=param, kind=rule.kind, headers=rule.headers, cause=error
            )
    return ApiError(500, "internal_error", "the server failed on this request; its log says why", kind=SERVER)


def _http_error(error: HTTPException) -> ApiError:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return ApiError(error.status_code, code, str(error.detail), headers=error.headers)


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 3]}..."


# What pydantic calls a fault, and what should have been there.
_KINDS = {
    "string_type": "text", "int_type": "a whole number", "float_type": "a number", "bool_type": "true or false",
    "list_type": "a list", "dict_type": "an object", "model_type": "an object", "model_attributes_type": "an object",
}  # fmt: skip
_BOUNDS = {
    "literal_error": "be {expected}",
    "union_tag_invalid": "be one of {expected_tags}",
    "string_pattern_mismatch": "match {pattern}",
    "string_too_short": "have {min_length} or more characters",
    "string_too_long": "have {max_length} characters at most",
    "too_short": "hold {min_length} or more entries",
}


def _invalid_body(errors: Sequence[Any], body: Any) -> ApiError:
    """One message for the first field that is wrong. Of a union's branches the one that got furthest is heard."""
    first = [error for error in errors if error["loc"][1:2] == errors[0]["loc"][1:2]]
    paths = [_path(error, body) for error in first]
    path = max(paths, key=len)
    told = [error for error, own in zip(first, paths, strict=True) if own == path]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    where = _cut(where, MAX_MESSAGE // 4)
    error = told[0]
    if error["type"] in ("missing", "union_tag_not_found"):
        message, code = f"{where} is missing", "missing_field"
    elif error["type"] == "extra_forbidden":
        message, code = f"{where} is not a field of this request", "unknown_field"
    elif error["type"] == "value_error":
        message, code = str(error["ctx"]["error"]), "invalid_value"
        first_word = re.split("[ =]", message, maxsplit=1)[0]
        where = first_word if first_word in body else ""
    else:
        wanted = " or ".join(dict.fromkeys(_wanted(entry) for entry in told)).replace(" or be ", " or ")
        message = f"{where or 'the body'} must {wanted}, not {_show(error)}"
        code = "invalid_type" if error["type"] in _KINDS else "invalid_value"
    return ApiError(400, code, message, param=where or None)


def _path(error: Mapping[str, Any], body: Any) -> tuple[str | int, ...]:
    """The parts of a location that lead through `body`; pydantic puts the names of a union's branches between them."""
    path: list[str | int] = []
    value = body
    for part in error["loc"][1:]:
        in_object = isinstance(value, Mapping) and part in value
        if in_object or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
            path.append(part)
        elif error["type"] == "missing" and part == error["loc"][-1]:
            path.append(part)
    if error["type"].startswith("union_tag_"):
        path.append(str(error["ctx"]["discriminator"]).strip("'"))
    return tuple(path)


def _wanted(error: Mapping[str, Any]) -> str:
    """What should have been there, behind "must"."""
    if error["type"] in _KINDS:
        return f"be {_KINDS[error['type']]}"
    bound = _BOUNDS.get(error["type"], "be something else").format(**error.get("ctx", {}))
    return {"be True": "be true", "be False": "be false"}.get(bound, bound)


def _show(error: Mapping[str, Any]) -> str:
    """The value that was there, as far as a message has room for it."""
    value = error["ctx"]["tag"] if error["type"] == "union_tag_invalid" else error["input"]
    named = {True: "true", False: "false", None: "null"}
    return named[value] if value is None or isinstance(value, bool) else show(value)
