"""What the server sends, field by field. Fields that were not set are left out: null stands where it was meant."""

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class Reply(BaseModel):
    """A JSON object."""

    def json_bytes(self) -> bytes:
        """UTF-8, on one line."""
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(Reply):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str
    """For programs."""
    explain: str | None
    """The command that says more of this error."""


class ErrorReply(Reply):
    """OpenAI's error object."""

    error: ErrorDetail


class PromptTokensDetails(Reply):
    """Where prompt tokens came from."""

    cached_tokens: int


class UsageReply(Reply):
    """Token counts of a whole request: its prompts once each, all of its completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PrefillReply(Reply):
    """How far a prompt is."""

    prompt: int
    """Its place in the request."""
    total: int
    cached: int
    processed: int
    """Cached ones included."""
    elapsed: float
    """Seconds."""


class PromptLogprob(Reply):
    """One token that could stand at a place of the prompt."""

    logprob: float
    rank: int
    """1: the most probable one of those listed."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, one a prompt token; null for the first."""


class CompletionLogprobs(Reply):
    """Lists of equal length, an entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]
    """Where the token begins in the text, in characters."""


class CompletionChoice(Reply):
    """One completion, or a piece of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionReply(Reply):
    """Of `/v1/completions`; with stream=true one of many."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | None = None
    prefill_progress: PrefillReply | None = None


class AlternativeLogprob(Reply):
    """A token that could have stood there."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(AlternativeLogprob):
    """A token of the reply."""

    top_logprobs: list[AlternativeLogprob]


class ChatLogprobs(Reply):
    """An entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class FunctionReply(Reply):
    """The function of a call; in a stream the arguments come in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolCallReply(Reply):
    """A call that the model makes, or a piece of one."""

    index: int | None = None
    """In streams: which call the piece belongs to."""
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionReply


class MessageReply(Reply):
    """The model's turn, or a piece of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallReply] | None = None
    refusal: None = None


class ChatChoice(Reply):
    """One reply."""

    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatDelta(Reply):
    """A piece of one reply."""

    index: int
    delta: MessageReply
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatReply(Reply):
    """Of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunk(Reply):
    """One of many, with stream=true."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDelta]
    usage: UsageReply | None = None
    prefill_progress: PrefillReply | None = None


class ModelReply(Reply):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """Tokens of prompt and reply together."""


class ModelsReply(Reply):
    """All of them."""

    object: Literal["list"]
    data: list[ModelReply]


class HealthReply(Reply):
    """Requests are taken."""

    status: Literal["ok"]


class TokenizeReply(Reply):
    """Token ids of a text or chat."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(Reply):
    """The text of token ids."""

    prompt: str


class KVReply(Reply):
    """The pool: pages by owner, bytes by plane."""

    page_size: int
    """Tokens."""
    pages: dict[str, int]
    tokens: dict[str, int]
    """That fit into these pages."""
    bytes: dict[str, int]


class SessionReply(Reply):
    """A prompt that is kept in the KV tiers."""

    name: str
    tokens: int
    """Of its full pages."""
    pages: int
    bytes: int


class SessionsReply(Reply):
    """All of them, by name."""

    object: Literal["list"]
    data: list[SessionReply]


class SessionDeletedReply(Reply):
    """It is not kept any more."""

    name: str
    deleted: Literal[True]
