"""Reading pages layer by layer, whatever they lie in: verified part by part, before anybody sees a byte."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tamis.errors import TierReadError
from tamis.kv.layout import KVLayout
from tamis.kv.tiers.base import Key, ReadPart
from tamis.kv.tiers.format import PREFIX, PartPlace, Rows, digest, header_bytes, page_format, parse_header

Fetch = Callable[[int, Rows], None]
"""`fetch(offset, rows)` fills rows[i], all of it, with what lies at `offset` in the blob of key i.

Raises TierReadError for a key that is missing or too short, TierError where the store fails.
"""
_SPAN_ROOM = 64 << 20
"""Bytes that are fetched at once where parts are put together to make fewer requests."""


@dataclass(frozen=True)
class Span:
    """Parts that lie one after the other and are fetched at once."""

    places: tuple[PartPlace, ...]

    @property
    def offset(self) -> int:
        """Where the first part begins."""
        return self.places[0].offset

    @property
    def length(self) -> int:
        """Bytes; a multiple of what every part of it is aligned to."""
        return self.places[-1].end - self.offset


def spans(places: Sequence[PartPlace], least: int, most: int) -> Iterator[Span]:
    """Put neighbours together until a span has `least` bytes of each page, if they stay below `most`."""
    group: list[PartPlace] = []
    for place in places:
        length = group[-1].end - group[0].offset if group else 0
        fits = bool(group) and place.offset == group[-1].end and length + place.end - place.offset <= most
        if group and (length >= least or not fits):
            yield Span(tuple(group))
            group = []
        group.append(place)
    if group:
        yield Span(tuple(group))


def read_parts(
    fetch: Fetch, keys: Sequence[Key], layout: KVLayout, layers: Sequence[int] | None, least: int
) -> Iterator[ReadPart]:
    """`Tier.read` over `fetch`, in requests of at least `least` bytes of a page where that is possible."""
    shape = page_format(layout)
    places = shape.places_of(layers)
    if not keys:
        return
    headers = np.empty((len(keys), shape.header_bytes), np.uint8)
    fetch(0, headers)
    checksums = [shape.checksums(key, headers[row].tobytes()) for row, key in enumerate(keys)]
    for span in spans(places, least, _SPAN_ROOM // len(keys)):
        rows = np.empty((len(keys), span.length), np.uint8)
        fetch(span.offset, rows)
        for place in span.places:
            start = place.offset - span.offset
            part = rows[:, start : start + place.length]
            for row, key in enumerate(keys):
                if digest(part[row].data) != checksums[row][place.number]:
                    why = f"layer {place.layer}'s {place.part} part does not match its checksum"
                    raise TierReadError(key, why, corrupt=True)
            yield ReadPart(place.layer, place.part, shape.tensors(place, part))


def verify_blob(fetch: Fetch, key: Key, size: int) -> str:
    """Read all of one blob of `size` bytes and check it; the fingerprint of its layout. Raises TierReadError."""

    def piece(offset: int, length: int) -> bytes:
        # No more than there is, whatever the blob says of itself.
        rows = np.empty((1, min(length, size - offset)), np.uint8)
        fetch(offset, rows)
        return rows.tobytes()

    prefix = piece(0, PREFIX.size)
    header = parse_header(key, piece(0, header_bytes(key, prefix)), size)
    for layer, part, offset, length, checksum in header.parts:
        if digest(piece(offset, length)) != checksum:
            raise TierReadError(key, f"layer {layer}'s {part} part does not match its checksum", corrupt=True)
    return header.layout_fingerprint
