import itertools
import logging
import math
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.kv import DENSE, DTYPES, SPARSE_K, SPARSE_KV, contents, fill_random, plane, rows, same, small_layout
from tamis.errors import (
    ConfigError,
    ForeignPageError,
    LayerError,
    LayerNotLocalError,
    NoIndexValueError,
    NotALayerIdError,
    NotKeyOnlyLayerError,
    NotSparseLayerError,
    PageError,
    PlaneError,
    SlotError,
    TamisError,
)
from tamis.kernels.paging import gather_pages
from tamis.kv import LayerScales, SparseKVPool


def loc(*slots: int) -> Tensor:
    return torch.tensor(slots, dtype=torch.int64)


def kv(tokens: int = 2) -> Tensor:
    return torch.ones(tokens, 2, 8)


def index(tokens: int = 2) -> Tensor:
    return torch.ones(tokens, 1, 6)


@pytest.fixture
def pool() -> SparseKVPool:
    """Four pages of 4; layers: dense, K, K, KV, dense, KV; random everywhere."""
    pool = SparseKVPool(small_layout(), 4)
    fill_random(pool)
    return pool


def refused(
    pool: SparseKVPool, error: type[Exception], message: str, call: Callable[..., object], *args: object
) -> None:
    before = contents(pool)
    with pytest.raises(error) as caught:
        call(*args)
    assert str(caught.value) == message
    assert same(contents(pool), before)


def test_buffers_have_one_page_more_and_read_back_what_was_written(pool: SparseKVPool) -> None:
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = loc(5, 19, 8)
    before = contents(pool)
    pool.set_kv_buffer(4, slots, k, v)
    assert pool.get_key_buffer(4).shape == (5, 2, 4, 8)
    assert pool.get_index_k_buffer(3).shape == (5, 1, 4, 6)
    for row, (page, offset) in enumerate([(1, 1), (4, 3), (2, 0)]):
        assert torch.equal(pool.get_key_buffer(4)[page, :, offset], k[row])
        assert torch.equal(pool.get_value_buffer(4)[page, :, offset], v[row])
    after = contents(pool)
    changed = [key for key in after if not torch.equal(after[key], before[key])]
    assert changed == [(4, "k"), (4, "v")]


def test_index_getters_find_the_plane_of_either_group(pool: SparseKVPool) -> None:
    key, value = torch.randn(1, 1, 6), torch.randn(1, 1, 6)
    pool.set_index_k_buffer(2, loc(7), key)
    pool.set_index_kv_buffer(5, loc(7), key, value)
    for layer in (2, 5):
        assert torch.equal(pool.get_index_k_buffer(layer)[1, :, 3], key[0])
    index_k, index_v = pool.get_index_kv_buffer(5)
    assert torch.equal(index_k, pool.get_index_k_buffer(5))
    assert torch.equal(index_v[1, :, 3], value[0])


def test_getters_return_views(pool: SparseKVPool) -> None:
    for layer in pool.layout.local_layers:
        for name in pool.layout.planes(layer):
            plane(pool, layer, name).fill_(3.0)
            assert bool((plane(pool, layer, name) == 3.0).all())


@pytest.mark.parametrize("layer", [1, 3])
def test_a_fused_write_equals_the_separate_ones(layer: int) -> None:
    k, v, index_k, index_v = torch.randn(2, 2, 8), torch.randn(2, 2, 8), torch.randn(2, 1, 6), torch.randn(2, 1, 6)
    fused, apart = SparseKVPool(small_layout(), 4), SparseKVPool(small_layout(), 4)
    slots = loc(4, 11)
    apart.set_kv_buffer(layer, slots, k, v)
    if layer == 3:
        fused.set_fused_kv_index_buffer(layer, slots, k, v, index_k, index_v)
        apart.set_index_kv_buffer(layer, slots, index_k, index_v)
    else:
        fused.set_fused_kv_index_buffer(layer, slots, k, v, index_k)
        apart.set_index_k_buffer(layer, slots, index_k)
    assert same(contents(fused), contents(apart))
    assert all(bool(raw.any()) for (at, _), raw in contents(fused).items() if at == layer)


def test_messages_name_the_layers_that_would_be_right() -> None:
    pool = SparseKVPool(small_layout((DENSE, SPARSE_K, SPARSE_K, SPARSE_KV, DENSE, SPARSE_KV, DENSE, SPARSE_K)), 2)
    no_value = (
        "layer_id=7 does not have an index V cache (either dense, or in the K-only group). index_kv layers: [3, 5]"
    )
    refused(pool, NoIndexValueError, no_value, pool.get_index_kv_buffer, 7)
    refused(pool, NoIndexValueError, no_value, pool.set_index_kv_buffer, 7, loc(4, 5), index(), index())
    refused(
        pool, NoIndexValueError, no_value, pool.set_fused_kv_index_buffer, 7, loc(4, 5), kv(), kv(), index(), index()
    )

    pool = SparseKVPool(small_layout((DENSE, SPARSE_K, SPARSE_K)), 2)
    not_sparse = "layer_id=0 is not a sparse attention layer; sparse layers: [1, 2]"
    refused(pool, NotSparseLayerError, not_sparse, pool.get_index_k_buffer, 0)
    refused(pool, NotSparseLayerError, not_sparse, pool.make_resident, 0, loc())
    refused(pool, NotSparseLayerError, not_sparse, pool.set_fused_kv_index_buffer, 0, loc(4, 5), kv(), kv(), index())
    refused(
        pool,
        NotSparseLayerError,
        not_sparse,
        pool.set_fused_kv_index_buffer,
        0,
        loc(4, 5),
        kv(),
        kv(),
        index(),
        index(),
    )

    pool = SparseKVPool(small_layout((DENSE, SPARSE_K, SPARSE_K, SPARSE_KV)), 2)
    not_key_only = "layer_id=3 is not in the K-only sparse group. K-only layers: [1, 2]"
    refused(pool, NotKeyOnlyLayerError, not_key_only, pool.set_index_k_buffer, 3, loc(4, 5), index())
    refused(pool, NotKeyOnlyLayerError, not_key_only, pool.set_fused_kv_index_buffer, 3, loc(4, 5), kv(), kv(), index())


def test_layer_errors_are_both_tamis_and_value_errors(pool: SparseKVPool) -> None:
    for error in (NoIndexValueError, NotSparseLayerError, NotKeyOnlyLayerError, LayerNotLocalError, NotALayerIdError):
        assert issubclass(error, LayerError)
        assert issubclass(error, TamisError)
        assert issubclass(error, ValueError)


@pytest.mark.parametrize("layer", [2, 6, -1, -4])
def test_layers_of_another_stage_are_refused_and_write_nothing(layer: int) -> None:
    """Case B1."""
    pool = SparseKVPool(small_layout(start_layer=3, end_layer=6), 4)
    fill_random(pool)
    message = f"layer_id={layer} is not on this pipeline stage, which owns layers 3 <= id < 6"
    slots = loc(4, 5)
    refused(pool, LayerNotLocalError, message, pool.get_key_buffer, layer)
    refused(pool, LayerNotLocalError, message, pool.get_value_buffer, layer)
    refused(pool, LayerNotLocalError, message, pool.get_index_k_buffer, layer)
    refused(pool, LayerNotLocalError, message, pool.get_index_kv_buffer, layer)
    refused(pool, LayerNotLocalError, message, pool.make_resident, layer, loc())
    refused(pool, LayerNotLocalError, message, pool.set_kv_buffer, layer, slots, kv(), kv())
    refused(pool, LayerNotLocalError, message, pool.set_index_k_buffer, layer, slots, index())
    refused(pool, LayerNotLocalError, message, pool.set_index_kv_buffer, layer, slots, index(), index())
    refused(pool, LayerNotLocalError, message, pool.set_fused_kv_index_buffer, layer, slots, kv(), kv(), index())
    refused(pool, LayerNotLocalError, message, pool.import_pages, [1], pool.export_pages([1]), [layer])
    pool.set_kv_buffer(4, slots, kv(), kv())
    assert bool((pool.get_key_buffer(4)[1, :, :2] == 1).all())


def test_slots_never_wrap_and_padding_is_writable() -> None:
    """Case A15."""
    pool = SparseKVPool(small_layout(), 4)
    fill_random(pool)
    message = "loc holds slot -1, outside 0 <= slot < 20"
    refused(pool, SlotError, message, pool.set_kv_buffer, 0, loc(7, -1), kv(), kv())
    refused(pool, SlotError, message, pool.set_fused_kv_index_buffer, 1, loc(7, -1), kv(), kv(), index())
    refused(pool, SlotError, message, pool.check_loc, loc(7, -1))
    refused(pool, SlotError, "loc holds slot 20, outside 0 <= slot < 20", pool.set_kv_buffer, 0, loc(20), kv(1), kv(1))
    pool.set_kv_buffer(0, loc(0, 3, 3), kv(3), kv(3))
    assert bool((pool.get_key_buffer(0)[0, :, 3] == 1).all())
    pool.set_kv_buffer(0, loc(19), kv(1), kv(1))
    assert bool((pool.get_value_buffer(0)[4, :, 3] == 1).all())


def test_loc_must_be_a_row_of_int64(pool: SparseKVPool) -> None:
    for bad, message in [
        (torch.tensor([4, 5], dtype=torch.int32), "loc has dtype torch.int32, torch.int64 is needed"),
        (torch.tensor([4.0]), "loc has dtype torch.float32, torch.int64 is needed"),
        (torch.tensor([True]), "loc has dtype torch.bool, torch.int64 is needed"),
        (loc(4, 5)[None], "loc has shape [1, 2], one dimension is needed"),
        (torch.tensor(4), "loc has shape [], one dimension is needed"),
        ([4, 5], "loc is of type list, an int64 tensor is needed"),
    ]:
        refused(pool, SlotError, message, pool.check_loc, bad)
        refused(pool, SlotError, message, pool.set_kv_buffer, 0, bad, kv(), kv())


def test_every_tensor_is_checked_before_the_first_write(pool: SparseKVPool) -> None:
    slots = loc(4, 5)
    fused = pool.set_fused_kv_index_buffer
    shape = "has shape {}, {} (tokens, heads, dim) is needed"
    refused(
        pool,
        PlaneError,
        "v " + shape.format([2, 2, 7], [2, 2, 8]),
        fused,
        3,
        slots,
        kv(),
        kv()[..., :7],
        index(),
        index(),
    )
    refused(
        pool,
        PlaneError,
        "index_v " + shape.format([3, 1, 6], [2, 1, 6]),
        fused,
        3,
        slots,
        kv(),
        kv(),
        index(),
        index(3),
    )
    refused(
        pool,
        PlaneError,
        "index_k " + shape.format([2, 6], [2, 1, 6]),
        fused,
        3,
        slots,
        kv(),
        kv(),
        index()[:, 0],
        index(),
    )
    refused(pool, PlaneError, "k " + shape.format([2, 8, 2], [2, 2, 8]), pool.set_kv_buffer, 0, slots, kv().mT, kv())
    accepted = "torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2"
    message = f"index_k has dtype torch.int64, one of {accepted} is needed"
    refused(pool, PlaneError, message, pool.set_index_k_buffer, 1, slots, index().long())
    message = f"v has dtype torch.complex64, one of {accepted} is needed"
    refused(pool, PlaneError, message, pool.set_kv_buffer, 1, slots, kv(), kv().to(torch.complex64))
    refused(pool, PlaneError, "v is of type list, a tensor is needed", pool.set_kv_buffer, 0, slots, kv(), [1.0])


def test_a_layer_is_checked_before_its_slots_and_tensors(pool: SparseKVPool) -> None:
    with pytest.raises(LayerNotLocalError):
        pool.set_kv_buffer(6, loc(-1), kv().long(), kv())
    with pytest.raises(SlotError):
        pool.set_kv_buffer(0, loc(-1), kv().long(), kv())


@pytest.mark.parametrize("layer", ["1", 1.0, True, None])
def test_layer_ids_are_ints(pool: SparseKVPool, layer: object) -> None:
    with pytest.raises(NotALayerIdError):
        pool.get_key_buffer(layer)  # type: ignore[arg-type]
    with pytest.raises(NotALayerIdError):
        pool.set_index_k_buffer(layer, loc(4, 5), index())  # type: ignore[arg-type]


def test_checked_slots_are_checked_again_by_another_pool(pool: SparseKVPool) -> None:
    small = SparseKVPool(small_layout(), 2)
    checked = pool.check_loc(loc(18, 19))
    assert pool.check_loc(checked) is checked
    refused(small, SlotError, "loc holds slot 18, outside 0 <= slot < 12", small.set_kv_buffer, 0, checked, kv(), kv())
    again = small.check_loc(pool.check_loc(loc(10, 11)))
    small.set_kv_buffer(0, again, kv(), kv())
    assert bool((small.get_key_buffer(0)[2, :, 2:] == 1).all())


def test_checked_slots_cannot_be_changed_through_the_callers_tensor(pool: SparseKVPool) -> None:
    mine = loc(4, 5)
    checked = pool.check_loc(mine)
    mine.fill_(-1)
    checked.slots.fill_(-1)
    assert checked.slots.tolist() == [4, 5]
    before = contents(pool)
    pool.set_kv_buffer(0, checked, kv(), kv())
    after = contents(pool)
    assert bool((pool.get_key_buffer(0)[1, :, :2] == 1).all())
    rest = torch.arange(20)[~torch.isin(torch.arange(20), loc(4, 5))]
    assert same(rows(after, rest), rows(before, rest))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_cast_and_the_callers_tensor_stays(dtype: torch.dtype) -> None:
    pool = SparseKVPool(small_layout(dtype=dtype), 2)
    k = torch.randn(3, 2, 8)
    kept = k.clone()
    pool.set_kv_buffer(0, loc(4, 9, 6), k, k.to(torch.float64))
    assert torch.equal(k, kept)
    assert pool.get_key_buffer(0).dtype is dtype
    stored = pool.get_key_buffer(0).float()[loc(1, 2, 1), :, loc(0, 1, 2)]
    assert torch.equal(stored, k.to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_divide_on_write_in_their_own_plane(dtype: torch.dtype) -> None:
    scales = (LayerScales(),) * 3 + (LayerScales(0.5, 2.0, 4.0, 8.0),) + (LayerScales(),) * 2
    layout = small_layout(dtype=dtype, start_layer=3, scales=scales)
    pool = SparseKVPool(layout, 2)
    pool.set_fused_kv_index_buffer(3, loc(4), 4 * kv(1), 4 * kv(1), 4 * index(1), 4 * index(1))
    pool.set_kv_buffer(4, loc(4), 4 * kv(1), 4 * kv(1))
    stored = {name: float(plane(pool, 3, name).float()[1, 0, 0, 0]) for name in ("k", "v", "index_k", "index_v")}
    assert stored == {"k": 8.0, "v": 2.0, "index_k": 1.0, "index_v": 0.5}
    assert float(pool.get_key_buffer(4).float()[1, 0, 0, 0]) == 4.0
    read = gather_pages(plane(pool, 3, "k"), loc(1), 1, layout.layer_scales(3).k)
    assert float(read[0, 0, 0]) == 4.0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_saturates_and_keeps_nan(dtype: torch.dtype) -> None:
    pool = SparseKVPool(small_layout(dtype=dtype), 2)
    largest = torch.finfo(dtype).max
    k = kv(1)
    k[0, 0, :5] = torch.tensor([1e9, -1e9, math.inf, -math.inf, math.nan])
    pool.set_kv_buffer(0, loc(4), k, k)
    stored = pool.get_key_buffer(0).float()[1, 0, 0]
    assert stored[:4].tolist() == [largest, -largest, largest, -largest]
    assert math.isnan(stored[4])


def test_a_plane_may_be_written_from_itself(pool: SparseKVPool) -> None:
    before = contents(pool)
    own_k, own_v = (buffer[1].transpose(0, 1) for buffer in pool.get_kv_buffer(0))
    pool.set_kv_buffer(0, loc(5, 6, 7, 8), own_k, own_v)
    after = contents(pool)
    assert torch.equal(rows(after, loc(5, 6, 7, 8))[0, "k"], rows(before, loc(4, 5, 6, 7))[0, "k"])
    assert torch.equal(rows(after, loc(5, 6, 7, 8))[0, "v"], rows(before, loc(4, 5, 6, 7))[0, "v"])


def test_planes_of_a_layer_can_be_exchanged(pool: SparseKVPool) -> None:
    """All rows are read before any plane is written, whichever plane of the pool they are a view of."""
    before = contents(pool)
    k, v, index_k = (plane(pool, 3, name)[1].transpose(0, 1) for name in ("k", "v", "index_k"))
    through_numpy = torch.from_numpy(pool.get_index_kv_buffer(3)[1].numpy()[1]).transpose(0, 1)
    pool.set_fused_kv_index_buffer(3, loc(4, 5, 6, 7), v, k, through_numpy, index_k)
    after = contents(pool)
    for name, source in (("k", "v"), ("v", "k"), ("index_k", "index_v"), ("index_v", "index_k")):
        assert torch.equal(after[3, name][1], before[3, source][1])


@pytest.mark.parametrize("spoil", [Tensor.to_sparse, Tensor.to_mkldnn, lambda tensor: tensor.to("meta")])
@pytest.mark.parametrize("name", ["k", "v", "index_k", "index_v", "loc"])
def test_tensors_without_ordinary_memory_are_refused(
    pool: SparseKVPool, name: str, spoil: Callable[[Tensor], Tensor]
) -> None:
    operands = {"loc": loc(4, 5), "k": kv(), "v": kv(), "index_k": index(), "index_v": index()}
    operands[name] = spoil(operands[name].float())
    meta = operands[name].is_meta
    layout = operands[name].layout
    message = (
        "is on device meta, where tensors hold no values" if meta else f"has layout {layout}, torch.strided is needed"
    )
    error = SlotError if name == "loc" else PlaneError
    refused(pool, error, f"{name} {message}", pool.set_fused_kv_index_buffer, 3, *operands.values())


def test_gradients_do_not_follow_into_the_pool(pool: SparseKVPool) -> None:
    k = torch.ones(2, 2, 8, requires_grad=True)
    pool.set_kv_buffer(0, loc(4, 5), k, k)
    assert not pool.get_key_buffer(0).requires_grad


def test_a_pool_made_in_inference_mode_is_writable_outside() -> None:
    with torch.inference_mode():
        pool = SparseKVPool(small_layout(), 2)
        slots = pool.check_loc(loc(4, 5))
        pool.set_kv_buffer(0, slots, kv(), kv())
        buffer = pool.get_key_buffer(0)
    buffer.add_(1.0)
    pool.set_kv_buffer(0, slots, 2 * kv(), kv())
    assert bool((pool.get_key_buffer(0)[1, :, :2] == 2).all())


def test_copied_slots_take_every_plane_and_nothing_else(pool: SparseKVPool) -> None:
    """Case D8."""
    before = contents(pool)
    pool.copy_slots(loc(4, 5, 6), loc(9, 12, 7))
    after = contents(pool)
    assert same(rows(after, loc(9, 12, 7)), rows(before, loc(4, 5, 6)))
    rest = torch.arange(20)[~torch.isin(torch.arange(20), loc(9, 12, 7))]
    assert same(rows(after, rest), rows(before, rest))


@pytest.mark.parametrize("dtype", DTYPES)
def test_overlapping_copies_happen_at_once(dtype: torch.dtype) -> None:
    pool = SparseKVPool(small_layout(dtype=dtype), 4)
    fill_random(pool)
    before = contents(pool)
    pool.copy_slots(loc(4, 5, 6), loc(5, 6, 4))
    assert same(rows(contents(pool), loc(5, 6, 4)), rows(before, loc(4, 5, 6)))
    before = contents(pool)
    pool.copy_pages([1, 2, 3, 3], [2, 3, 1, 4])
    after = contents(pool)
    for key in after:
        assert torch.equal(after[key], before[key][loc(0, 3, 1, 2, 3)])


def test_bad_copies_are_refused_and_change_nothing(pool: SparseKVPool) -> None:
    slots, pages = pool.copy_slots, pool.copy_pages
    refused(pool, SlotError, "src holds slot 3, outside 4 <= slot < 20", slots, loc(4, 3), loc(8, 9))
    refused(pool, SlotError, "dst holds slot 20, outside 4 <= slot < 20", slots, loc(4, 5), loc(8, 20))
    refused(pool, SlotError, "2 source slots cannot be copied to 1 slots", slots, loc(4, 5), loc(8))
    refused(pool, SlotError, "dst names slot 8 more than once", slots, loc(4, 5, 6), loc(8, 9, 8))
    foreign = "page={} is not a page of this pool, whose pages are 1 <= id <= 4"
    refused(pool, ForeignPageError, foreign.format(0), pages, [1, 0], [2, 3])
    refused(pool, ForeignPageError, foreign.format(5), pages, [1, 2], [3, 5])
    refused(pool, ForeignPageError, foreign.format(-1), pages, [1], torch.tensor([-1]))
    refused(pool, PageError, "2 source pages cannot be copied to 1 pages", pages, [1, 2], [3])
    refused(pool, PageError, "page=3 is named more than once as a destination", pages, [1, 2], [3, 3])
    refused(pool, PageError, "page=1.0 is not a page id: an int is needed", pages, torch.tensor([1.0]), [2])
    refused(pool, PageError, "page=True is not a page id: an int is needed", pages, [True], [2])
    refused(pool, PageError, "pages have shape [1, 1], one dimension is needed", pages, torch.tensor([[1]]), [2])
    refused(pool, PageError, "pages=5 is not a sequence", pages, 5, [2])
    refused(pool, PageError, "pages=None is not a sequence", pool.export_pages, None)
    refused(
        pool, PageError, "pages is on device meta, where tensors hold no values",
        pool.export_pages, torch.ones(1, device="meta"),
    )  # fmt: skip


def test_memory_is_what_is_allocated_by_plane() -> None:
    pool = SparseKVPool(small_layout(), 4)
    per_token = pool.layout.bytes_per_token
    tokens = 4 * 4
    expected = {name: per_token[name] * tokens for name in ("main", "index_k", "index_kv")}
    expected["padding"] = pool.layout.bytes_per_page
    expected["total"] = sum(raw.nbytes for raw in contents(pool).values())
    assert pool.memory_bytes == expected
    assert sum(value for name, value in expected.items() if name != "total") == expected["total"]


def test_a_group_without_layers_takes_no_memory() -> None:
    pool = SparseKVPool(small_layout((DENSE, DENSE, SPARSE_KV), end_layer=2), 4)
    assert pool.memory_bytes["index_k"] == pool.memory_bytes["index_kv"] == 0
    assert pool.memory_bytes["padding"] == pool.layout.bytes_per_token["main"] * 4
    refused(
        pool, NotSparseLayerError, "layer_id=1 is not a sparse attention layer; sparse layers: []",
        pool.get_index_k_buffer, 1,
    )  # fmt: skip


def test_the_groups_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tamis.kv.pool"):
        pool = SparseKVPool(small_layout(), 4)
        fill_random(pool)
    assert [record.getMessage() for record in caplog.records] == [
        "KV pool of 4 pages of 4 tokens on cpu; layers: dense [0, 4], index K [1, 2], index K+V [3, 5]"
    ]


@pytest.mark.parametrize("num_pages", [0, -1, True, 2.0])
def test_a_pool_has_pages(num_pages: int) -> None:
    with pytest.raises(ConfigError, match=rf"^num_pages={num_pages} must be a whole number of at least 1$"):
        SparseKVPool(small_layout(), num_pages)


@pytest.mark.parametrize(
    ("pages", "device"), [(2, "nonsense"), (2, "meta"), (1 << 30, "cpu"), (1 << 50, "cpu"), (10**30, "cpu")]
)
def test_what_cannot_be_allocated_is_a_config_error(pages: int, device: str) -> None:
    size = (pages + 1) * small_layout().bytes_per_page
    with pytest.raises(
        ConfigError, match=rf"^a KV pool of {size} bytes cannot be made on device='{device}': "
    ) as caught:
        SparseKVPool(small_layout(), pages, device)
    assert "\n" not in str(caught.value)


def test_make_resident_hands_the_picks_back(pool: SparseKVPool) -> None:
    picks = torch.tensor([[[0, 2, -1]]], dtype=torch.int32)
    assert pool.make_resident(1, picks) is picks


def test_a_pool_needs_a_layout_and_takes_counters_only(pool: SparseKVPool) -> None:
    with pytest.raises(ConfigError, match=r"^layout=None is not a KVLayout$"):
        SparseKVPool(None, 3)  # type: ignore[arg-type]
    message = "counter='x' is not a LayerTransferCounter"
    refused(pool, ConfigError, message, pool.register_layer_transfer_counter, "x")


def test_memory_is_taken_page_by_page() -> None:
    """A pool of 1 GiB, of which a few tokens are used, is not touched as a whole."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    layout = small_layout()
    pool = SparseKVPool(layout, layout.pages_for(1 << 30))
    pool.set_kv_buffer(0, loc(4, 5), kv(), kv())
    assert not pool.get_key_buffer(0)[2].any()
    assert resident() - before < 1 << 27


@pytest.mark.parametrize("dtype", DTYPES)
def test_buffers_are_aligned_and_apart(dtype: torch.dtype) -> None:
    pool = SparseKVPool(small_layout(dtype=dtype, page_size=1), 2)
    places = sorted(
        (buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes)
        for layer in pool.layout.local_layers
        for buffer in (plane(pool, layer, name) for name in pool.layout.planes(layer))
    )
    assert all(start % 64 == 0 for start, _ in places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
