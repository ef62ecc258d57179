"""The engine: requests in, tokens out. `LLM` is its front door; names are loaded when they are first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tamis.engine.async_engine import AsyncEngine, RequestHandle
    from tamis.engine.engine import Engine
    from tamis.engine.llm import LLM
    from tamis.engine.runner import Runner
    from tamis.engine.sequence import EngineEvent
    from tamis.engine.stats import EngineStats
    from tamis.engine.tokenizer import Tokenizer

__all__ = ["LLM", "AsyncEngine", "Engine", "EngineEvent", "EngineStats", "RequestHandle", "Runner", "Tokenizer"]

_MODULES = {
    "LLM": "llm",
    "AsyncEngine": "async_engine",
    "Engine": "engine",
    "EngineEvent": "sequence",
    "EngineStats": "stats",
    "RequestHandle": "async_engine",
    "Runner": "runner",
    "Tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
