"""Weight containers and their loading: what is stored, what it means, and that nothing else is held."""

import math
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from support import spellings, tiny
from support.linears import random_matrix
from support.running import chunked_logits, random_ids
from tamis.config import EngineConfig
from tamis.errors import ConfigError
from tamis.kernels.linear import Linear
from tamis.kernels.quant import BLOCK_FORMATS, Format, Matrix, encode, from_blocks
from tamis.models import load_config
from tamis.models.checkpoint import GGUFCheckpoint
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.loader import load_model
from tamis.models.weights import half_split_rows

BLOCKS = [Type.Q8_0, Type.Q4_0, Type.Q4_1]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def gguf_blocks(values: torch.Tensor, kind: Type) -> tuple[Matrix, torch.Tensor]:
    """`values` as the gguf package quantises them, taken apart by us, and what the package reads them back as."""
    raw = gguf.quants.quantize(values.numpy(), kind)
    wanted = torch.from_numpy(gguf.quants.dequantize(raw, kind))
    return from_blocks(torch.from_numpy(raw.view(np.uint8)), BLOCK_FORMATS[kind.name]), wanted


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_blocks_keep_their_values(kind: Type) -> None:
    matrix, wanted = gguf_blocks(torch.randn(3, 10, 96), kind)
    assert matrix.shape == (3, 10, 96)
    assert torch.equal(matrix.dense(torch.float32), wanted)
    assert torch.equal(matrix[1].dense(torch.float32), wanted[1])
    assert torch.equal(matrix[1][4:7].dense(torch.bfloat16), wanted[1, 4:7].bfloat16())


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_rows_of_blocks_move_as_rows_of_numbers_do(kind: Type) -> None:
    matrix, wanted = gguf_blocks(torch.randn(32, 64), kind)
    reorder = half_split_rows(4)
    moved = Matrix(matrix.format, *(reorder(part) for part in matrix.parts))
    assert torch.equal(moved.dense(torch.float32), reorder(wanted))


@pytest.mark.parametrize(("form", "steps"), [(Format.INT8, 254), (Format.INT4, 15)])
def test_a_number_is_off_by_half_a_step_of_its_group(form: Format, steps: int) -> None:
    values = torch.randn(7, 64) * torch.logspace(-3, 2, 7)[:, None]
    got = encode(values, form).dense(torch.float32)
    groups = values.reshape(7, 2, 32)
    span = 2 * groups.abs().amax(-1) if form is Format.INT8 else groups.amax(-1) - groups.amin(-1)
    # Scales are rounded to fp16, which moves the far end of a group by up to `steps` roundings of 2**-11.
    limit = span / steps * 0.5 + span * 2**-10
    assert bool(((got - values).reshape(7, 2, 32).abs() <= limit[..., None]).all())


@pytest.mark.parametrize("form", [Format.INT8, Format.INT4])
def test_constant_groups_are_kept(form: Format) -> None:
    values = torch.tensor([0.0, 2.0, -0.5]).repeat_interleave(32)[None]
    torch.testing.assert_close(encode(values, form).dense(torch.float32), values, rtol=1e-3, atol=0)


@pytest.mark.parametrize(("form", "bits"), [(Format.INT8, 8.5), (Format.INT4, 5), (Format.INT4_CENTRED, 4.5)])
def test_bytes_and_description(form: Format, bits: float) -> None:
    matrix = random_matrix(form, (6, 64))
    assert matrix.nbytes == 6 * 64 * bits / 8
    assert matrix.describe() == f"{form.value}[6, 64]"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tiny.build(tiny.m3_config(3), seed=4), tmp_path_factory.mktemp("m3"))


def load(path: Path, quant: str, dtype: torch.dtype = torch.float32) -> CausalLM:
    source = ModelSource(path.name, path, "gguf")
    return load_model(source, load_config(source), dtype=dtype, quant=quant)


def formats(model: CausalLM) -> dict[str, Format]:
    return {name: module.weight.format for name, module in model.named_modules() if isinstance(module, Linear)}


def test_auto_keeps_blocks_and_expands_what_does_not_fit_together(tmp_path: Path, saved: Path) -> None:
    odd = {"token_embd.weight": Type.Q8_0, "blk.1.attn_k.weight": Type.Q8_0, "blk.2.attn_output.weight": Type.F16}
    path = spellings.write_m3_gguf(saved, tmp_path / "tiny.gguf", lambda name: odd.get(name, Type.Q4_1))
    found = formats(load(path, "auto", torch.bfloat16))
    assert found.pop("embed_tokens") is Format.INT8
    assert {name for name, form in found.items() if form is Format.BF16} == {
        "layers.1.attention.qkv_proj", "layers.2.attention.o_proj"}  # fmt: skip
    assert {form for form in found.values() if form is not Format.BF16} == {Format.INT4}


@pytest.mark.parametrize(
    ("quant", "table", "others"),
    [("none", Format.FP32, Format.FP32), ("int8", Format.INT8, Format.INT8), ("int4", Format.INT8, Format.INT4)],
)
def test_the_setting_decides(tmp_path: Path, saved: Path, quant: str, table: Format, others: Format) -> None:
    path = spellings.write_m3_gguf(saved, tmp_path / "tiny.gguf", lambda _: Type.Q4_0)
    found = formats(load(path, quant))
    assert found.pop("embed_tokens") is found.pop("lm_head") is table
    assert set(found.values()) == {others}


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_kept_blocks_give_the_logits_of_dense_weights(tmp_path: Path, saved: Path, kind: Type) -> None:
    path = spellings.write_m3_gguf(saved, tmp_path / "tiny.gguf", lambda _: kind)
    dense, kept = load(path, "none"), load(path, "auto")
    assert set(formats(kept).values()) == {BLOCK_FORMATS[kind.name]}
    ids = random_ids(40, kept.config, 1)
    wanted, got = (chunked_logits(model, ids, [30, 10], page_size=2) for model in (dense, kept))
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_large_tensors_are_read_in_parts(tmp_path: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = spellings.write_m3_gguf(saved, tmp_path / "tiny.gguf", lambda _: Type.Q4_1)
    whole = load(path, "auto")
    largest: list[int] = []
    read = GGUFCheckpoint.read_blocks

    def watched(self: GGUFCheckpoint, name: str, part: slice | None = None) -> Matrix:
        matrix = read(self, name, part)
        largest.append(math.prod(matrix.shape))
        return matrix

    monkeypatch.setattr(GGUFCheckpoint, "read_blocks", watched)
    monkeypatch.setattr("tamis.models.loader.PART_NUMBERS", 1024)
    parts = load(path, "auto")
    # One expert of gate, up or down is the smallest part that can be cut off: 64 x 32 numbers.
    assert max(largest) == 2048
    for one, other in zip(whole.modules(), parts.modules(), strict=True):
        if isinstance(one, Linear) and isinstance(other, Linear):
            assert all(map(torch.equal, one.weight.parts, other.weight.parts))


def test_weights_describe_themselves(tmp_path: Path, saved: Path) -> None:
    model = load(spellings.write_m3_gguf(saved, tmp_path / "tiny.gguf"), "int4")
    assert model.get_submodule("layers.1.mlp.gate_up_proj").weight.describe() == "int4[4, 64, 64]"  # type: ignore[union-attr, operator]


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match="quant='int5' is not one of auto, none, int8, int4"):
        EngineConfig(quant="int5")
