"""`tamis generate` over a scripted engine: what is asked of it, and where everything is printed."""

import io
import json
import sys
from collections.abc import Iterator

import pytest

from support.cli import invoke
from support.fake_llm import FakeLLM, FakeTokenizer
from tamis.cli import main
from tamis.errors import PromptTooLongError, TokenizerError
from tamis.names import DEFAULT_MODEL
from tamis.request import SamplingParams, TokenEvent


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr("tamis.engine.llm.LLM", FakeLLM)
    return FakeLLM


def test_text_goes_to_standard_output_and_figures_to_standard_error(engine: type[FakeLLM]) -> None:
    result = invoke("generate", "--prompt", "hello")
    assert (result.code, result.out) == (0, "Paris né\n")
    assert result.err.splitlines() == [
        "KV pool:   room for 32,000 tokens in 15.6 MiB, 16 a page",
        "prompt:    1 tokens, 6.0 tokens/s",
        "generated: 4 tokens, 1.5 tokens/s (stop)",
        "KV pool:   6 of 32,000 tokens, 8.0 KiB of 15.6 MiB (1 of 2,000 pages)",
    ]
    assert engine.last.closed


def test_quiet_leaves_the_text_alone() -> None:
    result = invoke("generate", "--prompt", "hello", "--quiet")
    assert (result.code, result.out, result.err) == (0, "Paris né\n", "")


def test_the_prompt_is_a_chat_message_unless_it_is_raw(engine: type[FakeLLM]) -> None:
    invoke("generate", "--prompt", "hello")
    assert engine.last.prompt == [5]
    invoke("generate", "--prompt", "hello", "--system", "Be brief.")
    assert engine.last.prompt == [9, 5]
    invoke("generate", "--prompt", "hello", "--raw")
    assert engine.last.prompt == list(b"hello")


def test_sampling_is_greedy_by_default_and_otherwise_the_models_own(engine: type[FakeLLM]) -> None:
    invoke("generate", "--prompt", "x")
    assert engine.last.sampling == SamplingParams(temperature=0, max_tokens=256, top_k=40, top_p=0.9)
    options = [
        "--max-tokens", "7", "--temperature", "0.5", "--top-p", "1", "--top-k", "0", "--min-p", "0.1", "--seed", "3",
        "--stop", "a", "--stop", "b",
    ]  # fmt: skip
    invoke("generate", "--prompt", "x", *options)
    assert engine.last.sampling == SamplingParams(
        max_tokens=7, temperature=0.5, top_p=1, top_k=0, min_p=0.1, seed=3, stop=("a", "b")
    )


def test_the_engine_gets_its_settings(engine: type[FakeLLM]) -> None:
    options = [
        "--dtype", "fp32", "--kv-dtype", "bf16", "--page-size", "8", "--kv-budget", "1GiB",
        "--max-batch-tokens", "64", "--quant", "int8", "--threads", "2",
    ]  # fmt: skip
    assert invoke("generate", "some/model", "--prompt", "x", *options).code == 0
    settings = dict(engine.last.settings)
    settings.pop("progress")
    assert engine.last.model == "some/model"
    assert settings == {
        "dtype": "fp32", "kv_dtype": "bf16", "page_size": 8, "kv_budget": "1GiB", "max_batch_tokens": 64,
        "quant": "int8", "threads": 2, "max_num_seqs": 1,
    }  # fmt: skip


def test_json_is_one_object_with_everything() -> None:
    result = invoke("generate", "--prompt", "hello", "--json", "--logprobs", "1")
    assert result.code == 0
    answer = json.loads(result.out)
    assert (answer["model"], answer["text"], answer["token_ids"]) == (DEFAULT_MODEL, "Paris né", [0, 1, 2, 3])
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
    assert answer["prefill"] == {"tokens": 3, "seconds": 0.5, "tokens_per_second": 6.0}
    assert answer["decode"] == {"tokens": 3, "seconds": 2.0, "tokens_per_second": 1.5}
    assert answer["pool"] == {
        "page_size": 16, "pages_used": 1, "pages_total": 2_000, "tokens_used": 6, "tokens_total": 32_000,
        "bytes_used": 8_192, "bytes_total": 16_384_000,
    }  # fmt: skip
    assert answer["logprobs"][2] == {"token_id": 2, "token": "is", "logprob": -0.5, "top": {"2": -0.5, "9": -1.5}}
    assert "logprobs" not in json.loads(invoke("generate", "--prompt", "hello", "--json").out)


def test_ctrl_c_keeps_what_was_said(monkeypatch: pytest.MonkeyPatch, engine: type[FakeLLM]) -> None:
    def interrupted(self: FakeLLM) -> Iterator[TokenEvent]:
        yield TokenEvent(0, 0, "Par")
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "_events", interrupted)
    result = invoke("generate", "--prompt", "hello")
    assert (result.code, result.out) == (130, "Par\n")
    assert "generated: 1 tokens, 1.5 tokens/s (abort)" in result.err
    assert "Traceback" not in result.err
    assert engine.last.closed


def test_a_character_that_the_terminal_lacks_does_not_end_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(["generate", "--prompt", "hello", "--quiet"]) == 0
    terminal.seek(0)
    assert terminal.read() == "Paris n?\n"


def test_a_request_that_is_refused_is_one_line(monkeypatch: pytest.MonkeyPatch, engine: type[FakeLLM]) -> None:
    def refused(self: FakeLLM, prompt: list[int], sampling: SamplingParams) -> Iterator[TokenEvent]:
        raise PromptTooLongError("5 + 256 tokens are more than the context of 64")

    monkeypatch.setattr(engine, "stream", refused)
    result = invoke("generate", "--prompt", "hello")
    assert (result.code, result.out) == (2, "")
    assert result.told == "error: 5 + 256 tokens are more than the context of 64\n"
    assert engine.last.closed


def test_a_model_without_chat_template_is_one_line_and_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: FakeTokenizer, messages: object) -> list[int]:
        raise TokenizerError("toy: the model has no chat template")

    monkeypatch.setattr(FakeTokenizer, "encode_chat", refused)
    other = invoke("generate", "--prompt", "hello")
    monkeypatch.setattr(FakeTokenizer, "has_chat_template", False)
    result = invoke("generate", "--prompt", "hello")
    assert (result.code, result.out) == (2, "")
    assert result.told == "error: toy: the model has no chat template; --raw continues the prompt as it is\n"
    assert other.told == "error: toy: the model has no chat template\n"
    assert invoke("generate", "--prompt", "hello", "--raw").code == 0


def test_a_model_without_tokenizer_is_one_line(monkeypatch: pytest.MonkeyPatch, engine: type[FakeLLM]) -> None:
    def missing(self: FakeLLM) -> FakeTokenizer:
        raise TokenizerError("the model has no tokenizer: give it token ids instead of text")

    monkeypatch.setattr(engine, "tokenizer", property(missing, lambda self, value: None), raising=False)
    result = invoke("generate", "--prompt", "hello")
    assert (result.code, result.out) == (2, "")
    assert result.told == "error: the model has no tokenizer: give it token ids instead of text\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give the prompt with --prompt TEXT or --file PATH"),
        (("--prompt", "x", "--file", "-"), "not both"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "x", "--max-tokens", "0"), "max_tokens=0 must be at least 1"),
        (("--prompt", "x", "--temperature", "-1"), "temperature=-1.0 must be at least 0"),
        (("--prompt", "x", "--top-p", "0"), "top_p=0 must be above 0"),
        (("--prompt", "x", "--stop", ""), "stop holds an empty string"),
        (("--prompt", "x", "--raw", "--system", "y"), "--system needs the chat template"),
        (("--prompt", "x", "--logprobs", "1"), "--logprobs needs --json"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("tamis.engine.llm.LLM", loaded)
    result = invoke("generate", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert result.told.count("\n") == 1
