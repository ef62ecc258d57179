"""Text to token ids and back, for every kind of tokenizer a model may bring."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import tokenizers

from tamis.engine.chat_template import ChatTemplates
from tamis.engine.gguf_tokenizer import read_gguf_tokenizer
from tamis.engine.token_text import TextDecoder, TokenTexts
from tamis.engine.tokenizer_files import read_tokenizer_files
from tamis.engine.tokenizer_parts import TokenizerParts, library_errors
from tamis.errors import RequestError, TokenizerError, TokenRangeError
from tamis.models.gguf_file import GGUFFile
from tamis.models.hub import ModelSource
from tamis.units import show


class Tokenizer:
    """A model's tokenizer. Threads may share it."""

    def __init__(self, parts: TokenizerParts) -> None:
        self.origin = parts.origin
        self.eos_token_ids = parts.eos_token_ids
        """The tokenizer's own end tokens; generation_config.json may name more."""
        self.prefix_ids, self.suffix_ids = parts.prefix_ids, parts.suffix_ids
        self.special_tokens = dict(parts.special_tokens)
        self._backend = parts.backend
        self._texts = TokenTexts(parts.backend, parts.origin)
        self._templates = ChatTemplates(parts.chat_templates, special_tokens=parts.special_tokens, origin=parts.origin)

    @classmethod
    def from_source(cls, source: ModelSource) -> Self:
        """The tokenizer of a model directory or GGUF file.

        Raises TokenizerError, naming directory or file, where there is none or it cannot be used.
        """
        if source.kind == "directory":
            return cls(read_tokenizer_files(source.path))
        if source.kind == "gguf":
            with GGUFFile(source.path) as file:
                return cls(read_gguf_tokenizer(file))
        raise TokenizerError(f"{source.path}: a configuration alone has no tokenizer")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of `text`, with what the model wants before and after unless told otherwise.

        Special tokens written out in `text` become those tokens; with `parse_special=False` they are read as ordinary
        text. Raises RequestError where `text` is not text or holds half a surrogate pair, TokenizerError where the
        tokenizer fails on it: an unknown word and no token for that, a pattern that takes too long.
        """
        if not isinstance(text, str):
            raise RequestError(f"the prompt must be text, not {type(text).__name__}")
        backend = self._backend if parse_special else self._literal_backend
        with library_errors(f"{self.origin}: the tokenizer failed on this text"):
            try:
                # `encode` holds Python's lock, seconds for a long text; `encode_batch` lets other threads go on.
                ids: list[int] = backend.encode_batch([text], add_special_tokens=False)[0].ids
            except (UnicodeEncodeError, TypeError):
                place = next((i for i, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
                if place is None:
                    raise
                raise RequestError(
                    f"the prompt's character {place} is {text[place]!a}, half a surrogate pair"
                ) from None
        return [*self.prefix_ids, *ids, *self.suffix_ids] if add_special_tokens else ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`: their bytes as UTF-8, U+FFFD where they are not; ids without a token add nothing.

        A SentencePiece model's space before the first word is dropped. Raises RequestError for what is no list of ids,
        TokenRangeError for what can be no id in it.
        """
        return self.text_decoder(skip_special_tokens=skip_special_tokens).decode(_plain_ids(token_ids))

    def text_decoder(self, *, skip_special_tokens: bool = True, continues: bool = False) -> TextDecoder:
        """A decoder for one text whose tokens come one by one."""
        return TextDecoder(self._texts, skip_special_tokens=skip_special_tokens, continues=continues)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """The prompt text of a chat; see ChatTemplates.render for the messages and what is raised."""
        return self._templates.render(messages, add_generation_prompt=add_generation_prompt, **extra)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """The token ids of a chat. The template alone says which special tokens there are, BOS included."""
        text = self.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **extra)
        return self.encode(text, add_special_tokens=False)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a template for plain chats."""
        return "default" in self._templates.templates

    def chat_template(self, *, tools: bool = False) -> str | None:
        """The text of the model's chat template, with or without tools; None where it has none."""
        return self._templates.source(tools=tools)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest token id. The model's own vocabulary may be padded beyond it."""
        added = self._backend.get_added_tokens_decoder()
        return max(self._backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which texts do not show."""
        return self._texts.special_ids

    @property
    def bos_token_id(self) -> int | None:
        """The id of bos_token, whether or not texts start with it."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of eos_token."""
        return self._special_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        """The id of pad_token."""
        return self._special_id("pad_token")

    def token_to_id(self, token: str) -> int | None:
        """The id of a token, given as the vocabulary spells it."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """The token under an id, as the vocabulary spells it."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; special tokens give their own spelling."""
        return self._texts.bytes_of(token_id)

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    @cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """The same vocabulary, blind to special tokens in text. A copy: the setting belongs to the whole object."""
        with library_errors(f"{self.origin}: the tokenizer cannot be copied"):
            copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
            copy.encode_special_tokens = True
            return copy


def _plain_ids(token_ids: Iterable[int]) -> Iterator[int]:
    if isinstance(token_ids, str | bytes) or not isinstance(token_ids, Iterable):
        raise RequestError(f"token_ids={show(token_ids)} is not a list of token ids")
    for token in token_ids:
        try:
            value = operator.index(token)
        except TypeError:
            raise TokenRangeError(f"{show(token)} is not a token id") from None
        yield value
