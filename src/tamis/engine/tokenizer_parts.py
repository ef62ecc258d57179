"""What a tokenizer is made of, whichever files it came from."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import tokenizers

from tamis.errors import TamisError, TokenizerError


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Turn what the tokenizers library raises inside the block into TokenizerError, which says `what` first."""
    try:
        yield
    except TamisError:
        raise
    except BaseException as error:
        # It raises bare Exceptions, and where it panics PanicException, which is no Exception and cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: {' '.join(str(error).split()) or type(error).__name__}") from error


@dataclass(frozen=True)
class TokenizerParts:
    """Filled by `tokenizer_files` and `gguf_tokenizer`, used by `tokenizer`."""

    backend: tokenizers.Tokenizer
    """Its post-processor is not used: `prefix_ids` and `suffix_ids` say what is added to a text."""
    origin: str
    """The directory or file, for messages."""
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """Texts of special tokens by name: bos_token, eos_token, pad_token, ..."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end a reply, as far as the tokenizer's files know."""
    prefix_ids: tuple[int, ...] = ()
    """What the model wants before a text: BOS, or nothing."""
    suffix_ids: tuple[int, ...] = ()
    """What the model wants after a text: almost always nothing."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; "default" where there is only one."""
