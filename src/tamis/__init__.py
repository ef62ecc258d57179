"""tamis runs language models with block-sparse attention on a sparse KV pool.

The names below are the public ones. They are loaded when they are first used, so that `import tamis` is quick.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tamis.config import LayerKind, ModelConfig
    from tamis.engine.async_engine import AsyncEngine
    from tamis.engine.llm import LLM
    from tamis.errors import TamisError
    from tamis.kv import KVLayout, SparseKVPool
    from tamis.request import Completion, FinishReason, SamplingParams, TokenEvent, Usage

    __version__: str

# OpenMP reads this when torch is loaded. Threads that spin while they wait for each other make a step more than ten
# times slower as soon as anything else runs on the machine.
if "torch" not in sys.modules:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")

__all__ = [
    "LLM",
    "AsyncEngine",
    "Completion",
    "FinishReason",
    "KVLayout",
    "LayerKind",
    "ModelConfig",
    "SamplingParams",
    "SparseKVPool",
    "TamisError",
    "TokenEvent",
    "Usage",
    "__version__",
]

_MODULES = {
    "LLM": "tamis.engine.llm",
    "AsyncEngine": "tamis.engine.async_engine",
    "Completion": "tamis.request",
    "FinishReason": "tamis.request",
    "KVLayout": "tamis.kv",
    "LayerKind": "tamis.config",
    "ModelConfig": "tamis.config",
    "SamplingParams": "tamis.request",
    "SparseKVPool": "tamis.kv",
    "TamisError": "tamis.errors",
    "TokenEvent": "tamis.request",
    "Usage": "tamis.request",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("tamis")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
