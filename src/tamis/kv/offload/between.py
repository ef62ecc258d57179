"""What loading and saving share: the two ends, and where both keep their figures."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from tamis.kv.manager import KVManager
from tamis.kv.offload.figures import Failures, OffloadStats
from tamis.kv.offload.saving import MakeKeys
from tamis.kv.offload.settings import OffloadConfig
from tamis.kv.tiers.base import Tier


@dataclass(frozen=True)
class Between:
    """One pool and the tiers."""

    manager: KVManager
    tier: Tier
    make_keys: Callable[[Sequence[int], Hashable], MakeKeys]
    """Of token ids and salt."""
    config: OffloadConfig
    stats: OffloadStats
    failures: Failures
    news: Callable[[], None]
    """Called when there is something for `poll` to see."""
