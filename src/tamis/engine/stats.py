"""What an engine has done so far, and how full its pool is."""

from dataclasses import dataclass, field, replace

from tamis.engine.scheduler import Chunk
from tamis.engine.sequence import RequestState
from tamis.kv import PageUsage
from tamis.kv.offload import OffloadStats


@dataclass(frozen=True)
class EngineStats:
    """Counters as they stood after a step."""

    steps: int = 0
    prefill_tokens: int = 0
    """Tokens of prompts computed, and of replies computed again after a retraction."""
    prefill_seconds: float = 0.0
    """A step that mixes prompt tokens and replies is divided between the two by tokens."""
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    """Of the prompts that were read to their end."""
    hit_tokens: int = 0
    """Of these, tokens that the prefix cache had, or a KV tier."""
    retractions: int = 0
    """Requests that had to give their pages up for others, and went on later."""
    waiting: int = 0
    """Requests in the queue."""
    running: int = 0
    """Requests."""
    pages_peak: int = 0
    """The most pages that requests held at once so far."""
    pages: PageUsage = field(default_factory=lambda: PageUsage(0, 0, 0, 0))
    """By owner."""
    page_size: int = 0
    offload: OffloadStats | None = None
    """What was moved to and from KV tiers; None: there are none."""

    @property
    def pages_total(self) -> int:
        """Usable pages of the pool."""
        return self.pages.total

    @property
    def pages_used(self) -> int:
        """Pages that requests hold."""
        return self.pages.held

    @property
    def pages_cached(self) -> int:
        """Pages that only the prefix cache holds."""
        return self.pages.cached


class Counters:
    """Adds up what the steps of one engine did."""

    def __init__(self) -> None:
        self.stats = EngineStats()

    def add_step(self, chunks: list[Chunk], seconds: float) -> None:
        """A step of these chunks took so long."""
        prefill = sum(len(chunk.token_ids) for chunk in chunks if chunk.is_prefill)
        total = sum(len(chunk.token_ids) for chunk in chunks)
        old = self.stats
        self.stats = replace(
            old,
            steps=old.steps + 1,
            prefill_tokens=old.prefill_tokens + prefill,
            prefill_seconds=old.prefill_seconds + seconds * prefill / total,
            decode_tokens=old.decode_tokens + total - prefill,
            decode_seconds=old.decode_seconds + seconds * (total - prefill) / total,
        )

    def add_prompt(self, request: RequestState) -> None:
        """A prompt was read to its end."""
        old = self.stats
        self.stats = replace(
            old,
            prompt_tokens=old.prompt_tokens + len(request.prompt),
            hit_tokens=old.hit_tokens + request.cached_tokens,
        )

    def see_held(self, pages: int) -> None:
        """So many pages are held by requests now."""
        if pages > self.stats.pages_peak:
            self.stats = replace(self.stats, pages_peak=pages)
