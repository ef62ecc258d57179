"""What the server says of itself holds for whatever a client sends: no 5xx, every 4xx an OpenAI error object."""

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from schemathesis.specs.openapi.schemas import OpenApiSchema

from support.serving import MODEL, Running, all_pages_back, eventually, serving, write_byte_model
from tamis.engine.async_engine import AsyncEngine
from tamis.server.config import ServerConfig

OPERATIONS = (
    ("GET", "/v1/models"), ("GET", "/v1/models/{name}"), ("GET", "/v1/kv"), ("GET", "/health"), ("GET", "/metrics"),
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("GET", "/v1/kv/sessions"), ("POST", "/v1/kv/sessions/{name}"), ("DELETE", "/v1/kv/sessions/{name}"),
)  # fmt: skip
ROUNDS = [
    (method, path, mode)
    for method, path in OPERATIONS
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or method == "POST" or "{" in path  # else there is nothing to get wrong
]
KEY = {"Authorization": "Bearer k"}
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance,
          negative_data_rejection, ignored_auth, unsupported_method]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_byte_model(tmp_path_factory.mktemp("model"), context=128)
    engine = AsyncEngine(path, kv_budget="1MiB", kernels="reference", kv_tiers=["host:8MiB"])
    with serving(engine, ServerConfig(port=0, api_keys=("k",))) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: Running) -> OpenApiSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


@pytest.mark.parametrize(("method", "path", "mode"), ROUNDS)
def test_whatever_is_sent_is_answered_as_described(
    server: Running, api: OpenApiSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = api[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def send(case: Case[Any]) -> None:
        if isinstance(case.body, dict) and mode is GenerationMode.POSITIVE:
            # Any name would do for the schema, and nearly none for the server.
            case.body["model"] = MODEL
        response = case.call(headers=KEY)
        case.validate_response(response, checks=CHECKS, headers=KEY)
        if response.status_code >= 400:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code", "explain"}
            assert error["message"]
            assert error["code"]

    send()
    eventually(lambda: all_pages_back(server.engine))


def test_every_path_is_described_with_its_errors(api: OpenApiSchema) -> None:
    described = api.raw_schema["paths"]
    assert {(method.upper(), path) for path, methods in described.items() for method in methods} == set(OPERATIONS)
    for methods in described.values():
        for operation in methods.values():
            told = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert told["$ref"].endswith("/ErrorReply")
            assert "422" not in operation["responses"]
