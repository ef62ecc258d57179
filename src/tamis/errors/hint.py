"""The way from an error that is printed to its page: `tamis explain ID`. It stands beside an error, never inside it."""

import logging


def hint_for(error: BaseException) -> str | None:
    """The command that explains `error`; None for what is not in the catalogue.

    Reads the catalogue when it is first asked.
    """
    from tamis.errors import TamisError
    from tamis.errors.catalog import id_of

    number = id_of(error) if isinstance(error, TamisError) else None
    return None if number is None else f"tamis explain {number}"


class HintingFormatter(logging.Formatter):
    """Log entries as ever; below the traceback of an error of the catalogue stands its hint."""

    def format(self, record: logging.LogRecord) -> str:
        """The entry, and the hint."""
        error = record.exc_info[1] if record.exc_info else None
        hint = None if error is None else hint_for(error)
        return super().format(record) + (f"\n{hint}" if hint is not None else "")
