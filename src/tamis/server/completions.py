"""`/v1/completions`: text that goes on where a prompt ends."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response
from starlette.requests import Request

from tamis.request import FinishReason, PrefillProgress, TokenEvent, TokenLogprobs
from tamis.server.context import Context
from tamis.server.logprobs import completion_logprobs, prompt_logprobs
from tamis.server.replies import CompletionChoice, CompletionReply, UsageReply
from tamis.server.replies import FinishReason as ReplyReason
from tamis.server.sampling import completion_sampling
from tamis.server.schema import CompletionRequest
from tamis.server.stream import Feed, Item, answer, prefill_reply

_Token = tuple[int, TokenLogprobs | None, int]
"""A token, its log-probabilities, where it begins in the text."""


async def complete(context: Context, body: CompletionRequest, request: Request) -> Response:
    """Answer one request. Raises ApiError and whatever AsyncEngine.submit raises."""
    context.check_model(body.model)
    sampling = completion_sampling(context.engine, body)
    feed = context.feed(request)
    salt = context.salt(request, body.cache_salt)
    await feed.submit(context.engine, body.prompts, sampling, salt=salt, progress=body.progress)
    context.remember(request, salt, feed)
    writer = CompletionWriter(context, body, feed.prompt_token_ids)
    return await answer(feed, writer, body, request, patience=context.config.write_timeout)


@dataclass
class _Choice:
    """One completion in the making."""

    index: int
    sent: int = 0
    """Characters told so far."""
    begun: bool = False
    texts: list[str] = field(default_factory=list)
    tokens: list[_Token] = field(default_factory=list)
    reason: FinishReason | None = None


class CompletionWriter:
    """Makes replies of events: chunk by chunk, or one whole reply."""

    def __init__(self, context: Context, body: CompletionRequest, prompt_token_ids: Sequence[Sequence[int]]) -> None:
        self._context, self._body = context, body
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": context.model,
        }  # fmt: skip
        self._prompts = prompt_token_ids
        self._samples = body.n or 1
        self._choices = [_Choice(index) for index in range(len(prompt_token_ids) * self._samples)]
        self._echoed = [self._prompt_text(place) if body.echo else "" for place in range(len(prompt_token_ids))]

    def chunks(self, place: int, item: Item) -> list[CompletionReply]:
        """Chunks of a stream; none where an event has nothing to tell."""
        if isinstance(item, PrefillProgress):
            return [self._reply([], prefill_progress=prefill_reply(place, item))]
        choice = self._take(place, item)
        text, tokens = "".join(choice.texts), choice.tokens
        choice.texts, choice.tokens = [], []
        if not text and not tokens and choice.reason is None:
            return []
        return [self._reply([self._piece(choice, text, tokens)])]

    def usage_chunk(self, usage: UsageReply) -> CompletionReply:
        """A last chunk with nothing but token counts."""
        return self._reply([], usage=self._counted(usage))

    async def whole(self, feed: Feed) -> CompletionReply:
        """Wait for the end and tell everything."""
        async for batch in feed.batches():
            for place, item in batch:
                if isinstance(item, TokenEvent):
                    self._take(place, item)
        prompts = await feed.prompt_logprobs()
        pieces = []
        for choice in self._choices:
            entries = prompts[choice.index // self._samples]
            if self._body.echo and self._body.logprobs is not None and entries is not None:
                choice.tokens = self._prompt_tokens(choice.index // self._samples, entries) + choice.tokens
            piece = self._piece(choice, "".join(choice.texts), choice.tokens)
            if self._body.prompt_logprobs is not None and entries is not None:
                piece.prompt_logprobs = prompt_logprobs(self._context.names, entries)
            pieces.append(piece)
        return self._reply(pieces, usage=self._counted(feed.usage()))

    def _take(self, place: int, event: TokenEvent) -> _Choice:
        choice = self._choices[place * self._samples + event.index]
        if not choice.begun:
            choice.begun, choice.sent = True, len(self._echoed[place])
            choice.texts.append(self._echoed[place])
        choice.reason = event.finish_reason
        if self._body.max_tokens == 0:  # only the prompt was asked for
            choice.reason = event.finish_reason and FinishReason.LENGTH
            return choice
        if event.token_id is not None and self._body.logprobs is not None:
            choice.tokens.append((event.token_id, event.logprobs, choice.sent))
        choice.texts.append(event.text)
        choice.sent += len(event.text)
        return choice

    def _piece(self, choice: _Choice, text: str, tokens: Sequence[_Token]) -> CompletionChoice:
        asked = self._body.logprobs
        found = completion_logprobs(self._context.names, tokens, asked) if asked is not None and tokens else None
        return CompletionChoice(index=choice.index, text=text, logprobs=found, finish_reason=_reason(choice.reason))

    def _reply(self, choices: list[CompletionChoice], **more: Any) -> CompletionReply:
        return CompletionReply(**self._head, object="text_completion", choices=choices, **more)

    def _counted(self, usage: UsageReply) -> UsageReply:
        """Without the tokens that had to be generated where none were asked for."""
        if self._body.max_tokens == 0:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _prompt_text(self, place: int) -> str:
        prompt = self._body.prompts[place]
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._context.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)

    def _prompt_tokens(self, place: int, entries: Sequence[TokenLogprobs | None]) -> list[_Token]:
        """The prompt's tokens with the places where they begin in its text."""
        tokenizer = self._context.engine.tokenizer
        written = isinstance(self._body.prompts[place], str)  # what the model wants at its start is not part of that
        decoder = None if tokenizer is None else tokenizer.text_decoder(skip_special_tokens=written)
        tokens: list[_Token] = []
        offset = 0
        for token_id, entry in zip(self._prompts[place], entries, strict=True):
            tokens.append((token_id, entry, offset))
            offset += len(decoder.push(token_id)) if decoder is not None else 0
        return tokens


def _reason(reason: FinishReason | None) -> ReplyReason | None:
    if reason is None:
        return None
    return "stop" if reason is FinishReason.STOP else "length"
