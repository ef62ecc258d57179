import dataclasses
from itertools import product

import pytest
import torch

from support.kv import DENSE, SPARSE_K, SPARSE_KV, small_layout
from tamis.config import LayerKind, ModelConfig, ParallelContext, RopeConfig, SparseAttentionConfig
from tamis.errors import ConfigError, LayerNotLocalError, NotALayerIdError, PageSizeError
from tamis.kv import KVLayout, LayerScales, SparseKVPool, split_layers

M3_KINDS = (DENSE,) * 3 + (SPARSE_K,) * 57


def m3_config(kv_heads: int = 4) -> ModelConfig:
    return ModelConfig(
        family="minimax_m3", model_type="minimax_m3_vl_text", vocab_size=200064, hidden_size=6144, num_layers=60,
        q_heads=64, kv_heads=kv_heads, head_dim=128, intermediate_size=12288, context_length=1 << 20, norm_eps=1e-6,
        rope=RopeConfig(5e6, 64), layer_kinds=M3_KINDS,
        sparse=SparseAttentionConfig(index_heads=4, index_head_dim=128, block_size=128, topk=16),
    )  # fmt: skip


def test_bytes_of_a_token_count_the_index_planes() -> None:
    """Case A2."""
    layout = KVLayout.from_model(m3_config(), page_size=128, dtype=torch.bfloat16)
    assert layout.bytes_per_token == {"main": 122_880, "index_k": 14_592, "index_kv": 0, "total": 137_472}
    assert layout.pages_for(1 << 30) == 61
    assert layout.pages_for(1 << 30) * layout.page_size == 7_808


def test_a_budget_is_turned_into_whole_pages_of_a_dense_model() -> None:
    """Case F2."""
    layout = KVLayout((DENSE,) * 28, 8, 128, page_size=128)
    assert layout.bytes_per_token["total"] == 114_688
    assert layout.pages_for(4 << 30) * layout.page_size == 37_376


def test_bytes_per_token_is_the_sum_over_planes_and_dtypes() -> None:
    layout = small_layout(dtype=torch.float8_e4m3fn)
    assert layout.bytes_per_token == {
        "main": 6 * 2 * 2 * 8,
        "index_k": 2 * 6 * 2,
        "index_kv": 2 * 2 * 6 * 2,
        "total": 264,
    }
    assert layout.bytes_per_page == 264 * 4
    wide = dataclasses.replace(layout, index_dtype=torch.float32)
    assert wide.bytes_per_token["index_k"] == 2 * 6 * 4


def test_pages_for_never_exceeds_the_budget() -> None:
    layout = small_layout()
    size = layout.bytes_per_page
    assert [layout.pages_for(budget) for budget in (0, size - 1, size, 2 * size - 1)] == [0, 0, 1, 1]
    with pytest.raises(ConfigError, match=r"^budget_bytes=-1 must be a whole number of at least 0$"):
        layout.pages_for(-1)


def test_tensor_parallel_ranks_split_main_and_repeat_the_index() -> None:
    layout = KVLayout.from_model(
        m3_config(), page_size=128, dtype=torch.bfloat16, parallel=ParallelContext(tp_rank=5, tp_size=8)
    )
    assert layout.bytes_per_token["total"] == 30_720 + 14_592
    assert (layout.kv_heads, layout.kv_head_offset) == (1, 2)
    two = ParallelContext(tp_rank=1, tp_size=2)
    layout = KVLayout.from_model(m3_config(), page_size=128, dtype=torch.bfloat16, parallel=two)
    assert (layout.kv_heads, layout.kv_head_offset) == (2, 2)


def test_pipeline_stages_of_a_model_follow_split_layers() -> None:
    parallel = ParallelContext(pp_rank=1, pp_size=2)
    layout = KVLayout.from_model(m3_config(), page_size=64, dtype=torch.bfloat16, parallel=parallel)
    assert layout.local_layers == tuple(range(30, 60))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (ParallelContext(tp_size=3), "4 KV heads cannot be split over 3 ranks"),
        (ParallelContext(tp_rank=2, tp_size=2), "tp_rank=2 is not below tp_size=2"),
        (ParallelContext(pp_size=61), "60 layers cannot be split over 61 pipeline stages: some would be empty"),
    ],
)
def test_impossible_splits_are_refused(parallel: ParallelContext, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KVLayout.from_model(m3_config(), page_size=128, dtype=torch.bfloat16, parallel=parallel)
    assert str(caught.value) == message


def test_a_page_size_that_does_not_divide_the_block_is_refused() -> None:
    with pytest.raises(PageSizeError, match=r"^page_size=48 does not divide the sparse block_size=128$"):
        KVLayout.from_model(m3_config(), page_size=48, dtype=torch.bfloat16)


def test_stage_ids_are_global_and_never_wrap() -> None:
    """Case B1."""
    layout = small_layout(start_layer=3, end_layer=6)
    assert layout.local_index(4) == 1
    assert layout.kind(4) is DENSE
    for layer in (2, 6, -1, -3):
        for method in (layout.kind, layout.local_index, layout.layer_scales, layout.planes):
            with pytest.raises(LayerNotLocalError) as caught:
                method(layer)
            assert str(caught.value) == (
                f"layer_id={layer} is not on this pipeline stage, which owns layers 3 <= id < 6"
            )


def test_sub_pools_number_their_layers_on_their_own() -> None:
    """Case B3."""
    kinds = tuple(SPARSE_K if layer % 4 == 3 else DENSE for layer in range(60))
    layout = small_layout(kinds, start_layer=30, end_layer=60)
    assert layout.sparse_layers == (31, 35, 39, 43, 47, 51, 55, 59)
    assert layout.index_k_layers == layout.sparse_layers
    assert layout.index_kv_layers == ()
    assert layout.dense_layers[0] == 30
    pool = SparseKVPool(layout, 1)
    assert layout.index_k_layers.index(31) == 0
    pool.get_index_k_buffer(31).fill_(7.0)
    assert [layer for layer in layout.sparse_layers if pool.get_index_k_buffer(layer).any()] == [31]


def test_stages_cover_every_layer_once_and_none_is_empty() -> None:
    """Case B4."""
    assert split_layers(5, 2) == ((0, 2), (2, 5))
    for layers, stages in product(range(1, 13), range(1, 13)):
        if stages > layers:
            with pytest.raises(ConfigError):
                split_layers(layers, stages)
            continue
        windows = split_layers(layers, stages)
        assert len(windows) == stages
        assert all(start < end for start, end in windows)
        assert [layer for start, end in windows for layer in range(start, end)] == list(range(layers))


@pytest.mark.parametrize("layer", ["1", 1.0, True, None])
def test_what_is_not_an_int_is_not_a_layer_id(layer: object) -> None:
    with pytest.raises(NotALayerIdError, match=rf"^layer_id={layer!r} is not a layer id: an int is needed, not "):
        small_layout().kind(layer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_kinds": ()}, "layer_kinds=() must be a tuple of one LayerKind a layer"),
        ({"layer_kinds": ("dense",)}, "layer_kinds=('dense',) must be a tuple of one LayerKind a layer"),
        ({"kv_heads": 0}, "kv_heads=0 must be a whole number of at least 1"),
        ({"head_dim": True}, "head_dim=True must be a whole number of at least 1"),
        ({"index_head_dim": 0}, "index_head_dim=0 must be a whole number of at least 1"),
        ({"page_size": 0}, "page_size=0 must be a whole number of at least 1"),
        ({"kv_head_offset": -1}, "kv_head_offset=-1 must be a whole number of at least 0"),
        ({"start_layer": 6}, "pipeline stage 6 <= id < 6 is not a range of the 6 layers"),
        ({"end_layer": 7}, "pipeline stage 0 <= id < 7 is not a range of the 6 layers"),
        ({"scales": (LayerScales(),)}, "scales has 1 entries for 6 layers"),
        ({"dtype": None}, "dtype=None is not one of torch.float32, torch.bfloat16, torch.float16, "
                          "torch.float8_e4m3fn, torch.float8_e5m2"),
        ({"index_dtype": torch.int8}, "index_dtype=torch.int8 is not one of torch.float32, torch.bfloat16, "
                                      "torch.float16, torch.float8_e4m3fn, torch.float8_e5m2"),
    ],
)  # fmt: skip
def test_bad_layouts_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(small_layout(), **changes)  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), True])
def test_bad_scales_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"^scale index_v=.* must be a finite number above 0$"):
        LayerScales(index_v=value)


def test_index_planes_of_an_fp8_layout_are_bf16_unless_told() -> None:
    assert small_layout(dtype=torch.float8_e5m2).index_storage is torch.bfloat16
    assert small_layout(dtype=torch.float16).index_storage is torch.float16
    layout = dataclasses.replace(small_layout(dtype=torch.float16), index_dtype=torch.float8_e5m2)
    assert layout.index_storage is torch.float8_e5m2


def test_fingerprints_differ_in_every_field_and_only_there() -> None:
    base = small_layout()
    others: list[dict[str, object]] = [
        {"layer_kinds": (DENSE, SPARSE_K, SPARSE_K, SPARSE_K, DENSE, SPARSE_KV)},
        {"layer_kinds": (*base.layer_kinds, DENSE), "end_layer": 6},
        {"kv_heads": 1}, {"head_dim": 4}, {"index_head_dim": 3}, {"page_size": 2}, {"dtype": torch.bfloat16},
        {"index_dtype": torch.bfloat16}, {"start_layer": 1}, {"end_layer": 5}, {"kv_head_offset": 2},
        {"scales": (LayerScales(v=0.5),) + (LayerScales(),) * 5},
    ]  # fmt: skip
    prints = {dataclasses.replace(base, **changes).fingerprint() for changes in others}  # type: ignore[arg-type]
    assert len(prints | {base.fingerprint()}) == len(others) + 1
    spelled_out = dataclasses.replace(base, end_layer=6, index_dtype=torch.float32, scales=(LayerScales(),) * 6)
    assert spelled_out.fingerprint() == base.fingerprint()


def test_kinds_are_spelled_as_users_write_them() -> None:
    assert [kind.value for kind in LayerKind] == ["dense", "sparse_k", "sparse_kv"]
