"""How a weight matrix is stored: dense, or in groups of 32 numbers a row that share a scale.

A value of a group is `scale * q` (int8), `scale * (q - 8)` (int4 centred) or `scale * q + offset` (int4), with q in
-128..127 or 0..15 and fp16 scales and offsets. These are GGUF's Q8_0, Q4_0 and Q4_1 with each field in an array of its
own, so blocks of such a file are taken over without changing a value.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

GROUP = 32
"""Numbers that share a scale."""


class Format(enum.Enum):
    """What the numbers of a matrix are stored as."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"
    INT4 = "int4"
    INT4_CENTRED = "int4_centred"

    @property
    def is_quantised(self) -> bool:
        """Whether values share scales."""
        return self not in DENSE_DTYPES


DENSE_DTYPES: Mapping[Format, torch.dtype] = MappingProxyType({Format.FP32: torch.float32, Format.BF16: torch.bfloat16})


def dense_format(dtype: torch.dtype) -> Format:
    """The format of a plain matrix in fp32 or bf16."""
    return next(form for form, kind in DENSE_DTYPES.items() if kind is dtype)


@dataclass(frozen=True)
class Matrix:
    """One or several (experts) matrices of `rows x width`; every part has the leading dimensions [..., rows]."""

    format: Format
    values: Tensor
    """[..., rows, width] fp32, bf16 or int8; int4: uint8 [..., rows, width / 2], where byte j of a group of 32 holds
    number j in its low half and number j + 16 in its high half."""
    scales: Tensor | None = None
    """fp16 [..., rows, width / 32]."""
    offsets: Tensor | None = None
    """fp16 [..., rows, width / 32], of INT4 alone."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., rows, width], counted in numbers."""
        packed = self.format in (Format.INT4, Format.INT4_CENTRED)
        return (*self.values.shape[:-1], self.values.shape[-1] * (2 if packed else 1))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that hold it."""
        return tuple(part for part in (self.values, self.scales, self.offsets) if part is not None)

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return sum(part.nbytes for part in self.parts)

    def describe(self) -> str:
        """Format and shape, such as "int4[49152, 576]": part of what identifies the weights of a model."""
        return f"{self.format.value}{list(self.shape)}"

    def __getitem__(self, index: int | slice | Tensor) -> "Matrix":
        """Part of the leading dimension: an expert of several, or some of the rows."""
        return Matrix(self.format, *(part[index] for part in self.parts))

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The numbers in `dtype`, [..., rows, width]; no copy where they are stored so."""
        if self.scales is None:
            return self.values.to(dtype)
        groups = grouped(self._integers()).to(torch.float32)
        if self.format is Format.INT4_CENTRED:
            groups -= 8
        groups *= self.scales.float()[..., None]
        if self.offsets is not None:
            groups += self.offsets.float()[..., None]
        return groups.flatten(-2).to(dtype)

    def _integers(self) -> Tensor:
        if self.format is Format.INT8:
            return self.values
        halves = grouped(self.values, GROUP // 2)
        return torch.cat([halves & 15, halves >> 4], dim=-1).flatten(-2)


def grouped(values: Tensor, size: int = GROUP) -> Tensor:
    """[..., n] -> [..., n / size, size]."""
    return values.reshape(*values.shape[:-1], -1, size)


def empty_matrix(form: Format, shape: tuple[int, ...]) -> Matrix:
    """A matrix without values. The width of a quantised one is a multiple of 32."""
    if not form.is_quantised:
        return Matrix(form, torch.empty(shape, dtype=DENSE_DTYPES[form]))
    *lead, width = shape
    scales = torch.empty((*lead, width // GROUP), dtype=torch.float16)
    if form is Format.INT8:
        return Matrix(form, torch.empty(shape, dtype=torch.int8), scales)
    values = torch.empty((*lead, width // 2), dtype=torch.uint8)
    return Matrix(form, values, scales, torch.empty_like(scales) if form is Format.INT4 else None)


def encode(values: Tensor, form: Format) -> Matrix:
    """Store `values` [..., rows, width] in a format: the dense ones round, the quantised ones fit each group by itself.

    int8 spans the largest magnitude of a group, int4 its range; int4 centred is for files that have it, and never made.
    """
    if not form.is_quantised:
        return Matrix(form, values.to(DENSE_DTYPES[form]))
    if form is Format.INT4_CENTRED:
        raise ValueError("int4 centred is read from files, not made")
    groups = grouped(values.float())
    if form is Format.INT8:
        scales = (groups.abs().amax(dim=-1) / 127).half()
        return Matrix(form, _round(groups, scales, -127, 127).to(torch.int8).flatten(-2), scales)
    low, high = groups.amin(dim=-1), groups.amax(dim=-1)
    scales, offsets = ((high - low) / 15).half(), low.half()
    integers = _round(groups - offsets.float()[..., None], scales, 0, 15).to(torch.uint8)
    return Matrix(form, pack_nibbles(integers), scales, offsets)


def _round(groups: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    wide = scales.float()[..., None]
    return torch.where(wide == 0, 0.0, groups / wide).round().clamp(low, high)


def pack_nibbles(integers: Tensor) -> Tensor:
    """uint8 [..., groups, 32] of 0..15 -> [..., groups * 16]."""
    low, high = integers.chunk(2, dim=-1)
    return (low | (high << 4)).flatten(-2)


BLOCK_FORMATS: Mapping[str, Format] = MappingProxyType(
    {"Q8_0": Format.INT8, "Q4_0": Format.INT4_CENTRED, "Q4_1": Format.INT4}
)
"""GGUF block types that are taken over as they are, by the name of the type."""


def from_blocks(raw: Tensor, form: Format) -> Matrix:
    """Take GGUF blocks apart: raw uint8 [..., rows, bytes of a row], each block its scale, its offset, its integers."""
    fields = 2 if form is Format.INT4 else 1
    size = 2 * fields + (GROUP if form is Format.INT8 else GROUP // 2)
    blocks = grouped(raw, size)
    numbers = blocks[..., : 2 * fields].contiguous().view(torch.float16)
    integers = blocks[..., 2 * fields :].flatten(-2)
    values = integers.view(torch.int8) if form is Format.INT8 else integers
    return Matrix(form, values, *(numbers[..., i].contiguous() for i in range(fields)))
