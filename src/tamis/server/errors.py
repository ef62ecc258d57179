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
    TamisError,
    TokenizerError,
    TokenRangeError,
)
from tamis.units import show

INVALID = "invalid_request_error"
SERVER = "server_error"
_PARAMETER = re.compile(r"(?:prompt \d+: )?([a-z_]+)(?:=| holds | has the key | of token )")
"""How messages of SamplingError begin."""
_RETRY_AFTER = "1"
"""Seconds; a place in the queue is free again as soon as a request ends."""


class ApiError(TamisError):
    """An answer other than 200, raised where a request is handled. `code` is a stable slug for programs."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

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
    RequestError: _Rule(400, "invalid_request"),
    TokenizerError: _Rule(400, "not_supported_by_model"),
    QueueFullError: _Rule(503, "queue_full", "overloaded_error", headers={"Retry-After": _RETRY_AFTER}),
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
            match = _PARAMETER.match(str(error)) if rule.param is None else None
            param = match[1] if match else rule.param
            return ApiError(rule.status, rule.code, str(error), param=param, kind=rule.kind, headers=rule.headers)
    return ApiError(500, "internal_error", "the server failed on this request; its log says why", kind=SERVER)


def _http_error(error: HTTPException) -> ApiError:
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return ApiError(error.status_code, code, str(error.detail), headers=error.headers)


def _invalid_body(errors: Sequence[Any], body: Any) -> ApiError:
    """One message for the first field that is wrong. Of a union's branches the one that got furthest is heard."""
    first = [error for error in errors if error["loc"][1:2] == errors[0]["loc"][1:2]]
    paths = [_path(error, body) for error in first]
    path = max(paths, key=len)
    told = [error for error, own in zip(first, paths, strict=True) if own == path]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    error = told[0]
    if error["type"] == "missing":
        message, code = f"{where} is missing", "missing_field"
    elif error["type"] == "extra_forbidden":
        message, code = f"{where} is not a field of this request", "unknown_field"
    elif error["type"] == "value_error":
        message, code = _expected(error), "invalid_value"
        where = where or message.partition(" ")[0].partition("=")[0]
    else:
        expected = " or ".join(dict.fromkeys(_expected(entry) for entry in told))
        message, code = f"{where or 'the body'}: {expected}, not {show(error['input'])}", "invalid_type"
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
    return tuple(path)


def _expected(error: Mapping[str, Any]) -> str:
    message = str(error["msg"]).removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
