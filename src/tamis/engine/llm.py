"""The library's front door: a model, its engine and its tokenizer behind a few blocking calls."""

import threading
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tamis.config import EngineConfig, GenerationDefaults, ModelConfig
from tamis.engine.build import build_engine
from tamis.engine.engine import Engine, EngineEvent, EngineStats
from tamis.engine.prefill_report import PrefillReport
from tamis.engine.tokenizer import Tokenizer
from tamis.engine.worker import Worker
from tamis.errors import ConfigError, EngineClosedError, RequestError, SamplingError, TokenizerError
from tamis.kv import KVLayout, SparseKVPool
from tamis.models import load_generation_defaults, resolve
from tamis.progress import NoProgress, Progress
from tamis.request import Completion, Request, SamplingParams, TokenEvent
from tamis.units import parse_size, show

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
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        page_size: int | None = None,
        kv_budget: int | str | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 64,
        device: str = "auto",
        quant: str = "auto",
        threads: int | None = None,
        kernels: str = "auto",
        progress: Progress | None = None,
    ) -> None:
        """Load `model`: a directory, a .gguf file, a hub name, or None for the built-in model.

        The settings are those of `EngineConfig`; `kv_budget` may be written "2GiB". `threads` counts for the
        whole process. `progress` is told of downloads, loading and prompts.

        Raises ModelNotFoundError, DownloadError, ConfigError, WeightError or TokenizerError.
        """
        if not isinstance(model, str | Path | None):
            raise ConfigError(f"model={show(model)} is not a name or a path")
        settings = EngineConfig(
            dtype=dtype,
            kv_dtype=kv_dtype,
            page_size=page_size,
            kv_budget=None if kv_budget is None else parse_size(kv_budget),
            max_batch_tokens=max_batch_tokens,
            max_num_seqs=max_num_seqs,
            device=device,
            quant=quant,
            threads=threads,
            kernels=kernels,
        )
        source = resolve(None if model is None else str(model), progress=progress)
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
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
            raise RequestError(f"prompts={show(prompts)} is not text, a list of texts or a list of lists of token ids")
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
        """Abort what runs and release model and pool; every later call raises EngineClosedError.

        A step that is being taken ends first. In a signal's handler that interrupted a step, `close` returns at once,
        and the rest happens as soon as the step has ended.
        """
        worker = self._worker
        if worker is not None:
            with worker.signals:
                self._worker = None
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
        # One gate around it all: an interrupt finds no moment in which requests are queued and nobody's.
        with worker.signals, closing(self._follow(worker, requests)) as events:
            for place, event in events:
                if event.completion is not None:
                    done[place, event.token.index] = event.completion
        return [done[key] for key in sorted(done)]

    def _events(self, worker: Worker, request: Request) -> Iterator[TokenEvent]:
        with closing(self._follow(worker, [request])) as events:
            for _, event in events:
                yield event.token

    def _follow(self, worker: Worker, requests: Sequence[Request]) -> Generator[tuple[int, EngineEvent], None, None]:
        """Every event of `requests`, each with its request's place among them; raises the error of one that failed."""
        prefill = PrefillReport(self._progress, self._reporting, worker.signals, requests)
        ids: list[int] = []
        left = sum(request.sampling.n for request in requests)
        try:
            if left:
                prefill.start()
                worker.submit(requests, ids)
            places = {request_id: place for place, request_id in enumerate(ids)}
            while left:
                for event in worker.next_events(ids, prefill.advance):
                    if event.error is not None:
                        raise event.error
                    left -= event.completion is not None
                    yield places[event.request_id], event
        finally:
            try:
                prefill.finish()
                worker.abort(ids)
            except BaseException:  # perhaps a signal's handler, before either had begun
                prefill.finish()
                worker.abort(ids)
                raise
