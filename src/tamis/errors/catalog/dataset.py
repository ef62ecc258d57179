"""Data sets of error records: JSON lines, one record each, in the envelope that says when the set was made."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import IO, Any

from tamis.errors import CatalogError
from tamis.errors.catalog.catalog import Catalog
from tamis.errors.catalog.patterns import pattern_fault
from tamis.errors.catalog.record import ErrorRecord

SCHEMA = Path(__file__).with_name("schema.json")
"""The JSON schema of one line."""


def write_dataset(catalog: Catalog, out: IO[str]) -> None:
    """Write one JSON object a line, in ASCII."""
    for record in catalog.records:
        print(json.dumps({"record": record.to_json(), "datasetVersion": catalog.version}), file=out)


def read_dataset(path: Path) -> Catalog:
    """The records of a data set. Raises CatalogError naming the first line that is not as the schema says, and why."""
    records, version = [], None
    for number, line in _lines(path):
        value, fault = _checked(line)
        if fault is not None:
            raise CatalogError(f"{path}: line {number}: {fault}")
        records.append(ErrorRecord.from_json(value["record"]))
        version = value["datasetVersion"]
    if not records:
        raise CatalogError(f"{path}: it holds no records")
    return Catalog(tuple(records), version)


def check_dataset(path: Path) -> tuple[int, list[str]]:
    """How many records a data set holds, and all that is wrong with it, line by line.

    Raises CatalogError where the file cannot be read.
    """
    count, faults = 0, []
    seen: dict[str, int] = {}
    for number, line in _lines(path):
        count += 1
        value, fault = _checked(line)
        if fault is not None:
            faults.append(f"line {number}: {fault}")
            continue
        record = ErrorRecord.from_json(value["record"])
        faults += [f"line {number}: record {record.id}: {fault}" for fault in _contradictions(record)]
        if seen.setdefault(record.id, number) != number:
            faults.append(f"line {number}: record {record.id} is on line {seen[record.id]} already")
    if not count:
        faults.append("it holds no records")
    return count, faults


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            yield from ((number, line) for number, line in enumerate(file, 1) if line.strip())
    except OSError as error:
        raise CatalogError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CatalogError(f"{path}: not UTF-8 text (byte {error.start})") from error


def _checked(line: str) -> tuple[Any, str | None]:
    """The object on a line, and what is wrong with it."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"
    fault = next(iter(sorted(_validator().iter_errors(value), key=lambda fault: list(map(str, fault.path)))), None)
    if fault is not None:
        where = ".".join(map(str, fault.path)) or "the line"
        return None, f"{where}: {fault.message[:200]}"
    unsafe = pattern_fault(value["record"]["messagePattern"])
    return value, None if unsafe is None else f"record.messagePattern: {unsafe}"


@cache
def _validator() -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


def _contradictions(record: ErrorRecord) -> Iterator[str]:
    """What a schema cannot say: whether the fields agree with each other."""
    if record.example_message is None:
        yield "messagePattern does not match errorMessage with values filled in"
    first, last, line = record.source_code_start, record.source_code_end, record.line_number
    if record.source_code is None or first is None or last is None or line is None:
        return
    if not first <= line <= last:
        yield f"lineNumber {line} is outside the excerpt, lines {first} to {last}"
    lines = record.source_code.count("\n") + 1
    if lines != last - first + 1:
        yield f"the excerpt has {lines} lines, not the {last - first + 1} from {first} to {last}"
