"""Residence: where the storage of a sequence is: on the device while it runs, on the host while it waits.

Knows ids, not tensors: the runner carries out the copies that `hand_over` names. A preempted sequence moves as a
whole, sealed pages and slot, if the host has room; else it is recomputed. Pages are immutable and found by their
prefix keys on both sides, so a page that is there already is shared and not copied: a shared prefix lies on the
host once, and comes back as one of several references to the device page that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable

from netra_backend.batch import Batch, HostMoves
from netra_backend.block_manager import BlockManager
from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.memory_plan import MemoryPlan
from netra_backend.metrics import Metrics
from netra_backend.prefix_cache import PrefixCache
from netra_backend.prefix_reuse import PrefixReuse
from netra_backend.sequence import PAGE_SIZE, Sequence


class Residence:
    """Gives sequences their pages and slots when they start, and takes them when they pause or end.

    `host` owns the ids of the host tier, None if there is none.
    """

    def __init__(
        self,
        device: BlockManager,
        metrics: Metrics,
        prefixes: PrefixReuse | None,
        host: BlockManager | None,
    ) -> None:
        self._device = device
        self._metrics = metrics
        self._prefixes = prefixes
        self._host = host
        self._restored: list[tuple[int, int]] = []
        self._moves = HostMoves()

    def has_room(self, seq: Sequence) -> bool:
        """Whether what waits on the host fits the free pages of the device, and the page that its next step
        seals.
        """
        held = len(seq.host_block_table)
        seals = seq.num_computed_tokens >= (held + 1) * PAGE_SIZE
        return held + seals <= self._device.num_free_for(seq.block_table)

    def start(self, seq: Sequence) -> None:
        """Give `seq` a slot, and its storage from the host or the pages of a prefix that is resident."""
        seq.slot = self._device.allocate_slot()
        if seq.host_slot >= 0:
            self._move_in(seq)
        elif self._prefixes is not None:
            checkpoint_id = self._prefixes.start(seq)
            if checkpoint_id >= 0:
                self._restored.append((checkpoint_id, seq.slot))
            if seq.num_preemptions == 0:
                self._metrics.prefix_queries.value += seq.num_prompt_tokens
                self._metrics.prefix_hits.value += seq.num_cached_tokens

    def pause(self, seq: Sequence, is_intact: bool) -> None:
        """Take everything from a preempted sequence: to the host if that has room and the storage is intact,
        else `seq` begins anew.
        """
        seq.num_preemptions += 1
        self._metrics.preemptions.value += 1
        is_kept = is_intact and seq.num_computed_tokens > 0 and self._move_out(seq)
        (self._metrics.moved_out if is_kept else self._metrics.recomputed).value += 1
        self._free(seq)
        if not is_kept:
            seq.num_computed_tokens = seq.num_replay_tokens = 0

    def end(self, seq: Sequence) -> None:
        """Free what a sequence holds, wherever that is."""
        if seq.slot >= 0:
            self._free(seq)
        elif seq.host_slot >= 0:
            self._free_host(seq)

    def hand_over(self, batch: Batch) -> None:
        """Give the copies that the next step has to make to its batch."""
        batch.restored, self._restored = self._restored, []
        batch.moves, self._moves = self._moves, HostMoves()

    def check(
        self, running: Iterable[Sequence], waiting: Iterable[Sequence], pending: Iterable[int]
    ) -> None:
        """Assert the invariants of both sides, given the pages that a step is filling. For tests."""
        self._device.check(running, pending)
        waiting = list(waiting)
        assert all(seq.slot < 0 and not seq.block_table for seq in waiting)
        assert all((seq.num_computed_tokens > 0) == (seq.host_slot >= 0) for seq in waiting)
        moved = [(seq.host_block_table, seq.host_slot) for seq in waiting if seq.host_slot >= 0]
        if self._host is not None:
            self._host.check_owners(moved)
        assert not self._moves, "copies without a step"

    def _free(self, seq: Sequence) -> None:
        self._device.free_pages(seq.block_table)
        self._device.free_slot(seq.slot)
        seq.block_table, seq.slot = [], -1

    def _free_host(self, seq: Sequence) -> None:
        assert self._host is not None
        self._host.free_pages(seq.host_block_table)
        self._host.free_slot(seq.host_slot)
        seq.host_block_table, seq.host_slot = [], -1

    def _move_out(self, seq: Sequence) -> bool:
        host, table = self._host, seq.block_table
        if host is None or host.num_free_slots == 0:
            return False
        copies: list[tuple[int, int]] = []
        pages = self._place(host, table, self._keys(seq, len(table)), copies)
        if pages is None:
            return False
        seq.host_block_table, seq.host_slot = pages, host.allocate_slot()
        self._moves.pages_out += copies
        self._moves.slots_out.append((seq.slot, seq.host_slot))
        self._metrics.host_pages_out.value += len(copies)
        return True

    def _move_in(self, seq: Sequence) -> None:
        table, copies = seq.host_block_table, self._moves.pages_in
        num_before = len(copies)
        pages = self._place(self._device, table, self._keys(seq, len(table)), copies)
        assert pages is not None, "has_room was not asked"
        seq.block_table = pages
        self._moves.slots_in.append((seq.host_slot, seq.slot))
        self._metrics.host_pages_in.value += len(copies) - num_before
        self._free_host(seq)

    def _keys(self, seq: Sequence, num_pages: int) -> list[bytes]:
        return self._prefixes.keys(seq, num_pages) if self._prefixes is not None else []

    @staticmethod
    def _place(
        target: BlockManager, table: list[int], keys: list[bytes], copies: list[tuple[int, int]]
    ) -> list[int] | None:
        """Pages of `target` for those of `table`, found by their keys or copied; None if it lacks room."""
        index = target.prefix_cache
        found = [index.find_page(key) for key in keys] if index else [None] * len(table)
        resident = [page for page in found if page is not None]
        # What is allocated continues the resident beginning, or has a first page itself.
        beginning = resident[:1] if found and found[0] is not None else []
        target.share_pages(resident)
        num_missing = len(table) - len(resident)
        if num_missing > target.num_free_for(beginning):
            target.free_pages(resident)
            return None
        fresh = iter(target.allocate_pages(num_missing, beginning))
        pages = []
        for place, (source, page) in enumerate(zip(table, found, strict=True)):
            if page is None:
                page = next(fresh)
                copies.append((source, page))
                if index:
                    index.add_page(keys[place], page)
            pages.append(page)
        return pages


def make_storage(
    config: EngineConfig, model: ModelConfig, plan: MemoryPlan, name: str
) -> tuple[BlockManager, PrefixReuse | None, BlockManager | None]:
    """Pages and slots of the device, prefix reuse, and pages and slots of the host, as far as there are any."""
    has_states = model.num_linear_layers > 0
    cache = host_cache = host = None
    if config.enable_prefix_caching:
        cache = PrefixCache(plan.num_checkpoints, has_states)
        host_cache = PrefixCache(0, needs_checkpoints=False)
    if plan.num_host_slots:
        sizes = plan.num_host_pages, plan.num_host_slots
        host = BlockManager(*sizes, host_cache, plan.num_host_opening_pages)
    blocks = BlockManager(plan.num_pages, plan.num_slots, cache, plan.num_opening_pages)
    if cache is None:
        return blocks, None, host
    salt = f"{name} {plan.kv.codec}"
    interval = config.prefix_checkpoint_interval
    return blocks, PrefixReuse(blocks, cache, salt, interval, has_states), host
