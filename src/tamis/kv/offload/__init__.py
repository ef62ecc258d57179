"""Moving pages between the pool and the tiers while the engine goes on."""

from tamis.kv.offload.figures import OffloadStats
from tamis.kv.offload.loading import Lookup
from tamis.kv.offload.offload import KVOffload
from tamis.kv.offload.saving import SaveTicket
from tamis.kv.offload.settings import OffloadConfig

__all__ = ["KVOffload", "Lookup", "OffloadConfig", "OffloadStats", "SaveTicket"]
