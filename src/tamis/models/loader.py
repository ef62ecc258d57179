"""Fill a model from a checkpoint: check every name and shape first, then stream tensor by tensor into place."""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from tamis.config import ModelConfig
from tamis.errors import MissingTensorError, TensorShapeError, UnexpectedTensorError
from tamis.models import llama, minimax_m3
from tamis.models.checkpoint import Checkpoint, open_checkpoint
from tamis.models.decoder import CausalLM
from tamis.models.hub import ModelSource
from tamis.models.weights import Piece, WeightPlan
from tamis.progress import NoProgress, Progress


def load_model(
    source: ModelSource, config: ModelConfig, *, dtype: torch.dtype, progress: Progress | None = None
) -> CausalLM:
    """Build the model of `config` and read its weights in `dtype` (norms and routers stay fp32).

    At most one checkpoint tensor is in memory beside the model. Raises MissingTensorError, UnexpectedTensorError,
    TensorShapeError, TensorDtypeError or CorruptFileError, each naming the tensor and the file.
    """
    checkpoint = open_checkpoint(source)
    try:
        model = CausalLM(config, dtype)
        gguf = source.kind == "gguf"
        if config.family == "minimax_m3":
            plan = minimax_m3.weight_plan(config, checkpoint.names(), gguf=gguf)
        else:
            plan = llama.weight_plan(config, gguf=gguf)
        check_plan(plan, checkpoint, source)
        model.load_state_dict(dict(_filled(model, plan, checkpoint, progress or NoProgress())), assign=True)
    finally:
        checkpoint.close()
    return model.eval()


def check_plan(plan: WeightPlan, checkpoint: Checkpoint, source: ModelSource) -> None:
    """Raise where a planned tensor is missing or misshapen, or a tensor has no place in the plan."""
    names = checkpoint.names()
    planned = {piece.name: piece for pieces in plan.parameters.values() for piece in pieces}
    missing = [name for name in planned if name not in names]
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MissingTensorError(f"tensor {missing[0]!r}{others} is missing in {source.path}")
    for name, piece in planned.items():
        if checkpoint.shape(name) != piece.shape:
            raise TensorShapeError(
                f"tensor {name!r} in {checkpoint.file(name)} has shape {list(checkpoint.shape(name))}, "
                f"but the configuration calls for {list(piece.shape)}"
            )
    ignored = re.compile("|".join(plan.ignored)) if plan.ignored else None
    extra = sorted(name for name in names if name not in planned and not (ignored and ignored.match(name)))
    if extra:
        others = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise UnexpectedTensorError(
            f"tensor {extra[0]!r}{others} in {checkpoint.file(extra[0])} has no place in a {source.name} "
            f"of this configuration"
        )


def _filled(
    model: CausalLM, plan: WeightPlan, checkpoint: Checkpoint, progress: Progress
) -> Iterator[tuple[str, Tensor]]:
    """Each parameter with its values; one at a time, so that nothing is held twice."""
    progress.start(
        "loading weights", sum(checkpoint.nbytes(p.name) for ps in plan.parameters.values() for p in ps), "bytes"
    )
    for name, parameter in model.state_dict().items():
        value = torch.empty(parameter.shape, dtype=parameter.dtype)
        for piece in plan.parameters[name]:
            _copy(value, piece, checkpoint)
            progress.advance(checkpoint.nbytes(piece.name))
        yield name, value
    progress.finish()


def _copy(value: Tensor, piece: Piece, checkpoint: Checkpoint) -> None:
    tensor = checkpoint.read(piece.name)
    if piece.transform is not None:
        tensor = piece.transform(tensor)
    target = value[piece.into] if piece.into else value
    target.copy_(tensor)
