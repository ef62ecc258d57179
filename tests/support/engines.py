"""Engines over a model without weights, whose tokens are exact: for tests of scheduling, sampling and bookkeeping."""

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tamis.config import LayerKind, ModelConfig, RopeConfig
from tamis.engine.batch import Batch
from tamis.engine.engine import Engine
from tamis.engine.runner import Runner
from tamis.engine.sequence import EngineEvent
from tamis.engine.tokenizer import Tokenizer
from tamis.kernels import ReferenceOps
from tamis.kv import KVLayout, SparseKVPool
from tamis.kv.offload import OffloadConfig
from tamis.kv.tiers.base import Tier
from tamis.models.attention import StepContext
from tamis.models.decoder import CausalLM
from tamis.request import Completion, Request, SamplingParams

VOCAB = 50
END = 2


def hash_config(context: int = 64) -> ModelConfig:
    """One dense layer with room for a token id and a position."""
    return ModelConfig(
        family="llama", model_type="llama", vocab_size=VOCAB, hidden_size=2, num_layers=1, q_heads=1, kv_heads=1,
        head_dim=2, intermediate_size=2, context_length=context, norm_eps=1e-5, rope=RopeConfig(1e4, 2),
        layer_kinds=(LayerKind.DENSE,), eos_token_ids=(END,),
    )  # fmt: skip


class HashModel(CausalLM):
    """Logits are a hash of the whole context, read back from the pool: one wrong page changes every token after it."""

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.batch_sizes: list[int] = []
        self.fail_at_token: int | None = None
        """A step that holds this token raises RuntimeError."""
        self.nan_after: int | None = None
        """Logits that follow this token are NaN."""
        self.script: dict[int, int] = {}
        """By position: the token that certainly follows there, whatever the context."""

    def forward(self, token_ids: Tensor, step: StepContext, logit_rows: Tensor) -> Tensor:
        step.before_layer()
        self.batch_sizes.append(len(token_ids))
        step.batch.check(step.pool.layout.page_size, step.pool.num_pages)
        if self.fail_at_token in token_ids.tolist():
            raise RuntimeError("the kernel failed")
        rows = (len(token_ids), 1, 2)
        positions = step.batch.positions
        key, value = token_ids.float()[:, None, None].expand(rows), positions.float()[:, None, None].expand(rows)
        step.pool.set_kv_buffer(0, step.slots, key, value)
        logits = [self._logits(row, step) for row in logit_rows.tolist()]
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)

    def _logits(self, row: int, step: StepContext) -> Tensor:
        batch = step.batch
        seq = int(torch.searchsorted(batch.query_start, torch.tensor(row), right=True)) - 1
        length = int(batch.positions[row]) + 1
        keys, values = step.pool.get_kv_buffer(0)
        pages = batch.page_table[seq]
        tokens = step.ops.gather_pages(keys, pages, length)[:, 0, 0]
        places = step.ops.gather_pages(values, pages, length)[:, 0, 0]
        assert places.tolist() == list(range(length)), f"positions in the pool: {places.tolist()}"
        if length in self.script:
            return torch.zeros(VOCAB).index_fill(0, torch.tensor(self.script[length]), 100.0)
        logits = hash_logits([int(token) for token in tokens])
        return logits * torch.nan if int(tokens[-1]) == self.nan_after else logits


def hash_logits(context: Sequence[int]) -> Tensor:
    """What HashModel gives after `context`: fp32 [VOCAB]."""
    seed = zlib.crc32(bytes(context))
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def expected_greedy(prompt: Sequence[int], max_tokens: int, *, ends: Sequence[int] = (END,)) -> list[int]:
    """Greedy tokens of HashModel, an end id included."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(int(hash_logits(context).argmax()))
        if context[-1] in ends:
            break
    return context[len(prompt) :]


def make_engine(
    *,
    pages: int = 64,
    page_size: int = 4,
    context: int = 64,
    max_batch_tokens: int = 512,
    max_num_seqs: int = 64,
    tokenizer: Tokenizer | None = None,
    end_ids: Sequence[int] = (END,),
    prefix_cache: bool = True,
    step_seconds: float | None = None,
    tiers: Tier | None = None,
    offload: OffloadConfig | None = None,
) -> Engine:
    """An engine over a HashModel."""
    config = hash_config(context)
    pool = SparseKVPool(KVLayout.from_model(config, page_size=page_size, dtype=torch.float32), pages)
    return Engine(
        Runner(HashModel(config), pool, ReferenceOps()),
        max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs, tokenizer=tokenizer,
        end_ids=end_ids, prefix_cache=prefix_cache, step_seconds=step_seconds,
        tiers=tiers, fingerprint="hash", offload=offload,
    )  # fmt: skip


def model_of(engine: Engine) -> HashModel:
    """The engine's model."""
    model = engine.runner.model
    assert isinstance(model, HashModel)
    return model


class HeldStep:
    """From now on the engine's steps wait, before they compute, until `go_on` is set."""

    def __init__(self, engine: Engine) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._run = engine.runner.run
        engine.runner.run = self._wait_and_run  # type: ignore[method-assign,assignment]

    def _wait_and_run(self, batch: Batch, before_layer: Callable[[], None]) -> Tensor:
        self.begun.set()
        assert self.go_on.wait(60)
        return self._run(batch, before_layer)


def run(engine: Engine, max_steps: int = 2000) -> list[EngineEvent]:
    """Step until there is no work; the bookkeeping of pages is checked after every step."""
    events: list[EngineEvent] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return events
        events += engine.step()
        engine.check()
    raise AssertionError(f"still busy after {max_steps} steps")


def complete(engine: Engine, prompts: Sequence[Sequence[int]], *sampling: SamplingParams) -> list[list[Completion]]:
    """Completions of each prompt, by sample; one SamplingParams for all prompts or one for each."""
    params = list(sampling) * len(prompts) if len(sampling) == 1 else list(sampling)
    ids = [engine.add_request(Request(tuple(p), s)) for p, s in zip(prompts, params, strict=True)]
    done: dict[int, dict[int, Completion]] = {request_id: {} for request_id in ids}
    for event in run(engine):
        if event.completion is not None:
            assert event.token.index not in done[event.request_id], "a second terminal event"
            done[event.request_id][event.token.index] = event.completion
    return [[samples[index] for index in sorted(samples)] for samples in done.values()]


def greedy(max_tokens: int | None = 8, **changes: Any) -> SamplingParams:
    """Greedy sampling."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, **changes)
