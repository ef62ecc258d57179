import dataclasses
import struct
import tracemalloc
from collections.abc import Callable

import pytest
import torch

from support.kv import DENSE, DTYPES, SPARSE_K, SPARSE_KV, small_layout
from support.tiers import make_pages
from tamis.errors import BlobMismatchError, TierReadError
from tamis.kv import KVLayout, LayerScales
from tamis.kv.tiers.base import Key
from tamis.kv.tiers.format import (
    MAGIC,
    PREFIX,
    Rows,
    check_blob,
    digest,
    encode_page,
    header_bytes,
    page_format,
    parse_header,
)
from tamis.kv.tiers.keys import next_keys, page_keys, root_key
from tamis.kv.tiers.reader import Span, read_parts, spans, verify_blob

LAYOUT = small_layout((DENSE, SPARSE_K, SPARSE_KV), page_size=2)
KEY = bytes(range(32))


def blob_of(layout: KVLayout = LAYOUT, key: Key = KEY, seed: int = 0) -> bytes:
    return encode_page(layout, key, make_pages(layout, 1, seed))


def fetch_from(blob: bytes, key: Key = KEY) -> Callable[[int, Rows], None]:
    def fetch(offset: int, rows: Rows) -> None:
        data = blob[offset : offset + rows.shape[1]]
        if len(data) < rows.shape[1]:
            raise TierReadError(key, f"it ends after {len(blob)} bytes", corrupt=True)
        rows[0] = list(data)

    return fetch


def read(blob: bytes, layout: KVLayout = LAYOUT) -> dict[tuple[int, str], torch.Tensor]:
    parts = read_parts(fetch_from(blob), [KEY], layout, None, 0)
    return {name: tensor for part in parts for name, tensor in part.tensors.items()}


def test_the_header_is_what_the_module_says() -> None:
    blob = blob_of()
    magic, version, parts, size, key, fingerprint = struct.unpack_from("<8sIIQ32s32s", blob)
    assert (magic, version, parts, size, key) == (b"TAMISKV\x00", 1, 5, len(blob), KEY)
    assert fingerprint.hex() == LAYOUT.fingerprint()
    table = [struct.unpack_from("<IIQQ16s", blob, 88 + 40 * row) for row in range(5)]
    assert [(layer, part) for layer, part, *_ in table] == [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    main, index_k, index_kv = 2 * 2 * 2 * 8 * 4, 2 * 6 * 4, 2 * 2 * 6 * 4
    assert [length for *_, length, _ in table] == [main, index_k, main, index_kv, main]
    assert all(offset % 64 == 0 for _, _, offset, _, _ in table)
    assert all(digest(blob[offset : offset + length]) == checksum for _, _, offset, length, checksum in table)
    assert blob[288:304] == digest(blob[:288])
    pages = make_pages(LAYOUT, 1)
    offset = table[1][2]
    assert blob[offset : offset + index_k] == pages.tensors[1, "index_k"].numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_every_plane_comes_back(dtype: torch.dtype, page_size: int) -> None:
    layout = small_layout(dtype=dtype, page_size=page_size, start_layer=1)
    pages = make_pages(layout, 1)
    found = read(encode_page(layout, KEY, pages), layout)
    assert found.keys() == pages.tensors.keys()
    assert all(torch.equal(tensor, pages.tensors[name]) for name, tensor in found.items())


def test_every_flipped_bit_is_refused_or_means_nothing() -> None:
    blob, pages = blob_of(), make_pages(LAYOUT, 1)
    shape = page_format(LAYOUT)
    unused = set(range(len(blob))) - set(range(shape.header_bytes))
    for place in shape.places:
        unused -= set(range(place.offset, place.offset + place.length))
    for at in range(len(blob)):
        spoiled = bytearray(blob)
        spoiled[at] ^= 1 << (at % 8)
        try:
            found = read(bytes(spoiled))
        except TierReadError as error:
            assert error.corrupt
            assert at not in unused
        else:
            assert at in unused
            assert all(torch.equal(tensor, pages.tensors[name]) for name, tensor in found.items())
    assert unused


def test_every_truncation_is_refused() -> None:
    blob = blob_of()
    last = page_format(LAYOUT).places[-1]
    for length in range(0, last.offset + last.length, 7):
        with pytest.raises(TierReadError):
            read(blob[:length])
        with pytest.raises(TierReadError):
            check_blob(KEY, blob[:length])


def forged(blob: bytes, at: int, form: str, value: int) -> bytes:
    """The blob with one number changed and the header's checksum made right again."""
    length = page_format(LAYOUT).header_bytes
    header = bytearray(blob[:length])
    struct.pack_into(form, header, at, value)
    header[-16:] = digest(bytes(header[:-16]))
    return bytes(header) + blob[length:]


@pytest.mark.parametrize(
    ("at", "form", "value", "why"),
    [
        (12, "<I", 0, "it says it has 0 parts"),
        (12, "<I", 2**32 - 1, "it says it has 4294967295 parts"),
        (12, "<I", 6, "its header does not match its checksum"),
        (16, "<Q", 2**64 - 1, "it has 1280 bytes and says it has 18446744073709551615"),
        (88 + 4, "<I", 7, "the places of its parts make no sense"),
        (88 + 8, "<Q", 2**64 - 64, "the places of its parts make no sense"),
        (88 + 8, "<Q", 0, "the places of its parts make no sense"),
        (88 + 16, "<Q", 2**64 - 1, "the places of its parts make no sense"),
        (88 + 160 + 16, "<Q", 1, "its parts end at 1088 of 1280 bytes"),
    ],
)
def test_numbers_that_lie_are_refused_whoever_reads(at: int, form: str, value: int, why: str) -> None:
    """Hostile blobs: checksums are right, and nothing is allocated for what they say they hold."""
    blob = forged(blob_of(), at, form, value)
    tracemalloc.start()
    try:
        with pytest.raises(TierReadError) as caught:
            verify_blob(fetch_from(blob), KEY, len(blob))
        with pytest.raises(TierReadError):
            check_blob(KEY, blob)
        with pytest.raises(TierReadError):
            read(blob)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert caught.value.why == why
    assert caught.value.corrupt


def test_whoever_has_no_layout_can_still_check_a_blob() -> None:
    blob = blob_of()
    assert verify_blob(fetch_from(blob), KEY, len(blob)) == LAYOUT.fingerprint()
    header = parse_header(KEY, blob[: header_bytes(KEY, blob[: PREFIX.size])], len(blob))
    assert (header.key, header.layout_fingerprint) == (KEY, LAYOUT.fingerprint())
    assert [(layer, part) for layer, part, *_ in header.parts] == [
        (place.layer, place.part) for place in page_format(LAYOUT).places
    ]
    spoiled = bytearray(blob)
    spoiled[page_format(LAYOUT).places[3].offset] ^= 1
    with pytest.raises(TierReadError, match="layer 2's index part does not match its checksum"):
        verify_blob(fetch_from(bytes(spoiled)), KEY, len(blob))


def test_only_whole_pages_of_the_layout_are_written_down() -> None:
    two = make_pages(LAYOUT, 2)
    with pytest.raises(BlobMismatchError, match="the blob holds 2 pages, 1 were named to take them"):
        encode_page(LAYOUT, KEY, two)
    one = two.page(1)
    less = dataclasses.replace(one, tensors={name: t for name, t in one.tensors.items() if name != (2, "index_v")})
    with pytest.raises(BlobMismatchError, match="the blob has no index_v of layer_id=2"):
        encode_page(LAYOUT, KEY, less)
    with pytest.raises(BlobMismatchError, match="the blob was made under page_size=2, this pool has page_size=4"):
        encode_page(small_layout((DENSE, SPARSE_K, SPARSE_KV), page_size=4), KEY, one)


def test_a_page_that_is_not_contiguous_is_written_down_all_the_same() -> None:
    pages = make_pages(LAYOUT, 3)
    apart = {name: tensor.transpose(0, 1).contiguous().transpose(0, 1)[1:2] for name, tensor in pages.tensors.items()}
    assert encode_page(LAYOUT, KEY, dataclasses.replace(pages, num_pages=1, tensors=apart)) == encode_page(
        LAYOUT, KEY, pages.page(1)
    )


def test_neighbours_are_fetched_together_and_nothing_else() -> None:
    shape = page_format(LAYOUT)
    assert [span.places for span in spans(shape.places, 0, 1 << 30)] == [(place,) for place in shape.places]
    assert list(spans(shape.places, 1 << 30, 1 << 30)) == [Span(shape.places)]
    assert [span.places for span in spans(shape.places, 1 << 30, 1)] == [(place,) for place in shape.places]
    some = shape.places_of([2, 0])
    assert [span.places for span in spans(some, 1 << 30, 1 << 30)] == [tuple(some[:2]), tuple(some[2:])]
    assert [len(span.places) for span in spans(shape.places, 300, 1 << 30)] == [2, 2, 1]
    for least in (0, 300, 1 << 30):
        covered = [place for span in spans(shape.places, least, 1 << 30) for place in span.places]
        assert covered == list(shape.places)
        assert all(span.length % 64 == 0 for span in spans(shape.places, least, 1 << 30))
    assert blob_of()[:8] == MAGIC


def test_keys_are_chained() -> None:
    keys = page_keys("model", LAYOUT, b"", range(9), 2)
    assert len(keys) == 4
    assert len(set(keys)) == 4
    assert all(len(key) == 32 for key in keys)
    assert page_keys("model", LAYOUT, b"", range(8), 2) == keys
    assert page_keys("model", LAYOUT, b"", range(1), 2) == []
    assert next_keys(keys[1], [4, 5, 6, 7, 8], 2) == keys[2:]
    changed = page_keys("model", LAYOUT, b"", [0, 1, 9, 3, 4, 5, 6, 7], 2)
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)


def test_a_key_stands_for_everything_the_bytes_depend_on() -> None:
    """Model, stage, head range, storage, scales, kinds, salt, and the tokens before."""
    other_scale = (LayerScales(),) * 2 + (LayerScales(index_v=2.0),)
    roots = [
        root_key("model", LAYOUT, b""), root_key("model2", LAYOUT, b""), root_key("model", LAYOUT, b"2"),
        root_key("modelx", LAYOUT, b""), root_key("model", LAYOUT, b"x"), root_key("", LAYOUT, b"model"),
        *(root_key("model", dataclasses.replace(LAYOUT, **change), b"") for change in (
            {"page_size": 1}, {"start_layer": 1}, {"end_layer": 2}, {"kv_head_offset": 2}, {"kv_heads": 4},
            {"dtype": torch.bfloat16, "index_dtype": torch.float32}, {"index_dtype": torch.bfloat16},
            {"scales": other_scale}, {"layer_kinds": (DENSE, SPARSE_KV, SPARSE_KV)},
        )),
    ]  # fmt: skip
    assert len(set(roots)) == len(roots)
    assert root_key("model", dataclasses.replace(LAYOUT, end_layer=3, scales=(LayerScales(),) * 3), b"") == roots[0]
    first = page_keys("model", LAYOUT, b"", [1, 2, 3, 4], 2)
    assert page_keys("model", LAYOUT, b"", [2, 2, 3, 4], 2)[1] != first[1]
