"""DESIGN 7 with KV tiers: fp32 tokens do not depend on what was loaded, layer by layer, in which chunks, by whom.

Contexts reach over several sparse blocks, beyond what top-k picks, so that an index plane left behind would show.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support import spellings, tiny
from support.engines import complete, greedy, run
from support.offload import IMPATIENT, FaultyTier, Gate
from support.running import greedy as model_greedy
from support.running import random_ids
from support.serving import eventually
from tamis.config import KV_DTYPES
from tamis.engine.engine import Engine
from tamis.engine.runner import Runner
from tamis.errors import TierError
from tamis.kernels import ReferenceOps
from tamis.kernels.cpu.ops import CpuOps
from tamis.kernels.ops import Ops
from tamis.kv import KVLayout, LayerScales, SparseKVPool
from tamis.kv.offload import Lookup, OffloadConfig
from tamis.kv.tiers.base import ReadPart
from tamis.kv.tiers.disk import DiskTier
from tamis.models import load_config
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model
from tamis.request import Request

BLOCK, PAGE, STEPS = 16, 8, 10
PROMPT = 6 * BLOCK + 3
READABLE = (PROMPT - 1) // PAGE * PAGE


@pytest.fixture(scope="module", params=["dense", "K-only", "K+V"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    path = tmp_path_factory.mktemp("model")
    if request.param == "dense":
        tiny.save(tiny.build(tiny.llama_config("llama", num_hidden_layers=3), seed=1), path)
    else:
        oracle = tiny.build(tiny.m3_config(3, topk=2, block=BLOCK), seed=2)
        index_value = [1, 2] if request.param == "K+V" else []
        spellings.add_index_value(oracle, index_value)
        spellings.write_released(oracle, path, index_value=index_value)
    source = ModelSource(path.name, path, "directory")
    return load_model(source, load_config(source), dtype=torch.float32)


@pytest.fixture(params=["reference", "cpu"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    ops = ReferenceOps() if request.param == "reference" else CpuOps(2)
    yield ops
    ops.close()


Make = Callable[..., Engine]


@pytest.fixture
def make(model: CausalLM, ops: Ops) -> Make:
    def build(
        tier: FaultyTier,
        config: OffloadConfig | None = None,
        *,
        pages: int = 200,
        max_batch_tokens: int = 512,
        kv_dtype: str = "fp32",
    ) -> Engine:
        scales = (LayerScales(0.5, 0.25, 0.5, 2.0),) * 3 if kv_dtype.startswith("fp8") else None
        layout = KVLayout.from_model(model.config, page_size=PAGE, dtype=KV_DTYPES[kv_dtype], scales=scales)
        runner = Runner(model, SparseKVPool(layout, pages), ops)
        runner.close = lambda: None  # type: ignore[method-assign]  # the kernels' threads are for several engines
        engine = Engine(
            runner, max_batch_tokens=max_batch_tokens, max_num_seqs=64, tiers=tier, fingerprint="tiny", offload=config
        )
        assert engine.offload is not None
        engine.offload.loader.rate.seconds = lambda nbytes: 0.0  # type: ignore[method-assign]
        for layer in layout.local_layers:
            for plane in engine.pool._memory.planes[layer].values():
                plane.raw.view(torch.uint8).fill_(0xFF)  # NaN, whatever the type: bytes that are not loaded show
        return engine

    return build


@pytest.fixture(scope="module")
def prompt(model: CausalLM) -> list[int]:
    return random_ids(PROMPT, model.config, seed=5)


@pytest.fixture(scope="module")
def alone(model: CausalLM, prompt: list[int]) -> list[int]:
    """What the model says without an engine."""
    return model_greedy(model, prompt, STEPS, page_size=BLOCK)


def ask(engine: Engine, prompt: list[int], cached: int) -> list[int]:
    ((done,),) = complete(engine, [prompt], greedy(STEPS, ignore_eos=True))
    assert done.usage.cached_tokens == cached
    assert engine.pages_used == 0
    return list(done.token_ids)


@pytest.fixture
def tier(make: Make, prompt: list[int], alone: list[int]) -> FaultyTier:
    """With the pages of the prompt in it."""
    tier = FaultyTier()
    engine = make(tier)
    assert ask(engine, prompt, cached=0) == alone
    engine.close()
    return tier


@pytest.mark.parametrize("layerwise", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_behind_a_loaded_prefix(
    make: Make, tier: FaultyTier, prompt: list[int], alone: list[int], chunk: int, layerwise: bool
) -> None:
    engine = make(tier, OffloadConfig(layerwise=layerwise), max_batch_tokens=chunk)
    assert ask(engine, prompt, cached=READABLE) == alone
    assert tier.reads == 1


def test_behind_a_loaded_prefix_of_every_number_of_pages(make: Make, model: CausalLM, tier: FaultyTier) -> None:
    """Also a control: a prompt that begins differently finds nothing."""
    ids = random_ids(PROMPT, model.config, seed=5)
    for pages in (0, 1, 2, 3, 7, 12):
        prompt = [*ids[: pages * PAGE + 3], *random_ids(40, model.config, seed=pages)]
        wanted = model_greedy(model, prompt, STEPS, page_size=BLOCK)
        assert ask(make(tier), prompt, cached=pages * PAGE) == wanted
    other = [4 if ids[0] == 3 else 3, *ids[1:]]
    assert ask(make(tier), other, cached=0) == model_greedy(model, other, STEPS, page_size=BLOCK)


def test_layers_are_waited_for_one_by_one(make: Make, tier: FaultyTier, prompt: list[int], alone: list[int]) -> None:
    """D1, D6: each part comes late, and the first layers are computed while the last are not there yet."""
    engine = make(tier)
    computed: list[tuple[int, int]] = []
    take = engine.pool.get_kv_buffer
    given = 0

    def late(number: int, part: ReadPart) -> ReadPart:
        nonlocal given
        time.sleep(0.02)
        given = number + 1
        return part

    def watched(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        buffers = take(layer)
        computed.append((layer, given))
        return buffers

    engine.pool.get_kv_buffer = watched  # type: ignore[method-assign, assignment]
    tier.on_part = late
    assert ask(engine, prompt, cached=READABLE) == alone
    if computed:  # the kernels for few rows open a layer in another way
        parts = len(engine.pool.layout.local_layers) + len(engine.pool.layout.sparse_layers)
        assert computed[0][0] == 0
        assert computed[0][1] < parts, "the first layer ran when all had been loaded"
    assert engine.reads.seconds_waited > 0


def test_a_load_that_fails_half_way_is_computed(
    make: Make, tier: FaultyTier, prompt: list[int], alone: list[int]
) -> None:
    def fail(number: int, part: ReadPart) -> ReadPart:
        if number == 2:
            raise TierError("the connection is lost")
        return part

    tier.on_part = fail
    engine = make(tier)
    assert ask(engine, prompt, cached=0) == alone
    assert engine.stats.offload is not None
    assert engine.stats.offload.failures == {"load": 1}
    assert engine.crashes == 0


def test_a_load_that_stops_half_way_is_computed_soon(
    make: Make, tier: FaultyTier, prompt: list[int], alone: list[int]
) -> None:
    gate = Gate()
    tier.on_part = lambda number, part: gate.part(number, part) if number == 2 else part
    engine = make(tier, IMPATIENT)
    started = time.monotonic()
    assert ask(engine, prompt, cached=0) == alone
    assert time.monotonic() - started < 20
    assert gate.reached.is_set()
    gate.open.set()
    assert ask(engine, prompt, cached=READABLE) == alone


def test_two_loads_in_one_step_of_which_one_fails(
    make: Make, model: CausalLM, tier: FaultyTier, prompt: list[int], alone: list[int]
) -> None:
    """The one loses its prefix and is computed, the other runs again."""
    other = random_ids(PROMPT, model.config, seed=6)
    wanted = model_greedy(model, other, STEPS, page_size=BLOCK)
    first = make(tier)
    assert ask(first, other, cached=0) == wanted
    first.close()
    fails_at = {2}

    def fail(number: int, part: ReadPart) -> ReadPart:
        time.sleep(0.01)
        if number in fails_at:
            fails_at.clear()
            raise TierError("the connection is lost")
        return part

    tier.on_part = fail
    results = complete(make(tier), [prompt, other], greedy(STEPS, ignore_eos=True))
    assert [list(done.token_ids) for (done,) in results] == [alone, wanted]
    assert sorted(done.usage.cached_tokens for (done,) in results) == [0, READABLE]


def test_an_abort_while_a_step_waits_for_its_layers(make: Make, tier: FaultyTier, prompt: list[int]) -> None:
    gate = Gate()
    engine = make(tier, OffloadConfig(stall_seconds=60))
    state = engine.prepare(Request(prompt, greedy(STEPS)))

    def hang_up(number: int, part: ReadPart) -> ReadPart:
        if number == 1:
            state.cancelled = True
            gate()
        return part

    tier.on_part = hang_up
    engine.enqueue(state)
    started = time.monotonic()
    while not gate.reached.is_set():
        engine.step()
    engine.step()
    engine.abort(state.request_id)
    assert time.monotonic() - started < 20
    engine.check()
    assert engine.pages_used == 0
    gate.open.set()
    run(engine)
    assert engine.stats.pages.in_transfer == 0


def test_under_retraction(make: Make, model: CausalLM) -> None:
    """A save that races with retraction and eviction, and reads of what was just written."""
    prompts = [random_ids(2 * BLOCK + 3 * seed, model.config, seed) for seed in range(4)]
    steps = 2 * BLOCK + 5
    wanted = [model_greedy(model, ids, steps, page_size=BLOCK) for ids in prompts]
    tier, retractions = FaultyTier(), 0
    for write_through in (False, True):
        engine = make(tier, OffloadConfig(write_through=write_through), pages=18, max_batch_tokens=16)
        answer_at_once(engine)
        results = complete(engine, prompts, greedy(steps, ignore_eos=True))
        assert [list(done.token_ids) for (done,) in results] == wanted
        retractions += engine.stats.retractions
        engine.close()
    assert retractions > 0


def answer_at_once(engine: Engine) -> None:
    """Requests that wait for answers begin one after the other on a busy machine, and need no pages at one time."""
    assert engine.offload is not None
    loader = engine.offload.loader
    look_up = loader.look_up

    def answered(*arguments: Any) -> Lookup | None:
        lookup = look_up(*arguments)
        eventually(lambda: lookup is None or lookup.hits is not None)
        return lookup

    loader.look_up = answered  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_narrow_types_read_from_a_tier_what_they_read_from_the_pool(
    make: Make, prompt: list[int], kv_dtype: str
) -> None:
    """D7: as a prefix that was kept in the pool, scales and all."""
    tier = FaultyTier()
    engine = make(tier, kv_dtype=kv_dtype)
    ask(engine, prompt, cached=0)
    kept = ask(engine, prompt, cached=READABLE)
    engine.close()
    assert ask(make(tier, kv_dtype=kv_dtype), prompt, cached=READABLE) == kept
    assert ask(make(tier, kv_dtype="fp16"), prompt, cached=0), "another layout finds nothing of it"


def test_from_disk_after_a_restart(make: Make, prompt: list[int], alone: list[int], tmp_path: Path) -> None:
    for cached in (0, READABLE):
        disk = DiskTier(str(tmp_path), 1 << 30)
        engine = make(FaultyTier(disk))
        assert ask(engine, prompt, cached=cached) == alone
        engine.close()
        disk.close()
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            with path.open("r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(b"?")
    disk = DiskTier(str(tmp_path), 1 << 30)
    engine = make(FaultyTier(disk))
    assert ask(engine, prompt, cached=0) == alone, "a byte of every file is wrong"
    disk.close()
