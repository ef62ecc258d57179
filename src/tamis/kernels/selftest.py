"""A backend against the reference on this machine, on small random batches: what `tamis doctor` runs.

The tests compare more shapes, and more closely; this is for machines that the tests never saw. Slots that belong to no
token hold NaN.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tamis.config import SparseAttentionConfig
from tamis.kernels.dense import TorchModelOps
from tamis.kernels.linear import Gate, GatedWeights, Linear, ModelOps
from tamis.kernels.ops import AttentionBatch, Ops
from tamis.kernels.quant import Format, dense_format, encode
from tamis.kernels.reference import ReferenceOps

SECONDS = 30.0
"""Time that no new comparison is begun after."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float8_e4m3fn: 2e-2}
"""Of the largest value compared, by the type of the planes or weights."""
_LENGTHS, _QUERIES, _PAGE = (1, 47, 300), (1, 3, 40), 16
_HEADS, _KV_HEADS, _DIM = 8, 2, 64
_SPARSE = SparseAttentionConfig(index_heads=2, index_head_dim=32, block_size=32, topk=4)
_WIDTH, _INNER = 128, 96


@dataclass(frozen=True)
class Check:
    """One comparison."""

    op: str
    kind: str
    """Types of the operands, and how many rows."""
    seconds: float
    difference: float
    """The largest, as a share of the largest value."""
    tolerance: float
    fault: str | None = None
    """Why there is no difference to tell, where the backend raised."""

    @property
    def passed(self) -> bool:
        """Whether the backend does what the reference does."""
        return self.fault is None and self.difference <= self.tolerance


@dataclass(frozen=True)
class SelfTest:
    """What was compared."""

    checks: tuple[Check, ...]
    skipped: int
    """Comparisons that the time was too short for."""
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing that was compared differs."""
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class _Case:
    op: str
    kind: str
    tolerance: float
    run: Callable[[], tuple[Tensor, Tensor]] = field(repr=False)
    """What the backend gives, and the reference."""


def self_test(ops: Ops, model_ops: ModelOps, *, seconds: float = SECONDS, seed: int = 0) -> SelfTest:
    """Compare `ops` and `model_ops` with plain torch, for about `seconds`; the first run of a kernel compiles it."""
    began = time.perf_counter()
    cases = [*_attention_cases(ops, seed), *_model_cases(model_ops, seed)]
    checks: list[Check] = []
    for case in cases:
        if time.perf_counter() - began > seconds:
            break
        checks.append(_check(case))
    return SelfTest(tuple(checks), len(cases) - len(checks), time.perf_counter() - began)


def _check(case: _Case) -> Check:
    began = time.perf_counter()
    difference, fault = math.inf, None
    try:
        difference = relative_difference(*case.run())
    except Exception as error:  # whatever a backend does on a strange machine is what we want to hear of
        fault = f"{type(error).__name__}: {error}"
    return Check(case.op, case.kind, time.perf_counter() - began, difference, case.tolerance, fault)


def relative_difference(got: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest value (at least 1); infinite where shapes, NaN or infinities differ."""
    got, wanted = got.float(), wanted.float()
    if got.shape != wanted.shape or not torch.equal(got.isfinite(), wanted.isfinite()):
        return math.inf
    finite = wanted.isfinite()
    if not torch.equal(got[~finite].nan_to_num(nan=0.5), wanted[~finite].nan_to_num(nan=0.5)):
        return math.inf
    if not finite.any():
        return 0.0
    return float((got - wanted)[finite].abs().max() / wanted[finite].abs().max().clamp(min=1.0))


def _attention_cases(ops: Ops, seed: int) -> Iterator[_Case]:
    reference = ReferenceOps()
    for q_dtype, kv_dtype in (
        (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.float32, torch.float8_e4m3fn),
    ):  # fmt: skip
        step = _Step(q_dtype, kv_dtype, seed)
        kind = f"{_name(q_dtype)} over {_name(kv_dtype)}"
        tolerance = max(TOLERANCE[q_dtype], TOLERANCE[kv_dtype])
        for op, call in step.calls(reference).items():
            # Blocks are chosen by the backend's own scores, which may differ in the last place.
            tight = 0.0 if op in ("write_pages", "gather_pages", "select_blocks") else tolerance
            yield _Case(op, kind, tight, lambda call=call: (call(ops), call(reference)))  # type: ignore[misc]


class _Step:
    """A ragged batch on planes of random contents."""

    def __init__(self, q_dtype: torch.dtype, kv_dtype: torch.dtype, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        counts = [-(-length // _PAGE) for length in _LENGTHS]
        self.pages = sum(counts) + 2
        ids = (torch.randperm(self.pages, generator=self._random) + 1).tolist()
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.batch = _batch(tables)
        slots = [[table[i // _PAGE] * _PAGE + i % _PAGE for i in range(length)]
                 for table, length in zip(tables, _LENGTHS, strict=True)]  # fmt: skip
        self.slots = torch.tensor([slot for row in slots for slot in row])
        self.k, self.v = (self._plane(_KV_HEADS, _DIM, kv_dtype) for _ in range(2))
        self.index_k, self.index_v = (self._plane(1, _SPARSE.index_head_dim, kv_dtype) for _ in range(2))
        self.q = self._values(sum(_QUERIES), _HEADS, _DIM).to(q_dtype)
        self.index_q = self._values(sum(_QUERIES), _SPARSE.index_heads, _SPARSE.index_head_dim).to(q_dtype)
        self.sinks = self._values(_HEADS)

    def calls(self, reference: Ops) -> dict[str, Callable[[Ops], Tensor]]:
        """Each operation on this batch. Scores and picks that others start from are the reference's."""
        batch, k, v = self.batch, self.k, self.v
        scores = reference.score_blocks(self.index_q, self.index_k, batch, _SPARSE)
        picks = reference.select_blocks(scores, batch.positions, _SPARSE)
        values = self._values(len(self.slots), _KV_HEADS, _DIM)
        return {
            "write_pages": lambda ops: self._written(ops, values),
            "gather_pages": lambda ops: ops.gather_pages(k, batch.page_table[-1], _LENGTHS[-1], 0.5),
            "score_blocks": lambda ops: ops.score_blocks(self.index_q, self.index_k, batch, _SPARSE),
            "select_blocks": lambda ops: ops.select_blocks(scores, batch.positions, _SPARSE),
            "sparse_attention": lambda ops: ops.sparse_attention(self.q, k, v, picks, batch, _SPARSE.block_size),
            "dense_attention": lambda ops: ops.dense_attention(self.q, k, v, batch, sinks=self.sinks),
            "index_value_attention": lambda ops: ops.index_value_attention(
                self.index_q, self.index_k, self.index_v, batch
            ),
        }

    def _written(self, ops: Ops, values: Tensor) -> Tensor:
        plane = torch.full_like(self.k.float(), float("nan")).to(self.k.dtype)
        ops.write_pages(plane, self.slots, values, 2.0)
        return plane

    def _plane(self, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
        plane = torch.full((self.pages + 1, heads, _PAGE, dim), float("nan")).to(dtype)
        ReferenceOps().write_pages(plane, self.slots, self._values(len(self.slots), heads, dim))
        return plane

    def _values(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._random)


def _batch(tables: list[list[int]]) -> AttentionBatch:
    columns = max(map(len, tables))
    starts = [sum(_QUERIES[:row]) for row in range(len(_QUERIES) + 1)]
    positions = [p for length, new in zip(_LENGTHS, _QUERIES, strict=True) for p in range(length - new, length)]
    rows = [table + [-1] * (columns - len(table)) for table in tables]
    return AttentionBatch(*(torch.tensor(values, dtype=torch.int32) for values in (rows, _LENGTHS, starts, positions)))


@dataclass(frozen=True)
class _Norm:
    weight: Tensor
    eps: float = 1e-6


def _model_cases(model_ops: ModelOps, seed: int) -> Iterator[_Case]:
    random = torch.Generator().manual_seed(seed)
    norm = _Norm(torch.rand(_WIDTH, generator=random) + 0.5)
    for dtype, form in ((torch.bfloat16, Format.BF16), (torch.float32, Format.FP32), (torch.bfloat16, Format.INT8),
                        (torch.bfloat16, Format.INT4)):  # fmt: skip
        up, down, head = (_linear(inputs, outputs, dtype, form, random) for inputs, outputs in (
            (_WIDTH, 2 * _INNER), (_INNER, _WIDTH), (_WIDTH, 2 * _WIDTH)))  # fmt: skip
        mlp = GatedWeights(up, down, Gate())
        for rows in (2, 40):
            x = torch.randn(rows, _WIDTH, generator=random)
            calls: dict[str, Callable[[ModelOps], Tensor]] = {
                "logits": lambda ops, x=x, head=head: ops.logits(x, norm, head),  # type: ignore[misc]
                "add_gated": lambda ops, x=x, mlp=mlp: _added(ops, x, norm, mlp),  # type: ignore[misc]
            }
            for op, call in calls.items():
                kind = f"{_name(dtype)}, {form.value} weights, {rows} rows"
                yield _Case(op, kind, TOLERANCE[dtype], lambda call=call: (call(model_ops), call(TorchModelOps())))  # type: ignore[misc]


def _added(ops: ModelOps, x: Tensor, norm: _Norm, mlp: GatedWeights) -> Tensor:
    total = x.clone()
    ops.add_gated(total, norm, mlp)
    return total


def _linear(inputs: int, outputs: int, dtype: torch.dtype, form: Format, random: torch.Generator) -> Linear:
    linear = Linear(inputs, outputs, dtype)
    linear.weight = encode(torch.randn(outputs, inputs, generator=random) * inputs**-0.5, form)
    assert form.is_quantised or form is dense_format(dtype)
    return linear


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
