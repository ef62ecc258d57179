"""What `tamis plan` says is what the pool and the loader really take."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from support import tiny
from support.cli import invoke
from support.llama_gguf import write_llama_gguf
from support.model_dirs import write_model
from tamis import LLM, SamplingParams
from tamis.config import KV_DTYPES, ParallelContext
from tamis.engine.planning import Load, row_bytes, scratch_bytes
from tamis.errors import ConfigError
from tamis.kernels.cpu.model import CpuModelOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.kernels.linear import Linear
from tamis.kv import KVLayout, SparseKVPool
from tamis.models import load_config
from tamis.models import resolve as find_model
from tamis.models.decoder import CausalLM
from tamis.models.loader import load_model
from tamis.models.sizes import rank_config, weight_bytes

GB = 10**9


def plan(*arguments: str) -> dict[str, Any]:
    result = invoke("plan", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    facts: dict[str, Any] = json.loads(result.out)
    return facts


def random_config(rng: random.Random) -> dict[str, Any]:
    """config.json of an M3 of any kinds of layers, in the released spelling."""
    layers, kv_heads = rng.randint(1, 9), rng.choice([1, 2, 4, 8])
    index_heads, dim = kv_heads * rng.choice([1, 2]), rng.choice([8, 16, 48])
    sparse = [rng.randint(0, 1) for _ in range(layers)]
    return {
        "model_type": "minimax_m3_vl_text", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * 8, "num_key_value_heads": kv_heads, "head_dim": 2 * dim,
        "max_position_embeddings": 4096, "rope_theta": 1e4, "rotary_dim": 8, "partial_rotary_factor": 8 / (2 * dim),
        "dense_intermediate_size": 64, "intermediate_size": 32, "shared_intermediate_size": 32,
        "num_local_experts": 4, "num_experts_per_tok": 2, "moe_layer_freq": [0] * layers,
        "sparse_attention_config": {
            "sparse_index_dim": dim, "sparse_num_index_heads": index_heads, "sparse_topk_blocks": 4,
            "sparse_block_size": 64, "sparse_attention_freq": sparse,
            "sparse_disable_index_value": [rng.randint(0, 1) for _ in range(layers)],
        },
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(100))
def test_the_plan_is_what_the_pool_allocates(seed: int, tmp_path: Path) -> None:
    """A hundred random layouts: each plane, the padding page, the total."""
    rng = random.Random(seed)
    config = random_config(rng)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    stages = rng.randint(1, config["num_hidden_layers"])
    place = ParallelContext(
        tp_size=rng.choice([1, 2, 4, 8]), pp_rank=rng.randrange(stages), pp_size=stages
    )  # fmt: skip
    page_size, memory = rng.choice([1, 8, 16, 64]), rng.randint(1, 4 << 20)
    kv_dtype, index_dtype = rng.choice(list(KV_DTYPES)), rng.choice([None, *KV_DTYPES])
    options = ["--page-size", page_size, "--memory", memory, "--kv-dtype", kv_dtype, "--tp-size", place.tp_size,
               "--pp-size", place.pp_size, "--pp-rank", place.pp_rank]  # fmt: skip
    if index_dtype is not None:
        options += ["--index-dtype", index_dtype]
    result = invoke("plan", str(path), "--json", *map(str, options))
    facts = json.loads(result.out)
    assert result.code == (facts["pages"] == 0)

    layout = KVLayout.from_model(
        load_config(find_model(str(path), weights=False)), page_size=page_size, dtype=KV_DTYPES[kv_dtype],
        index_dtype=None if index_dtype is None else KV_DTYPES[index_dtype], parallel=place,
    )  # fmt: skip
    pages = max(1, facts["pages"])
    held = SparseKVPool(layout, pages).memory_bytes
    per_token = facts["bytes_per_token"]
    assert {plane: held[plane] for plane in ("main", "index_k", "index_kv")} == {
        plane: per_token[plane] * page_size * pages for plane in ("main", "index_k", "index_kv")
    }
    assert held["padding"] == facts["padding_page_bytes"]
    assert held["total"] == (pages + 1) * facts["bytes_per_page"]
    assert facts["pages"] * facts["bytes_per_page"] <= memory < (facts["pages"] + 1) * facts["bytes_per_page"]
    assert facts["tokens"] == facts["pages"] * page_size


@pytest.mark.parametrize(("ranks", "main"), [(1, 122_880), (4, 30_720), (8, 30_720)])
def test_the_released_model_is_as_facts_section_4_says(ranks: int, main: int) -> None:
    facts = plan("minimax-m3", "--tp-size", str(ranks), "--memory", "10GB", "--page-size", "128")
    assert facts["bytes_per_token"] == {"main": main, "index_k": 14_592, "index_kv": 0, "total": main + 14_592}
    assert facts["tokens"] == 10 * GB // (128 * (main + 14_592)) * 128
    assert facts["held_dense"]["bytes_per_token"] == main


def loaded_bytes(model: CausalLM) -> int:
    """What a model's weights take, a tied table once."""
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    return parameters + sum(module.weight.nbytes for module in model.modules() if isinstance(module, Linear))


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_planned_as_they_are_loaded(quant: str, dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    tiny.save(tiny.build(tiny.llama_config("qwen2", tie_word_embeddings=tied)), tmp_path)
    source = find_model(str(tmp_path))
    config = load_config(source)
    planned = weight_bytes(config, ParallelContext(), dtype=dtype, quant=quant, source=source)
    assert planned["total"] == loaded_bytes(load_model(source, config, dtype=dtype, quant=quant))
    assert planned["total"] == sum(size for part, size in planned.items() if part != "total")


@pytest.mark.parametrize("quant", ["auto", "int8"])
def test_weights_of_experts_are_planned_as_they_are_loaded(quant: str, tmp_path: Path) -> None:
    tiny.save(tiny.build(tiny.m3_config()), tmp_path)
    source = find_model(str(tmp_path))
    config = load_config(source)
    planned = weight_bytes(config, ParallelContext(), dtype=torch.bfloat16, quant=quant, source=source)
    assert planned["total"] == loaded_bytes(load_model(source, config, dtype=torch.bfloat16, quant=quant))
    if quant == "auto":  # a config.json alone says the same
        facts = plan(str(tmp_path / "config.json"), "--weight-dtype", "bf16")
        assert facts["weights"] == planned


def test_blocks_of_a_gguf_are_planned_as_they_are_stored(tmp_path: Path) -> None:
    path = write_llama_gguf(tiny.build(tiny.llama_config("llama")), tmp_path / "m.gguf", half=True)
    source = find_model(str(path))
    config = load_config(source)
    for quant in ("auto", "int4"):
        planned = weight_bytes(config, ParallelContext(), dtype=torch.bfloat16, quant=quant, source=source)
        assert planned["total"] == loaded_bytes(load_model(source, config, dtype=torch.bfloat16, quant=quant))


def test_the_built_in_model_is_planned_in_four_bits() -> None:
    assert plan("smollm2-135m")["weights"]["total"] == 96_576_768


def test_ranks_together_hold_the_matrices_once_and_norms_each() -> None:
    config = load_config(find_model("minimax-m3", weights=False))
    one = weight_bytes(config, ParallelContext(), dtype=torch.bfloat16)
    eight = weight_bytes(config, ParallelContext(tp_size=4), dtype=torch.bfloat16)
    index_k = 57 * 128 * 6144 * 2  # on every rank, like norms and routers
    routers = 57 * 128 * (6144 + 1) * 4
    assert 4 * eight["embeddings"] == one["embeddings"]
    assert 4 * (eight["attention"] - index_k) == one["attention"] - index_k
    assert 4 * (eight["mlp"] - routers) == one["mlp"] - routers
    assert eight["norms"] == one["norms"]


def test_stages_together_hold_every_layer_once_and_the_tables_at_the_ends() -> None:
    config = load_config(find_model("minimax-m3", weights=False))
    one = weight_bytes(config, ParallelContext(), dtype=torch.bfloat16)
    stages = [weight_bytes(config, ParallelContext(pp_rank=i, pp_size=7), dtype=torch.bfloat16) for i in range(7)]
    assert {part: sum(stage[part] for stage in stages) for part in one} == one
    assert [stage["embeddings"] > 0 for stage in stages] == [True, *[False] * 5, True]


def test_a_tied_table_is_on_both_ends(tmp_path: Path) -> None:
    config = load_config(find_model(str(write_model(tmp_path))))
    one = weight_bytes(config, ParallelContext(), dtype=torch.float32)
    ends = [weight_bytes(config, ParallelContext(pp_rank=i, pp_size=2), dtype=torch.float32) for i in range(2)]
    assert [end["embeddings"] for end in ends] == [one["embeddings"]] * 2


def test_heads_that_cannot_be_split_are_refused() -> None:
    config = load_config(find_model("minimax-m3", weights=False))
    with pytest.raises(ConfigError, match="64 query heads cannot be split over 3 ranks"):
        rank_config(config, ParallelContext(tp_size=3))


def test_a_device_holds_weights_scratch_padding_and_pages() -> None:
    facts = plan("minimax-m3", "--tp-size", "8", "--device-memory", "141GB")
    beside = facts["weights"]["total"] + facts["scratch_bytes"] + facts["padding_page_bytes"]
    assert facts["memory_bytes"] == 141 * GB - beside
    assert facts["total_bytes"] == beside + facts["pages"] * facts["bytes_per_page"]
    assert 141 * GB - facts["bytes_per_page"] < facts["total_bytes"] <= 141 * GB


def test_a_device_too_small_for_the_weights_is_said_in_one_line() -> None:
    result = invoke("plan", "minimax-m3", "--device-memory", "80GB")
    assert result.code == 1
    line = result.err.splitlines()[0]
    assert line.startswith(
        "error: --device-memory 80GB is 80,000,000,000 bytes and holds no page: weights take 852,440,"
    )


def test_two_budgets_are_refused() -> None:
    result = invoke("plan", "minimax-m3", "--memory", "1GB", "--device-memory", "1GB")
    assert (result.code, result.out) == (2, "")
    assert "only one of them" in result.err


def test_requests_take_whole_pages() -> None:
    facts = plan("minimax-m3", "--memory", "1GiB", "--page-size", "128", "--request-tokens", "128,129,7808,7809")
    assert facts["pages"] == 61
    assert facts["requests"] == {"128": 61, "129": 30, "7808": 1, "7809": 0}


def test_tiers_are_counted_and_not_opened(tmp_path: Path) -> None:
    tiers = ["host:1GiB", f"disk:{tmp_path}/new?size=2GiB", "redis://user:secret@nowhere.invalid:1"]
    facts = plan("minimax-m3", *(word for tier in tiers for word in ("--kv-tier", tier)))
    host, disk, redis = facts["tiers"]
    assert host["tokens"] == (1 << 30) // host["bytes_per_page"] * 32
    assert disk["tokens"] == (2 << 30) // disk["bytes_per_page"] * 32
    assert redis["tokens"] is None
    assert "secret" not in json.dumps(facts)
    assert host["bytes_per_page"] > facts["bytes_per_page"]
    assert list(tmp_path.iterdir()) == []


def test_the_comparison_with_a_dense_model() -> None:
    """57 of 60 layers read 16 blocks of 128 tokens and all index keys."""
    facts = plan("minimax-m3", "--memory", "1GiB", "--page-size", "128")
    dense, context, layer = facts["held_dense"], 524_288, 2 * 4 * 128 * 2
    assert dense["tokens"] == (1 << 30) // (122_880 * 128) * 128
    assert dense["read_at_context"] == 60 * layer * context
    assert dense["sparse_read_at_context"] == 3 * layer * context + 57 * (layer * 2048 + 256 * context)


def test_a_dense_model_is_not_compared_with_itself() -> None:
    assert plan("smollm2-135m")["held_dense"] is None
    assert "held dense" not in invoke("plan", "smollm2-135m").out


def test_lists_give_a_table_to_paste() -> None:
    arguments = ["minimax-m3", "--tp-size", "1,4,8", "--kv-dtype", "bf16,fp8_e4m3", "--memory", "1GiB"]
    lines = invoke("plan", *arguments, "--request-tokens", "1000").out.splitlines()
    assert lines[0] == "| KV type | TP | PP | page | bytes a token | weights | tokens | requests of 1,000 |"
    assert len(lines) == 2 + 6
    assert {line.count("|") for line in lines} == {9}
    assert lines[3].startswith("| bf16 | 4 | 1 | 32 | 45,312 | 198.7 GiB | 23,680 | 23 |")
    plans = plan(*arguments)["plans"]
    assert [(each["kv_dtype"], each["tp_size"]) for each in plans] == [
        (kind, ranks) for kind in ("bf16", "fp8_e4m3") for ranks in (1, 4, 8)
    ]
    assert [each["tokens"] for each in plans[:3]] == [plan("minimax-m3", "--tp-size", n, "--memory", "1GiB")["tokens"]
                                                     for n in ("1", "4", "8")]  # fmt: skip


def test_the_stage_with_the_least_room_is_planned_for_unless_one_is_named() -> None:
    stages = [plan("minimax-m3", "--pp-size", "7", "--pp-rank", str(rank), "--memory", "1GiB") for rank in range(7)]
    assert len({stage["tokens"] for stage in stages}) > 1
    chosen = plan("minimax-m3", "--pp-size", "7", "--memory", "1GiB")
    assert chosen["tokens"] == min(stage["tokens"] for stage in stages)
    assert chosen == stages[chosen["pp_rank"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp-size", "1,x"], "'x' is not a whole number"),
        (["--request-tokens", "0"], "'--request-tokens'"),
        (["--kv-dtype", "bf16,int4"], "kv_dtype='int4'"),
        (["--weight-dtype", "fp8"], "weight dtype 'fp8' is not one of auto, fp32, bf16"),
        (["--kv-tier", "tape:1"], "kv tier 'tape:1' is not one of"),
        (["--page-size", "32,48"], "page_size=48 does not divide"),
        (["--device-memory", "much"], "'much'"),
    ],
)
def test_bad_lists_and_names_are_one_line(arguments: list[str], message: str) -> None:
    result = invoke("plan", "minimax-m3", *arguments)
    assert (result.code, result.out) == (2, "")
    assert message in result.err.splitlines()[0]


def test_scratch_covers_what_the_kernels_hold(tmp_path: Path) -> None:
    """The rows of a step, as planned, are at least what the kernels keep for them once a prompt has run."""
    tiny.save(tiny.build(tiny.m3_config()), tmp_path)
    with LLM(str(tmp_path), max_batch_tokens=256, kv_budget=4 << 20, threads=1, dtype="fp32") as llm:
        config, runner = llm.config, llm._engine.runner
        llm.generate([[3 + i % 100 for i in range(1000)]], SamplingParams(max_tokens=2, temperature=0))
        assert isinstance(runner.ops, CpuOps)
        assert isinstance(runner.model_ops, CpuModelOps)
        held = runner.ops.scratch.nbytes + runner.model_ops._scratch.nbytes
    rows = 256 * row_bytes(config, torch.float32)
    assert rows / 4 < held < rows
    assert scratch_bytes(config, torch.float32, Load(256, 1)) > rows
