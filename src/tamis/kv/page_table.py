"""Where one sequence's tokens lie: an ordered list of pages, and how many tokens they hold."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tamis.errors import ConfigError, PageError, SlotError
from tamis.kv.allocator import PageAllocator
from tamis.kv.pool import SparseKVPool


class PageTable:
    """One sequence: token t lies at offset t % page_size of page pages[t // page_size], in every plane of every layer.

    A table is one holder of each of its pages. A page that others hold too is never written: `append` first gives
    the table a copy of its own. Not thread-safe.
    """

    def __init__(self, pool: SparseKVPool, allocator: PageAllocator) -> None:
        """An empty sequence. Raises ConfigError unless the allocator hands out the pool's pages."""
        if allocator.num_pages != pool.num_pages:
            raise ConfigError(f"the allocator has {allocator.num_pages} pages, the pool {pool.num_pages}")
        self._pool = pool
        self._allocator = allocator
        self._page_size = pool.layout.page_size
        self._pages: list[int] = []
        self._length = 0

    @property
    def pages(self) -> list[int]:
        """Page ids in order (a copy)."""
        return list(self._pages)

    @property
    def length(self) -> int:
        """Tokens."""
        return self._length

    def pages_needed(self, n: int) -> int:
        """Free pages that appending `n` tokens takes."""
        _check_tokens("append", n, None)
        missing = -(-(self._length + n) // self._page_size) - len(self._pages)
        return missing + (self._must_copy_last() and n > 0)

    def append(self, n: int) -> Tensor:
        """Make room for `n` more tokens; their slots, int64 [n], on the pool's device.

        Raises OutOfPagesError, or TransferError where a shared page could not be copied; nothing has changed then.
        """
        needed = self.pages_needed(n)
        slots_needed = self._length + n
        copied = self._must_copy_last() and n > 0
        after = self._pages[-1] if self._pages and not copied else None
        fresh = self._allocator.allocate(needed, after)
        if copied:
            self._replace_last(fresh)
        self._pages += fresh[copied:]
        slots = self._slots(self._length, slots_needed)
        self._length = slots_needed
        return slots

    def fork(self) -> "PageTable":
        """The same sequence once more. All pages are shared until one of the two writes into the last one."""
        twin = PageTable(self._pool, self._allocator)
        self._allocator.share(self._pages)
        twin._pages = list(self._pages)
        twin._length = self._length
        return twin

    def adopt(self, pages: Sequence[int]) -> None:
        """Go on with full pages that others hold too. Raises SlotError in the middle of a page, PageError."""
        if self._length % self._page_size:
            raise SlotError(f"{self._length} tokens do not end with a page of {self._page_size}: none can be adopted")
        self._allocator.share(pages)
        self._pages += pages
        self._length += len(pages) * self._page_size

    def replace(self, place: int, page: int) -> None:
        """Hold `page`, which others hold and which says the same, instead of the page at `place`. Raises PageError."""
        if not 0 <= place < len(self._pages):
            raise PageError(f"place={place} is not one of the {len(self._pages)} pages of the table")
        self._allocator.share([page])
        self._allocator.free([self._pages[place]])
        self._pages[place] = page

    def trim(self, tokens: int) -> None:
        """Drop the last `tokens` tokens and the pages left empty. Raises SlotError for more than `length`."""
        _check_tokens("trim", tokens, self._length)
        length = self._length - tokens
        kept = -(-length // self._page_size)
        self._allocator.free(self._pages[kept:])
        del self._pages[kept:]
        self._length = length

    def reset(self) -> None:
        """Drop all tokens and pages."""
        self.trim(self._length)

    @staticmethod
    def reorder(tables: Sequence["PageTable"], order: Sequence[int]) -> list["PageTable"]:
        """Row i becomes old row order[i]: forked where a row is used again, reset where it is not used at all.

        Raises SlotError for a row that does not exist, before anything changes.
        """
        for row in order:
            if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < len(tables):
                raise SlotError(f"row={row!r} is not one of the {len(tables)} page tables")
        rows: list[PageTable] = []
        used: set[int] = set()
        for row in order:
            table = tables[row]
            rows.append(table.fork() if id(table) in used else table)
            used.add(id(table))
        for table in tables:
            if id(table) not in used:
                table.reset()
        return rows

    def _must_copy_last(self) -> bool:
        return self._length % self._page_size != 0 and self._allocator.holders(self._pages[-1]) > 1

    def _replace_last(self, fresh: list[int]) -> None:
        """Copy the shared last page to fresh[0] and hold that instead; on failure give all of `fresh` back."""
        shared = self._pages[-1]
        try:
            self._pool.copy_pages([shared], fresh[:1])
        except BaseException:
            self._allocator.free(fresh)
            raise
        self._pages[-1] = fresh[0]
        self._allocator.free([shared])

    def _slots(self, start: int, end: int) -> Tensor:
        """Slots of tokens start to end - 1."""
        first = start // self._page_size
        pages = torch.tensor(self._pages[first:], dtype=torch.int64)
        tokens = torch.arange(start, end, dtype=torch.int64)
        slots = pages[tokens // self._page_size - first] * self._page_size + tokens % self._page_size
        return slots.to(self._pool.device)


def _check_tokens(verb: str, tokens: int, most: int | None) -> None:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise SlotError(f"cannot {verb} {tokens!r} tokens: a whole number is needed")
    if most is not None and tokens > most:
        raise SlotError(f"cannot {verb} {tokens} tokens of a sequence of {most}")
