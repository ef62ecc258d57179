"""Finding markers in text that arrives in pieces."""

from collections.abc import Iterable


def held_back(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the start of one of `markers`."""
    return max((_overlap(text, marker) for marker in markers), default=0)


def find_first(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Where the first of `markers` begins in `text`, and which it is: the longest of those that begin there."""
    found = [(place, -len(marker), marker) for marker in markers if (place := text.find(marker)) >= 0]
    if not found:
        return None
    place, _, marker = min(found)
    return place, marker


def _overlap(text: str, marker: str) -> int:
    """The length of the longest end of `text` that is the start, and not the whole, of `marker`."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
