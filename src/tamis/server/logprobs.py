"""Log-probabilities of tokens, in the two forms that OpenAI's API has."""

from collections.abc import Sequence

from tamis.engine.tokenizer import Tokenizer
from tamis.request import TokenLogprobs
from tamis.server.replies import (
    AlternativeLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)

_LEAST = -9999.0
"""JSON has no -inf."""


class TokenNames:
    """What tokens are called in replies."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds to a text; special tokens give their own spelling."""
        return f"<{token_id}>".encode() if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def text(self, token_id: int) -> str:
        """With U+FFFD for bytes that are no characters yet."""
        return self.bytes_of(token_id).decode(errors="replace")

    def key(self, token_id: int) -> str:
        """Like `text`, but no two pieces of a character are called the same."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(names: TokenNames, tokens: Sequence[tuple[int, TokenLogprobs]], top: int) -> ChatLogprobs:
    """Entries of generated tokens with their `top` most probable alternatives each."""
    content = []
    for token_id, found in tokens:
        listed = list(found.top.items())[:top]
        others = [_alternative(names, other, value) for other, value in listed]
        own = _alternative(names, token_id, found.logprob)
        content.append(TokenLogprob(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=others))
    return ChatLogprobs(content=content, refusal=None)


def _alternative(names: TokenNames, token_id: int, logprob: float) -> AlternativeLogprob:
    data = list(names.bytes_of(token_id))
    return AlternativeLogprob(token=names.text(token_id), logprob=max(logprob, _LEAST), bytes=data)


def completion_logprobs(
    names: TokenNames, tokens: Sequence[tuple[int, TokenLogprobs | None, int]], top: int
) -> CompletionLogprobs:
    """Lists over tokens, their log-probabilities (None: a prompt's first) and where they begin in the text."""
    return CompletionLogprobs(
        tokens=[names.key(token_id) for token_id, _, _ in tokens],
        token_logprobs=[None if found is None else max(found.logprob, _LEAST) for _, found, _ in tokens],
        top_logprobs=[_by_name(names, found) for _, found, _ in tokens] if top else None,
        text_offset=[offset for _, _, offset in tokens],
    )


def _by_name(names: TokenNames, found: TokenLogprobs | None) -> dict[str, float] | None:
    if found is None:
        return None
    named: dict[str, float] = {}
    for token_id, value in found.top.items():
        # Two tokens may spell the same text; the more probable one comes first.
        named.setdefault(names.key(token_id), max(value, _LEAST))
    return named


def prompt_logprobs(names: TokenNames, entries: Sequence[TokenLogprobs | None]) -> PromptLogprobs:
    """One entry a prompt token, by token id, most probable first."""
    return [
        None
        if entry is None
        else {
            str(token_id): PromptLogprob(logprob=max(value, _LEAST), rank=rank, decoded_token=names.text(token_id))
            for rank, (token_id, value) in enumerate(entry.top.items(), start=1)
        }
        for entry in entries
    ]
