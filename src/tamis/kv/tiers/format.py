"""One page as one blob: a header that says what it is and where each part lies, then the parts, layer by layer.

    magic, version, number of parts, bytes of the blob, key, fingerprint of the layout       88 bytes
    for each part: layer, 0 (index) or 1 (main), offset, length, checksum                    40 bytes each
    checksum of all of the above                                                             16 bytes

Numbers are little-endian, checksums XXH3 of 128 bits, offsets multiples of 64. A layer's index part comes before its
main part; a part is its planes as stored, one after the other. Header and parts can each be verified on their own.

A reader knows the layout, and with it every byte of the header but the checksums: it compares, and believes no number
that it reads. Whoever has no layout (`parse_header`) checks every number against the size of the blob.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from tamis.errors import TierReadError
from tamis.kernels.paging import raw_view, storage_dtype
from tamis.kv.blob import PageBlob
from tamis.kv.layout import MAIN_PLANES, KVLayout
from tamis.kv.tiers.base import Blob, Key

Rows = npt.NDArray[np.uint8]
"""[number of keys, bytes]: the same stretch of several blobs."""
MAGIC = b"TAMISKV\x00"
VERSION = 1
PREFIX = struct.Struct("<8sIIQ32s32s")
"""What a header begins with, whatever the layout."""
_PART = np.dtype(
    [("layer", "<u4"), ("part", "<u4"), ("offset", "<u8"), ("length", "<u8"), ("checksum", "V16")]
)  # fmt: skip
_ROW = struct.Struct("<IIQQ16s")
_PARTS = ("index", "main")
_DIGEST = 16
_ALIGN = 64
"""So that any plane's values lie where their type may be read, in a file mapped or read at once."""
_MAX_PARTS = 1 << 14


@dataclass(frozen=True)
class PartPlace:
    """Where one part lies in the blob of a page."""

    number: int
    layer: int
    """Global id."""
    part: str
    """ "index" or "main"."""
    offset: int
    length: int
    """Bytes."""
    planes: tuple[str, ...]

    @property
    def end(self) -> int:
        """Where the next part begins."""
        return _aligned(self.offset + self.length)


class PageFormat:
    """How pages of one layout are written down."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._fingerprint = bytes.fromhex(layout.fingerprint())
        planned = [(layer, part, part_planes(layout, layer, part)) for layer in layout.local_layers for part in _PARTS]
        planned = [(layer, part, planes) for layer, part, planes in planned if planes]
        self.header_bytes = PREFIX.size + len(planned) * _PART.itemsize + _DIGEST
        places: list[PartPlace] = []
        end = _aligned(self.header_bytes)
        for number, (layer, part, planes) in enumerate(planned):
            length = sum(_plane_bytes(layout, plane) for plane in planes)
            places.append(PartPlace(number, layer, part, end, length, planes))
            end = places[-1].end
        self.places = tuple(places)
        self.blob_bytes = end
        self._table = np.zeros(len(places), _PART)
        for name, values in {
            "layer": [place.layer for place in places],
            "part": [_PARTS.index(place.part) for place in places],
            "offset": [place.offset for place in places],
            "length": [place.length for place in places],
        }.items():
            self._table[name] = values

    def places_of(self, layers: Sequence[int] | None) -> list[PartPlace]:
        """The parts of these layers (None: all), in the order in which they are read. Raises LayerError."""
        by_layer: dict[int, list[PartPlace]] = {}
        for place in self.places:
            by_layer.setdefault(place.layer, []).append(place)
        wanted = self.layout.local_layers if layers is None else layers
        for layer in wanted:
            self.layout.local_index(layer)
        return [place for layer in wanted for place in by_layer[layer]]

    def header(self, key: Key, checksums: Sequence[bytes]) -> bytes:
        """The header of the page `key` whose parts have these checksums."""
        table = self._table.copy()
        table["checksum"] = np.frombuffer(b"".join(checksums), "V16")
        prefix = PREFIX.pack(MAGIC, VERSION, len(self.places), self.blob_bytes, key, self._fingerprint)
        head = prefix + table.tobytes()
        return head + digest(head)

    def checksums(self, key: Key, header: bytes) -> list[bytes]:
        """The checksum of each part. Raises TierReadError unless this is the header of page `key` in this format."""
        table = np.frombuffer(header, _PART, len(self.places), PREFIX.size)
        found = [bytes(checksum) for checksum in table["checksum"]]
        if header != self.header(key, found):
            raise TierReadError(key, self._why(key, header), corrupt=True)
        return found

    def _why(self, key: Key, header: bytes) -> str:
        _, _, fingerprint = _read_prefix(key, header)
        if fingerprint != self._fingerprint:
            return f"it was made under another layout, {fingerprint.hex()[:16]}"
        return "its header does not match its checksum or its layout"

    def tensors(self, place: PartPlace, rows: Rows) -> dict[tuple[int, str], Tensor]:
        """The planes of a part of several pages, views of `rows` [n, at least place.length]."""
        found: dict[tuple[int, str], Tensor] = {}
        start = 0
        for plane in place.planes:
            size = _plane_bytes(self.layout, plane)
            heads, dim = self.layout.row_shape(plane)
            raw = torch.from_numpy(rows[:, start : start + size])
            typed = raw.view(storage_dtype(self.layout.plane_dtype(plane)))
            found[place.layer, plane] = typed.view(len(rows), heads, self.layout.page_size, dim)
            start += size
        return found


@lru_cache(maxsize=8)
def page_format(layout: KVLayout) -> PageFormat:
    """How pages of `layout` are written down."""
    return PageFormat(layout)


def encode_page(layout: KVLayout, key: Key, page: PageBlob) -> bytes:
    """The blob of one page. Raises BlobMismatchError unless `page` is one whole page of `layout`."""
    return encode_pages(layout, [key], page)[0]


def encode_pages(layout: KVLayout, keys: Sequence[Key], pages: PageBlob) -> list[bytes]:
    """The blob of each page. Raises BlobMismatchError unless these are as many whole pages of `layout` as keys."""
    shape = page_format(layout)
    pages.check(layout, len(keys), ((place.layer, plane) for place in shape.places for plane in place.planes))
    planes = [[_bytes_of(pages.tensors[place.layer, plane]) for plane in place.planes] for place in shape.places]
    return [_encode(shape, key, [[rows[at].data for rows in part] for part in planes]) for at, key in enumerate(keys)]


def _encode(shape: PageFormat, key: Key, parts: Sequence[Sequence[memoryview]]) -> bytes:
    body: list[bytes | memoryview] = []
    checksums: list[bytes] = []
    end = shape.header_bytes
    for place, planes in zip(shape.places, parts, strict=True):
        state = xxhash.xxh3_128()
        body.append(bytes(place.offset - end))
        for values in planes:
            state.update(values)
            body.append(values)
        checksums.append(state.digest())
        end = place.offset + place.length
    return b"".join([shape.header(key, checksums), *body, bytes(shape.blob_bytes - end)])


@dataclass(frozen=True)
class BlobHeader:
    """What a blob says of itself, checked against its size, for whoever does not know its layout."""

    key: Key
    layout_fingerprint: str
    header_bytes: int
    parts: tuple[tuple[int, str, int, int, bytes], ...]
    """(global layer id, "index" | "main", offset, length, checksum)"""


def header_bytes(key: Key, prefix: bytes) -> int:
    """How long the header is that begins like this (PREFIX.size bytes or more). Raises TierReadError."""
    parts, _, _ = _read_prefix(key, prefix)
    return PREFIX.size + parts * _PART.itemsize + _DIGEST


def has_other_version(prefix: bytes) -> bool:
    """Whether a blob that begins like this is one of an earlier or later format."""
    return prefix[: len(MAGIC)] == MAGIC and len(prefix) >= PREFIX.size and PREFIX.unpack_from(prefix)[1] != VERSION


def parse_header(key: Key, header: bytes, size: int) -> BlobHeader:
    """Read the header of a blob of `size` bytes. Raises TierReadError unless it is whole and all numbers fit."""
    _, blob_bytes, fingerprint = _read_prefix(key, header)
    length = header_bytes(key, header)
    if blob_bytes != size:
        raise TierReadError(key, f"it has {size} bytes and says it has {blob_bytes}", corrupt=True)
    if len(header) < length or digest(header[: length - _DIGEST]) != header[length - _DIGEST : length]:
        raise TierReadError(key, "its header does not match its checksum", corrupt=True)
    end = _aligned(length)
    found: list[tuple[int, str, int, int, bytes]] = []
    for layer, part, offset, room, checksum in _ROW.iter_unpack(header[PREFIX.size : length - _DIGEST]):
        if part >= len(_PARTS) or offset != end or room > size - offset:
            raise TierReadError(key, "the places of its parts make no sense", corrupt=True)
        found.append((layer, _PARTS[part], offset, room, checksum))
        end = _aligned(offset + room)
    if end != size:
        raise TierReadError(key, f"its parts end at {end} of {size} bytes", corrupt=True)
    return BlobHeader(key, fingerprint.hex(), length, tuple(found))


def check_blob(key: Key, blob: Blob) -> None:
    """Raise TierReadError unless `blob` begins with the header of page `key`, and all numbers in it fit."""
    data = memoryview(blob).cast("B")
    parse_header(key, bytes(data[: header_bytes(key, bytes(data[: PREFIX.size]))]), len(data))


def part_planes(layout: KVLayout, layer: int, part: str) -> tuple[str, ...]:
    """Planes of a layer's "index" or "main" part; none where the layer has no such part."""
    return tuple(plane for plane in layout.planes(layer) if (plane in MAIN_PLANES) == (part == "main"))


def digest(data: Blob) -> bytes:
    """The checksum of these bytes."""
    return xxhash.xxh3_128_digest(data)


def _read_prefix(key: Key, prefix: bytes) -> tuple[int, int, bytes]:
    """Number of parts, bytes of the blob, fingerprint of the layout; raises TierReadError for what is not `key`'s."""
    if len(prefix) < PREFIX.size:
        raise TierReadError(key, f"it ends after {len(prefix)} bytes", corrupt=True)
    magic, version, parts, size, found, fingerprint = PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise TierReadError(key, f"it begins with {magic!r}, not as a page does", corrupt=True)
    if version != VERSION:
        raise TierReadError(key, f"it has format {version}, this is format {VERSION}", corrupt=True)
    if found != key:
        raise TierReadError(key, f"it is the page {found.hex()}", corrupt=True)
    if not 0 < parts <= _MAX_PARTS:
        raise TierReadError(key, f"it says it has {parts} parts", corrupt=True)
    return parts, size, fingerprint


def _plane_bytes(layout: KVLayout, plane: str) -> int:
    heads, dim = layout.row_shape(plane)
    return heads * layout.page_size * dim * layout.plane_dtype(plane).itemsize


def _bytes_of(tensor: Tensor) -> Rows:
    """The bytes of each page: [pages, bytes]."""
    pages = raw_view(tensor.detach()).cpu().contiguous()
    return pages.view(len(pages), -1).view(torch.uint8).numpy()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
