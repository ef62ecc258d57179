"""Records to look things up in, and the id of an error that was raised."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tamis.errors.catalog.record import ErrorRecord
from tamis.errors.catalog.written import read_records

REPO = "tamis"
"""Where tamis's own records say they are from."""
MAX_MESSAGE = 4000
"""Characters of a message that are compared with patterns: its end, where they are anchored."""


@dataclass(frozen=True)
class Catalog:
    """Records in a fixed order."""

    records: tuple[ErrorRecord, ...]
    version: str | None = None
    """When the data set was made, as it says."""

    def by_id(self, text: str) -> ErrorRecord | None:
        """The record with this id."""
        return self._by_id.get(text.strip().lower())

    def by_slug(self, text: str) -> ErrorRecord | None:
        """The record with this slug; of several, the first."""
        return self._by_slug.get(text.strip().lower())

    @cached_property
    def _by_id(self) -> dict[str, ErrorRecord]:
        return {record.id: record for record in reversed(self.records)}

    @cached_property
    def _by_slug(self) -> dict[str, ErrorRecord]:
        return {record.slug: record for record in reversed(self.records)}

    @cached_property
    def _by_weight(self) -> list[ErrorRecord]:
        """Those that say most come first."""
        return sorted(self.records, key=lambda record: -record.template.weight)

    @cached_property
    def _by_class(self) -> dict[str, list[ErrorRecord]]:
        """The records of each class; those that say most come first."""
        classes: dict[str, list[ErrorRecord]] = {}
        for record in self._by_weight:
            classes.setdefault(record.error_class, []).append(record)
        return classes

    def record_of(self, error: BaseException) -> ErrorRecord | None:
        """The record of an error at hand: of its class, or of a base, or of any class, the longest wording that fits.

        An error may carry the message of one of another class on: of a file inside a larger one, say.
        """
        message = str(error)[-MAX_MESSAGE:]
        kinds = [kind.__name__ for kind in type(error).__mro__]
        for records in (*(self._by_class.get(kind, ()) for kind in kinds), self._by_weight):
            for record in records:
                if record.fits(message):
                    return record
        return None


def load_catalog(path: Path | None = None) -> Catalog:
    """tamis's own catalogue with the places in the installed source, or the data set in the file `path`.

    Raises CatalogError where the file is not a data set.
    """
    if path is None:
        return _own()
    from tamis.errors.catalog.dataset import read_dataset

    return read_dataset(path)


def id_of(error: BaseException) -> str | None:
    """The id of tamis's record for `error`, for `tamis explain`; None where there is none."""
    record = _written().record_of(error)
    return None if record is None else record.id


@cache
def _written() -> Catalog:
    """tamis's own records without their places: enough to know an error, and fast to read."""
    return Catalog(_unique(record for written in read_records() for _, record in written.records(REPO)))


@cache
def _own() -> Catalog:
    from tamis.errors.catalog.build import build_own

    return build_own().catalog


def _unique(records: Iterable[ErrorRecord]) -> tuple[ErrorRecord, ...]:
    return tuple({record.id: record for record in records}.values())
