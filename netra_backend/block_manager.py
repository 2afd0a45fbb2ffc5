"""BlockManager: who owns which page and which slot.

Knows ids only: no tensors, no tokens, no policy. A page is free, or referenced, or cached: referenced
by nobody, but found by its prefix until its room is needed. A slot (tail and recurrent state) is
either free or owned by one running sequence. `check` proves it from the sequences.

The first pages of tables may be a class of their own (`num_opening_pages`, at least one per slot, so that one is
always to be had); their ids are negative and index the byte maps from the end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from netra_backend.prefix_cache import PrefixCache
from netra_backend.sequence import Sequence

RUN_PAGES = 16
"""Pages that a sequence finds in a row when it opens a new run (1,024 tokens): attention on a CPU
reads neighbouring pages as one matrix, so a run should be long, and short enough that small pools
still have some."""

_FREE = 1


class BlockManager:
    """Allocates pages in runs of neighbours and the lowest free slot; reference-counts pages.

    Free lists are byte maps: finding the lowest free id is one memchr, also in a pool of 10^5
    pages. With a `prefix_cache`, pages that it can find stay cached when their last reference goes,
    and the least recently used one makes room when no page is free.
    """

    def __init__(
        self,
        num_pages: int,
        num_slots: int,
        prefix_cache: PrefixCache | None = None,
        num_opening_pages: int = 0,
    ) -> None:
        assert num_opening_pages == 0 or num_opening_pages >= num_slots
        self.prefix_cache = prefix_cache
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._cached_openings: OrderedDict[int, None] = OrderedDict()
        self.num_opening_pages = num_opening_pages
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.num_free_pages = num_pages
        self.num_free_slots = num_slots
        self._num_ids = num_pages + num_opening_pages
        self._ref_counts = [0] * self._num_ids
        self._page_is_free = bytearray([_FREE]) * self._num_ids
        self._used_in_run = bytearray(-(-num_pages // RUN_PAGES))
        self._slot_is_free = bytearray([_FREE]) * num_slots

    @property
    def num_used_pages(self) -> int:
        """Pages referenced by at least one sequence or step in flight, first pages of their own class left
        out.
        """
        return self.num_pages - self.num_free_pages

    @property
    def num_used_slots(self) -> int:
        """Slots owned by running sequences."""
        return self.num_slots - self.num_free_slots

    @property
    def longest_table(self) -> int:
        """Pages that one sequence can have."""
        return self.num_pages + (self.num_opening_pages > 0)

    def num_free_for(self, table: list[int]) -> int:
        """Pages that may be added to `table`."""
        return self.num_free_pages + (self.num_opening_pages > 0 and not table)

    def allocate_pages(self, count: int, table: list[int]) -> list[int]:
        """Take `count` free pages for the end of `table`, each next to the one before where possible."""
        free = self.num_free_for(table)
        assert count <= free, f"{count} pages wanted, {free} free"
        if count and self.num_opening_pages and not table:
            opening = self._allocate_opening()
            return [opening, *self.allocate_pages(count - 1, [opening])]
        after = table[-1] if table else -1
        page_ids = []
        for _ in range(count):
            after = self._next_page(after)
            self._page_is_free[after] = 0
            self._used_in_run[after // RUN_PAGES] += 1
            self._ref_counts[after] = 1
            self.num_free_pages -= 1
            page_ids.append(after)
        return page_ids

    def _allocate_opening(self) -> int:
        index = self._page_is_free.find(_FREE, self.num_pages)
        if index < 0:
            self._evict(self._cached_openings)
            index = self._page_is_free.find(_FREE, self.num_pages)
        page_id = index - self._num_ids
        self._page_is_free[page_id] = 0
        self._ref_counts[page_id] = 1
        return page_id

    def _next_page(self, after: int) -> int:
        if self.num_free_pages == len(self._cached):
            self._evict(self._cached)
        following = after + 1
        if 0 < following < self.num_pages and self._page_is_free[following]:
            return following
        empty_run = self._used_in_run.find(0)
        if empty_run >= 0:
            return empty_run * RUN_PAGES
        return self._page_is_free.find(_FREE, 0, self.num_pages)

    def share_pages(self, page_ids: Iterable[int]) -> None:
        """Add one reference to pages that are in use or cached."""
        for page_id in page_ids:
            cached = self._cached_like(page_id)
            if page_id in cached:
                del cached[page_id]
                self.num_free_pages -= page_id >= 0
            else:
                assert self._ref_counts[page_id] > 0, f"page {page_id} is free and cannot be shared"
            self._ref_counts[page_id] += 1

    def free_pages(self, page_ids: Iterable[int]) -> None:
        """Drop one reference to each page of a table; those without references become free or
        cached, the end of the table as the first to be evicted."""
        for page_id in reversed(list(page_ids)):
            count = self._ref_counts[page_id] - 1
            assert count >= 0, f"page {page_id} freed twice"
            self._ref_counts[page_id] = count
            if count == 0:
                self.num_free_pages += page_id >= 0
                if self.prefix_cache is not None and self.prefix_cache.has_page(page_id):
                    self._cached_like(page_id)[page_id] = None
                else:
                    self._set_free(page_id)

    def _cached_like(self, page_id: int) -> OrderedDict[int, None]:
        return self._cached if page_id >= 0 else self._cached_openings

    def _evict(self, cached: OrderedDict[int, None]) -> None:
        """Free the least recently used page of `cached`."""
        assert self.prefix_cache is not None, "no free page"
        page_id, _ = cached.popitem(last=False)
        self.prefix_cache.drop_page(page_id)
        self._set_free(page_id)

    def _set_free(self, page_id: int) -> None:
        self._page_is_free[page_id] = _FREE
        if page_id >= 0:
            self._used_in_run[page_id // RUN_PAGES] -= 1

    def allocate_slot(self) -> int:
        """Take the lowest free slot: tails of neighbouring slots are read as one matrix on a
        CPU."""
        slot = self._slot_is_free.find(_FREE)
        assert slot >= 0, "no free slot"
        self._slot_is_free[slot] = 0
        self.num_free_slots -= 1
        return slot

    def free_slot(self, slot: int) -> None:
        """Give a slot back."""
        assert not self._slot_is_free[slot], f"slot {slot} freed twice"
        self._slot_is_free[slot] = _FREE
        self.num_free_slots += 1

    def check(self, running: Iterable[Sequence], pending_page_ids: Iterable[int] = ()) -> None:
        """Assert every invariant, given all running sequences and the pages that a step is filling.

        Costs O(pages in use): for tests.
        """
        self.check_owners([(seq.block_table, seq.slot) for seq in running], pending_page_ids)

    def check_owners(
        self, owners: Iterable[tuple[list[int], int]], pending_page_ids: Iterable[int] = ()
    ) -> None:
        """The same, given the table and the slot of each owner."""
        owners = list(owners)
        expected = Counter(pending_page_ids)
        for table, slot in owners:
            assert len(set(table)) == len(table), f"slot {slot}: page twice"
            has_class = self.num_opening_pages > 0
            assert all((page < 0) == (has_class and i == 0) for i, page in enumerate(table))
            expected.update(table)
        ids = [*range(self.num_pages), *range(-self.num_opening_pages, 0)]
        held = {
            page_id: count for page_id, count in zip(ids, self._ref_counts, strict=True) if count
        }
        assert held == dict(expected), f"reference counts {held} != owners {dict(expected)}"
        free_pages = zip(ids, self._page_is_free, strict=True)
        taken_pages = {page_id for page_id, free in free_pages if not free}
        cached = set(self._cached) | set(self._cached_openings)
        assert not cached & set(held), f"pages both cached and used: {cached & set(held)}"
        used = set(held) | cached
        assert taken_pages == used, f"pages both free and used, or neither: {taken_pages ^ used}"
        num_used = sum(page_id >= 0 for page_id in held)
        assert self.num_used_pages == num_used, f"{self.num_used_pages} counted, {num_used} used"
        assert all(self.prefix_cache and self.prefix_cache.has_page(page) for page in cached)
        in_runs = Counter(page_id // RUN_PAGES for page_id in used if page_id >= 0)
        assert list(self._used_in_run) == [in_runs[i] for i in range(len(self._used_in_run))]
        slots = sorted(slot for _, slot in owners)
        taken = [slot for slot, free in enumerate(self._slot_is_free) if not free]
        assert slots == taken, f"slots taken {taken} != slots owned {slots}"
        assert self.num_used_slots == len(taken), f"{self.num_used_slots} counted, {taken} taken"
