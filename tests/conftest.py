"""Settings of the whole suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.raised import errors_have_records
from support.redis_server import redis_server
from support.tiers import KINDS, Store, make_store
from tamis.cache import cache_dir

# Tests run in several processes; a pool of threads in each would make them wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def every_error_has_a_record() -> Iterator[None]:
    """Where an error has none, the last test that a process runs fails."""
    with errors_have_records():
        yield


@pytest.fixture(scope="session")
def builtin_gguf() -> Path:
    """The GGUF file of the built-in model, which `make test` fetches before the tests run."""
    path = cache_dir() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        pytest.fail(f"{path} is missing: run `tamis pull` first")
    return path


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server that runs for one file of tests."""
    with redis_server(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A place for KV pages, of each kind in turn."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    made = make_store(request.param, tmp_path, url)
    yield made
    made.close()
