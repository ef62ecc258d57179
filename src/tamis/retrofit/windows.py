"""From texts to the token windows that a run trains and measures on."""

import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from tamis.errors import ConfigError
from tamis.retrofit.corpus import Document
from tamis.retrofit.scoring import Encode

PIECE = 1 << 16
"""Characters that are tokenised at a time."""


def token_stream(documents: Iterable[Document], encode: Encode, most: int) -> list[int]:
    """The tokens of the documents one after another, at most `most` of them."""
    ids: list[int] = []
    for document in documents:
        for start in range(0, len(document.text), PIECE):
            if len(ids) >= most:
                return ids[:most]
            ids += encode(document.text[start : start + PIECE])
        ids += encode("\n\n")
    return ids[:most]


def cut(ids: Sequence[int], length: int) -> list[Tensor]:
    """Windows of `length` tokens, int64, without overlap; what is left at the end is dropped."""
    whole = torch.tensor(ids[: len(ids) - len(ids) % length], dtype=torch.int64)
    return list(torch.split(whole, length)) if len(whole) else []


def training_windows(
    groups: Sequence[Sequence[Document]], encode: Encode, length: int, count: int, seed: int
) -> list[Tensor]:
    """`count` windows, taken from the groups of documents in turn; where one runs out, from the others.

    The documents of a group come in an order that depends on `seed`. Raises ConfigError where all of them together do
    not fill one window; where they fill some, these are used again.
    """
    rng = random.Random(seed)
    piles = [_pile(group, encode, length, -(-count // len(groups)), rng) for group in groups]
    found = [window for turn in range(count) for pile in piles for window in pile[turn : turn + 1]][:count]
    if not found:
        raise ConfigError(f"the corpus is shorter than one window of {length} tokens")
    return [found[i % len(found)] for i in range(count)]


def _pile(group: Sequence[Document], encode: Encode, length: int, count: int, rng: random.Random) -> list[Tensor]:
    order = list(group)
    rng.shuffle(order)
    return cut(token_stream(order, encode, count * length), length)
