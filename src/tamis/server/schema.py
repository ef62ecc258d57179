"""What clients may send, field by field. Ranges of sampling parameters are checked by `SamplingParams` alone."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MAX_PROMPTS = 1024
"""Prompts in one request."""
Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern="^[a-zA-Z0-9_.-]+$")]
TokenIds = list[int]


class Body(BaseModel):
    """A JSON object whose fields are all known; numbers are not read out of strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream holds beside the text."""

    include_usage: bool | None = None
    """A last chunk with the token counts."""
    include_obfuscation: bool | None = None
    """Without effect."""
    include_prefill_progress: bool | None = None
    """Chunks that tell how far the prompt is: total, cached and processed tokens, elapsed seconds."""


class JsonSchema(Body):
    """A schema with a name."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None
    """Without effect: replies always follow the schema."""


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class SamplingFields(Body):
    """What both kinds of completion take."""

    model: str | None = None
    """As `/v1/models` lists it; may be left out."""
    n: int | None = None
    """Completions of the same prompt."""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    """By token id."""
    prompt_logprobs: int | None = None
    """Alternatives to report with each prompt token; 0: the token's own log-probability. Not for streams."""
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    """Only requests with the same salt share cached prompts."""
    user: str | None = None
    """Without effect."""

    @property
    def progress(self) -> bool:
        """Whether the stream tells how far the prompt is."""
        return bool(self.stream_options and self.stream_options.include_prefill_progress)

    @property
    def stream_usage(self) -> bool:
        """Whether the stream ends with the token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _streams_only(self) -> "SamplingFields":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs needs stream=false: they are known as a whole")
        return self


class CompletionRequest(SamplingFields):
    """`/v1/completions`: text that goes on where the prompt ends."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    """Text, token ids, or a list of either."""
    echo: bool | None = None
    """Put the prompt before the text."""
    logprobs: int | None = None
    """Alternatives to report with each token; with echo also for the prompt."""
    best_of: int | None = None
    """Only as `n`."""
    suffix: str | None = None
    """Not supported."""

    @property
    def prompts(self) -> list[str | TokenIds]:
        """One entry a prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _supported(self) -> "CompletionRequest":
        if not 1 <= len(self.prompts) <= MAX_PROMPTS:
            raise ValueError(f"prompt holds {len(self.prompts)} prompts, and must hold 1 to {MAX_PROMPTS}")
        if self.best_of not in (None, self.n or 1):
            raise ValueError(f"best_of={self.best_of} must be n={self.n or 1}")
        if self.suffix:
            raise ValueError("suffix is not supported")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs needs stream=false")
        return self


class ContentPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="allow", strict=True)
    type: str
    text: str | None = None


class CalledFunction(Body):
    """The function of a call that the model made."""

    name: str
    arguments: str
    """JSON."""


class CalledTool(Body):
    """A call that the model made in an earlier turn."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(BaseModel):
    """One turn of a chat. Further fields reach the model's chat template."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionTool(Body):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(Body):
    """Something that the model may call."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """A function by name."""

    name: str


class NamedTool(Body):
    """The one function that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields):
    """`/v1/chat/completions`: the next turn of a chat."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: int | None = None
    """Alternatives to report with each token; needs logprobs=true."""
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""
    reasoning_effort: str | None = None
    """Handed to the chat template."""
    modalities: list[Literal["text"]] | None = None
    metadata: dict[str, str] | None = None
    """Without effect, as all that follow."""
    store: Literal[False] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    verbosity: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        wants_tool = self.tool_choice not in (None, "none", "auto")
        if wants_tool and not self.tools:
            raise ValueError("tool_choice needs tools")
        if isinstance(self.tool_choice, NamedTool):
            names = [tool.function.name for tool in self.tools or []]
            if self.tool_choice.function.name not in names:
                raise ValueError(f"tool_choice names {self.tool_choice.function.name!r}, and tools holds {names}")
        if wants_tool and self.response_format is not None and self.response_format.type != "text":
            raise ValueError("tool_choice and response_format cannot both bind the reply")
        return self


class TokenizeRequest(Body):
    """`/tokenize`: text, or a chat through the model's template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    """What the model wants at the start of a text. A chat template alone decides for a chat."""
    add_generation_prompt: bool = True
    """Of a chat: end where the model's reply begins."""
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """`/detokenize`: token ids."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False


class SessionRequest(Body):
    """`/v1/kv/sessions/NAME`: what is to be kept, in one of three ways."""

    model: str | None = None
    prompt: str | TokenIds | None = None
    """Text or token ids, as for `/v1/completions`."""
    messages: list[Message] | None = None
    """A chat, as for `/v1/chat/completions`."""
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = False
    """Of a chat: end where the model's reply begins."""
    request_id: str | None = None
    """X-Request-Id of a request of one prompt that was answered lately: its prompt and reply are kept."""
    cache_salt: str | None = None
    """Of the requests that shall read it; not with request_id, which has its own."""

    @model_validator(mode="after")
    def _one_of_three(self) -> "SessionRequest":
        if sum(value is not None for value in (self.prompt, self.messages, self.request_id)) != 1:
            raise ValueError("give one of prompt, messages and request_id")
        if self.request_id is not None and self.cache_salt is not None:
            raise ValueError("cache_salt cannot be given with request_id, which has its own")
        return self
