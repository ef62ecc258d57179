"""Fill a model from a checkpoint: check every name and shape first, then stream tensor by tensor into place."""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator, Set
from pathlib import Path

import torch
from torch import nn

from tamis.config import ModelConfig
from tamis.errors import (
    BaseMismatchError,
    MissingTensorError,
    ModelNotFoundError,
    TensorShapeError,
    UnexpectedTensorError,
)
from tamis.kernels.linear import Linear
from tamis.kernels.quant import GROUP, Format, Matrix, dense_format, empty_matrix, encode
from tamis.models import llama, minimax_m3
from tamis.models.checkpoint import Checkpoint, SafetensorsCheckpoint, open_checkpoint
from tamis.models.decoder import CausalLM
from tamis.models.fingerprint import base_fingerprint
from tamis.models.hub import ModelSource
from tamis.models.index_branch import BRANCH_FILE, BRANCH_TENSORS, read_index_branch
from tamis.models.weights import Piece, WeightPlan
from tamis.progress import NoProgress, Progress

PART_NUMBERS = 1 << 24
"""Numbers of a checkpoint tensor that are converted at a time: 64 MiB in fp32."""


def load_model(
    source: ModelSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    quant: str = "auto",
    progress: Progress | None = None,
) -> CausalLM:
    """Build the model of `config` and read its weights (norms and routers stay fp32).

    `dtype` is what the model computes in and dense weights are kept in; `quant` see `EngineConfig.quant`. Beside the
    model, part of one checkpoint tensor is in memory at a time. An index branch beside the model stays dense.
    Raises MissingTensorError, UnexpectedTensorError, TensorShapeError, TensorDtypeError or CorruptFileError, each
    naming the tensor and the file; BaseMismatchError for an index branch that was made for other weights.
    """
    progress = progress or NoProgress()
    with contextlib.ExitStack() as stack:
        checkpoint = stack.enter_context(contextlib.closing(open_checkpoint(source)))
        plan = plan_weights(config, checkpoint.names(), gguf=source.kind == "gguf")
        check_plan(plan, checkpoint, source.path, source.name)
        if source.branch is None:
            branch = None
        else:
            branch = stack.enter_context(contextlib.closing(_open_branch(source, source.branch, config)))
        model = CausalLM(config, dtype)
        _fill(model, plan, checkpoint, dtype, quant, progress)
        if branch is not None:
            _fill(model, llama.branch_plan(config), branch, dtype, "none", progress)
    return model.eval()


def plan_weights(config: ModelConfig, names: frozenset[str], *, gguf: bool) -> WeightPlan:
    """Which tensors of a checkpoint that holds `names` fill which parameter of the model."""
    if config.family == "minimax_m3":
        return minimax_m3.weight_plan(config, names, gguf=gguf)
    return llama.weight_plan(config, gguf=gguf)


def _open_branch(source: ModelSource, directory: Path, config: ModelConfig) -> Checkpoint:
    """The tensors of an index branch, checked; raises where they do not suit the configuration or the base."""
    path = directory / BRANCH_TENSORS
    if not path.is_file():
        raise ModelNotFoundError(f"{path}: no such file")
    checkpoint = SafetensorsCheckpoint(path)
    try:
        check_plan(llama.branch_plan(config), checkpoint, path, "branch")
        _check_base(source, directory)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def _check_base(source: ModelSource, directory: Path) -> None:
    wanted, found = read_index_branch(directory).base_fingerprint, base_fingerprint(source)
    if wanted != found:
        raise BaseMismatchError(
            f"{directory / BRANCH_FILE}: the index branch was made for other weights than those of {source.path}: "
            f"base_fingerprint={wanted!r}, found {found!r}"
        )


def check_plan(plan: WeightPlan, checkpoint: Checkpoint, path: Path, name: str) -> None:
    """Raise where a planned tensor is missing or misshapen, or a tensor has no place in the plan.

    `path` and `name`: where the checkpoint lies and what it is called, for messages.
    """
    names = checkpoint.names()
    planned = {piece.name: piece for pieces in plan.parameters.values() for piece in pieces}
    ignored = re.compile("|".join(plan.ignored)) if plan.ignored else None
    extra = sorted(each for each in names if each not in planned and not (ignored and ignored.match(each)))
    missing = [each for each in planned if each not in names]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        instead = f", but there is {_nearest(missing[0], extra)!r}, which has no place" if extra else ""
        raise MissingTensorError(f"tensor {missing[0]!r}{others} is missing in {path}{instead}")
    for tensor, piece in planned.items():
        if checkpoint.shape(tensor) != piece.shape:
            raise TensorShapeError(
                f"tensor {tensor!r} in {checkpoint.file(tensor)} has shape {list(checkpoint.shape(tensor))}, "
                f"but the configuration calls for {list(piece.shape)}"
            )
    if extra:
        others = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UnexpectedTensorError(
            f"tensor {extra[0]!r}{others} in {checkpoint.file(extra[0])} has no place in a {name} of this configuration"
        )


def _nearest(name: str, others: list[str]) -> str:
    """The one of `others` that is spelled most like `name`: what it was perhaps misnamed to."""
    return max(others, key=lambda other: _same_start(name, other) + _same_start(name[::-1], other[::-1]))


def _same_start(a: str, b: str) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _fill(
    model: CausalLM, plan: WeightPlan, checkpoint: Checkpoint, dtype: torch.dtype, quant: str, progress: Progress
) -> None:
    """Give every parameter its values, one at a time, so that nothing is held twice."""
    stored = sum(checkpoint.nbytes(piece.name) for pieces in plan.parameters.values() for piece in pieces)
    progress.start("loading weights", stored, "bytes")
    try:
        for name, pieces in plan.parameters.items():
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            if isinstance(module, Linear) and leaf == "weight":
                formats = {checkpoint.block_format(piece.name) for piece in pieces}
                form = choose_format(quant, dtype, name, pieces[0].shape[-1], formats)
                matrix = empty_matrix(form, module.shape)
                for piece in pieces:
                    _fill_matrix(matrix, piece, checkpoint)
                    progress.advance(checkpoint.nbytes(piece.name))
                module.weight = matrix
            else:
                value = torch.empty(module.get_parameter(leaf).shape)
                for piece in pieces:
                    tensor = checkpoint.read(piece.name)
                    value[piece.into].copy_(piece.transform(tensor) if piece.transform else tensor)
                    progress.advance(checkpoint.nbytes(piece.name))
                setattr(module, leaf, nn.Parameter(value, requires_grad=False))
    finally:
        progress.finish()


def choose_format(quant: str, dtype: torch.dtype, name: str, width: int, stored: Set[Format | None]) -> Format:
    """How the weight `name` of rows of `width` numbers is kept, by the setting `EngineConfig.quant`.

    `stored`: the formats its pieces have in the checkpoint. What cannot be quantised (a width that is no multiple of
    32) or kept as stored (pieces of several types, a type without kernels) stays or becomes dense.
    """
    dense = dense_format(dtype)
    if quant == "none" or width % GROUP:
        return dense
    if quant == "auto":
        return next(iter(stored)) or dense if len(stored) == 1 else dense
    # Tokens are told apart by these two tables; 4 bits cost more there than anywhere else.
    table = name in ("embed_tokens.weight", "lm_head.weight")
    return Format.INT8 if quant == "int8" or table else Format.INT4


def _fill_matrix(matrix: Matrix, piece: Piece, checkpoint: Checkpoint) -> None:
    """Put one checkpoint tensor into its place in `matrix`, some rows at a time."""
    keeps = checkpoint.block_format(piece.name) is matrix.format
    for part in _parts(piece):
        if keeps:
            source = checkpoint.read_blocks(piece.name, part)
        else:
            source = encode(checkpoint.read(piece.name, part), matrix.format)
        for target, values in zip(matrix.parts, source.parts, strict=True):
            target[piece.into][part].copy_(piece.transform(values) if piece.transform else values)


def _parts(piece: Piece) -> Iterator[slice]:
    """The first dimension of a piece in parts of about PART_NUMBERS numbers; whole where a transform needs all rows."""
    total = piece.shape[0]
    step = total if piece.transform else max(1, PART_NUMBERS * total // math.prod(piece.shape))
    return (slice(start, min(start + step, total)) for start in range(0, total, step))
