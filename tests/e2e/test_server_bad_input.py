"""What a client can get wrong: the right status, a message that names the value, others unharmed, no page lost."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.serving import MODEL, Running, all_pages_back, byte_ids, eventually, serving, write_byte_model
from tamis.engine.async_engine import AsyncEngine

HI = [{"role": "user", "content": "hi"}]
CONTEXT = 64
PAGES = 3
"""Of 16 tokens: less than a context."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_byte_model(tmp_path_factory.mktemp("model"), context=CONTEXT)
    budget = PAGES * 16 * 2 * 2 * 8 * 4  # tokens, K and V, layers, channels, bytes
    with serving(AsyncEngine(path, kv_budget=budget, kernels="reference", page_size=16, max_num_seqs=4)) as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        before = told(client, prompt="hello")
        yield client
        assert told(client, prompt="hello") == before
    eventually(lambda: all_pages_back(server.engine))


def told(client: httpx.Client, **fields: Any) -> str:
    reply = client.post("/v1/completions", json={"temperature": 0, "max_tokens": 4, **fields})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def refused(reply: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    error: dict[str, Any] = reply.json()["error"]
    assert error["code"] == code
    return error


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is empty"),
        (b"{", "EOF while parsing an object at line 1 column 1"),
        (b'{"prompt": "x"', "the body is not JSON"),
        (b'{"prompt": "\xff"}', "byte 12 is 0xff"),
        (b'{"prompt": "\\ud800"}', "the body is not JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "the body is not JSON"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "number out of range"),
        (b"[" * 100_000, "recursion limit exceeded"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_body_that_is_not_json_is_refused(http: httpx.Client, path: str, body: bytes, words: str) -> None:
    reply = http.post(path, content=body, headers={"content-type": "application/json"})
    assert words in refused(reply, 400, "invalid_json")["message"]


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"temperature": -1}, "invalid_value", "temperature=-1.0 must be at least 0"),
        ({"temperature": 1e308 * 10}, "invalid_json", "not JSON"),
        ({"top_p": 0}, "invalid_value", "top_p=0"),
        ({"top_p": 1.5}, "invalid_value", "top_p=1.5 must be between 0 and 1"),
        ({"n": 0}, "invalid_value", "n=0 must be between 1 and 128"),
        ({"n": 5}, "invalid_value", "n=5 is more than max_num_seqs=4"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens=0 must be at least 1"),
        ({"max_tokens": -5}, "invalid_value", "max_tokens=-5"),
        ({"max_tokens": "5"}, "invalid_type", "max_tokens must be a whole number, not '5'"),
        ({"seed": 2**64}, "invalid_value", str(2**64)),
        ({"logprobs": 101}, "invalid_value", "logprobs=101 must be between 0 and 100"),
        ({"stop": [""]}, "invalid_value", "stop holds an empty string"),
        ({"stop_token_ids": [999]}, "token_out_of_range", "stop_token_ids holds token 999"),
        ({"logit_bias": {"999": 1}}, "token_out_of_range", "logit_bias holds token 999"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "the key 'x'"),
        ({"logit_bias": {"-1": 1}}, "invalid_value", "the key '-1'"),
        ({"presence_penalty": 3}, "invalid_value", "presence_penalty=3"),
        ({"repetition_penalty": 0}, "invalid_value", "repetition_penalty=0 must be above 0"),
        ({"prompt": []}, "invalid_value", "prompt holds 0 prompts"),
        ({"prompt": ""}, "empty_prompt", "the prompt is empty"),
        ({"prompt": [[]]}, "empty_prompt", "the prompt is empty"),
        ({"prompt": ["ok", ""]}, "empty_prompt", "the prompt is empty"),
        ({"prompt": [-1]}, "token_out_of_range", "token 0 is -1"),
        ({"prompt": [5, 10**30]}, "token_out_of_range", str(10**30)),
        ({"prompt": "x", "nonsense": 1}, "unknown_field", "nonsense"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "invalid_schema",
         "foo"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}},
         "invalid_schema", "nowhere"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_named(http: httpx.Client, fields: dict[str, Any], code: str, words: str) -> None:
    body = json.dumps({"prompt": "x", **fields})
    for stream in ("false", "true"):  # errors come before a stream begins
        content = f'{body[:-1]}, "stream": {stream}}}'
        reply = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert words in refused(reply, 400, code)["message"]


def test_a_prompt_longer_than_the_context_names_both_numbers(http: httpx.Client) -> None:
    """Field case E7."""
    for reply in (
        http.post("/v1/completions", json={"prompt": "x" * 70}),
        http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x" * 58}]}),
    ):
        error = refused(reply, 400, "context_length_exceeded")
        assert error["type"] == "invalid_request_error"
        assert "70 tokens" in error["message"]
        assert "64" in error["message"]


def test_what_can_never_fit_into_the_pool_names_both_numbers_and_an_exact_fit_runs(http: httpx.Client) -> None:
    room = PAGES * 16
    error = refused(
        http.post("/v1/completions", json={"prompt": "x" * 40, "max_tokens": room - 40 + 2, "ignore_eos": True}),
        400, "kv_pool_exceeded",
    )  # fmt: skip
    assert "4 pages" in error["message"]
    assert "3 pages" in error["message"]
    # The last token is generated and never read: it needs no room.
    fits = {"prompt": "x" * 40, "max_tokens": room - 40 + 1, "ignore_eos": True}
    assert http.post("/v1/completions", json=fits).json()["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_an_unknown_model_is_not_found(http: httpx.Client, path: str) -> None:
    bodies: dict[str, dict[str, Any]] = {"/v1/chat/completions": {"messages": HI}, "/detokenize": {"tokens": [5]}}
    fields = bodies.get(path, {"prompt": "x"})
    assert http.post(path, json={**fields, "model": MODEL}).status_code == 200
    error = refused(http.post(path, json={**fields, "model": "gpt-4"}), 404, "model_not_found")
    assert (error["param"], "'gpt-4'" in error["message"]) == ("model", True)
    refused(http.get("/v1/models/gpt-4"), 404, "model_not_found")


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"messages": []}, "invalid_value", "messages must hold 1 or more entries"),
        ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0] has no content"),
        ({"messages": [*HI, {"role": "wizard", "content": "x"}]}, "invalid_request",
         "messages[1].role is 'wizard', not one of system, developer, user, assistant, tool"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "invalid_request", "only text parts are supported"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}, "strict": True}}]},
         "invalid_schema", "'f'"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs needs logprobs=true"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs holds 'messages'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "invalid_request", "the arguments of 'f' are not JSON"),
    ],
)  # fmt: skip
def test_a_chat_that_cannot_be_is_refused(http: httpx.Client, fields: dict[str, Any], code: str, words: str) -> None:
    reply = http.post("/v1/chat/completions", json={"messages": HI, **fields})
    assert words in refused(reply, 400, code)["message"]


def test_ids_without_a_token_cannot_be_text(http: httpx.Client) -> None:
    error = refused(http.post("/detokenize", json={"tokens": [5, 259]}), 400, "token_out_of_range")
    assert error["message"] == "tokens[1] is 259, outside the vocabulary of 259 tokens"


def test_what_is_not_there_is_not_found(http: httpx.Client) -> None:
    assert "GET /nowhere" in refused(http.get("/nowhere"), 404, "not_found")["message"]
    wrong = http.get("/v1/completions")
    assert "GET /v1/completions" in refused(wrong, 405, "method_not_allowed")["message"]
    assert wrong.headers["allow"] == "POST"


def test_a_batch_with_one_bad_prompt_runs_none(http: httpx.Client, server: Running) -> None:
    refused(http.post("/v1/completions", json={"prompt": ["ok", "x" * 70]}), 400, "context_length_exceeded")
    eventually(lambda: all_pages_back(server.engine))


def test_a_special_token_written_out_is_just_text_of_a_prompt(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "a</s>"}).json()["tokens"] == [*byte_ids("a"), 2]
