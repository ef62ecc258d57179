"""From token ids to text, one token at a time.

Every token stands for some bytes; the text is those bytes joined and read as UTF-8, where what is not UTF-8 becomes
U+FFFD. So a text can be decoded as its tokens arrive, in constant time a token, and comes out the same in one go.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import tokenizers

from tamis.errors import TokenizerError, TokenRangeError

_UTF8 = codecs.getincrementaldecoder("utf-8")
_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies.

    Printable bytes of Latin-1 stand for themselves; the rest follow from U+0100 on (GPT-2's convention).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_ALPHABET = MappingProxyType(_byte_alphabet())
"""Byte values by the characters that byte-level vocabularies spell them with."""


@dataclass(frozen=True)
class TextRules:
    """What a tokenizer's decoder does, in terms of single tokens. Built by `text_rules`."""

    token_bytes: Callable[[str], bytes]
    """The bytes of a token of the vocabulary."""
    byte_level: bool = False
    """Added tokens are literal text and not spelled in the byte alphabet."""
    strip: str = ""
    """Up to `strip_count` of this character are dropped from the start of the text."""
    strip_count: int = 0
    marker: str = ""
    """Dropped wherever it stands in the first token."""
    separator: str = ""
    """Stands between two tokens."""


@dataclass
class _Steps:
    """Collects decoder steps until they make a TextRules."""

    origin: str
    replacements: list[tuple[str, str]] = field(default_factory=list)
    byte_level: bool = False
    byte_fallback: bool = False
    fused: bool = False
    strip: str = ""
    strip_count: int = 0
    marker: str = ""

    def add(self, step: dict[str, Any]) -> None:
        kind = step["type"]
        if kind == "Sequence":
            for inner in step["decoders"]:
                self.add(inner)
        elif kind == "ByteLevel":
            self.byte_level = True
        elif kind == "ByteFallback":
            self.byte_fallback = True
        elif kind == "Fuse":
            self.fused = True
        elif kind == "Replace" and "String" in step["pattern"] and not self.fused:
            self.replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "Strip" and self.fused and not step["stop"]:
            self.strip, self.strip_count = step["content"], step["start"]
        elif kind == "Metaspace":
            self.marker = step["replacement"] if step["prepend_scheme"] != "never" else ""
            self.replacements.append((step["replacement"], " "))
        else:
            raise TokenizerError(f"{self.origin}: the decoder step {kind} is not supported here")

    def token_bytes(self, token: str) -> bytes:
        if self.byte_fallback and (byte := _fallback_byte(token)) is not None:
            return byte
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_level and all(char in BYTE_ALPHABET for char in token):
            return bytes(BYTE_ALPHABET[char] for char in token)
        return token.encode("utf-8")


def _fallback_byte(token: str) -> bytes | None:
    """The byte that a token like <0x0A> stands for."""
    found = _FALLBACK.fullmatch(token)
    return bytes.fromhex(found[1]) if found else None


def text_rules(backend: tokenizers.Tokenizer, origin: str) -> TextRules:
    """The rules of `backend`'s decoder. Raises TokenizerError naming `origin` and a step that is not supported."""
    if backend.decoder is None:
        return TextRules(str.encode, separator=" ")
    steps = _Steps(origin)
    steps.add(json.loads(backend.decoder.__getstate__()))
    return TextRules(steps.token_bytes, steps.byte_level, steps.strip, steps.strip_count, steps.marker)


class TokenTexts:
    """The text of a vocabulary's tokens: their bytes by id, kept once worked out. Safe to share."""

    def __init__(self, backend: tokenizers.Tokenizer, origin: str) -> None:
        self.rules = text_rules(backend, origin)
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._literal = {i: token.content.encode() for i, token in added.items() if self.rules.byte_level}
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """What `token_id` adds to a text that it does not start. Empty for ids without a token.

        Raises TokenRangeError for what can be no token id at all.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._work_out(token_id)
        return known

    def first_bytes_of(self, token_id: int) -> bytes:
        """What `token_id` adds as the first token of a text."""
        if not self.rules.marker:
            return self.bytes_of(token_id)
        token = self._backend.id_to_token(token_id) or ""
        return self.rules.token_bytes(token.replace(self.rules.marker, ""))

    def _work_out(self, token_id: int) -> bytes:
        if token_id in self._literal:
            return self._literal[token_id]
        if not 0 <= token_id < 1 << 32:
            raise TokenRangeError(f"{token_id} is not a token id")
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self.rules.token_bytes(token)


class TextDecoder:
    """Turns the tokens of one text into characters as they come.

    `push` returns whole characters only; `finish` returns U+FFFD for bytes that never became one. With `continues`
    the text carries on from another: its first token is not treated as the start of a text, so its space stays.
    """

    def __init__(self, texts: TokenTexts, *, skip_special_tokens: bool = True, continues: bool = False) -> None:
        self._texts = texts
        self._skipped = texts.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _UTF8(errors="replace")
        self._started = continues
        self._to_strip = 0 if continues else texts.rules.strip_count

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes."""
        if token_id in self._skipped:
            return ""
        return self._strip(self._utf8.decode(self._next_bytes(token_id)))

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of all of `token_ids`, to its end."""
        data = b"".join(self._next_bytes(token_id) for token_id in token_ids if token_id not in self._skipped)
        return self._strip(self._utf8.decode(data, final=True))

    def finish(self) -> str:
        """What is left once there are no more tokens."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _next_bytes(self, token_id: int) -> bytes:
        if self._started:
            return self._texts.rules.separator.encode() + self._texts.bytes_of(token_id)
        self._started = True
        return self._texts.first_bytes_of(token_id)

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if text[0] != self._texts.rules.strip:
                self._to_strip = 0
                break
            text, self._to_strip = text[1:], self._to_strip - 1
        return text
