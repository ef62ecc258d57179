import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from tamis import errors
from tamis.server.errors import ApiError, to_api_error
from tamis.server.schema import ChatRequest, CompletionRequest


def refused(kind: Any, body: Any) -> ApiError:
    """The answer to a body that FastAPI found wrong."""
    try:
        TypeAdapter(kind).validate_python(body)
    except ValidationError as error:
        found = [{**entry, "loc": ("body", *entry["loc"])} for entry in error.errors()]
        return to_api_error(RequestValidationError(found, body=body))
    raise AssertionError("the body was taken")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.PromptTooLongError("70 > 64"), 400, "context_length_exceeded"),
        (errors.NeverFitsError("9 > 8"), 400, "kv_pool_exceeded"),
        (errors.EmptyPromptError("empty"), 400, "empty_prompt"),
        (errors.TokenRangeError("999"), 400, "token_out_of_range"),
        (errors.SamplingError("top_p=2 must be between 0 and 1"), 400, "invalid_value"),
        (errors.GrammarError("no"), 400, "invalid_schema"),
        (errors.RequestError("messages is empty"), 400, "invalid_request"),
        (errors.TokenizerError("no chat template"), 400, "not_supported_by_model"),
        (errors.QueueFullError("max_queue=3"), 503, "queue_full"),
        (errors.EngineDeadError("a bug"), 503, "engine_dead"),
        (errors.EngineClosedError("closed"), 503, "shutting_down"),
        (errors.LogitsError("NaN"), 500, "broken_logits"),
        (HTTPException(404), 404, "not_found"),
        (HTTPException(405, headers={"Allow": "GET"}), 405, "method_not_allowed"),
        (ApiError(413, "body_too_large", "17 bytes"), 413, "body_too_large"),
    ],
)
def test_every_error_has_a_status_and_a_slug(error: Exception, status: int, code: str) -> None:
    told = to_api_error(error)
    assert (told.status, told.code) == (status, code)
    body = json.loads(bytes(told.response().body))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]


def test_an_error_nobody_planned_for_is_not_shown_to_the_client() -> None:
    told = to_api_error(ZeroDivisionError("secret/path.py"))
    assert (told.status, told.code, told.kind) == (500, "internal_error", "server_error")
    assert "secret" not in str(told)


def test_a_full_queue_says_when_to_come_back() -> None:
    assert to_api_error(errors.QueueFullError("full")).response().headers["retry-after"] == "1"


def test_a_wrong_method_names_the_right_ones() -> None:
    assert to_api_error(HTTPException(405, headers={"Allow": "GET"})).response().headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature=-1 must be at least 0", "temperature"),
        ("stop holds an empty string", "stop"),
        ("logit_bias has the key 'x', which is not a token id", "logit_bias"),
        ("logit_bias of token 5 is nan, which is not a number", "logit_bias"),
        ("something else", None),
    ],
)
def test_a_sampling_error_names_its_field(message: str, param: str | None) -> None:
    assert to_api_error(errors.SamplingError(message)).param == param


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "prompt is missing"),
        (
            {"prompt": "x", "temperature": "hot"},
            "temperature",
            "input should be a valid number, not 'hot'",
        ),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "not 1.5"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "not '5'"),
        ({"prompt": "x", "n": True}, "n", "not True"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "prompt[0][1]: input should be a valid integer, not 'a'"),
        ({"prompt": 5}, "prompt", "prompt: input should be a valid string or input should be a valid list, not 5"),
        ({"prompt": "x", "stop": [1]}, "stop[0]", "stop[0]: input should be a valid string, not 1"),
        ({"prompt": "x", "foo": 1}, "foo", "foo is not a field of this request"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "stream_options needs stream=true"),
        ({"prompt": "x", "best_of": 3, "n": 2}, "best_of", "best_of=3 must be n=2"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "suffix is not supported"),
        ([], None, "the body: "),
    ],
)
def test_a_wrong_completion_names_field_and_value(body: Any, param: str | None, words: str) -> None:
    told = refused(CompletionRequest, body)
    assert (told.status, told.param) == (400, param)
    assert words in str(told)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "not 5"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs=true"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        ({"response_format": {"type": "yaml"}}, "response_format", "'yaml'"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "'a b'"),
        ({"audio": {}}, "audio", "audio is not a field of this request"),
        ({"store": True}, "store", "not True"),
    ],
)
def test_a_wrong_chat_names_field_and_value(fields: dict[str, Any], param: str, words: str) -> None:
    told = refused(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert (told.status, told.param) == (400, param)
    assert words in str(told)


def test_a_large_value_is_not_repeated_in_full() -> None:
    told = refused(CompletionRequest, {"prompt": "x", "temperature": "y" * 100_000})
    assert len(str(told)) < 300
