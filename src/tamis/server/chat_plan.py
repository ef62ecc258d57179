"""What a chat request means for one model: the prompt, how to sample, how to read the reply."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tamis.engine.tokenizer import Tokenizer
from tamis.request import SamplingParams
from tamis.server.answer_format import ToolChoice, answer_format
from tamis.server.call_parser import Tool, ToolCallParser
from tamis.server.context import Context
from tamis.server.errors import ApiError
from tamis.server.reasoning import Markers, ReasoningSplitter, opens_reasoning, reasoning_markers
from tamis.server.reply_reader import ReplyReader
from tamis.server.sampling import chat_sampling
from tamis.server.schema import ChatRequest, Message, NamedTool, TokenizeRequest
from tamis.server.schema import Tool as ToolField
from tamis.server.tool_calls import choose_parser

_OWN_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
"""Of the chat template; other fields of a request set them."""


@dataclass(frozen=True)
class ChatPlan:
    """A chat request, ready to be run."""

    prompt: list[int]
    sampling: SamplingParams
    markers: Markers | None
    inside: bool
    """The reply begins in the middle of thinking."""
    parser: type[ToolCallParser]
    tools: Sequence[Tool]
    """Those that may be called."""

    def reader(self) -> ReplyReader:
        """A reader for one reply."""
        calls = self.parser(self.tools) if self.tools else None
        return ReplyReader(ReasoningSplitter(self.markers, inside=self.inside), calls)


def plan_chat(context: Context, body: ChatRequest) -> ChatPlan:
    """Render the prompt and work out the rest; takes long for a long chat.

    Raises SamplingError, RequestError for messages, GrammarError for schemas, TokenizerError for a model that cannot.
    """
    tokenizer = context.tokenizer
    sampling = chat_sampling(context.engine, body)
    choice = _choice(body)
    tools = [] if choice == "none" else _tools(body.tools)
    effort = {} if body.reasoning_effort is None else {"reasoning_effort": body.reasoning_effort}
    text = _render(tokenizer, body.messages, tools, {**effort, **(body.chat_template_kwargs or {})})
    template = tokenizer.chat_template(tools=bool(tools))
    markers, parser = reasoning_markers(template), choose_parser(template)
    inside = opens_reasoning(text, markers)
    wanted = answer_format(
        tokenizer, response_format=sampling.response_format, tools=tools, tool_choice=choice,
        parallel=body.parallel_tool_calls is not False, parser=parser, markers=markers, inside=inside,
    )  # fmt: skip
    shown = [*(parser.markers if tools else ()), *((markers.begin, markers.end) if markers else ())]
    hidden = not any(tokenizer.token_to_id(marker) in tokenizer.special_ids for marker in shown)
    sampling = replace(sampling, response_format=wanted, skip_special_tokens=hidden)
    return ChatPlan(tokenizer.encode(text, add_special_tokens=False), sampling, markers, inside, parser, tools)


def encode_chat(context: Context, body: TokenizeRequest) -> list[int]:
    """The token ids of a chat. Raises RequestError, TokenizerError."""
    variables = {**(body.chat_template_kwargs or {})}
    messages, tools = body.messages or (), _tools(body.tools)
    text = _render(context.tokenizer, messages, tools, variables, asks=body.add_generation_prompt)
    return context.tokenizer.encode(text, add_special_tokens=False)


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Tool],
    variables: Mapping[str, Any],
    *,
    asks: bool = True,
) -> str:
    """The prompt of a chat; without `asks` the model is not asked to speak next."""
    taken = sorted(_OWN_VARIABLES & variables.keys())
    if taken:
        message = f"chat_template_kwargs holds {taken[0]!r}, which is a field of its own"
        raise ApiError(400, "invalid_value", message, param="chat_template_kwargs")
    turns = [message.model_dump(exclude_none=True) for message in messages]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=asks, **{**variables, "tools": tools or None})


def _tools(fields: Sequence[ToolField] | None) -> list[Tool]:
    return [tool.model_dump(exclude_none=True) for tool in fields or ()]


def _choice(body: ChatRequest) -> ToolChoice:
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.model_dump()
    return body.tool_choice or "auto"
