"""Running the code of error records: their setup, and then an example, in a world of small models."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import tamis
from support.serving import serving, write_byte_model
from tamis import LLM
from tamis.engine.async_engine import AsyncEngine
from tamis.errors.catalog.written import WrittenRecord
from tamis.server.config import ServerConfig

KEY = "secret"
"""The API key of the server that examples talk to."""
SMALL: dict[str, Any] = {"kernels": "reference", "page_size": 4, "kv_budget": 64 * 4 * 128, "threads": 1}


@contextlib.contextmanager
def serving_examples(directory: Path) -> Iterator[str]:
    """A server for the examples over a tiny model; its address."""
    engine = AsyncEngine(write_byte_model(directory, context=512), **SMALL)
    config = ServerConfig(port=0, drain=1, api_keys=(KEY,), max_body=20_000, max_bodies=40_000)
    with serving(engine, config) as running:
        yield running.url


def small_llm(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`LLM()` is from now on a tiny model, and so is `AsyncEngine()`."""
    write_byte_model(directory, context=64)

    def make(kind: type[Any], model: Any = None, **options: Any) -> Any:
        return kind(directory if model is None else model, **{**SMALL, **options})

    monkeypatch.setattr(tamis, "LLM", functools.partial(make, LLM), raising=False)
    monkeypatch.setattr(tamis, "AsyncEngine", functools.partial(make, AsyncEngine), raising=False)


@contextlib.contextmanager
def prepared(record: WrittenRecord) -> Iterator[dict[str, Any]]:
    """The names that the record's setup makes, in an empty directory; what it opened is closed afterwards."""
    names: dict[str, Any] = {"__name__": "example"}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory), contextlib.ExitStack() as opened:
        if record.example_setup:
            run(record.example_setup, names, f"{record.slug}: setup")
        for value in names.values():
            if isinstance(value, LLM | httpx.Client):
                opened.callback(value.close)
        yield names


def run(code: str, names: dict[str, Any], what: str) -> None:
    """Execute an example."""
    exec(compile(code, what, "exec"), names)
