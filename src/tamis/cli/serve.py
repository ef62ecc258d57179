"""`tamis serve`: answer OpenAI's API over HTTP."""

import contextlib
import dataclasses
import logging
import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from tamis.cli.options import (
    ApiKey,
    CorsOrigin,
    Debug,
    Drain,
    EngineKVDtype,
    Host,
    KVBudget,
    KVTier,
    KVTierOptional,
    KVWriteThrough,
    MaxBatchTokens,
    MaxBody,
    MaxQueue,
    MaxSeqs,
    Model,
    PageSize,
    Port,
    Quant,
    Quiet,
    ServedName,
    Threads,
    WeightDtype,
)
from tamis.units import parse_size

if TYPE_CHECKING:
    from tamis.engine.async_engine import AsyncEngine
    from tamis.server.config import ServerConfig

logger = logging.getLogger("tamis.server")

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Model = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    name: ServedName = None,
    api_key: ApiKey = None,
    cors_origin: CorsOrigin = None,
    max_body: MaxBody = "16MiB",
    max_queue: MaxQueue = 1024,
    max_seqs: MaxSeqs = 64,
    drain: Drain = 30.0,
    dtype: WeightDtype = "auto",
    kv_dtype: EngineKVDtype = "auto",
    page_size: PageSize = None,
    kv_budget: KVBudget = None,
    kv_tier: KVTier = None,
    kv_tier_optional: KVTierOptional = False,
    kv_write_through: KVWriteThrough = False,
    max_batch_tokens: MaxBatchTokens = 512,
    quant: Quant = "auto",
    threads: Threads = None,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Answer OpenAI's API over HTTP until Ctrl-C or SIGTERM; running requests may end then, unless Ctrl-C comes again.

    Once requests are taken, one line on standard output says where. Standard error gets a line for each request.
    """
    from tamis.server.config import ServerConfig

    keys = tuple(api_key or ()) or tuple(filter(None, [os.environ.get("TAMIS_API_KEY")]))
    config = ServerConfig(host=host, port=port, api_keys=keys, cors_origins=tuple(cors_origin or ()), drain=drain)
    config = dataclasses.replace(
        config, max_body=parse_size(max_body), max_bodies=max(config.max_bodies, parse_size(max_body))
    )
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "page_size": page_size, "kv_budget": kv_budget,
                "max_batch_tokens": max_batch_tokens, "quant": quant, "threads": threads,
                "max_num_seqs": max_seqs, "max_queue": max_queue, "kv_tiers": kv_tier or (),
                "kv_tiers_optional": kv_tier_optional, "kv_write_through": kv_write_through}  # fmt: skip
    _log(quiet=quiet, debug=debug)
    _run(model, settings, config, name, quiet=quiet)


def _run(model: str | None, settings: dict[str, Any], config: "ServerConfig", name: str | None, *, quiet: bool) -> None:
    from tamis.server.serve import address_of, listen
    from tamis.server.serve import serve as answer

    with listen(config) as sock:  # before the model is loaded: a port in use is said at once
        if config.host not in _LOOPBACK and not config.api_keys:
            logger.warning("there is no API key: anybody who reaches %s may use the model", config.host)
        _allow_many_connections()
        engine = _load(model, settings, quiet=quiet)
        line = ready_line(engine, name, address_of(sock))
        answer(engine, config, sock, model_name=name, ready=lambda: print(line, flush=True))


def _load(model: str | None, settings: dict[str, Any], *, quiet: bool) -> "AsyncEngine":
    from tamis.cli.progress import make_progress
    from tamis.engine.async_engine import AsyncEngine

    progress = make_progress(quiet=quiet)
    try:
        return AsyncEngine(model, **settings, progress=progress)
    finally:
        progress.finish()  # also where loading was interrupted


def ready_line(engine: "AsyncEngine", name: str | None, url: str) -> str:
    """Where the server is and what it serves: URL, model, layers by kind, tokens that fit into the pool."""
    kinds = Counter(kind.value for kind in engine.config.layer_kinds)
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    tokens = engine.stats.pages_total * engine.stats.page_size
    return f"tamis serves {name or engine.model_name} at {url}: layers {layers}; {tokens:,} tokens fit"


def _log(*, quiet: bool, debug: bool) -> None:
    """A line for each request, and what goes wrong, on standard error."""
    from tamis.errors.hint import HintingFormatter

    if debug:
        return  # everything is logged already
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(HintingFormatter("%(asctime)s %(levelname)s %(message)s"))
    for name in ("tamis", "uvicorn"):
        logging.getLogger(name).addHandler(handler)
    logger.setLevel(logging.WARNING if quiet else logging.INFO)


def _allow_many_connections() -> None:
    """As many open files as the system lets this process have: every connection is one."""
    if sys.platform == "win32":
        return
    import resource  # not on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS calls it unlimited and does not allow that
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
