"""The official openai client against a server over a tiny random model, in fp32, greedy unless said otherwise."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from support.serving import MODEL, TEMPLATE, Running, byte_ids, serving, write_byte_model
from tamis.engine.async_engine import AsyncEngine

HI: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"], "additionalProperties": False,
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    path = write_byte_model(tmp_path_factory.mktemp("model"))
    engine = AsyncEngine(path, kv_budget="8MiB", kernels="reference", page_size=16)
    with serving(engine) as running:
        yield running
        pages = engine.kv_usage()["pages"]
        assert pages["held"] == 0
        assert pages["free"] + pages["cached"] == pages["total"]


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with server.openai() as made:
        yield made


def chat(client: OpenAI, **fields: Any) -> ChatCompletion:
    reply: ChatCompletion = client.chat.completions.create(**{**GREEDY, "messages": HI, "max_tokens": 8, **fields})
    return reply


def chunks(client: OpenAI, **fields: Any) -> list[ChatCompletionChunk]:
    asked = {**GREEDY, "messages": HI, "max_tokens": 8, "stream": True, **fields}
    return list(client.chat.completions.create(**asked))


def text_of(stream: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in stream for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_the_model_is_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "tamis"


def test_a_chat_streamed_and_not_says_the_same(client: OpenAI) -> None:
    whole, stream = chat(client), chunks(client)
    assert whole.object == "chat.completion"
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == text_of(stream) != ""
    assert whole.choices[0].finish_reason == stream[-1].choices[0].finish_reason == "length"
    assert [chunk.choices[0].delta.role for chunk in stream] == ["assistant"] + [None] * (len(stream) - 1)
    assert len({(chunk.id, chunk.created) for chunk in stream}) == 1


def test_usage_counts_tokens_and_not_chunks(client: OpenAI) -> None:
    """Characters of several bytes, several tokens here, come in one chunk."""
    bias = {str(token): 100 for token in byte_ids("\U0001f30d")[:1]}
    fields: dict[str, Any] = {"max_tokens": 12, "logit_bias": bias, "stream_options": {"include_usage": True}}
    stream = chunks(client, **fields)
    *parts, last = stream
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert all(part.usage is None for part in parts)
    whole = chat(client, max_tokens=12, logit_bias=bias).usage
    assert whole is not None
    assert (whole.prompt_tokens, whole.completion_tokens) == (last.usage.prompt_tokens, 12)
    assert whole.total_tokens == whole.prompt_tokens + 12


def test_n_replies_are_told_apart_streamed_and_not(client: OpenAI) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 1.5, "seed": 7}
    whole, stream = chat(client, **fields), chunks(client, **fields)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert [text_of(stream, index) for index in range(3)] == texts
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_the_same_seed_gives_the_same_text(client: OpenAI) -> None:
    texts = [chat(client, temperature=1.5, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_log_probabilities_come_a_token_streamed_and_not(client: OpenAI) -> None:
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
    whole, stream = chat(client, **fields), chunks(client, **fields)
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content
    assert entries is not None
    assert len(entries) == 8
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0  # greedy
        assert entry.top_logprobs == sorted(entry.top_logprobs, key=lambda other: -other.logprob)
    told = [choice.logprobs.content for chunk in stream for choice in chunk.choices if choice.logprobs]
    assert [entry for part in told for entry in part or []] == entries
    data = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert data.decode(errors="replace") == whole.choices[0].message.content


def test_a_stop_string_across_tokens_ends_the_text_before_it(client: OpenAI) -> None:
    text = client.completions.create(**GREEDY, prompt="hello", max_tokens=12).choices[0].text
    stop = text[3:6]
    assert text.find(stop) == 3
    for stream in (False, True):
        reply: Any = client.completions.create(**GREEDY, prompt="hello", max_tokens=12, stop=stop, stream=stream)
        parts = list(reply) if stream else [reply]
        assert "".join(part.choices[0].text for part in parts) == text[:3]
        assert parts[-1].choices[0].finish_reason == "stop"


def test_text_held_back_for_a_stop_string_comes_at_the_end(client: OpenAI) -> None:
    """Field case E3."""
    text = client.completions.create(**GREEDY, prompt="hello", max_tokens=6).choices[0].text
    reply: Any = client.completions.create(
        **GREEDY, prompt="hello", max_tokens=6, stop=text[-2:] + "never", stream=True
    )
    parts = list(reply)
    assert "".join(part.choices[0].text for part in parts) == text
    assert parts[-1].choices[0].finish_reason == "length"


def test_a_bias_and_penalties_change_the_choice(client: OpenAI) -> None:
    always = {str(byte_ids("a")[0]): 100}
    assert chat(client, logit_bias=always, max_tokens=4).choices[0].message.content == "aaaa"
    mild = {str(byte_ids(letter)[0]): value for letter, value in (("a", 100), ("b", 99))}
    penalised = chat(client, logit_bias=mild, max_tokens=4, frequency_penalty=2, presence_penalty=2)
    assert set(penalised.choices[0].message.content or "") == {"a", "b"}


def test_json_follows_its_schema(client: OpenAI) -> None:
    schema = WEATHER["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}}
    reply = chat(client, response_format=form, max_tokens=200).choices[0]
    value = json.loads(reply.message.content or "")
    assert value["city"] in ("Paris", "Rome")
    assert value["days"] in (1, 2)
    assert reply.finish_reason == "stop"
    assert json.loads(text_of(chunks(client, response_format=form, max_tokens=200))) == value


def test_a_character_of_several_tokens_comes_whole(client: OpenAI) -> None:
    """Field case E1."""
    world = "\U0001f30d"
    form = {"type": "json_schema", "json_schema": {"name": "world", "schema": {"const": world}}}
    stream = chunks(client, response_format=form, max_tokens=20)
    assert json.loads(text_of(stream)) == world
    assert world in [choice.delta.content for chunk in stream for choice in chunk.choices]


def test_a_json_object_is_one(client: OpenAI) -> None:
    bias = {str(byte_ids("}")[0]): 100}
    reply = chat(client, response_format={"type": "json_object"}, logit_bias=bias, max_tokens=50).choices[0]
    assert json.loads(reply.message.content or "") == {}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_tool_is_called_streamed_and_not(client: OpenAI, choice: Any) -> None:
    fields: dict[str, Any] = {
        "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 300,
    }  # fmt: skip
    reply = chat(client, **fields).choices[0]
    assert reply.finish_reason == "tool_calls"
    assert not reply.message.content
    (call,) = reply.message.tool_calls or []
    assert call.type == "function"
    assert call.id
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome")

    stream = chunks(client, **fields)
    deltas = [delta for chunk in stream for choice in chunk.choices for delta in choice.delta.tool_calls or []]
    assert (deltas[0].index, deltas[0].type) == (0, "function")
    assert deltas[0].function is not None
    assert deltas[0].function.name == "weather"
    pieces = [delta.function.arguments or "" for delta in deltas if delta.function]
    assert len([piece for piece in pieces if piece]) > 1
    assert json.loads("".join(pieces)) == arguments
    assert stream[-1].choices[0].finish_reason == "tool_calls"


def test_without_tool_choice_a_model_need_not_call(client: OpenAI) -> None:
    reply = chat(client, tools=[WEATHER], tool_choice="none").choices[0]
    assert reply.message.tool_calls is None
    assert reply.finish_reason == "length"


def test_results_of_tools_go_back_into_the_chat(client: OpenAI) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "days": 1}'}}
    messages = [
        *HI, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]  # fmt: skip
    usage = chat(client, messages=messages, tools=[WEATHER]).usage
    assert usage is not None
    assert usage.prompt_tokens > 100


def test_thinking_comes_apart_from_the_answer(tmp_path: Path) -> None:
    """The template opens the thinking, which this model never ends; what may follow it makes no difference."""
    template = TEMPLATE.replace("bot: ", "bot: <think>") + "{# </think> #}"
    engine = AsyncEngine(write_byte_model(tmp_path, template), kv_budget="4MiB", kernels="reference")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 5}}}
    with serving(engine) as server, server.openai() as client:
        for fields in ({}, {"response_format": form}):
            asked = {**fields, "max_tokens": 60, "seed": 3, "temperature": 1}
            message = chat(client, **asked).choices[0].message
            thought = (message.model_extra or {})["reasoning_content"]
            stream = chunks(client, **asked)
            deltas = [choice.delta.model_extra or {} for chunk in stream for choice in chunk.choices]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought != ""
            assert text_of(stream) == message.content


def test_a_completion_streamed_and_not_says_the_same(client: OpenAI) -> None:
    whole = client.completions.create(**GREEDY, prompt="hello", max_tokens=8)
    stream = list(client.completions.create(**GREEDY, prompt="hello", max_tokens=8, stream=True))
    assert whole.object == "text_completion"
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert stream[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_several_prompts_have_their_replies_in_order(client: OpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "max_tokens": 4, "n": 2}
    alone = [client.completions.create(**fields, prompt=prompt).choices[0].text for prompt in ("ab", "xyz")]
    for prompts in (["ab", "xyz"], [byte_ids("ab"), byte_ids("xyz")]):
        together = client.completions.create(**fields, prompt=prompts)
        assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]
        assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
        assert together.usage is not None
        assert (together.usage.prompt_tokens, together.usage.completion_tokens) == (5, 16)


def test_echo_puts_the_prompt_first_with_its_log_probabilities(client: OpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "prompt": "hello", "max_tokens": 3, "echo": True}
    choice = client.completions.create(**fields, logprobs=2).choices[0]
    assert choice.text.startswith("hello")
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.tokens[:5] == list("hello")
    assert found.text_offset == list(range(8))
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])
    streamed = client.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_a_text_can_be_scored_without_going_on(client: OpenAI) -> None:
    scored = client.completions.create(**GREEDY, prompt="hello", max_tokens=0, echo=True, logprobs=0)
    choice, whole = scored.choices[0], client.completions.create(
        **GREEDY, prompt="hello", max_tokens=1, echo=True, logprobs=0
    )  # fmt: skip
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert scored.usage is not None
    assert scored.usage.completion_tokens == 0
    assert choice.logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert choice.logprobs.token_logprobs == (whole.choices[0].logprobs.token_logprobs or [])[:5]
    assert choice.logprobs.top_logprobs is None


def test_prompt_log_probabilities_are_there_for_the_asking(client: OpenAI) -> None:
    reply = client.completions.create(**GREEDY, prompt="abc", max_tokens=1, extra_body={"prompt_logprobs": 1})
    entries = (reply.choices[0].model_extra or {})["prompt_logprobs"]
    pairs = zip(entries, byte_ids("abc"), strict=True)
    assert [entry and entry[str(token)]["decoded_token"] for entry, token in pairs] == [None, "b", "c"]
    extra = chat(client, extra_body={"prompt_logprobs": 0}).model_extra or {}
    assert len(extra["prompt_logprobs"]) == len("user: hi\nbot: ")


def test_a_prompt_seen_before_comes_from_the_cache_and_another_does_not(client: OpenAI) -> None:
    def cached(prompt: str, **fields: Any) -> int:
        usage = client.completions.create(**GREEDY, prompt=prompt, max_tokens=1, **fields).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0

    assert cached("c" * 100) == 0
    assert cached("c" * 100) == 96
    assert cached("d" * 100) == 0
    assert cached("c" * 100, extra_body={"cache_salt": "other"}) == 0


def test_a_stream_tells_how_far_the_prompt_is(client: OpenAI) -> None:
    options: Any = {"include_prefill_progress": True}
    stream = chunks(client, messages=[{"role": "user", "content": "p" * 1200}], stream_options=options)
    told = [(chunk.model_extra or {})["prefill_progress"] for chunk in stream if not chunk.choices]
    assert len(told) >= 2
    assert [entry["processed"] for entry in told] == sorted(entry["processed"] for entry in told)
    assert told[-1]["processed"] == told[-1]["total"] == len("user: \nbot: ") + 1200
    assert all(entry["cached"] == 0 and entry["elapsed"] >= 0 for entry in told)
    assert stream[len(told)].choices[0].delta.role == "assistant"


def test_text_and_tokens_are_turned_into_each_other(server: Running) -> None:
    with server.http() as http:
        counted = http.post("/tokenize", json={"prompt": "h\u00e9"}).json()
        assert counted == {"tokens": byte_ids("h\u00e9"), "count": 3, "max_model_len": 2048}
        assert http.post("/detokenize", json={"tokens": counted["tokens"]}).json() == {"prompt": "h\u00e9"}
        chat_ids = http.post("/tokenize", json={"messages": HI}).json()["tokens"]
        assert chat_ids == byte_ids("user: hi\nbot: ")
        bare = http.post("/tokenize", json={"messages": HI, "add_generation_prompt": False}).json()["tokens"]
        assert bare == byte_ids("user: hi\n")


def test_the_server_tells_what_it_did(server: Running, client: OpenAI) -> None:
    chat(client)
    with server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        usage = http.get("/v1/kv").json()
        pages = usage["pages"]
        assert pages["free"] + pages["held"] + pages["cached"] + pages["in_transfer"] == pages["total"] > 0
        assert usage["tokens"]["total"] == pages["total"] * usage["page_size"]
        text = http.get("/metrics").text
    for name in ("tamis_generated_tokens_total", "tamis_prompt_tokens_total", "tamis_time_to_first_token_seconds_count",
                 "tamis_time_between_tokens_seconds_count", "tamis_requests_waiting", "tamis_retractions_total",
                 "tamis_prefix_cache_hit_rate", 'tamis_kv_pages{owner="free"}', 'tamis_kv_bytes{plane="main"}',
                 'tamis_http_requests_total{path="/v1/chat/completions",status="200"}'):  # fmt: skip
        assert f"\n{name} " in text


def test_the_client_raises_the_error_that_it_knows_for_each_kind(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        chat(client, model="gpt-4")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, temperature=-1)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "temperature")
