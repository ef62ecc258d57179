import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from support.engines import hash_config
from tamis.config import EngineConfig, LayerKind, ModelConfig, SparseAttentionConfig
from tamis.engine.memory import available_memory, build_pool, kv_budget, resolve, resolve_dtype
from tamis.errors import ConfigError, PageSizeError
from tamis.kv import KVLayout, SparseKVPool
from tamis.units import format_size, parse_size

GiB = 1 << 30


def sparse_config(block_size: int) -> ModelConfig:
    sparse = SparseAttentionConfig(index_heads=1, index_head_dim=2, block_size=block_size, topk=2)
    return replace(hash_config(), layer_kinds=(LayerKind.SPARSE_K,), sparse=sparse)


def f2_layout() -> KVLayout:
    return KVLayout((LayerKind.DENSE,) * 28, kv_heads=8, head_dim=128, page_size=128, dtype=torch.bfloat16)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GiB), ("500MB", 500_000_000), ("1.5GiB", 3 * GiB // 2), ("4096", 4096), ("64 kib", 65536),
        (" 2g ", 2 * 10**9), ("10B", 10), ("0.1KB", 100), ("1TiB", 1 << 40), (7, 7), ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 gigs", "-1GiB", "1e9", "0x10", "8GiBs", None, True, 1.5])
def test_what_is_no_size_is_refused_by_name(text: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert str(caught.value) == f"size {text!r} is not a number of bytes such as 8GiB or 500MB"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9" * 5000, f"size '{'9' * 76}... has more than 20 digits"),
        ("1." + "0" * 21 + "GiB", f"size '1.{'0' * 21}GiB' has more than 20 digits"),
        ("9" * 20, f"size '{'9' * 20}' is more than {2**63 - 1} bytes"),
        ("8388608TiB", f"size '8388608TiB' is more than {2**63 - 1} bytes"),
        (2**63, f"size {2**63} is more than {2**63 - 1} bytes"),
        pytest.param(10**5000, f"size <an integer of thousands of digits> is more than {2**63 - 1} bytes", id="int"),
    ],
)
def test_sizes_are_counted_in_64_bits(text: str | int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_batch_tokens": None}, "max_batch_tokens=None must be a whole number of at least 1"),
        ({"max_num_seqs": None}, "max_num_seqs=None must be a whole number of at least 1"),
        ({"max_num_seqs": 2**31}, f"max_num_seqs={2**31} must be at most {2**31 - 1}"),
        ({"page_size": 1.0}, "page_size=1.0 must be a whole number of at least 1"),
        ({"kv_budget": 10**30}, f"kv_budget={10**30} must be at most {2**63 - 1}"),
        ({"threads": 10**5000}, "threads=<an integer of thousands of digits> must be at most 1024"),
        ({"threads": 0}, "threads=0 must be a whole number of at least 1"),
        ({"prefix_cache": 1}, "prefix_cache=1 is not True or False"),
        ({"kv_tiers_optional": None}, "kv_tiers_optional=None is not True or False"),
        ({"kv_write_through": "no"}, "kv_write_through='no' is not True or False"),
        ({"kv_tiers": "host:1GiB"}, "kv_tiers='host:1GiB' is not a list of texts such as host:8GiB"),
        ({"kv_tiers": (5,)}, "kv_tiers=(5,) is not a list of texts such as host:8GiB"),
        (
            {"kv_tiers": ("host:1GiB",), "prefix_cache": False},
            "kv_tiers need prefix_cache=True: what they hold is read through the prefix cache",
        ),
        ({"step_seconds": 0}, "step_seconds=0 must be above 0 and at most 3600"),
        ({"step_seconds": "fast"}, "step_seconds='fast' must be above 0 and at most 3600"),
        ({"step_seconds": math.nan}, "step_seconds=nan must be above 0 and at most 3600"),
        ({"kv_dtype": []}, "kv_dtype=[] is not one of auto, fp32, bf16, fp16, fp8_e4m3, fp8_e5m2"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**fields)
    assert str(caught.value) == message
    assert EngineConfig(page_size=None, kv_budget=None, threads=None) == EngineConfig()


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (137_472, "134.2 KiB"),
        (GiB - 1, "1.0 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_sizes_are_written_in_the_largest_unit(size: int, text: str) -> None:
    assert format_size(size) == text


def test_available_memory_is_the_tightest_limit(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n"})
    assert available_memory(tmp_path) == 4000 * 1024
    write(tmp_path, {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": "3000000\n", "sys/fs/cgroup/pod/memory.current": "1000000\n",
        "sys/fs/cgroup/pod/box/memory.max": "max\n", "sys/fs/cgroup/pod/box/memory.current": "900000\n",
    })  # fmt: skip
    assert available_memory(tmp_path) == 2_000_000
    write(tmp_path, {"sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 150000\nactive_file 100000\n"})
    assert available_memory(tmp_path) == 2_250_000, "file cache is given up before memory runs out"
    write(tmp_path, {"sys/fs/cgroup/pod/box/memory.high": "1500000\n"})
    assert available_memory(tmp_path) == 600_000, "beyond memory.high every allocation is slowed down"


def test_available_memory_reads_old_control_groups(tmp_path: Path) -> None:
    write(tmp_path, {
        "proc/meminfo": "MemAvailable: 4000 kB\n", "proc/self/cgroup": "5:cpu:/x\n4:cpuset,memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "500000", "sys/fs/cgroup/memory/memory.usage_in_bytes": "600000",
    })  # fmt: skip
    assert available_memory(tmp_path) == 0, "over its limit, and the container's own path is not mounted"
    write(tmp_path, {
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        "sys/fs/cgroup/memory/memory.stat": "cache 1\nhierarchical_memory_limit 700000\ntotal_active_file 40000\n",
    })  # fmt: skip
    assert available_memory(tmp_path) == 140_000, "a limit above the container counts as well"


def test_this_machine_has_memory(tmp_path: Path) -> None:
    assert available_memory() > 0
    assert available_memory(tmp_path) > 0


def test_a_given_budget_becomes_pages_and_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """F2: the pool's tokens are reported at start."""
    caplog.set_level("INFO", "tamis")
    config = replace(hash_config(), kv_heads=1)
    pool = build_pool(resolve(EngineConfig(kv_budget=1000, page_size=4, dtype="fp32"), config), config)
    assert pool.num_pages == 1000 // (4 * 16)
    assert "KV pool: 15 pages of 4 tokens = 60 tokens, 960 B (16 bytes a token, fp32)" in caplog.messages


def test_a_budget_holds_as_many_tokens_as_its_bytes_say() -> None:
    """F2: 114,688 bytes a token, 4 GiB, pages of 128."""
    layout = f2_layout()
    budget = kv_budget(EngineConfig(kv_budget=parse_size("4GiB")), layout, 131_072, available=0)
    assert layout.bytes_per_token["total"] == 114_688
    assert layout.pages_for(budget) * layout.page_size == 37_376


def test_the_default_budget_is_half_of_the_memory_or_a_context_for_each_running_reply() -> None:
    layout = f2_layout()
    assert kv_budget(EngineConfig(), layout, 131_072, available=10 * GiB) == 5 * GiB
    few = EngineConfig(max_num_seqs=3)
    assert kv_budget(few, layout, 1000, available=100 * GiB) == 3 * 8 * layout.bytes_per_page


def pool_of(budget: int) -> SparseKVPool:
    config = hash_config()
    return build_pool(resolve(EngineConfig(kv_budget=budget, page_size=4, dtype="fp32"), config), config)


def test_a_budget_above_the_available_memory_is_taken_and_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tamis.engine.memory.available_memory", lambda: 2048)
    pool_of(2048)
    assert not caplog.messages
    pool_of(4096)
    assert caplog.messages == [
        "kv_budget=4096 (4.0 KiB) is more than the 2048 bytes (2.0 KiB) of memory that are available: "
        "the system may end the process once the pool fills"
    ]


def test_a_budget_that_cannot_be_had_is_one_error_with_both_numbers_and_a_way_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_settings: object) -> None:
        raise ConfigError("a KV pool of 4096 bytes cannot be made on device='cpu': Unable to allocate")

    monkeypatch.setattr("tamis.engine.memory.SparseKVPool", refuse)
    monkeypatch.setattr("tamis.engine.memory.available_memory", lambda: 2048)
    with pytest.raises(ConfigError) as caught:
        pool_of(4096)
    assert str(caught.value) == (
        "kv_budget=4096 (4.0 KiB) is more than the 2048 bytes (2.0 KiB) of memory that are available, and cannot be "
        "had: give less, or no budget for half of what is free"
    )
    assert not caplog.messages
    with pytest.raises(ConfigError, match="Unable to allocate"):
        pool_of(2048)


def test_a_budget_below_one_page_names_both_numbers() -> None:
    layout = f2_layout()
    page = layout.bytes_per_page
    with pytest.raises(ConfigError) as caught:
        kv_budget(EngineConfig(kv_budget=page - 1), layout, 1000, available=GiB)
    assert str(caught.value) == f"kv_budget is {page - 1} bytes, less than one page of {page} bytes (128 tokens)"
    with pytest.raises(ConfigError, match="the memory available for the KV pool is 500 bytes, less than one page"):
        kv_budget(EngineConfig(), layout, 1000, available=1000)


@pytest.mark.parametrize(("block", "page"), [(128, 32), (48, 16), (16, 32), (4, 32), (6, 2), (7, 1)])
def test_the_default_page_size_divides_the_block_or_holds_several(block: int, page: int) -> None:
    assert resolve(EngineConfig(), sparse_config(block)).page_size == page


def test_a_dense_model_takes_any_page_size() -> None:
    assert resolve(EngineConfig(), hash_config()).page_size == 32
    assert resolve(EngineConfig(page_size=7), hash_config()).page_size == 7


def test_a_page_size_that_does_not_divide_the_block_is_refused() -> None:
    """A13, last part."""
    for page_size in (3, 6):
        with pytest.raises(PageSizeError, match=f"page_size={page_size} does not divide the sparse block_size=4"):
            resolve(EngineConfig(page_size=page_size), sparse_config(4))
    assert resolve(EngineConfig(page_size=12), sparse_config(4)).page_size == 12  # three whole blocks


@pytest.mark.parametrize(
    ("stored", "native", "expected"),
    [
        (torch.bfloat16, True, torch.bfloat16), (torch.float16, True, torch.bfloat16), (None, True, torch.bfloat16),
        (torch.float32, True, torch.float32), (torch.float16, False, torch.float32), (None, False, torch.float32),
    ],
)  # fmt: skip
def test_auto_is_bf16_where_nothing_is_lost_and_the_cpu_is_fast(
    stored: torch.dtype | None, native: bool, expected: torch.dtype
) -> None:
    config = replace(hash_config(), dtype=stored)
    assert resolve_dtype("auto", config, native_bf16=native) is expected
    assert resolve_dtype("fp32", config, native_bf16=native) is torch.float32
    assert resolve_dtype("bf16", config, native_bf16=native) is torch.bfloat16


def test_settings_are_resolved_into_a_new_object() -> None:
    given = EngineConfig(dtype="bf16")
    resolved = resolve(given, hash_config())
    assert (given.kv_dtype, given.device, given.page_size) == ("auto", "auto", None)
    assert (resolved.dtype, resolved.kv_dtype, resolved.device) == ("bf16", "bf16", "cpu")
    assert resolve(EngineConfig(dtype="fp32", kv_dtype="fp8_e4m3"), hash_config()).kv_dtype == "fp8_e4m3"


def test_an_unknown_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="device='cuda' is not one of auto, cpu"):
        resolve(EngineConfig(device="cuda"), hash_config())
