"""The library's front door: a model, its engine and its tokenizer behind a few blocking calls."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch

from tamis.config import EngineConfig, GenerationDefaults, ModelConfig
from tamis.engine.build import build_engine
from tamis.engine.engine import Engine, EngineStats
from tamis.engine.tokenizer import Tokenizer
from tamis.engine.worker import Worker
from tamis.errors import ConfigError, EngineClosedError, RequestError, SamplingError, TokenizerError
from tamis.kv import KVLayout, SparseKVPool
from tamis.models import load_generation_defaults, resolve
from tamis.progress import NoProgress, Progress
from tamis.request import Completion, Request, SamplingParams, TokenEvent
from tamis.units import parse_size

Message = Mapping[str, Any]
"""A chat message: "role", "content", and whatever else the model's template reads."""
Prompt = str | Sequence[int]
"""Text, or token ids."""


class LLM:
    """A language model, ready to generate. Safe to use from several threads, whose requests share the batches.

    >>> with LLM() as llm:
    ...     print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        page_size: int | None = None,
        kv_budget: int | str | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
        device: str = "auto",
        threads: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load `model`: a directory, a .gguf file, a hub name, or None for the built-in model.

        The settings are those of `EngineConfig`; `kv_budget` may be written "2GiB". `threads` sets how many threads
        torch computes with, in the whole process. `progress` is told of downloads, loading and prompts.

        Raises ModelNotFoundError, DownloadError, ConfigError, WeightError or TokenizerError.
        """
        settings = EngineConfig(
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            kv_budget=None if kv_budget is None else parse_size(kv_budget),
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            device=device,
        )
        if threads is not None:
            _set_threads(threads)
        source = resolve(model, progress=progress)
        defaults, end_ids = load_generation_defaults(source)
        self._set_up(build_engine(source, settings, end_ids, progress), defaults, progress)

    @classmethod
    def from_engine(
        cls, engine: Engine, *, defaults: GenerationDefaults | None = None, progress: Progress | None = None
    ) -> Self:
        """Wrap an engine built from parts; from now on only the LLM may touch it."""
        llm = cls.__new__(cls)
        llm._set_up(engine, defaults or GenerationDefaults(), progress)
        return llm

    def _set_up(self, engine: Engine, defaults: GenerationDefaults, progress: Progress | None) -> None:
        self._worker: Worker | None = Worker(engine)
        self._defaults = defaults
        self._progress = progress or NoProgress()
        self._reporting = threading.Lock()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several at once; a prompt with n samples gives n completions, all in order.

        `sampling` is for all prompts, or a list with one for each; None: `default_sampling()`. Raises RequestError (or
        one of its kinds) before any work where a prompt cannot be run, and what a failing step raised.
        """
        worker = self._open()
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        params = self._sampling_for(len(listed), sampling)
        requests = [
            self._request(prompt, param, f"prompt {place}: " if len(listed) > 1 else "")
            for place, (prompt, param) in enumerate(zip(listed, params, strict=True))
        ]
        return self._run(worker, requests)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Complete one prompt token by token; work begins with the first event asked for.

        Closing or dropping the iterator ends the request and frees its pages. Raises as `generate`, at the call.
        """
        worker = self._open()
        (params,) = self._sampling_for(1, sampling)
        return self._events(worker, self._request(prompt, params))

    def chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Completion:
        """The model's reply to a conversation, by its chat template. Raises as `generate`; SamplingError for n > 1."""
        worker = self._open()
        request = self._chat_request(messages, sampling)
        if request.sampling.n > 1:
            raise SamplingError(f"n={request.sampling.n}: chat gives one reply; use generate for several")
        return self._run(worker, [request])[0]

    def stream_chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """`chat`, token by token, as `stream`."""
        worker = self._open()
        return self._events(worker, self._chat_request(messages, sampling))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with what the model wants at its start. Raises TokenizerError."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Raises TokenizerError where the model has no tokenizer."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def default_sampling(self, **changes: Any) -> SamplingParams:
        """The sampling that the model's generation_config.json recommends, with `changes` on top."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self._defaults, name) for name in names}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None} | changes)

    def close(self) -> None:
        """Abort what runs and release model and pool; every later call raises EngineClosedError."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()

    def __enter__(self) -> Self:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def config(self) -> ModelConfig:
        """The model's configuration."""
        return self._engine.runner.model.config

    @property
    def layout(self) -> KVLayout:
        """What the pool keeps a token, plane by plane."""
        return self._engine.pool.layout

    @property
    def pool(self) -> SparseKVPool:
        """The KV pool; not to be written to while requests run."""
        return self._engine.pool

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError where it has none."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise TokenizerError("the model has no tokenizer: give it token ids instead of text")
        return tokenizer

    @property
    def stats(self) -> EngineStats:
        """Tokens and seconds so far, and how full the pool is."""
        return self._engine.stats

    @property
    def _engine(self) -> Engine:
        return self._open().engine

    def _open(self) -> Worker:
        if self._worker is None:
            raise EngineClosedError("the LLM is closed")
        return self._worker

    def _sampling_for(
        self, count: int, sampling: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling or self.default_sampling()] * count
        if not isinstance(sampling, Sequence):
            raise RequestError(f"sampling is of type {type(sampling).__name__}, not SamplingParams or a list of them")
        if len(sampling) != count:
            raise RequestError(f"there are {count} prompts and {len(sampling)} sampling parameters")
        return list(sampling)

    def _request(self, prompt: Prompt, sampling: SamplingParams, place: str = "") -> Request:
        """A request that can be run. Messages of its errors begin with `place`."""
        try:
            ids = self.encode(prompt) if isinstance(prompt, str) else prompt
            checked = self._engine.limits.check(ids, sampling)
            return Request(checked, sampling, continues=isinstance(prompt, str))
        except RequestError as error:
            raise type(error)(f"{place}{error}") from None

    def _chat_request(self, messages: Sequence[Message], sampling: SamplingParams | None) -> Request:
        (params,) = self._sampling_for(1, sampling)
        return Request(self._engine.limits.check(self.tokenizer.encode_chat(messages), params), params)

    def _run(self, worker: Worker, requests: Sequence[Request]) -> list[Completion]:
        done: dict[tuple[int, int], Completion] = {}
        with (
            _Prefill(self._progress, self._reporting, requests) as prefill,
            worker.running(requests, prefill.advance) as ids,
        ):
            order = [(key, index) for key, r in zip(ids, requests, strict=True) for index in range(r.sampling.n)]
            while len(done) < len(order):
                for event in worker.next_events(ids):
                    if event.error is not None:
                        raise event.error
                    if event.completion is not None:
                        done[event.request_id, event.token.index] = event.completion
        return [done[key] for key in order]

    def _events(self, worker: Worker, request: Request) -> Iterator[TokenEvent]:
        left = request.sampling.n
        with (
            _Prefill(self._progress, self._reporting, [request]) as prefill,
            worker.running([request], prefill.advance) as ids,
        ):
            while left:
                for event in worker.next_events(ids):
                    if event.error is not None:
                        raise event.error
                    left -= event.completion is not None
                    yield event.token

    @contextmanager
    def _running(self, worker: Worker, requests: Sequence[Request]) -> Iterator[list[int]]:
        """The ids of requests that run inside the block and end with it; how far their prompts are is reported."""
        prompts = _Prefill(self._progress, self._reporting, requests)
        with prompts, worker.running(requests, prompts.advance) as ids:
            yield ids


class _Prefill:
    """Shows how far the prompts of one call are, and is done as soon as they are.

    A Progress hears of one task at a time: while one call holds `reporting`, the prompts of others are not shown.
    """

    def __init__(self, progress: Progress, reporting: threading.Lock, requests: Sequence[Request]) -> None:
        self._progress, self._reporting = progress, reporting
        self._left = sum(len(request.prompt_token_ids) for request in requests)

    def __enter__(self) -> Self:
        if self._left and self._reporting.acquire(blocking=False):
            self._progress.start("reading the prompt", self._left, "tokens")
        else:
            self._left = 0
        return self

    def advance(self, tokens: int) -> None:
        """`tokens` more are in the pool."""
        if self._left:
            self._progress.advance(tokens)
            self._left -= tokens
            if not self._left:
                self._finish()

    def __exit__(self, *_: object) -> None:
        if self._left:
            self._left = 0
            self._finish()

    def _finish(self) -> None:
        self._reporting.release()
        self._progress.finish()


def _set_threads(threads: int) -> None:
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"threads={threads!r} must be a whole number of at least 1")
    torch.set_num_threads(threads)
