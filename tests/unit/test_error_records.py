"""What the records claim of tamis's errors is tried: the examples raise what they say, and the fixes do not."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.error_examples import prepared, run, serving_examples, small_llm
from tamis.errors.catalog import id_of
from tamis.errors.catalog.catalog import REPO
from tamis.errors.catalog.written import WrittenRecord, read_records
from tamis.server.errors import to_api_error

RECORDS = read_records()
every_record = pytest.mark.parametrize("record", RECORDS, ids=[record.slug for record in RECORDS])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_examples(tmp_path_factory.mktemp("served")) as url:
        yield url


@pytest.fixture(autouse=True)
def world(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Examples run with small models, and their client reaches the test's server."""
    record: WrittenRecord = request.getfixturevalue("record")
    setup = record.example_setup or ""
    if "LLM" in setup or "AsyncEngine" in setup:
        small_llm(tmp_path / "model", monkeypatch)
    if "127.0.0.1:8000" in setup:
        monkeypatch.setattr(httpx, "Client", client_of(request.getfixturevalue("server")))


def client_of(url: str) -> type[httpx.Client]:
    """A client that asks the server at `url`, whatever its address should be."""

    class Client(httpx.Client):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, "base_url": url})

    return Client


def fits(record: WrittenRecord, error: BaseException) -> bool:
    """Whether this is the error that the record tells of."""
    known = {entry.id: entry for _, entry in record.records(REPO)}
    if not isinstance(error, httpx.HTTPStatusError):
        answer = to_api_error(error) if record.http_status is not None and isinstance(error, Exception) else None
        told_alike = answer is None or (answer.status, answer.code) == (record.http_status, record.error_code)
        return id_of(error) in known and told_alike
    told: dict[str, Any] = error.response.json()["error"]
    status = error.response.status_code == record.http_status
    words = any(entry.regex.search(told["message"]) for entry in known.values())
    return status and words and told["code"] == record.error_code


@every_record
def test_the_example_raises_and_the_fixed_one_does_not(record: WrittenRecord) -> None:
    with prepared(record) as names, pytest.raises(BaseException) as caught:
        run(record.before, names, f"{record.slug}: before")
    assert fits(record, caught.value), repr(caught.value)
    with prepared(record) as names:
        run(record.after, names, f"{record.slug}: after")


@every_record
def test_the_checks_run(record: WrittenRecord) -> None:
    for code in (record.validation_code, record.type_guard, record.try_catch_pattern):
        if code is not None:
            with prepared(record) as names:
                run(code, names, f"{record.slug}: check")
