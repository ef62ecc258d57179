import contextlib
import itertools
import json
import re
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.exceptions import HTTPException

from tamis import errors
from tamis.server.errors import MAX_MESSAGE, ApiError, to_api_error
from tamis.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest


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
    assert set(body["error"]) == {"message", "type", "param", "code", "explain"}
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
        ({"prompt": "x", "temperature": "hot"}, "temperature", "temperature must be a number, not 'hot'"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "not 1.5"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "not '5'"),
        ({"prompt": "x", "n": True}, "n", "not true"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "prompt[0][1] must be a whole number, not 'a'"),
        ({"prompt": 5}, "prompt", "prompt must be text or a list, not 5"),
        ({"prompt": "x", "stop": [1]}, "stop[0]", "stop[0] must be text, not 1"),
        ({"prompt": "x", "foo": 1}, "foo", "foo is not a field of this request"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "stream_options needs stream=true"),
        ({"prompt": "x", "best_of": 3, "n": 2}, "best_of", "best_of=3 must be n=2"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "suffix is not supported"),
        ({"prompt": None}, "prompt", "prompt must be text or a list, not null"),
        ({"prompt": "x", "logit_bias": {"5": "x"}}, "logit_bias.5", "logit_bias.5 must be a number, not 'x'"),
        ([], None, "the body must be an object, not []"),
    ],
)
def test_a_wrong_completion_names_field_and_value(body: Any, param: str | None, words: str) -> None:
    told = refused(CompletionRequest, body)
    assert (told.status, told.param) == (400, param)
    assert words in str(told)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "messages must hold 1 or more entries, not []"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "messages[0].content must be text or a list, not 5",
        ),
        ({"messages": [5]}, "messages[0]", "messages[0] must be an object, not 5"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs=true"),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
        (
            {"response_format": {"type": "yaml"}},
            "response_format.type",
            "response_format.type must be one of 'text', 'json_object', 'json_schema', not 'yaml'",
        ),
        ({"response_format": {}}, "response_format.type", "response_format.type is missing"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name",
            "tools[0].function.name must match ^[a-zA-Z0-9_.-]+$, not 'a b'",
        ),
        (
            {"tool_choice": "maybe"},
            "tool_choice",
            "tool_choice must be 'none', 'auto' or 'required' or an object, not 'maybe'",
        ),
        ({"audio": {}}, "audio", "audio is not a field of this request"),
        ({"store": True}, "store", "store must be false, not true"),
    ],
)
def test_a_wrong_chat_names_field_and_value(fields: dict[str, Any], param: str, words: str) -> None:
    told = refused(ChatRequest, {"messages": [{"role": "user", "content": "hi"}], **fields})
    assert (told.status, told.param) == (400, param)
    assert words in str(told)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "y" * 100_000},
        {"y" * 100_000: 1},
        {"logit_bias": {"y" * 100_000: "x"}},
        {"best_of": 10**4000},
    ],
)
def test_nothing_large_is_repeated_in_full(fields: dict[str, Any]) -> None:
    told = refused(CompletionRequest, {"prompt": "x", **fields})
    assert len(str(told)) <= MAX_MESSAGE
    assert len(told.param or "") <= MAX_MESSAGE


VALUES: list[Any] = [
    None, True, 5, 1.5, "x", "", [], {}, [1], ["a"], [[]], [None], {"a": 1}, {"type": "x"}, {"type": 5},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}, {"type": "function", "function": {}}, [{}],
    [{"type": "function", "function": {"name": "a" * 65}}], [{"type": "function", "function": {"name": ""}}],
    [{"role": "user", "content": [{}]}], [{"role": "user", "tool_calls": [{"type": "x"}]}], [{"role": 5}], 10**400,
]  # fmt: skip


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest])
def test_every_fault_of_a_body_is_told_in_our_words_and_names_a_field(kind: type[BaseModel]) -> None:
    sound = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
    sound = {name: value for name, value in sound.items() if name in kind.model_fields}
    if kind is TokenizeRequest:
        sound.pop("messages")
    told = []
    for name, value in itertools.product(kind.model_fields, VALUES):
        with contextlib.suppress(AssertionError):  # the value was good
            told.append((name, refused(kind, {**sound, name: value})))
    assert len(told) > 5 * len(kind.model_fields)
    for name, error in told:
        message = str(error)
        assert not re.search(r"[Ii]nput|should|[Vv]alid|[Vv]alue error|dictionary|instance|something else", message)
        assert re.search(r"\b(must|missing|needs|supported|names|cannot|field|either)\b", message), message
        assert (error.param or name).startswith(name), (name, error.param, message)


@pytest.mark.parametrize(
    ("error", "param"),
    [
        (errors.RequestError("messages[3].role is 'x', not one of user"), "messages[3].role"),
        (errors.RequestError("messages[0] has no content"), "messages[0]"),
        (
            errors.RequestError("messages[0].tool_calls[1]: the arguments of 'f' are not JSON"),
            "messages[0].tool_calls[1]",
        ),
        (errors.GrammarError("tools: the parameters of 'f': no"), "tools"),
        (errors.GrammarError("tool_choice names 'x', and there is no such tool"), "tool_choice"),
        (errors.GrammarError("the grammar cannot be compiled"), "response_format"),
        (errors.TokenRangeError("stop_token_ids holds token 999"), "stop_token_ids"),
        (errors.TokenRangeError("the prompt's token 0 is -1"), "prompt"),
        (errors.SamplingError("prompt 1: n=5 is more than max_num_seqs=4"), "n"),
        (errors.TokenizerError("toy: the chat template failed"), None),
    ],
)
def test_what_is_wrong_with_a_request_names_its_field(error: errors.TamisError, param: str | None) -> None:
    assert to_api_error(error).param == param
