"""BlockManager: who owns which page and which slot.

Knows ids only: no tensors, no tokens, no policy. A page is free, or referenced, or cached: referenced
by nobody, but found by its prefix until its room is needed. A slot (tail and recurrent state) is
either free or owned by one running sequence. `check` proves it from the sequences.
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
        self, num_pages: int, num_slots: int, prefix_cache: PrefixCache | None = None
    ) -> None:
        self.prefix_cache = prefix_cache
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.num_pages = num_pages
        self.num_slots = num_slots
        self.num_free_pages = num_pages
        self.num_free_slots = num_slots
        self._ref_counts = [0] * num_pages
        self._page_is_free = bytearray([_FREE]) * num_pages
        self._used_in_run = bytearray(-(-num_pages // RUN_PAGES))
        self._slot_is_free = bytearray([_FREE]) * num_slots

    @property
    def num_used_pages(self) -> int:
        """Pages referenced by at least one sequence or step in flight."""
        return self.num_pages - self.num_free_pages

    @property
    def num_used_slots(self) -> int:
        """Slots owned by running sequences."""
        return self.num_slots - self.num_free_slots

    def allocate_pages(self, count: int, after: int = -1) -> list[int]:
        """Take `count` free pages, each next to the one before where possible, the first next to
        `after`."""
        assert count <= self.num_free_pages, f"{count} pages wanted, {self.num_free_pages} free"
        page_ids = []
        for _ in range(count):
            after = self._next_page(after)
            self._page_is_free[after] = 0
            self._used_in_run[after // RUN_PAGES] += 1
            self._ref_counts[after] = 1
            self.num_free_pages -= 1
            page_ids.append(after)
        return page_ids

    def _next_page(self, after: int) -> int:
        if self.num_free_pages == len(self._cached):
            self._evict()
        following = after + 1
        if 0 < following < self.num_pages and self._page_is_free[following]:
            return following
        empty_run = self._used_in_run.find(0)
        return empty_run * RUN_PAGES if empty_run >= 0 else self._page_is_free.find(_FREE)

    def share_pages(self, page_ids: Iterable[int]) -> None:
        """Add one reference to pages that are in use or cached."""
        for page_id in page_ids:
            if page_id in self._cached:
                del self._cached[page_id]
                self.num_free_pages -= 1
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
                self.num_free_pages += 1
                if self.prefix_cache is not None and self.prefix_cache.has_page(page_id):
                    self._cached[page_id] = None
                else:
                    self._set_free(page_id)

    def _evict(self) -> None:
        """Free the least recently used cached page."""
        assert self.prefix_cache is not None, "no free page"
        page_id, _ = self._cached.popitem(last=False)
        self.prefix_cache.drop_page(page_id)
        self._set_free(page_id)

    def _set_free(self, page_id: int) -> None:
        self._page_is_free[page_id] = _FREE
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
            expected.update(table)
        held = {page_id: count for page_id, count in enumerate(self._ref_counts) if count}
        assert held == dict(expected), f"reference counts {held} != owners {dict(expected)}"
        taken_pages = {page_id for page_id, free in enumerate(self._page_is_free) if not free}
        cached = set(self._cached)
        assert not cached & set(held), f"pages both cached and used: {cached & set(held)}"
        used = set(held) | cached
        assert taken_pages == used, f"pages both free and used, or neither: {taken_pages ^ used}"
        assert self.num_used_pages == len(held), f"{self.num_used_pages} counted, {len(held)} used"
        assert all(self.prefix_cache and self.prefix_cache.has_page(page) for page in cached)
        in_runs = Counter(page_id // RUN_PAGES for page_id in used)
        assert list(self._used_in_run) == [in_runs[i] for i in range(len(self._used_in_run))]
        slots = sorted(slot for _, slot in owners)
        taken = [slot for slot, free in enumerate(self._slot_is_free) if not free]
        assert slots == taken, f"slots taken {taken} != slots owned {slots}"
        assert self.num_used_slots == len(taken), f"{self.num_used_slots} counted, {taken} taken"
