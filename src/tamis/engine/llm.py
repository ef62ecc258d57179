"""The library's front door: a model, its engine and its tokenizer behind a few blocking calls."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Self

from tamis.config import GenerationDefaults
from tamis.engine.engine import Engine
from tamis.engine.front import Front, Message, Prompt
from tamis.engine.prefill_report import PrefillReport
from tamis.engine.sequence import EngineEvent, RequestState
from tamis.engine.thread import Delivery, EngineThread, take
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import EngineClosedError, RequestError, SamplingError
from tamis.progress import Progress
from tamis.request import Completion, PrefillProgress, SamplingParams, TokenEvent
from tamis.units import show


class LLM(Front):
    """A language model, ready to generate. Safe to use from several threads, whose requests share the batches.

    >>> with LLM() as llm:
    ...     print(llm.chat([{"role": "user", "content": "What is the capital of France?"}]).text)
    """

    def _set_up(self, engine: Engine, defaults: GenerationDefaults, progress: Progress | None, model_name: str) -> None:
        super()._set_up(engine, defaults, progress, model_name)
        self._closed = False
        self._reporting: dict[str, object] = {}

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Complete one prompt or several at once; a prompt with n samples gives n completions, all in order.

        `sampling` is for all prompts, or a list with one for each; None: `default_sampling()`. Raises RequestError (or
        one of its kinds) before any work where a prompt cannot be run, and what a failing step raised.
        """
        self._running()
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | Mapping):
            raise RequestError(f"prompts={show(prompts)} is not text, a list of texts or a list of lists of token ids")
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        params = self._sampling_for(len(listed), sampling)
        requests = [
            self._request(prompt, param, f"prompt {place}: " if len(listed) > 1 else "")
            for place, (prompt, param) in enumerate(zip(listed, params, strict=True))
        ]
        return self._run(requests)

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Complete one prompt token by token; work begins with the first event asked for.

        Closing or dropping the iterator ends the request and frees its pages. Raises as `generate`, at the call.
        """
        self._running()
        (params,) = self._sampling_for(1, sampling)
        return self._events(self._request(prompt, params))

    def chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Completion:
        """The model's reply to a conversation, by its chat template. Raises as `generate`; SamplingError for n > 1."""
        self._running()
        request = self._chat_request(messages, sampling)
        if request.sampling.n > 1:
            raise SamplingError(f"n={request.sampling.n}: chat gives one reply; use generate for several")
        return self._run([request])[0]

    def stream_chat(self, messages: Sequence[Message], sampling: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """`chat`, token by token, as `stream`."""
        self._running()
        return self._events(self._chat_request(messages, sampling))

    def close(self) -> None:
        """Abort what runs and release model and pool; every later call raises EngineClosedError.

        A step that is being taken ends before its next layer.
        """
        self._closed = True
        self._thread.close()
        self._thread.join()

    def __enter__(self) -> Self:
        self._running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises TokenizerError where it has none."""
        return self._need_tokenizer()

    def _running(self) -> EngineThread:
        """Raises EngineClosedError, EngineDeadError."""
        if self._closed:
            raise EngineClosedError("the LLM is closed")
        self._thread.check_open()
        return self._thread

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

    def _request(self, prompt: Prompt, sampling: SamplingParams, place: str = "") -> RequestState:
        """A request that can be run. Messages of its errors begin with `place`."""
        try:
            return self._prepare(prompt, sampling)
        except RequestError as error:
            raise type(error)(f"{place}{error}") from None

    def _chat_request(self, messages: Sequence[Message], sampling: SamplingParams | None) -> RequestState:
        (params,) = self._sampling_for(1, sampling)
        return self._prepare(self.tokenizer.encode_chat(messages), params)

    def _run(self, requests: Sequence[RequestState]) -> list[Completion]:
        done: dict[tuple[int, int], Completion] = {}
        with closing(self._follow(requests)) as events:
            for place, event in events:
                if event.completion is not None:
                    done[place, event.token.index] = event.completion
        return [done[key] for key in sorted(done)]

    def _events(self, request: RequestState) -> Iterator[TokenEvent]:
        with closing(self._follow([request])) as events:
            for _, event in events:
                yield event.token

    def _follow(self, requests: Sequence[RequestState]) -> Generator[tuple[int, EngineEvent], None, None]:
        """Every event of `requests`, each with its request's place among them; raises the error of one that failed."""
        prefill = PrefillReport(self._progress, self._reporting, [len(request.prompt) for request in requests])
        mail: SimpleQueue[tuple[int, Delivery]] = SimpleQueue()
        left = sum(request.sampling.n for request in requests)
        try:
            if left:
                prefill.start()
                self._thread.submit(requests, [partial(_put, mail, place) for place in range(len(requests))])
            while left:
                place, item = take(mail)
                if isinstance(item, PrefillProgress):
                    prefill.advance(place, item)
                    continue
                error = item.error if isinstance(item, EngineEvent) else item
                if error is not None:
                    raise error
                assert isinstance(item, EngineEvent)
                left -= item.completion is not None
                yield place, item
        finally:
            try:
                self._leave(prefill, requests)
            except BaseException:  # an interrupt, perhaps before any of it had begun
                self._leave(prefill, requests)
                raise

    def _leave(self, prefill: PrefillReport, requests: Sequence[RequestState]) -> None:
        self._thread.abort(requests)
        prefill.finish()


def _put(mail: SimpleQueue[tuple[int, Delivery]], place: int, item: Delivery) -> None:
    mail.put((place, item))
