"""`/v1/chat/completions`: the next turn of a chat."""

import secrets
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import Response
from starlette.requests import Request

from tamis.request import FinishReason, PrefillProgress, TokenEvent, TokenLogprobs
from tamis.server.chat_plan import ChatPlan, plan_chat
from tamis.server.context import Context
from tamis.server.logprobs import chat_logprobs, prompt_logprobs
from tamis.server.replies import ChatChoice, ChatChunk, ChatDelta, ChatLogprobs, ChatReply, UsageReply
from tamis.server.replies import FinishReason as ReplyReason
from tamis.server.reply_reader import Piece, ReplyReader
from tamis.server.schema import ChatRequest
from tamis.server.stream import Feed, Item, answer, aside, prefill_reply


async def chat(context: Context, body: ChatRequest, request: Request) -> Response:
    """Answer one request. Raises ApiError and whatever AsyncEngine.submit raises."""
    context.check_model(body.model)
    plan = await aside(lambda: plan_chat(context, body))
    feed = context.feed(request)
    salt = context.salt(request, body.cache_salt)
    await feed.submit(context.engine, [plan.prompt], plan.sampling, salt=salt, progress=body.progress)
    context.remember(request, salt, feed)
    writer = ChatWriter(context, body, plan)
    return await answer(feed, writer, body, request, patience=context.config.write_timeout)


@dataclass
class _Choice:
    """One reply in the making."""

    index: int
    reader: ReplyReader
    begun: bool = False
    reason: FinishReason | None = None
    piece: Piece = field(default_factory=Piece)
    """What was not told yet."""
    tokens: list[tuple[int, TokenLogprobs]] = field(default_factory=list)

    def take(self, event: TokenEvent, *, logprobs: bool) -> None:
        """Read on."""
        self.piece.add(self.reader.feed(event.text))
        if event.finish_reason is not None:
            self.reason = event.finish_reason
            self.piece.add(self.reader.finish())
        if logprobs and event.token_id is not None and event.logprobs is not None:
            self.tokens.append((event.token_id, event.logprobs))

    @property
    def finish_reason(self) -> ReplyReason:
        """Why it ended, once it has."""
        if self.reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.reader.calls else "stop"


class ChatWriter:
    """Makes replies of events: chunk by chunk, or one whole reply."""

    def __init__(self, context: Context, body: ChatRequest, plan: ChatPlan) -> None:
        self._context, self._body = context, body
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(16)}", "created": int(time.time()), "model": context.model,
        }  # fmt: skip
        self._choices = [_Choice(index, plan.reader()) for index in range(body.n or 1)]

    def chunks(self, place: int, item: Item) -> list[ChatChunk]:
        """Chunks of a stream; none where an event has nothing to tell."""
        if isinstance(item, PrefillProgress):
            return [self._chunk([], prefill_progress=prefill_reply(place, item))]
        choice = self._take(item)
        piece, found = choice.piece, self._logprobs(choice)
        choice.piece, choice.tokens = Piece(), []
        if not piece and found is None and choice.reason is None:
            return []
        delta = piece.delta()
        if not choice.begun:
            choice.begun, delta.role = True, "assistant"
        reason = choice.finish_reason if choice.reason is not None else None
        return [self._chunk([ChatDelta(index=choice.index, delta=delta, logprobs=found, finish_reason=reason)])]

    def usage_chunk(self, usage: UsageReply) -> ChatChunk:
        """A last chunk with nothing but token counts."""
        return self._chunk([], usage=usage)

    async def whole(self, feed: Feed) -> ChatReply:
        """Wait for the end and tell everything."""
        async for batch in feed.batches():
            for _, item in batch:
                if isinstance(item, TokenEvent):
                    self._take(item)
        choices = [
            ChatChoice(
                index=choice.index, message=choice.piece.message(), logprobs=self._logprobs(choice),
                finish_reason=choice.finish_reason,
            )
            for choice in self._choices
        ]  # fmt: skip
        reply = ChatReply(**self._head, object="chat.completion", choices=choices, usage=feed.usage())
        (entries,) = await feed.prompt_logprobs()
        if entries is not None:
            reply.prompt_logprobs = prompt_logprobs(self._context.names, entries)
        return reply

    def _take(self, event: TokenEvent) -> _Choice:
        choice = self._choices[event.index]
        choice.take(event, logprobs=bool(self._body.logprobs))
        return choice

    def _logprobs(self, choice: _Choice) -> ChatLogprobs | None:
        if not choice.tokens:
            return None
        return chat_logprobs(self._context.names, choice.tokens, self._body.top_logprobs or 0)

    def _chunk(self, choices: list[ChatDelta], **more: Any) -> ChatChunk:
        return ChatChunk(**self._head, object="chat.completion.chunk", choices=choices, **more)
