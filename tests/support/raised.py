"""Every error that tamis makes while tests run is held against the catalogue: what is really said has a record."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tamis.errors import TamisError
from tamis.errors.catalog import id_of
from tamis.errors.catalog.build import PACKAGE
from tamis.errors.catalog.catalog import MAX_MESSAGE
from tamis.errors.catalog.scan import scan

Place = tuple[str, int]


@contextmanager
def errors_have_records() -> Iterator[None]:
    """Raise AssertionError at the end where an error was made with a message that no record fits."""
    made: dict[tuple[type[TamisError], str], Place] = {}

    def note(self: TamisError, *arguments: object) -> None:
        Exception.__init__(self, *arguments)
        frame = sys._getframe(1)
        while frame.f_back is not None and isinstance(frame.f_locals.get("self"), TamisError):
            frame = frame.f_back  # of a kind that has a constructor of its own
        if Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            made.setdefault((type(self), str(self)), (frame.f_code.co_filename, frame.f_lineno))

    outer = TamisError.__init__
    TamisError.__init__ = note  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        TamisError.__init__ = outer  # type: ignore[method-assign]
    unknown = [
        f"{Path(file).relative_to(PACKAGE)}:{line}: {kind.__name__}: {text}"
        for (kind, text), (file, line) in made.items()
        if len(text) < MAX_MESSAGE and id_of(type(kind.__name__, (Exception,), {})(text)) is None
    ]
    # What only passes on the words of others, of a server that is asked say, has none of its own.
    if unknown:
        sites = scan(PACKAGE, PACKAGE).sites
        wordless = {f"{site.source.name}:{site.found.line}" for site in sites if not site.found.speaks}
        unknown = [told for told in unknown if ":".join(told.split(":")[:2]) not in wordless]
    assert not unknown, "no record fits:\n" + "\n".join(unknown)
