"""What the two front doors of an engine share: opening a model, and making requests of prompts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict

from tamis.config import EngineConfig, GenerationDefaults, ModelConfig
from tamis.engine.build import build_engine
from tamis.engine.engine import Engine
from tamis.engine.limits import Limits
from tamis.engine.sequence import RequestState
from tamis.engine.sessions import Sessions
from tamis.engine.stats import EngineStats
from tamis.engine.thread import EngineThread
from tamis.engine.tokenizer import Tokenizer
from tamis.errors import ConfigError, TokenizerError
from tamis.kv import KVLayout, SparseKVPool
from tamis.kv.tiers.base import TierStat
from tamis.models import load_generation_defaults, resolve
from tamis.progress import NoProgress, Progress
from tamis.request import Request, SamplingParams
from tamis.units import parse_size, show

Message = Mapping[str, Any]
"""A chat message: "role", "content", and whatever else the model's template reads."""
Prompt = str | Sequence[int]
"""Text, or token ids."""


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of `Front`; each is described at its namesake in `EngineConfig`."""

    dtype: str
    kv_dtype: str
    page_size: int | None
    kv_budget: int | str | None
    max_batch_tokens: int
    max_num_seqs: int
    device: str
    quant: str
    threads: int | None
    kernels: str
    prefix_cache: bool
    step_seconds: float | None
    kv_tiers: tuple[str, ...] | list[str]
    kv_tiers_optional: bool
    kv_write_through: bool
    progress: Progress | None


class Front:
    """A model with its tokenizer and an engine that runs in a thread of its own."""

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
        prefix_cache: bool = True,
        step_seconds: float | None = None,
        kv_tiers: tuple[str, ...] | list[str] = (),
        kv_tiers_optional: bool = False,
        kv_write_through: bool = False,
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
            prefix_cache=prefix_cache,
            step_seconds=step_seconds,
            kv_tiers=tuple(kv_tiers) if isinstance(kv_tiers, list) else kv_tiers,
            kv_tiers_optional=kv_tiers_optional,
            kv_write_through=kv_write_through,
        )
        source = resolve(None if model is None else str(model), progress=progress)
        defaults, end_ids = load_generation_defaults(source)
        self._set_up(build_engine(source, settings, end_ids, progress), defaults, progress, source.name)

    @classmethod
    def from_engine(
        cls,
        engine: Engine,
        *,
        defaults: GenerationDefaults | None = None,
        progress: Progress | None = None,
        model_name: str = "model",
    ) -> Self:
        """Wrap an engine built from parts; from now on only its own thread may touch it."""
        front = cls.__new__(cls)
        front._set_up(engine, defaults or GenerationDefaults(), progress, model_name)
        return front

    def _set_up(self, engine: Engine, defaults: GenerationDefaults, progress: Progress | None, model_name: str) -> None:
        self.model_name = model_name
        self.defaults = defaults
        """Sampling defaults of the checkpoint."""
        self._progress = progress or NoProgress()
        self._thread = self._new_thread(engine)

    def _new_thread(self, engine: Engine) -> EngineThread:
        return EngineThread(engine)

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
    def stats(self) -> EngineStats:
        """Tokens and seconds so far, and how full the pool is."""
        return self._running().stats

    @property
    def limits(self) -> Limits:
        """The sizes that bound a request."""
        return self._engine.limits

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with what the model wants at its start. Raises TokenizerError."""
        return self._need_tokenizer().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids. Raises TokenizerError where the model has no tokenizer."""
        return self._need_tokenizer().decode(token_ids, skip_special_tokens=skip_special_tokens)

    def default_sampling(self, **changes: Any) -> SamplingParams:
        """The sampling that the model's generation_config.json, or its authors, recommend, with `changes` on top."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self.defaults, name) for name in names}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None} | changes)

    @property
    def tier_stats(self) -> list[TierStat]:
        """What each KV tier holds and was asked for, the fastest first; empty where there are none."""
        offload = self._engine.offload
        return [] if offload is None else offload.tier_stats()

    @property
    def sessions(self) -> Sessions:
        """Named sessions: prompts that KV tiers keep."""
        return Sessions(self._running(), lambda prompt, sampling, salt: self._prepare(prompt, sampling, salt=salt))

    def check(self) -> None:
        """Assert that every page is accounted for (`KVManager.check`); waits for the step that is being taken."""
        self._running().call(Engine.check)

    @property
    def _engine(self) -> Engine:
        return self._running().engine

    def _running(self) -> EngineThread:
        return self._thread

    def _need_tokenizer(self) -> Tokenizer:
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise TokenizerError("the model has no tokenizer: give it token ids instead of text")
        return tokenizer

    def _prepare(
        self, prompt: Prompt, sampling: SamplingParams, *, salt: str = "", continues: bool | None = None
    ) -> RequestState:
        """A request that can be run; whether the reply carries on its text, None: where the prompt is text.

        Raises RequestError, or one of its kinds, and TokenizerError.
        """
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        carries_on = isinstance(prompt, str) if continues is None else continues
        return self._engine.prepare(Request(ids, sampling, carries_on, salt))
