"""Kernels over the paged pool: one `Ops` protocol, backends chosen once. `reference` is the specification."""

from tamis.kernels.ops import AttentionBatch, Ops, combine_partials
from tamis.kernels.reference import ReferenceOps

__all__ = ["AttentionBatch", "Ops", "ReferenceOps", "choose_ops", "combine_partials"]


def choose_ops(device: str) -> tuple[Ops, str]:
    """The backend for `device` and why it was chosen."""
    return ReferenceOps(), f"the torch reference is the only backend, on {device}"
