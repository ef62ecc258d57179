"""E1, E3: a reply's text is exact, streamed and not, however it ends."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from support.engines import greedy, make_engine, model_of
from support.vocab import byte_level
from tamis import LLM, FinishReason
from tamis.engine.engine import Engine
from tamis.engine.sequence import EngineEvent
from tamis.request import Request

PIECES = [b"Mars", b"?\n", b"\nUs", b"\xf0\x9f", b"\x8c\x8d"]
END_ID = len(PIECES)
PROMPT = [0, 1]


@dataclass(frozen=True)
class Ending:
    """What the model says after the prompt, and what must come of it."""

    tokens: list[int]
    text: str
    reason: FinishReason
    options: dict[str, Any] = field(default_factory=dict)


ENDINGS = {
    "length": Ending([0, 1, 2, 3, 4], "Mars?\n\nUs\U0001f30d", FinishReason.LENGTH),
    "length, stop string held back": Ending([0, 1], "Mars?\n", FinishReason.LENGTH, {"stop": "\n\nU"}),
    "length, half a character held back": Ending([0, 3], "Mars\ufffd", FinishReason.LENGTH),
    "length, stop string of what was half a character": Ending([0, 3], "Mars", FinishReason.STOP, {"stop": "\ufffd"}),
    "stop string of two tokens": Ending([0, 1, 2], "Mars?", FinishReason.STOP, {"stop": "\n\n"}),
    "stop string with text before it": Ending([0, 1, 2], "Mars?\n\n", FinishReason.STOP, {"stop": "Us"}),
    "stop string with held text before it": Ending([0, 1, 2], "Mars?\n", FinishReason.STOP, {"stop": ["?\n?", "\nUs"]}),
    "stop string of one character in two tokens": Ending([2, 3, 4], "\nUs", FinishReason.STOP, {"stop": "\U0001f30d"}),
    "end id": Ending([0, 4, END_ID], "Mars\ufffd\ufffd", FinishReason.STOP),
    "end id, stop string held back": Ending([0, 1, END_ID], "Mars?\n", FinishReason.STOP, {"stop": "\n\n"}),
    "end id, half a character held back": Ending([2, 3, END_ID], "\nUs\ufffd", FinishReason.STOP),
    "stop token, stop string held back": Ending(
        [0, 1, 2], "Mars?\n", FinishReason.STOP, {"stop": "\n\n", "stop_token_ids": [2]}
    ),
    "stop token, half a character held back": Ending([3, 0], "\ufffd", FinishReason.STOP, {"stop_token_ids": [0]}),
    "abort": Ending([0, 3, 4], "Mars\U0001f30d", FinishReason.ABORT),
    "abort, stop string held back": Ending([0, 1], "Mars?\n", FinishReason.ABORT, {"stop": "\n\n"}),
    "abort, half a character held back": Ending([0, 1, 3], "Mars?\n\ufffd", FinishReason.ABORT),
}


def scripted(ending: Ending) -> Engine:
    engine = make_engine(tokenizer=byte_level(PIECES), end_ids=[END_ID])
    model_of(engine).script = {len(PROMPT) + place: token for place, token in enumerate(ending.tokens)}
    return engine


def request_of(ending: Ending) -> Request:
    aborted = ending.reason is FinishReason.ABORT
    return Request(tuple(PROMPT), greedy(len(ending.tokens) + aborted, **ending.options))


@pytest.mark.parametrize("name", ENDINGS)
def test_the_events_joined_are_the_completion(name: str) -> None:
    ending = ENDINGS[name]
    engine = scripted(ending)
    request_id = engine.add_request(request_of(ending))
    events: list[EngineEvent] = []
    for _ in ending.tokens:
        events += engine.step()
    if ending.reason is FinishReason.ABORT:
        engine.abort(request_id)
        events += engine.take_events()
    done = events[-1].completion
    assert done is not None
    assert done.finish_reason is ending.reason
    assert list(done.token_ids) == ending.tokens
    assert done.text == ending.text
    assert "".join(event.token.text for event in events) == ending.text
    assert not engine.has_work


@pytest.mark.parametrize("name", [name for name in ENDINGS if "abort" not in name])
def test_the_library_streams_what_it_completes(name: str) -> None:
    ending = ENDINGS[name]
    sampling = request_of(ending).sampling
    with LLM.from_engine(scripted(ending)) as llm:
        (done,) = llm.generate([PROMPT], sampling)
        events = list(llm.stream(PROMPT, sampling))
    assert (done.text, done.finish_reason) == (ending.text, ending.reason)
    assert ("".join(event.text for event in events), events[-1].finish_reason) == (ending.text, ending.reason)


def test_text_comes_as_soon_as_it_is_certain() -> None:
    ending = Ending([0, 1, 2, 3, 4], "", FinishReason.LENGTH, {"stop": "\n\nU!"})
    with LLM.from_engine(scripted(ending)) as llm:
        texts = [event.text for event in llm.stream(PROMPT, request_of(ending).sampling)]
    assert texts == ["Mars", "?", "\n\nUs", "", "\U0001f30d"]
