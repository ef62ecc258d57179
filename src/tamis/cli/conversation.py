"""A conversation that goes on turn by turn, and forgets its oldest turns when the context is full."""

from typing import TYPE_CHECKING

from tamis.request import SamplingParams

if TYPE_CHECKING:
    from tamis.engine.llm import LLM

ROOM_SHARE = 4
"""Without max_tokens, one part in this many of the context is kept free for a reply."""


class Conversation:
    """What was said so far, as chat messages. `system`, the first message, is never forgotten."""

    def __init__(self, llm: "LLM", sampling: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[tuple[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """Every message that is remembered, oldest first."""
        turns = [self._turn(said, reply) for said, reply in self._turns]
        return self._first + [message for turn in turns for message in turn]

    @property
    def room(self) -> int:
        """Tokens of prompt and reply together at most: the model's context, or the whole pool where that is less."""
        stats = self._llm.stats
        return min(self._llm.config.context_length, stats.pages_total * stats.page_size)

    def prompt(self, text: str) -> tuple[list[int], int]:
        """The token ids of the conversation with `text` said next, and how many turns had to be forgotten for it.

        The oldest go until a reply has room. What does not fit even alone is returned as it is: the engine refuses it
        with its numbers. Raises RequestError or TokenizerError where the chat template or the tokenizer refuses.
        """
        wanted = self._sampling.max_tokens or self.room // ROOM_SHARE
        forgotten = 0
        while True:
            said = self._first + [m for turn in self._turns[forgotten:] for m in self._turn(*turn)]
            ids = self._llm.tokenizer.encode_chat([*said, {"role": "user", "content": text}])
            if len(ids) + wanted <= self.room or forgotten == len(self._turns):
                return ids, forgotten
            forgotten += 1

    def add(self, text: str, reply: str, forgotten: int = 0) -> None:
        """Remember one more turn, and drop the `forgotten` oldest."""
        self._turns = [*self._turns[forgotten:], (text, reply)]

    def clear(self) -> None:
        """Forget every turn."""
        self._turns = []

    @staticmethod
    def _turn(said: str, reply: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
