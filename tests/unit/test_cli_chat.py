"""`tamis chat` over a scripted engine: what is remembered, what a message may do, and what stops what."""

import io
import sys
from collections.abc import Iterator

import pytest

from support.cli import Result, invoke
from support.fake_llm import FakeLLM, FakeTokenizer
from tamis.cli.conversation import Conversation
from tamis.errors import PromptTooLongError
from tamis.request import SamplingParams, TokenEvent

SAID = "Paris né"


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr("tamis.engine.llm.LLM", FakeLLM)
    return FakeLLM


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> "Talk":
    return Talk(monkeypatch)


class Talk:
    """Run `tamis chat` on these bytes of standard input."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, text: str | bytes, *options: str) -> Result:
        raw = text.encode() if isinstance(text, str) else text
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
        return invoke("chat", *options)


def chats() -> list[list[str]]:
    """The contents of every chat that was put to the model."""
    return [[content for _, content in chat] for chat in FakeLLM.last.tokenizer.chats]


def test_every_turn_is_remembered(talk: Talk) -> None:
    result = talk("one\ntwo\nthree", "--system", "Be brief.")
    assert (result.code, result.out) == (0, f"{SAID}\n" * 3)
    assert FakeLLM.last.tokenizer.chats[-1] == [
        ("system", "Be brief."), ("user", "one"), ("assistant", SAID), ("user", "two"), ("assistant", SAID),
        ("user", "three"),
    ]  # fmt: skip
    assert FakeLLM.last.closed


def test_the_room_is_told_first_and_figures_after_each_reply(talk: Talk) -> None:
    lines = talk("one\ntwo\n").err.splitlines()
    assert lines[0] == "KV pool:   room for 32,000 tokens in 15.6 MiB, 16 a page"
    assert [line.partition(",")[0] for line in lines[1:]] == ["(1 + 4 of 64 tokens", "(3 + 4 of 64 tokens"]
    assert not any("stopped" in line for line in lines)
    assert talk("one\n", "--quiet").err == ""


def test_commands_are_not_messages(talk: Talk) -> None:
    result = talk("one\n/clear\n\n  \ntwo\n/help\n/fly\n/exit\nthree\n", "--quiet")
    assert (result.code, result.out) == (0, f"{SAID}\n" * 2)
    assert chats() == [["one"], ["two"]]
    lines = result.told.splitlines()
    assert (lines[0], lines[-1]) == ("(forgotten)", "error: there is no command /fly; /help shows them")
    assert "/clear   forget what was said" in lines


def test_a_path_or_a_sentence_that_begins_with_a_slash_is_a_message(talk: Talk) -> None:
    talk("/etc is what?\n")
    assert chats() == [["/etc is what?"]]


def test_a_line_that_ends_in_a_backslash_goes_on(talk: Talk) -> None:
    talk("one\\\ntwo\\\r\nthree\nfour\\")
    assert chats() == [["one\ntwo\nthree"], ["one\ntwo\nthree", SAID, "four"]]


def test_bytes_that_are_no_text_are_one_line_and_the_next_message_is_answered(talk: Talk) -> None:
    result = talk(b"\xff\xfe\ngood\n", "--quiet")
    assert (result.code, result.out) == (0, f"{SAID}\n")
    assert result.err.startswith("error: the message is not UTF-8 text: ")
    assert result.told.count("\n") == 1
    assert chats() == [["good"]]


def test_ctrl_c_stops_the_reply_and_what_was_said_is_remembered(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, engine: type[FakeLLM]
) -> None:
    whole = engine._events
    interrupts = [True]

    def interrupted(self: FakeLLM) -> Iterator[TokenEvent]:
        if interrupts:
            interrupts.pop()
            yield TokenEvent(0, 0, "Par")
            raise KeyboardInterrupt
        yield from whole(self)

    monkeypatch.setattr(engine, "_events", interrupted)
    result = talk("one\ntwo\n")
    assert (result.code, result.out) == (0, f"Par\n{SAID}\n")
    assert chats()[-1] == ["one", "Par", "two"]
    assert result.err.count("stopped") == 1


def test_a_reply_stopped_before_its_first_word_is_as_if_never_asked(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, engine: type[FakeLLM]
) -> None:
    def interrupted(self: FakeLLM) -> Iterator[TokenEvent]:
        raise KeyboardInterrupt
        yield TokenEvent(0, 0, "")

    monkeypatch.setattr(engine, "_events", interrupted)
    assert talk("one\ntwo\n").code == 0
    assert chats() == [["one"], ["two"]]


def test_ctrl_c_at_the_prompt_does_not_leave(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[bytes | None] = [b"one\n", None, b"two\n", b""]

    class Terminal(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            line = lines.pop(0)
            if line is None:
                raise KeyboardInterrupt
            return line

    class Stdin:
        buffer = Terminal()

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stdin", Stdin())
    result = invoke("chat", "--quiet")
    assert (result.code, result.out) == (0, f"{SAID}\n" * 2)
    assert result.err == "\n(Ctrl-D or /exit leaves)\n"
    assert chats()[-1] == ["one", SAID, "two"]


def test_a_message_that_is_refused_is_one_line_and_forgotten(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, engine: type[FakeLLM]
) -> None:
    answer = engine.stream

    def stream(self: FakeLLM, prompt: list[int], sampling: SamplingParams) -> Iterator[TokenEvent]:
        if prompt[-1] == len("too long"):
            raise PromptTooLongError("the prompt has 70 tokens")
        return answer(self, prompt, sampling)

    monkeypatch.setattr(engine, "stream", stream)
    result = talk("one\ntoo long\ntwo\n", "--quiet")
    assert (result.code, result.told) == (0, "error: the prompt has 70 tokens\n")
    assert chats()[-1] == ["one", SAID, "two"]


def test_the_oldest_turns_are_forgotten_when_the_context_is_full(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, engine: type[FakeLLM]
) -> None:
    """A token a message: 8 tokens hold a prompt of 5 and a reply of 3."""
    monkeypatch.setattr(engine, "context", 8)
    result = talk("a\nbb\nccc\ndddd\n", "--max-tokens", "3")
    assert FakeLLM.last.prompt == [2, 8, 3, 8, 4]
    assert result.err.count("(the context is full: the oldest 1 of the remembered turns are left out)") == 1


def test_a_message_that_does_not_fit_alone_is_left_to_the_engine(engine: type[FakeLLM]) -> None:
    llm = engine(None)
    conversation = Conversation(llm, SamplingParams(max_tokens=1000), "x")  # type: ignore[arg-type]
    conversation.add("a", "b")
    assert conversation.prompt("cc") == ([1, 2], 1)
    assert [message["role"] for message in conversation.messages] == ["system", "user", "assistant"]


def test_sampling_is_the_models_own_unless_told_otherwise(talk: Talk, engine: type[FakeLLM]) -> None:
    talk("one\n")
    assert engine.last.sampling == SamplingParams(top_k=40, top_p=0.9, max_tokens=None)
    talk("one\n", "--temperature", "0", "--max-tokens", "7", "--stop", "x")
    assert engine.last.sampling == SamplingParams(temperature=0, top_k=40, top_p=0.9, max_tokens=7, stop=("x",))


def test_a_model_without_chat_template_is_refused_at_once(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "has_chat_template", False)
    result = talk("one\n")
    assert (result.code, result.out) == (2, "")
    assert result.told == "error: the model has no chat template; tamis generate --raw continues a text as it is\n"


def test_what_cannot_be_asked_is_refused_before_the_model_is_loaded(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tamis.engine.llm.LLM", None)
    assert talk("", "--max-tokens", "0").told == "error: max_tokens=0 must be at least 1\n"
