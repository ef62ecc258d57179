"""An LLM that follows a script, for tests of commands."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch

from support.engines import hash_config
from tamis.config import LayerKind
from tamis.engine.stats import EngineStats
from tamis.kv import KVLayout, PageUsage
from tamis.request import FinishReason, SamplingParams, TokenEvent, TokenLogprobs, Usage

PIECES = ["Par", "", "is", " né"]


class FakeTokenizer:
    has_chat_template = True

    def __init__(self) -> None:
        self.chats: list[list[tuple[str, str]]] = []
        """Role and content of every message of every chat, the last chat last."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        self.chats.append([(message["role"], message["content"]) for message in messages])
        return [len(message["content"]) for message in messages]


class FakeLLM:
    """Says PIECES, then stops; remembers how it was used."""

    last: "FakeLLM"
    context = 64

    def __init__(self, model: str | None, **settings: Any) -> None:
        self.model, self.settings = model, settings
        self.tokenizer = FakeTokenizer()
        self.config = hash_config(self.context)
        self.layout = KVLayout((LayerKind.DENSE,), 1, 64, page_size=16, dtype=torch.float32)
        self.prompt: list[int] = []
        self.closed = False
        type(self).last = self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return PIECES[token_ids[0]]

    def default_sampling(self, **changes: Any) -> SamplingParams:
        return SamplingParams(**{"top_k": 40, "top_p": 0.9} | changes)

    def stream(self, prompt: list[int], sampling: SamplingParams) -> Iterator[TokenEvent]:
        self.prompt, self.sampling = prompt, sampling
        return self._events()

    def _events(self) -> Iterator[TokenEvent]:
        for token, piece in enumerate(PIECES):
            logprobs = None if self.sampling.logprobs is None else TokenLogprobs(-0.5, {token: -0.5, 9: -1.5})
            last = token == len(PIECES) - 1
            yield TokenEvent(
                0, token, piece, logprobs, FinishReason.STOP if last else None, Usage(3, len(PIECES)) if last else None
            )

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            prefill_tokens=3, prefill_seconds=0.5, decode_tokens=3, decode_seconds=2.0, pages_peak=1,
            pages=PageUsage(total=2_000, free=2_000, held=0, cached=0), page_size=16,
        )  # fmt: skip
