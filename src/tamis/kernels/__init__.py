"""Kernels over the paged pool: one `Ops` protocol, backends chosen once. `reference` is the specification."""

from contextlib import AbstractContextManager, nullcontext

from tamis.config import EngineConfig
from tamis.kernels.dense import TorchModelOps
from tamis.kernels.linear import LayerRunner, ModelOps
from tamis.kernels.ops import AttentionBatch, LayerPlanes, Ops, combine_partials
from tamis.kernels.reference import ReferenceOps
from tamis.progress import Progress

__all__ = [
    "AttentionBatch", "LayerPlanes", "Ops", "ReferenceOps", "choose_layers", "choose_model_ops", "choose_ops",
    "combine_partials", "report_compiling",
]  # fmt: skip


def choose_ops(settings: EngineConfig) -> tuple[Ops, str]:
    """The backend for these settings, which are resolved, and why it was chosen."""
    if settings.kernels == "reference":
        return ReferenceOps(), "it was asked for"
    # Imported here: tamis.kernels is usable without Numba.
    from tamis.kernels.cpu.ops import CpuOps

    reason = "it was asked for" if settings.kernels == "cpu" else "the device is a CPU"
    return CpuOps(settings.threads or 1), reason


def choose_model_ops(ops: Ops) -> ModelOps:
    """What goes with an attention backend for the rest of the model; it shares the backend's threads."""
    if ops.name != "cpu":
        return TorchModelOps()
    from tamis.kernels.cpu.model import CpuModelOps
    from tamis.kernels.cpu.ops import CpuOps

    assert isinstance(ops, CpuOps)
    return CpuModelOps(ops.team)


def choose_layers(ops: Ops, model_ops: ModelOps) -> LayerRunner | None:
    """What runs whole layers in a piece, where these backends have such a thing."""
    if ops.name != "cpu" or model_ops.name != "cpu":
        return None
    from tamis.kernels.cpu.fused import FusedLayers
    from tamis.kernels.cpu.model import CpuModelOps
    from tamis.kernels.cpu.ops import CpuOps

    assert isinstance(ops, CpuOps) and isinstance(model_ops, CpuModelOps)
    return FusedLayers(ops, model_ops)


def report_compiling(ops: Ops, progress: Progress) -> AbstractContextManager[None]:
    """A block that tells `progress` when a kernel of `ops` has to be compiled in it and is not in the cache."""
    if ops.name != "cpu":
        return nullcontext()
    from tamis.kernels.cpu.compiling import report_to

    return report_to(progress)
