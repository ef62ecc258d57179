"""Finding stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopMatcher:
    """Ends a text at the first stop string that becomes complete.

    Characters are looked at one by one, so that the result does not depend on how the text was cut into pieces: the
    stop string whose last character comes first ends the text; where several end with the same character, the longest
    of them does. Text that may turn out to be the start of a stop string is held back. The cost of a character grows
    with the number of stop strings only (Knuth-Morris-Pratt).
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self.matched: str | None = None
        """The stop string that ended the text."""
        self._stops = [(stop, _borders(stop)) for stop in stop_strings]
        self._depths = [0] * len(self._stops)
        self._held = ""

    def push(self, text: str) -> str:
        """Take the next piece; returns the text that certainly stands before any stop string."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for place, char in enumerate(text):
            if self._advance(char):
                assert self.matched is not None
                seen = self._held + text[: place + 1]
                self._held = ""
                return seen[: len(seen) - len(self.matched)]
        seen = self._held + text
        certain = len(seen) - max(self._depths)
        self._held = seen[certain:]
        return seen[:certain]

    def finish(self) -> str:
        """The text that was held back: no stop string will come of it now."""
        held, self._held = self._held, ""
        self._depths = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> bool:
        """Move every stop string's state on by `char`; whether one of them is complete."""
        for index, (stop, borders) in enumerate(self._stops):
            depth = self._depths[index]
            while depth and stop[depth] != char:
                depth = borders[depth - 1]
            if stop[depth] == char:
                depth += 1
            self._depths[index] = depth
            if depth == len(stop) and len(stop) > len(self.matched or ""):
                self.matched = stop
        return self.matched is not None


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that it also ends with."""
    borders = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = borders[length - 1]
        if text[place] == text[length]:
            length += 1
        borders[place] = length
    return borders
