"""64 clients at once for a while: no error that was not asked for, and every page is accounted for afterwards.

TAMIS_SOAK_SECONDS says for how long; `make soak` lets it run for two minutes.
"""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.serving import Running, serving, write_byte_model
from support.soak import Client, Ledger, answer, known_bodies
from support.tiny import build, m3_config, save
from tamis.engine.async_engine import AsyncEngine

LONG = 20.0
"""Seconds after which the pool must have been full once."""
SECONDS = float(os.environ.get("TAMIS_SOAK_SECONDS", "5"))
CLIENTS, RUNNING, WAITING = 64, 24, 32
"""More clients than may run and wait: some are told to come back."""
PATIENCE_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model with dense and sparse layers, on a pool that is too small for what runs."""
    path = write_sparse_model(tmp_path_factory.mktemp("model"))
    engine = AsyncEngine(
        path,
        dtype="fp32",
        kv_budget="1200KiB",
        page_size=4,
        max_batch_tokens=128,
        max_num_seqs=RUNNING,
        max_queue=WAITING,
    )
    with serving(engine) as running:
        yield running


def write_sparse_model(directory: Path) -> Path:
    """A MiniMax-M3-shaped model of byte tokens."""
    write_byte_model(directory)
    config = m3_config(block=16, topk=4)
    config.vocab_size = 259
    return save(build(config), directory)


@pytest.mark.timeout(SECONDS + 3 * PATIENCE_S)
def test_no_client_harms_another_and_no_page_is_lost(server: Running) -> None:
    ledger = asyncio.run(soak(server))
    engine = server.engine
    print(f"\n{sum(ledger.counts.values())} acts of {CLIENTS} clients in {SECONDS:g} s: {dict(ledger.counts)}")
    print(f"{engine.stats}")
    assert not ledger.faults, f"{len(ledger.faults)} faults, the first: {ledger.faults[0]}"
    acts = ("known", "whole", "stream", "chat", "hang_up", "cancel", "nonsense", "half", "queue full")
    assert not [act for act in acts if not ledger.counts[act]], ledger.counts
    stats = engine.stats
    assert stats.retractions or SECONDS < LONG, "the pool was never full"
    assert stats.hit_tokens, "no prefix was ever shared"
    pages = engine.kv_usage()["pages"]
    assert pages["free"] + pages["cached"] == pages["total"], pages
    engine.check()


async def soak(server: Running) -> Ledger:
    """Find the known answers, let the clients loose, and wait until the engine is idle."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S, limits=limits) as http:
        known = [(body, await answer(http, body)) for body in known_bodies(10, seed=1)]
        ledger = Ledger(known)
        checker = asyncio.create_task(check_now_and_then(server.engine))
        await asyncio.gather(*(Client(http, ledger, seed).run(SECONDS) for seed in range(CLIENTS)))
        checker.cancel()
        await asyncio.wait([checker])
        if not checker.cancelled():
            checker.result()
        await until_idle(server.engine)
        for body, wanted in known:
            assert await answer(http, body) == wanted
    return ledger


async def check_now_and_then(engine: AsyncEngine) -> None:
    while True:
        await asyncio.to_thread(engine.check)
        await asyncio.sleep(0.2)


async def until_idle(engine: AsyncEngine) -> None:
    """Wait for the requests of clients that left."""
    deadline = time.monotonic() + PATIENCE_S
    while (stats := engine.stats).waiting or stats.running or stats.pages_used:
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.01)
