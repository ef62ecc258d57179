"""How an engine deals with its tiers."""

from dataclasses import dataclass


@dataclass(frozen=True)
class OffloadConfig:
    """What is written when, and what is waited for. Times in seconds."""

    write_through: bool = False
    """Write a page as soon as it is computed; else when its sequence ends or gives it up."""
    layerwise: bool = True
    """Let a step begin while its later layers are still being read."""
    slots: int = 3
    """Loads at once."""
    lookup_seconds: float = 1.0
    """That a request waits for an answer from the tiers while none comes at all."""
    stall_seconds: float = 3.0
    """That a load may go without a part of a layer coming in."""
    load_seconds: float = 60.0
    """That a load may take where nothing is known of what computing takes."""
    rest_seconds: float = 10.0
    """That tiers are not asked after they did not answer in time."""
    flush_seconds: float = 10.0
    """That closing waits for pages to be written."""
