from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams
from pydantic import BaseModel, ValidationError

from tamis.server.schema import ChatRequest, CompletionRequest, TokenizeRequest

NOT_TAKEN = {"audio", "function_call", "functions", "moderation", "prediction", "prompt_cache_options",
             "web_search_options"}  # fmt: skip
"""Fields that ask for what a text model cannot do, or were replaced long ago; they are refused by name."""
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(("request_type", "params"), [(ChatRequest, ChatParams), (CompletionRequest, CompletionParams)])
def test_every_field_of_the_official_client_is_taken_or_known_not_to_be(
    request_type: type[BaseModel], params: type
) -> None:
    missing = set(params.__annotations__) - set(request_type.model_fields)
    assert missing <= NOT_TAKEN


def test_null_is_as_good_as_nothing() -> None:
    nothing = {name: None for name in ChatRequest.model_fields if name != "messages"}
    assert ChatRequest(messages=HELLO, **nothing).model_dump(exclude={"messages"}) == nothing  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_either(prompt: Any, prompts: list[Any]) -> None:
    assert CompletionRequest(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", [[], ["a"] * 1025])
def test_a_list_of_prompts_has_some_and_not_too_many(prompt: list[str]) -> None:
    with pytest.raises(ValidationError, match=f"prompt holds {len(prompt)} prompts"):
        CompletionRequest(prompt=prompt)


@pytest.mark.parametrize("fields", [{}, {"prompt": "x", "messages": HELLO}])
def test_tokenize_takes_either_a_prompt_or_messages(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="give either prompt or messages"):
        TokenizeRequest.model_validate(fields)


def test_a_named_tool_must_be_among_the_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    choice = {"type": "function", "function": {"name": "g"}}
    with pytest.raises(ValidationError, match="tool_choice names 'g'"):
        ChatRequest.model_validate({"messages": HELLO, "tools": [tool], "tool_choice": choice})
