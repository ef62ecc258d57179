"""Who holds which page: free runs, and a count of holders for each page in use."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator

from tamis.errors import DoubleFreeError, OutOfPagesError, PageError
from tamis.kv.layout import check_int
from tamis.kv.slots import check_page, check_pages


class PageAllocator:
    """Hands out pages 1 to num_pages, in contiguous runs where it can, and counts the holders of each.

    Scoring a long index in place is one product a run, so runs matter: an allocation first grows the caller's last run,
    then takes the smallest free run that holds the rest, and only then pieces it together, largest run first. Every
    method checks all of its arguments before it changes anything. Not thread-safe: one thread owns it.
    """

    def __init__(self, num_pages: int) -> None:
        """All pages are free. Takes memory for pages in use and free runs only. Raises ConfigError for less than 1."""
        check_int("num_pages", num_pages, 1)
        self._num_pages = num_pages
        self._holders: dict[int, int] = {}
        # A free run in three indexes: by first page, by the page after its last, and by (size, first page).
        self._size_at: dict[int, int] = {}
        self._first_before: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._add_run(1, num_pages)

    @property
    def num_pages(self) -> int:
        """Pages in all, free or not."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_pages - len(self._holders)

    def holders(self, page: int) -> int:
        """How many hold this page; 0: it is free. Raises ForeignPageError, PageError unless it is an int."""
        check_page(page, self._num_pages)
        return self._holders.get(page, 0)

    def allocate(self, n: int, after: int | None = None) -> list[int]:
        """Take `n` free pages, one holder each, those right after page `after` first.

        Raises OutOfPagesError where fewer are free, PageError unless `n` is a whole number and `after` an int.
        """
        if after is not None and (isinstance(after, bool) or not isinstance(after, int)):
            raise PageError(f"after={after!r} is not a page id: an int is needed")
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise PageError(f"cannot allocate {n!r} pages: a whole number is needed")
        if n > self.num_free:
            raise OutOfPagesError(f"{n} pages were asked for, {self.num_free} of {self._num_pages} are free")
        pages: list[int] = []
        if n and after is not None and after + 1 in self._size_at:
            pages += self._take(after + 1, n)
        while len(pages) < n:
            wanted = n - len(pages)
            fitting = bisect_left(self._by_size, (wanted, 0))
            _, first = self._by_size[min(fitting, len(self._by_size) - 1)]
            pages += self._take(first, wanted)
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page. Raises ForeignPageError, or PageError where a page is free."""
        pages = check_pages(pages, self._num_pages)
        for page in pages:
            if not self.holders(page):
                raise PageError(f"page={page} is free and cannot be shared")
        for page in pages:
            self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """One holder less for each page; those without any are free again.

        Raises ForeignPageError, or DoubleFreeError where a page is named more often than it is held.
        """
        pages = check_pages(pages, self._num_pages)
        for page, times in Counter(pages).items():
            held = self.holders(page)
            if times > held:
                raise DoubleFreeError(f"page={page} is freed {times} times, but has {held} holders")
        unheld = []
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                unheld.append(page)
        for first, size in _runs(sorted(unheld)):
            self._add_run(first, size)

    def _take(self, first: int, most: int) -> list[int]:
        """The front of the free run at `first`, at most `most` pages."""
        size = self._remove_run(first)
        if size > most:
            self._add_run(first + most, size - most)
        return list(range(first, first + min(size, most)))

    def _add_run(self, first: int, size: int) -> None:
        """Record pages as free, joined with the free runs on both sides."""
        if first in self._first_before:
            before = self._first_before[first]
            size += self._remove_run(before)
            first = before
        if first + size in self._size_at:
            size += self._remove_run(first + size)
        self._size_at[first] = size
        self._first_before[first + size] = first
        insort(self._by_size, (size, first))

    def _remove_run(self, first: int) -> int:
        size = self._size_at.pop(first)
        del self._first_before[first + size]
        del self._by_size[bisect_left(self._by_size, (size, first))]
        return size


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """(first, size) of each run of consecutive ids in a sorted list without repeats."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield pages[start], index - start
            start = index
