"""What a model gives to each token of a text: perplexity by position, and the tokens it would have taken itself."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tamis.errors import ConfigError
from tamis.request import Completion, SamplingParams
from tamis.retrofit.corpus import Document

SCORING = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
"""A prompt's own log-probabilities, and the most probable token at each place."""

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""


@dataclass(frozen=True)
class Window:
    """A stretch of a text, as long as the context allows."""

    name: str
    kind: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Scored:
    """What a model made of a window of N tokens; entry i of each list is about the window's token i + 1."""

    logprobs: list[float]
    """[N - 1]: of the token that stands there."""
    best: list[int]
    """[N - 1]: the token that the model finds most probable."""

    @classmethod
    def of(cls, completion: Completion) -> "Scored":
        """From a completion that was asked for with `SCORING`."""
        assert completion.prompt_logprobs is not None
        given = [entry for entry in completion.prompt_logprobs if entry is not None]
        return cls([entry.logprob for entry in given], [next(iter(entry.top)) for entry in given])


def cut_windows(documents: Iterable[Document], encode: Encode, length: int, count: int) -> list[Window]:
    """`count` windows of `length` tokens of each kind of text, no token twice: one of each document, then its next.

    Documents that are too short are joined, in their order. Where there is not enough text the windows are fewer.
    Raises ConfigError where there is not one of some kind.
    """
    by_kind: dict[str, list[Document]] = {}
    for document in documents:
        by_kind.setdefault(document.kind, []).append(document)
    windows = []
    for kind, group in by_kind.items():
        found = _cut(kind, group, encode, length, count)
        if not found:
            raise ConfigError(f"the {kind} to measure with has fewer than {length} tokens, which is one context")
        windows += found
    return windows


def _cut(kind: str, documents: Sequence[Document], encode: Encode, length: int, count: int) -> list[Window]:
    queues: list[list[Window]] = []
    short: list[int] = []
    names: list[str] = []
    for document in documents:
        # No more of a long text than can be wanted: about ten characters make a token at most.
        ids = list(encode(document.text[: count * length * 10]))
        if len(ids) < length:
            short += ids
            names.append(document.name)
        else:
            queues.append(list(_whole(document.name, kind, ids, length)))
    queues.append(list(_whole(" + ".join(names), kind, short, length)))
    deepest = max(len(queue) for queue in queues)
    return [queue[turn] for turn in range(deepest) for queue in queues if turn < len(queue)][:count]


def _whole(name: str, kind: str, ids: Sequence[int], length: int) -> Iterator[Window]:
    for start in range(0, len(ids) - length + 1, length):
        yield Window(name, kind, tuple(ids[start : start + length]))


@dataclass(frozen=True)
class Stretch:
    """Perplexities at positions `start` to `end` - 1."""

    start: int
    end: int
    tokens: int
    dense: float
    sparse: float


@dataclass(frozen=True)
class Comparison:
    """A model against its dense base on the same text."""

    tokens: int
    first_position: int
    """Tokens before it are not counted, but in `by_position`."""
    dense: float
    """Perplexity."""
    sparse: float
    change: float
    """sparse / dense - 1."""
    change_error: float
    """Standard error of `change`, from how windows and their stretches differ."""
    same_greedy: float
    """Share of places where both find the same token most probable."""
    by_position: list[Stretch]


def compare(dense: Sequence[Scored], sparse: Sequence[Scored], first: int, step: int) -> Comparison:
    """The figures of windows of one kind, pairwise, from position `first` on; and in stretches of `step` positions."""
    last = len(dense[0].logprobs) + 1
    pieces = [
        [(a.logprobs[i - 1], b.logprobs[i - 1]) for i in range(max(start, first), min(start + step, last))]
        for a, b in zip(dense, sparse, strict=True)
        for start in range(first - first % step, last, step)
    ]
    pairs = [pair for piece in pieces for pair in piece]
    same = [
        x == y
        for a, b in zip(dense, sparse, strict=True)
        for x, y in zip(a.best[first - 1 :], b.best[first - 1 :], strict=True)
    ]
    stretches = []
    for start in range(0, last, step):
        begin, end = max(1, start), min(start + step, last)
        held = [
            (a.logprobs[i - 1], b.logprobs[i - 1])
            for a, b in zip(dense, sparse, strict=True)
            for i in range(begin, end)
        ]
        if held:
            stretches.append(Stretch(start, end, len(held), *_perplexities(held)))
    before, after = _perplexities(pairs)
    return Comparison(
        tokens=len(pairs), first_position=first, dense=before, sparse=after, change=after / before - 1,
        change_error=_error([_mean([a - b for a, b in piece]) for piece in pieces if piece]) * after / before,
        same_greedy=_mean(same), by_position=stretches,
    )  # fmt: skip


def _perplexities(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return math.exp(-_mean([a for a, _ in pairs])), math.exp(-_mean([b for _, b in pairs]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _error(means: Sequence[float]) -> float:
    """The standard error of the mean of `means`."""
    if len(means) < 2:
        return 0.0
    middle = _mean(means)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in means) / (len(means) - 1) / len(means))
