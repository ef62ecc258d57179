"""Writing grammars in llguidance's Lark syntax."""

import json
import re
from collections.abc import Iterable

from tamis.engine.tokenizer import Tokenizer

ANY_TEXT = "/(?s:.*)/"
"""Any text that holds no special token."""


class Rules:
    """A grammar in the making. Texts that the vocabulary has as special tokens are written as those tokens."""

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str]) -> None:
        ids = {marker: tokenizer.token_to_id(marker) for marker in markers}
        self._special = {text: token for text, token in ids.items() if token in tokenizer.special_ids}
        self._lines: list[str] = []

    def add(self, body: str, name: str | None = None) -> str:
        """Add a rule; returns its name."""
        name = name or f"r{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly `text`."""
        pattern = "|".join(re.escape(marker) for marker in sorted(self._special, key=len, reverse=True))
        pieces = re.split(f"({pattern})", text) if pattern else [text]
        terms = [self._special_term(piece) or json.dumps(piece) for piece in pieces if piece]
        return " ".join(terms)

    def until(self, text: str) -> str:
        """Any text up to the first `text`, and that."""
        start = next((marker for marker in self._special if text.startswith(marker)), None)
        if start is not None:
            return f"{self.add(ANY_TEXT)} {self.literal(text)}"
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}[suffix={json.dumps(text)}]: {ANY_TEXT}")
        return name

    def text(self) -> str:
        """The grammar."""
        return "\n".join(["%llguidance {}", *self._lines, ""])

    def _special_term(self, piece: str) -> str | None:
        return f"<[{self._special[piece]}]>" if piece in self._special else None
