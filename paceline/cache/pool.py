"""K/V pages as numbers: who may write where. Pure bookkeeping, no tensors, no requests.

A page is free, or taken by a `Reservation` for one step, or owned by whoever the reservation was
committed to, until it is given back. Pages for a step are taken in one transaction:

    reservation = pool.reserve({row: pages wanted})
    ... the step runs ...
    kept = reservation.commit({row: pages really needed})     the rest is free again
    or     reservation.release()                              all of it is free again
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.errors import PacelineError


class OutOfPages(PacelineError):
    """Fewer pages are free than a reservation wants. Callers evict or preempt first."""


class PagePool:
    """`pages` pages of `page_size` tokens each; a page freed last is used first."""

    def __init__(self, pages: int, page_size: int) -> None:
        self.pages = pages
        self.page_size = page_size
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def reserve(self, wanted: Mapping[int, int]) -> Reservation:
        """Take `wanted[row]` pages for each row, or none at all (OutOfPages)."""
        total = sum(wanted.values())
        if total > len(self._free):
            raise OutOfPages(f"{total} pages wanted, {len(self._free)} are free")
        return Reservation(self, {row: self._take(n) for row, n in wanted.items() if n})

    def give_back(self, pages: Iterable[int]) -> None:
        """Free pages that their owner no longer needs."""
        self._free.extend(pages)

    def free_pages(self) -> Sequence[int]:
        """The free pages, for checks."""
        return tuple(self._free)

    def _take(self, count: int) -> tuple[int, ...]:
        taken = tuple(self._free[-count:][::-1])
        del self._free[-count:]
        return taken


class Reservation:
    """Pages taken for one step. Ends exactly once, by `commit` or `release`."""

    __slots__ = ("_pool", "open", "page_size", "pages")

    def __init__(self, pool: PagePool, pages: Mapping[int, tuple[int, ...]]) -> None:
        self._pool = pool
        self.page_size = pool.page_size
        self.pages = pages
        self.open = True

    def commit(self, kept: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """Keep the first `kept[row]` pages of each row (0 where missing), free the rest.

        Returns the kept pages by row; they belong to the caller from here on.
        """
        self._end()
        result = {}
        for row, pages in self.pages.items():
            count = kept.get(row, 0)
            assert 0 <= count <= len(pages), (row, count, pages)
            result[row] = pages[:count]
            self._pool.give_back(reversed(pages[count:]))
        return result

    def release(self) -> None:
        """Free everything: the step did not happen."""
        self.commit({})

    def _end(self) -> None:
        assert self.open, "a reservation ends once"
        self.open = False
