"""One step's work as plain data: no pool, no requests, no tensors, so that it can be sent to another process."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Batch:
    """T tokens of B sequences, filled row by row with `add`."""

    token_ids: list[int] = field(default_factory=list)
    """[T]"""
    positions: list[int] = field(default_factory=list)
    """[T], each token's place in its sequence, from 0."""
    slots: list[int] = field(default_factory=list)
    """[T], where each token's K and V go: page * page_size + offset."""
    page_tables: list[list[int]] = field(default_factory=list)
    """[B], the pages of each sequence in order."""
    seq_lens: list[int] = field(default_factory=list)
    """[B], tokens of each sequence with this step's."""
    query_start: list[int] = field(default_factory=lambda: [0])
    """[B + 1], tokens of sequence b are query_start[b] to query_start[b + 1]."""
    logit_rows: list[int] = field(default_factory=list)
    """[R], ascending: the tokens whose successor's logits are wanted."""

    def add(
        self, token_ids: Sequence[int], start: int, slots: Sequence[int], pages: Sequence[int], num_logits: int
    ) -> None:
        """One more sequence: `token_ids` at positions from `start` on, with logits for its last `num_logits` tokens."""
        end = start + len(token_ids)
        self.token_ids.extend(token_ids)
        self.positions.extend(range(start, end))
        self.slots.extend(slots)
        self.page_tables.append(list(pages))
        self.seq_lens.append(end)
        total = len(self.token_ids)
        self.query_start.append(total)
        self.logit_rows.extend(range(total - num_logits, total))

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """B."""
        return len(self.seq_lens)
