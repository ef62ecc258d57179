"""Settings of the whole suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.raised import errors_have_records
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
