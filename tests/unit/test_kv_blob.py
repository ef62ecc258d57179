import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from support.kv import DENSE, DTYPES, SPARSE_K, SPARSE_KV, contents, fill_random, plane, same, small_layout
from tamis.errors import BlobMismatchError, ForeignPageError, LayerNotLocalError, NotALayerIdError, PageError
from tamis.kernels.paging import gather_pages
from tamis.kv import KVLayout, LayerScales, PageBlob, SparseKVPool


def filled(layout: KVLayout, seed: int = 0) -> SparseKVPool:
    pool = SparseKVPool(layout, 4)
    fill_random(pool, seed)
    return pool


def with_tensors(blob: PageBlob, changes: Mapping[tuple[int, str], Tensor]) -> PageBlob:
    return dataclasses.replace(blob, tensors=MappingProxyType({**blob.tensors, **changes}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("start", [0, 3])
def test_exported_pages_come_back_in_every_plane(dtype: torch.dtype, start: int) -> None:
    """Case A1, the pool's half: the index planes travel too, into other pages of another pool."""
    layout = small_layout(dtype=dtype, start_layer=start)
    source, target = filled(layout, 1), filled(layout, 2)
    given, before = contents(source), contents(target)
    target.import_pages([4, 1], source.export_pages([2, 3]))
    after = contents(target)
    for key in given:
        assert torch.equal(after[key][[4, 1]], given[key][[2, 3]])
        assert torch.equal(after[key][[0, 2, 3]], before[key][[0, 2, 3]])


def test_restored_pages_hold_the_sources_bytes_not_what_was_there() -> None:
    """Case D6: the target pages are NaN in every plane first."""
    source, target = filled(small_layout()), SparseKVPool(small_layout(), 4)
    for layer in target.layout.local_layers:
        for name in target.layout.planes(layer):
            plane(target, layer, name).fill_(torch.nan)
    target.import_pages([1, 2, 3, 4], source.export_pages([1, 2, 3, 4]))
    given, restored = contents(source), contents(target)
    assert all(torch.equal(restored[key][1:], given[key][1:]) for key in given)


def test_a_blob_is_a_copy() -> None:
    pool = filled(small_layout())
    blob = pool.export_pages([1])
    before = contents(pool)
    for layer in pool.layout.local_layers:
        for name in pool.layout.planes(layer):
            plane(pool, layer, name).zero_()
    pool.import_pages([1], blob)
    assert all(torch.equal(raw[1], before[key][1]) for key, raw in contents(pool).items())
    assert blob.nbytes == pool.layout.bytes_per_page


def test_scales_travel_with_the_pages() -> None:
    """Case D7, first half."""

    def layout(scale: float) -> KVLayout:
        return small_layout((DENSE,), dtype=torch.float8_e4m3fn, scales=(LayerScales(k=scale, v=scale),))

    source, target = SparseKVPool(layout(0.5), 4), SparseKVPool(layout(0.5), 4)
    four = torch.full((1, 2, 8), 4.0)
    source.set_kv_buffer(0, torch.tensor([5]), four, four)
    target.import_pages([3], source.export_pages([1]))
    for buffer in target.get_kv_buffer(0):
        assert float(buffer.float()[3, 0, 1, 0]) == 8.0
        assert torch.equal(gather_pages(buffer, torch.tensor([3]), 2, 0.5)[1], four[0])

    before = contents(target)
    with pytest.raises(BlobMismatchError) as caught:
        target.import_pages([3], SparseKVPool(layout(2.0), 4).export_pages([1]))
    assert str(caught.value) == "the blob was made under scales[0].k=2.0, this pool has scales[0].k=0.5"
    assert same(contents(target), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": torch.bfloat16, "index_dtype": torch.float32},
            "dtype=torch.bfloat16, this pool has dtype=torch.float32",
        ),
        ({"index_dtype": torch.float16}, "index_dtype=torch.float16, this pool has index_dtype=torch.float32"),
        ({"page_size": 2}, "page_size=2, this pool has page_size=4"),
        ({"kv_heads": 1}, "kv_heads=1, this pool has kv_heads=2"),
        ({"kv_head_offset": 2}, "kv_head_offset=2, this pool has kv_head_offset=0"),
        ({"head_dim": 4}, "head_dim=4, this pool has head_dim=8"),
        ({"index_head_dim": 8}, "index_head_dim=8, this pool has index_head_dim=6"),
        ({"start_layer": 1}, "start_layer=1, this pool has start_layer=0"),
        ({"end_layer": 4}, "end_layer=4, this pool has end_layer=6"),
        (
            {"layer_kinds": (DENSE, SPARSE_K, SPARSE_KV, SPARSE_KV, DENSE, SPARSE_KV)},
            "layer_kinds[2]=sparse_kv, this pool has layer_kinds[2]=sparse_k",
        ),
        (
            {"layer_kinds": small_layout().layer_kinds + (DENSE,)},
            "number of layers=7, this pool has number of layers=6",
        ),
        (
            {"scales": (LayerScales(),) * 5 + (LayerScales(index_v=2.0),)},
            "scales[5].index_v=2.0, this pool has scales[5].index_v=1.0",
        ),
    ],
)
def test_a_blob_of_another_layout_is_refused(changes: dict[str, object], message: str) -> None:
    pool = filled(small_layout())
    other = filled(dataclasses.replace(small_layout(), **changes))  # type: ignore[arg-type]
    before = contents(pool)
    with pytest.raises(BlobMismatchError) as caught:
        pool.import_pages([1, 2], other.export_pages([1, 2]))
    assert str(caught.value) == "the blob was made under " + message
    assert same(contents(pool), before)


def test_layouts_spelled_differently_but_equal_exchange_pages() -> None:
    spelled_out = dataclasses.replace(
        small_layout(), end_layer=6, index_dtype=torch.float32, scales=(LayerScales(),) * 6
    )
    filled(small_layout()).import_pages([1], filled(spelled_out).export_pages([2]))


def test_layers_can_be_imported_one_by_one() -> None:
    layout = small_layout(start_layer=1)
    source, target = filled(layout, 1), filled(layout, 2)
    blob = source.export_pages([2])
    for count, layer in enumerate(layout.local_layers):
        before = contents(target)
        target.import_pages([3], blob, [layer])
        after = contents(target)
        for key in after:
            expected = contents(source)[key][2] if key[0] <= layer else before[key][3]
            assert torch.equal(after[key][3], expected), (count, key)
    one_layer = {key: tensor for key, tensor in blob.tensors.items() if key[0] == 3}
    target.import_pages([4], dataclasses.replace(blob, tensors=one_layer), [3])


def test_bad_imports_are_refused_and_change_nothing() -> None:
    pool = filled(small_layout())
    blob = pool.export_pages([1, 2])
    short = with_tensors(blob, {(3, "index_v"): blob.tensors[3, "index_v"][:1]})
    typed = with_tensors(blob, {(0, "v"): blob.tensors[0, "v"].bfloat16()})
    lacking = dataclasses.replace(blob, tensors={key: t for key, t in blob.tensors.items() if key != (5, "index_k")})
    before = contents(pool)
    cases: list[tuple[type[Exception], str, list[int], PageBlob, list[int] | None]] = [
        (BlobMismatchError, "the blob holds 2 pages, 3 were named to take them", [1, 2, 3], blob, None),
        (PageError, "page=3 is named more than once as a destination", [3, 3], blob, None),
        (ForeignPageError, "page=0 is not a page of this pool, whose pages are 1 <= id <= 4", [3, 0], blob, None),
        (LayerNotLocalError, "layer_id=6 is not on this pipeline stage, which owns layers 0 <= id < 6", [3, 4], blob, [0, 6]),  # noqa: E501
        (NotALayerIdError, "layer_id='1' is not a layer id: an int is needed, not str", [3, 4], blob, ["1"]),  # type: ignore[list-item]
        (BlobMismatchError, "the blob's index_v of layer_id=3 is torch.float32 [1, 1, 4, 6], not torch.float32 [2, 1, 4, 6]", [3, 4], short, None),  # noqa: E501
        (BlobMismatchError, "the blob's v of layer_id=0 is torch.bfloat16 [2, 2, 4, 8], not torch.float32 [2, 2, 4, 8]", [3, 4], typed, None),  # noqa: E501
        (BlobMismatchError, "the blob has no index_k of layer_id=5", [3, 4], lacking, None),
    ]  # fmt: skip
    for error, message, pages, given, layers in cases:
        with pytest.raises(error) as caught:
            pool.import_pages(pages, given, layers)
        assert str(caught.value) == message
        assert same(contents(pool), before)
    pool.import_pages([3, 4], short, [0])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tensor: tensor.to("meta"), "is on device meta, where tensors hold no values"),
        (Tensor.to_sparse, "has layout torch.sparse_coo, torch.strided is needed"),
        (Tensor.numpy, "is of type ndarray, a tensor is needed"),
    ],
)
def test_tensors_of_a_blob_have_ordinary_memory(spoil: Callable[[Tensor], Tensor], message: str) -> None:
    """The last tensor of the blob: what comes before it must not have been written."""
    pool = filled(small_layout())
    blob = pool.export_pages([1, 2])
    spoiled = with_tensors(blob, {(5, "index_v"): spoil(blob.tensors[5, "index_v"])})
    before = contents(pool)
    with pytest.raises(BlobMismatchError) as caught:
        pool.import_pages([3, 4], spoiled)
    assert str(caught.value) == "the blob's index_v of layer_id=5 " + message
    assert same(contents(pool), before)


def test_what_is_no_blob_is_refused() -> None:
    pool = filled(small_layout())
    blob = pool.export_pages([1])
    with pytest.raises(BlobMismatchError, match=r"^the blob is of type dict, a PageBlob is needed$"):
        pool.import_pages([3], {})  # type: ignore[arg-type]
    with pytest.raises(BlobMismatchError, match=r"^the blob has no KVLayout or no mapping of tensors$"):
        pool.import_pages([3], dataclasses.replace(blob, tensors=None))  # type: ignore[arg-type]
    with pytest.raises(NotALayerIdError, match=r"^layers=5 is not a sequence$"):
        pool.import_pages([3], blob, 5)  # type: ignore[arg-type]


def test_gradients_do_not_follow_an_import() -> None:
    pool = filled(small_layout())
    blob = pool.export_pages([1])
    pool.import_pages([3], with_tensors(blob, {(0, "k"): blob.tensors[0, "k"].requires_grad_()}))
    assert not pool.get_key_buffer(0).requires_grad


def test_a_blob_may_be_a_view_of_the_pool() -> None:
    pool = filled(small_layout())
    before = contents(pool)
    k, v = pool.get_kv_buffer(0)
    pool.import_pages([2, 3], with_tensors(pool.export_pages([1, 2]), {(0, "k"): v[1:3], (0, "v"): k[1:3]}), [0])
    assert torch.equal(contents(pool)[0, "k"][2:4], before[0, "v"][1:3])
    assert torch.equal(contents(pool)[0, "v"][2:4], before[0, "k"][1:3])


def test_bad_exports_are_refused() -> None:
    pool = filled(small_layout((SPARSE_K, SPARSE_KV)))
    for pages in ([0], [5], [-1], [1, 9]):
        with pytest.raises(ForeignPageError):
            pool.export_pages(pages)
    assert pool.export_pages([]).num_pages == 0
    assert pool.export_pages(torch.tensor([2, 2])).num_pages == 2
