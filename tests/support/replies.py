"""Replies cut into pieces, and replies that a grammar allows: for tests of structured output and tool calls."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from support.vocab import byte_level
from tamis.engine.grammar import Constraint, Grammars
from tamis.engine.tokenizer import Tokenizer
from tamis.server.tool_calls import Delta, ToolCallParser

BYTES = byte_level([bytes([byte]) for byte in range(256)])
"""A token for every byte; the end token is 256."""
END_ID = 256


def cuts(text: str, seed: int = 0) -> Iterator[list[str]]:
    """`text` whole, cut once at every place, into pieces of 1, 2, 3 and 7 characters, and at random places."""
    yield [text]
    yield from ([text[:at], text[at:]] for at in range(1, len(text)))
    yield from ([text[at : at + size] for at in range(0, len(text), size)] for size in (1, 2, 3, 7))
    rng = random.Random(seed)
    for _ in range(50):
        places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(1, 12)))
        yield [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


def parse(parser: ToolCallParser, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls (name, JSON text of the arguments) of a reply, checked against what deltas promise."""
    deltas: list[Delta] = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    assert parser.finish() == [], "a second end tells nothing"
    content, calls = "", dict[int, list[str]]()
    for delta in deltas:
        assert delta.content or delta.arguments or delta.id, "a delta that tells nothing"
        if delta.index is None:
            assert delta.id is delta.name is None and not delta.arguments
            content += delta.content
        elif delta.id is not None:
            assert delta.index == len(calls) and delta.name, "calls begin in order, with a name"
            calls[delta.index] = [delta.name, delta.arguments]
        else:
            assert delta.index == len(calls) - 1 and not delta.content and delta.name is None
            calls[delta.index][1] += delta.arguments
    assert parser.calls == len(calls)
    return content, [(name, arguments) for name, arguments in calls.values()]


def ids() -> Callable[[], str]:
    """call_0, call_1, ..."""
    numbers = iter(range(1000))
    return lambda: f"call_{next(numbers)}"


def grammars(tokenizer: Tokenizer = BYTES, end: int = END_ID) -> Grammars:
    """The grammars of a toy vocabulary."""
    return Grammars(tokenizer, [end])


def allowed(constraint: Constraint, size: int = 257) -> set[int]:
    """The tokens that may come next."""
    logits = torch.zeros(size)
    constraint.mask(logits)
    return set(torch.nonzero(logits == 0).flatten().tolist())


def accepts(response_format: Mapping[str, Any], text: str) -> bool:
    """Whether the whole of `text` is a reply that `response_format` allows."""
    constraint = grammars().constraint(response_format)
    assert constraint is not None
    for byte in text.encode():
        if constraint.done or byte not in allowed(constraint):
            return False
        constraint.accept(byte)
    return constraint.done or END_ID in allowed(constraint)


def walk(response_format: Mapping[str, Any], rng: random.Random, hints: Sequence[str] = (), limit: int = 4000) -> str:
    """A random reply that `response_format` allows: letters and a few signs, and now and then one of `hints`."""
    constraint = grammars().constraint(response_format)
    assert constraint is not None
    usual = {*b'abwtxyz {}[]",:<>/0123456789\\\ntruefalsn-.', 0xC3, 0xA9, END_ID}
    ends = {*b'"}]<', END_ID}
    data, hint = bytearray(), b""
    for _ in range(limit):
        choices = allowed(constraint)
        if not hint and hints and rng.random() < 0.3:
            hint = rng.choice(hints).encode()
        if hint and hint[0] in choices:
            token, hint = hint[0], hint[1:]
        else:
            narrow, hint = sorted(choices & usual or choices), b""
            token = rng.choices(narrow, [30 if token in ends else 1 for token in narrow])[0]
        constraint.accept(token)
        if token == END_ID:
            return data.decode()
        data.append(token)
        if constraint.done:
            return data.decode()
    raise AssertionError(f"no end after {limit} bytes: {data!r}")
