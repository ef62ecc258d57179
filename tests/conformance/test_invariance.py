"""fp32 invariance: page size, chunk size and the other rows of a batch change nothing."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from support import spellings, tiny
from support.running import PoolRun, chunked_logits, greedy, greedy_together, random_ids
from tamis.config import LayerKind
from tamis.kernels import Ops, ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.kv import SparseKVPool
from tamis.models import load_config
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model

BLOCK = 128
LENGTH = 3 * BLOCK + 5
STEPS = 24


@pytest.fixture(scope="module", params=["dense", "K-only", "K+V"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = tmp_path_factory.mktemp("model")
    if request.param == "dense":
        tiny.save(tiny.build(tiny.llama_config("llama", num_hidden_layers=2), seed=1), path)
    else:
        oracle = tiny.build(tiny.m3_config(2, topk=2, block=BLOCK), seed=2)
        index_value = [1] if request.param == "K+V" else []
        spellings.add_index_value(oracle, index_value)
        spellings.write_released(oracle, path, index_value=index_value)
    source = ModelSource(path.name, path, "gguf" if path.is_file() else "directory")
    return load_model(source, load_config(source), dtype=torch.float32)


@pytest.fixture(scope="module", params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    backend: Ops = ReferenceOps() if request.param == "reference" else CpuOps(2)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def ids(model: CausalLM) -> list[int]:
    return random_ids(LENGTH, model.config, 3)


@pytest.fixture(scope="module")
def wanted(model: CausalLM, ids: list[int]) -> Tensor:
    return chunked_logits(model, ids, [LENGTH], page_size=BLOCK)


def same(got: Tensor, wanted: Tensor) -> None:
    assert torch.equal(got.argmax(-1), wanted.argmax(-1))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("page_size", [1, 2, 4, 16, 32, 64, 128])
def test_every_context_length_on_every_page_size(
    model: CausalLM, ops: Ops, ids: list[int], wanted: Tensor, page_size: int
) -> None:
    """Single steps over one whole block: every residue of the block and of the page as context length."""
    chunks = [BLOCK + 2, *[1] * BLOCK, LENGTH - 2 * BLOCK - 2]
    same(chunked_logits(model, ids, chunks, page_size, ops), wanted)


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_chunk_size(model: CausalLM, ops: Ops, ids: list[int], wanted: Tensor, chunk: int) -> None:
    chunks = [min(chunk, LENGTH - at) for at in range(0, LENGTH, chunk)]
    same(chunked_logits(model, ids, chunks, 16, ops), wanted)


def test_other_rows(model: CausalLM, ops: Ops, ids: list[int], wanted: Tensor) -> None:
    """Rows of other lengths, an idle one among them, join and leave; the row looked at does not notice."""
    run = PoolRun(model, 16, LENGTH, 4, ops)
    others = [random_ids(LENGTH, model.config, seed) for seed in (4, 5)]
    got, at = [], 0
    for step, chunk in enumerate([5, 60, 1, 1, 1, 120, 1, LENGTH - 189]):
        noise = others[0][: 30 if step % 2 else 0], others[1][: 1 if step > 2 else 50]
        rows = run.feed([noise[0], ids[at : at + chunk], [], noise[1]])
        got.append(rows[1])
        at += chunk
    same(torch.cat(got), wanted)


@pytest.fixture(scope="module")
def prompts(model: CausalLM) -> list[list[int]]:
    """Contexts of less than a block, of several, and across a block's end while they grow."""
    return [random_ids(length, model.config, length) for length in (5, BLOCK - 10, 2 * BLOCK + 3, 3 * BLOCK - 1)]


@pytest.fixture(scope="module")
def alone(model: CausalLM, prompts: list[list[int]]) -> list[list[int]]:
    return [greedy(model, ids, STEPS, page_size=BLOCK) for ids in prompts]


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 512), (2, 33), (16, 7), (32, 64), (64, 5), (128, 19)])
def test_greedy_tokens_do_not_depend_on_page_or_chunk_or_company(
    model: CausalLM, ops: Ops, prompts: list[list[int]], alone: list[list[int]], page_size: int, chunk: int
) -> None:
    assert greedy_together(model, prompts, STEPS, page_size, chunk, ops) == alone


def test_picks_pass_through_a_pool_whose_blocks_may_live_elsewhere(
    model: CausalLM, ops: Ops, ids: list[int], wanted: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def make_resident(pool: SparseKVPool, layer_id: int, picks: Tensor) -> Tensor:
        asked.append(layer_id)
        return picks

    monkeypatch.setattr(SparseKVPool, "all_resident", False)
    monkeypatch.setattr(SparseKVPool, "make_resident", make_resident)
    same(chunked_logits(model, ids, [LENGTH], 16, ops), wanted)
    sparse = [layer for layer, kind in enumerate(model.config.layer_kinds) if kind is not LayerKind.DENSE]
    assert asked == sparse
