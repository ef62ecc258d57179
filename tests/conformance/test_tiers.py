"""What every tier does, whatever it keeps its pages in."""

import dataclasses
import logging
import re
import threading

import pytest
import torch

from support.kv import DENSE, DTYPES, SPARSE_K, SPARSE_KV, contents, plane, small_layout
from support.tiers import Store, make_items, make_keys, make_pages
from tamis.errors import LayerNotLocalError, TierError, TierReadError
from tamis.kv import INDEX, MAIN, KVLayout, LayerScales, PageBlob, SparseKVPool
from tamis.kv.tiers.format import encode_page, page_format
from tamis.kv.tiers.stored import StoredTier

SCALES = tuple(LayerScales(0.5, 2.0, 0.25, 4.0) for _ in range(6))
LAYOUTS = {
    **{str(dtype).removeprefix("torch."): small_layout(dtype=dtype) for dtype in DTYPES},
    "scales": small_layout(dtype=torch.float8_e4m3fn, scales=SCALES),
    "stage 1-3": small_layout(start_layer=1, end_layer=3),
    "stage 3-6": small_layout(start_layer=3),
    "dense": small_layout((DENSE, DENSE)),
    "index K": small_layout((SPARSE_K,)),
    "index K+V": small_layout((SPARSE_KV, SPARSE_KV)),
    "odd sizes": KVLayout((SPARSE_K, DENSE), 1, 3, 1, 1, torch.float8_e5m2, torch.float32),
}
LAYOUT = LAYOUTS["float32"]
SIZE = page_format(LAYOUT).blob_bytes


def read_all(tier: StoredTier, keys: list[bytes], layout: KVLayout = LAYOUT) -> PageBlob:
    tensors = {name: tensor for part in tier.read(keys, layout) for name, tensor in part.tensors.items()}
    return PageBlob(layout, len(keys), tensors)


def same_pages(a: PageBlob, b: PageBlob) -> bool:
    return a.tensors.keys() == b.tensors.keys() and all(
        torch.equal(a.tensors[name], b.tensors[name]) for name in a.tensors
    )


def rows(pages: PageBlob, places: list[int]) -> PageBlob:
    return PageBlob(pages.layout, len(places), {name: tensor[places] for name, tensor in pages.tensors.items()})


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_pages_come_back_as_they_were_in_every_plane(store: Store, layout: KVLayout) -> None:
    """Cases D6, D7: into pages that held NaN, or as near to it as the type comes; scales are the layout's."""
    items = make_items(layout, 3)
    store.open().write(items)
    tier = store.open() if store.lasting else store._opened[-1]
    source, target = SparseKVPool(layout, 3), SparseKVPool(layout, 3)
    for layer in layout.local_layers:
        for name in layout.planes(layer):
            plane(target, layer, name).view(torch.uint8).fill_(0xFF)
    source.import_pages([1, 2, 3], make_pages(layout, 3))
    for part in tier.read([key for key, _ in items], layout):
        kind = INDEX if part.part == "index" else MAIN
        target.import_pages([3, 1, 2], PageBlob(layout, 3, part.tensors), [part.layer], kind)
    given, restored = contents(source), contents(target)
    assert given.keys() == restored.keys()
    for key in given:
        assert torch.equal(restored[key][[3, 1, 2]].view(torch.uint8), given[key][1:].view(torch.uint8))


def test_layers_come_in_order_each_index_part_first(store: Store) -> None:
    tier = store.open()
    items = make_items(LAYOUT, 2)
    tier.write(items)
    keys = [key for key, _ in items]
    expected = [(0, "main"), (1, "index"), (1, "main"), (2, "index"), (2, "main"), (3, "index"), (3, "main"),
                (4, "main"), (5, "index"), (5, "main")]  # fmt: skip
    assert [(part.layer, part.part) for part in tier.read(keys, LAYOUT)] == expected
    assert [(part.layer, part.part) for part in tier.read(keys, LAYOUT, [5, 0])] == [*expected[-2:], expected[0]]
    assert list(tier.read(keys, LAYOUT, [])) == []
    assert list(tier.read([], LAYOUT)) == []
    with pytest.raises(LayerNotLocalError):
        list(tier.read(keys, LAYOUT, [6]))
    assert tier.stat().errors == 0


def test_pages_come_in_the_order_of_the_keys(store: Store) -> None:
    tier = store.open()
    items, pages = make_items(LAYOUT, 4), make_pages(LAYOUT, 4)
    tier.write(items)
    for places in ([3, 0, 2], [1], [2, 2]):
        assert same_pages(read_all(tier, [items[place][0] for place in places]), rows(pages, places))


def test_what_was_read_is_the_readers_own(store: Store) -> None:
    tier = store.open()
    items = make_items(LAYOUT, 2)
    tier.write(items)
    for part in tier.read([key for key, _ in items], LAYOUT):
        for tensor in part.tensors.values():
            tensor.fill_(-1.0)
    assert same_pages(read_all(tier, [key for key, _ in items]), make_pages(LAYOUT, 2))


def test_a_blob_may_change_once_it_was_written(store: Store) -> None:
    tier = store.open()
    (key, blob), *_ = make_items(LAYOUT, 1)
    changing = bytearray(blob)
    tier.write([(key, changing)])
    changing[:] = bytes(len(changing))
    assert store.get_raw(key) == blob


def test_found_counted_listed_and_deleted(store: Store) -> None:
    tier = store.open(10 * SIZE)
    items = make_items(LAYOUT, 3)
    keys = [key for key, _ in items]
    assert tier.contains(keys) == [False] * 3
    tier.write(items[:2])
    assert tier.contains(keys) == [True, True, False]
    assert {entry.key: entry.bytes for entry in tier.scan()} == dict.fromkeys(keys[:2], SIZE)
    read_all(tier, keys[:2])
    stat = tier.stat()
    assert (stat.entries, stat.bytes, stat.capacity) == (2, 2 * SIZE, 10 * SIZE)
    assert (stat.hits, stat.misses, stat.errors, stat.corrupt, stat.evictions) == (2, 4, 0, 0, 0)
    assert tier.delete([keys[2], keys[0], keys[0]]) == 1
    assert tier.contains(keys) == [False, True, False]
    assert tier.stat().entries == 1
    assert tier.contains([]) == []
    tier.write([])
    assert tier.delete([]) == 0


def test_the_same_page_twice_is_one_page(store: Store) -> None:
    tier = store.open(10 * SIZE)
    items = make_items(LAYOUT, 2)
    tier.write([items[0], items[0]])
    tier.write(items)
    assert (tier.stat().entries, tier.stat().bytes) == (2, 2 * SIZE)
    # What is there stays: another rounding of the same page, say.
    tier.write([(items[0][0], make_items(LAYOUT, 1, seed=9)[0][1])])
    assert store.get_raw(items[0][0]) == items[0][1]


def test_a_missing_page_is_named(store: Store) -> None:
    tier = store.open()
    items = make_items(LAYOUT, 3)
    keys = [key for key, _ in items]
    tier.write([items[0], items[2]])
    with pytest.raises(TierReadError) as caught:
        next(tier.read(keys, LAYOUT))
    assert (caught.value.key, caught.value.corrupt) == (keys[1], False)
    assert str(caught.value) == f"page {keys[1].hex()} cannot be read: it is not there"
    assert (tier.stat().hits, tier.stat().misses, tier.stat().corrupt) == (0, 1, 0)


def test_the_least_recently_used_page_goes_first(store: Store) -> None:
    tier = store.open(4 * SIZE)
    items = make_items(LAYOUT, 6)
    keys = [key for key, _ in items]
    for item in items[:4]:
        tier.write([item])
    read_all(tier, [keys[0]])
    tier.write([items[1]])  # there already: that is a use too
    tier.write([items[4]])
    assert tier.contains(keys) == [True, True, False, True, True, False]
    tier.write([items[5]])
    assert tier.contains(keys) == [True, True, False, False, True, True]
    assert tier.stat().evictions == 2
    assert tier.stat().bytes == 4 * SIZE


def test_of_pages_written_together_the_last_go_first(store: Store) -> None:
    """A page is of no use without the pages before it."""
    tier = store.open(4 * SIZE)
    items = make_items(LAYOUT, 7)
    keys = [key for key, _ in items]
    tier.write(items[:4])
    tier.write([items[6]])
    assert tier.contains(keys) == [True, True, True, False, False, False, True]
    tier.write(items[:6])
    assert tier.contains(keys) == [True, True, True, True, False, False, False]
    read_all(tier, keys[:4])
    tier.write([items[6]])
    assert tier.contains(keys) == [True, True, True, False, False, False, True]


def test_a_batch_larger_than_the_tier_keeps_its_first_pages(store: Store) -> None:
    tier = store.open(3 * SIZE + 1)
    items = make_items(LAYOUT, 5)
    tier.write(items)
    assert tier.contains([key for key, _ in items]) == [True, True, True, False, False]
    assert (tier.stat().evictions, tier.stat().errors) == (2, 0)


def test_a_tier_full_of_pinned_pages_keeps_nothing_more(store: Store) -> None:
    """Case D3: the next look-up is a miss, nothing fails."""
    tier = store.open(2 * SIZE)
    items = make_items(LAYOUT, 3)
    keys = [key for key, _ in items]
    tier.write(items[:2])
    tier.pin(keys[:2], "a")
    tier.write([items[2]])
    assert tier.contains(keys) == [True, True, False]
    assert [entry.pinned for entry in tier.scan()] == [True, True]
    tier.unpin("a")
    tier.write([items[2]])
    assert tier.contains(keys) == [True, False, True]


def test_pages_stay_for_as_long_as_one_owner_pins_them(store: Store) -> None:
    tier = store.open(3 * SIZE)
    items = make_items(LAYOUT, 6)
    keys = [key for key, _ in items]
    tier.pin(keys[:1], "../../etc/passwd\n")  # not there yet
    tier.write(items[:3])
    tier.pin(keys[1:2], "../../etc/passwd\n")
    tier.pin(keys[:1], "b")
    assert tier.owners() == {"../../etc/passwd\n": keys[:2], "b": keys[:1]}
    if store.lasting:
        tier = store.open(3 * SIZE)
        assert tier.owners() == {"../../etc/passwd\n": keys[:2], "b": keys[:1]}
    assert tier.stat().pinned == 2
    for item in items[3:5]:
        tier.write([item])
    assert tier.contains(keys) == [True, True, False, False, True, False]
    tier.unpin("../../etc/passwd\n")
    tier.unpin("nobody")
    assert tier.owners() == {"b": keys[:1]}
    for item in items[2:4]:
        tier.write([item])
    assert tier.contains(keys) == [True, False, True, True, False, False]
    assert tier.delete(keys[:1]) == 1  # who deletes means it


def test_a_flipped_bit_is_a_miss_and_the_page_is_taken_out(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    tier = store.open()
    (key, blob), *others = make_items(LAYOUT, 2)
    places = [place.offset + place.length // 2 for place in page_format(LAYOUT).places]
    for count, at in enumerate([*range(0, page_format(LAYOUT).header_bytes, 37), *places]):
        spoiled = bytearray(blob)
        spoiled[at] ^= 1 << (at % 8)
        tier.write([(key, blob), *others])
        store.put_raw(key, bytes(spoiled))
        with pytest.raises(TierReadError) as caught:
            read_all(tier, [key, others[0][0]])
        assert (caught.value.key, caught.value.corrupt) == (key, True), at
        assert tier.contains([key, others[0][0]]) == [False, True]
        assert tier.stat().corrupt == count + 1
        assert store.get_raw(key) is None
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == tier.stat().corrupt


def test_a_flipped_bit_does_not_reach_back(store: Store) -> None:
    """The layers before it were verified and may have been used; nothing after it comes."""
    tier = store.open()
    ((key, blob),) = make_items(LAYOUT, 1)
    place = page_format(LAYOUT).places[5]
    spoiled = bytearray(blob)
    spoiled[place.offset] ^= 1
    tier.write([(key, bytes(spoiled))])
    seen = []
    with pytest.raises(TierReadError, match=f"layer {place.layer}'s {place.part} part does not match its checksum"):
        for part in tier.read([key], LAYOUT):
            seen.append((part.layer, part.part))
    assert seen == [(one.layer, one.part) for one in page_format(LAYOUT).places[:5]]


@pytest.mark.parametrize("length", [0, 1, 87, 88, 400, SIZE // 2, SIZE - 65])
def test_a_truncated_page_is_a_miss(store: Store, length: int) -> None:
    tier = store.open()
    ((key, blob),) = make_items(LAYOUT, 1)
    tier.write([(key, blob)])
    store.put_raw(key, blob[:length])
    with pytest.raises(TierReadError) as caught:
        read_all(tier, [key])
    assert caught.value.key == key
    assert tier.contains([key]) == [False]


def test_a_foreign_blob_is_a_miss(store: Store) -> None:
    """Of another page, another layout, an older version; and something else altogether."""
    tier = store.open()
    (key, blob), (other, _) = make_items(LAYOUT, 2)
    scaled = dataclasses.replace(LAYOUT, scales=SCALES)
    foreign = {
        f"it is the page {key.hex()}": (other, blob),
        "it was made under another layout": (key, encode_page(scaled, key, make_pages(scaled, 1))),
        "it has format 0, this is format 1": (key, blob[:8] + bytes(4) + blob[12:]),
        "it begins with b'%PDF-1.4', not as a page does": (key, b"%PDF-1.4" + blob),
        "it says it has 4294967295 parts": (key, blob[:12] + b"\xff" * 4 + blob[16:]),
    }
    for why, (name, data) in foreign.items():
        tier.write(make_items(LAYOUT, 2))
        store.put_raw(name, data)
        with pytest.raises(TierReadError, match=why) as caught:
            read_all(tier, [name])
        assert caught.value.corrupt
        assert tier.contains([name]) == [False]


def test_a_blob_that_is_not_its_keys_is_not_kept(store: Store) -> None:
    tier = store.open()
    (key, blob), (other, good) = make_items(LAYOUT, 2)
    for data in (b"", b"hello", blob[:-1], blob + b"\x00", good):
        with pytest.raises(TierError, match=f"was given no blob of page {key.hex()}: "):
            tier.write([(other, good), (key, data)])
    assert tier.contains([key, other]) == [False, False]
    tier.write([(key, memoryview(blob))])
    assert same_pages(read_all(tier, [key]), make_pages(LAYOUT, 1))


def test_layouts_and_salts_share_a_tier_and_never_meet(store: Store) -> None:
    tier = store.open()
    stages = [LAYOUT, LAYOUTS["stage 1-3"], LAYOUTS["stage 3-6"], LAYOUTS["bfloat16"], LAYOUTS["scales"]]
    stages += [dataclasses.replace(LAYOUT, kv_head_offset=2)]
    for layout in stages:
        for salt in (b"", b"tenant"):
            keys = make_keys(layout, 2, salt=salt)
            assert tier.contains(keys) == [False, False]
            tier.write(make_items(layout, 2, seed=len(salt), salt=salt))
    for layout in stages:
        for salt in (b"", b"tenant"):
            pages = make_pages(layout, 2, seed=len(salt))
            assert same_pages(read_all(tier, make_keys(layout, 2, salt=salt), layout), pages)


def test_what_one_process_writes_another_reads(store: Store) -> None:
    if not store.lasting:
        with pytest.raises(TierReadError):
            read_all(store.open(), make_keys(LAYOUT, 1))
        return
    first, second = store.open(4 * SIZE), store.open(4 * SIZE)
    items = make_items(LAYOUT, 6)
    keys = [key for key, _ in items]
    first.write(items[:4])
    assert second.contains(keys) == [True] * 4 + [False] * 2
    assert same_pages(read_all(second, keys[:4]), make_pages(LAYOUT, 4))
    first.pin(keys[3:4], "a")
    second.write(items[4:5])  # whoever writes makes room among all pages, and knows all pins
    assert sum(first.contains(keys)) == 4
    assert first.contains(keys[3:5]) == [True, True]
    second.delete(keys[3:4])
    with pytest.raises(TierReadError, match="it is not there"):
        read_all(first, keys[3:4])
    assert first.contains(keys[3:4]) == [False]


def test_pages_that_go_while_they_are_read_are_read_whole_or_not_at_all(store: Store) -> None:
    tier = store.open(4 * SIZE)
    items, pages = make_items(LAYOUT, 4), make_pages(LAYOUT, 4)
    keys = [key for key, _ in items]
    for went_after in range(len(page_format(LAYOUT).places)):
        tier.write(items)
        seen: dict[tuple[int, str], torch.Tensor] = {}
        try:
            for count, part in enumerate(tier.read(keys, LAYOUT)):
                seen |= part.tensors
                if count == went_after:
                    tier.delete(keys)
        except TierReadError as error:
            assert not error.corrupt
        assert all(torch.equal(tensor, pages.tensors[name]) for name, tensor in seen.items())
        assert len(seen) > went_after


def test_threads_may_do_everything_at_once(store: Store) -> None:
    tier = store.open(6 * SIZE)
    items, pages = make_items(LAYOUT, 9), make_pages(LAYOUT, 9)
    failures: list[BaseException] = []
    served = [0]

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for _ in range(25):
                first = int(torch.randint(0, 7, (), generator=generator))
                places = list(range(first, first + 3))
                verb = int(torch.randint(0, 5, (), generator=generator))
                if verb == 0:
                    tier.pin([items[first][0]], str(seed))
                    tier.unpin(str(seed))
                elif verb == 1:
                    tier.delete([items[first][0]])
                elif verb == 2:
                    tier.write([items[place] for place in places])
                else:
                    try:
                        found = read_all(tier, [items[place][0] for place in places])
                    except TierReadError as error:
                        assert not error.corrupt, error
                        continue
                    assert same_pages(found, rows(pages, places))
                    served[0] += 1
        except BaseException as error:
            failures.append(error)

    tier.write(items[:6])
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert served[0] > 0
    assert sum(entry.bytes for entry in tier.scan()) <= 6 * SIZE


def test_a_closed_tier_says_so(store: Store) -> None:
    tier = store.open()
    tier.close()
    tier.close()
    items = make_items(LAYOUT, 1)
    for use in (
        lambda: tier.contains([]), lambda: list(tier.read([], LAYOUT)), lambda: tier.write(items),
        lambda: tier.delete([]), lambda: list(tier.scan()), lambda: tier.pin([], "a"), lambda: tier.unpin("a"),
        lambda: tier.owners(),
    ):  # fmt: skip
        with pytest.raises(TierError, match=rf"^kv tier {re.escape(tier.name)} is closed$"):
            use()
    assert tier.stat().name == tier.name


def test_whoever_looks_after_a_store_can_check_and_shrink_it(store: Store) -> None:
    tier = store.open()
    items = make_items(LAYOUT, 4)
    keys = [key for key, _ in items]
    tier.write(items)
    tier.pin(keys[3:], "a")
    assert [tier.verify(entry) for entry in tier.scan()] == [LAYOUT.fingerprint()] * 4
    assert tier.shrink(2 * SIZE) == 2
    assert tier.contains(keys) == [True, False, False, True]
    spoiled = bytearray(items[0][1])
    spoiled[-65] ^= 1
    store.put_raw(keys[0], bytes(spoiled))
    with pytest.raises(TierReadError, match="main part does not match its checksum"):
        tier.verify(next(entry for entry in tier.scan() if entry.key == keys[0]))
