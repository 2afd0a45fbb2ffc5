"""Residence and HostCache: what moves between device and host, what is shared instead, and that bytes stay equal."""

from __future__ import annotations

import pytest
import torch

from netra_backend.batch import Batch, HostMoves
from netra_backend.block_manager import BlockManager
from netra_backend.cache.host_cache import HostCache
from netra_backend.memory_plan import MemoryPlan
from netra_backend.metrics import Metrics
from netra_backend.prefix_cache import PrefixCache
from netra_backend.prefix_reuse import PrefixReuse
from netra_backend.request import Request, SamplingParams
from netra_backend.residence import Residence
from netra_backend.sequence import PAGE_SIZE, Sequence


class House:
    """A device of 8 pages and 4 slots with prefix reuse of a dense model, and a host."""

    def __init__(self, host_pages: int, host_slots: int) -> None:
        index = PrefixCache(0, needs_checkpoints=False)
        self.device = BlockManager(8, 4, index)
        self.host = BlockManager(host_pages, host_slots, PrefixCache(0, needs_checkpoints=False))
        self.metrics = Metrics(1000)
        prefixes = PrefixReuse(self.device, index, "", 128, has_states=False)
        self.residence = Residence(self.device, self.metrics, prefixes, self.host)
        self._index = index
        self._prefixes = prefixes

    def running(self, seq_id: int, num_pages: int, first_token: int = 1) -> Sequence:
        """A sequence with that many sealed pages, findable by their prefix, and 10 tokens in its tail."""
        tokens = [first_token] + [1] * (num_pages * PAGE_SIZE + 10)
        request = Request(str(seq_id), tuple(tokens), SamplingParams(), 0.0)
        seq = Sequence(seq_id, request, tokens, len(tokens), 0)
        self.residence.start(seq)
        seq.block_table += self.device.allocate_pages(
            num_pages - len(seq.block_table), seq.block_table
        )
        for key, page in zip(self._prefixes.keys(seq, num_pages), seq.block_table, strict=True):
            self._index.add_page(key, page)
        seq.num_computed_tokens = num_pages * PAGE_SIZE + 10
        self.moves()
        return seq

    def moves(self) -> HostMoves:
        batch = Batch([])
        self.residence.hand_over(batch)
        return batch.moves

    def check(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        self.residence.check(running, waiting, [])


def test_a_sequence_goes_and_comes_back_as_a_whole() -> None:
    house = House(host_pages=5, host_slots=2)
    seq = house.running(0, 3)
    table, slot, computed = seq.block_table, seq.slot, seq.num_computed_tokens
    house.residence.pause(seq, is_intact=True)
    out = house.moves()
    assert [source for source, _ in out.pages_out] == table
    assert out.slots_out == [(slot, seq.host_slot)]
    assert seq.num_computed_tokens == computed
    house.check([], [seq])
    house.device.allocate_pages(8, [])  # the pages on the device are gone meanwhile
    house.device.free_pages(range(8))
    host_table, host_slot = seq.host_block_table, seq.host_slot
    house.residence.start(seq)
    back = house.moves()
    assert back.pages_in == list(zip(host_table, seq.block_table, strict=True))
    assert back.slots_in == [(host_slot, seq.slot)]
    house.check([seq], [])
    assert house.metrics.host_pages_in.value == house.metrics.host_pages_out.value == 3


def test_pages_that_are_there_already_are_not_copied() -> None:
    house = House(host_pages=8, host_slots=4)
    first, second = house.running(0, 3), house.running(1, 3)
    assert first.block_table == second.block_table
    for seq in (first, second):
        house.residence.pause(seq, is_intact=True)
    assert len(house.moves().pages_out) == 3
    assert first.host_block_table == second.host_block_table
    assert house.host.num_used_pages == 3
    house.check([], [first, second])
    for seq in (first, second):
        house.residence.start(seq)
    assert house.moves().pages_in == []
    assert first.block_table == second.block_table
    house.check([first, second], [])
    # A page further: only that one is new to the host.
    first.block_table += house.device.allocate_pages(1, first.block_table)
    first.token_ids += [1] * PAGE_SIZE
    first.num_computed_tokens += PAGE_SIZE
    house.residence.pause(first, is_intact=True)
    assert len(house.moves().pages_out) == 1
    house.check([second], [first])


@pytest.mark.parametrize(("pages", "slots"), [(2, 2), (3, 0)])
def test_without_room_on_the_host_it_begins_anew(pages: int, slots: int) -> None:
    house = House(pages, slots)
    seq = house.running(0, 3)
    house.residence.pause(seq, is_intact=True)
    assert not house.moves()
    assert seq.num_computed_tokens == 0
    assert house.metrics.recomputed.value == 1
    house.check([], [seq])


def test_a_sequence_with_a_broken_cache_begins_anew() -> None:
    house = House(host_pages=8, host_slots=4)
    seq = house.running(0, 3)
    house.residence.pause(seq, is_intact=False)
    assert not house.moves()
    assert (seq.num_computed_tokens, seq.host_slot) == (0, -1)


def test_it_waits_until_its_pages_fit_the_device() -> None:
    house = House(host_pages=8, host_slots=4)
    seq = house.running(0, 3)
    house.residence.pause(seq, is_intact=True)
    other = house.running(1, 6, first_token=9)
    assert not house.residence.has_room(seq)
    house.residence.end(other)
    assert house.residence.has_room(seq)
    house.residence.end(seq)
    house.moves()
    house.check([], [])
    assert house.host.num_used_pages == house.host.num_used_slots == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_copies_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    """Scattered ids, more than one transfer's worth, and ids that are not named stay as they are."""
    pages = torch.randint(0, 255, (3, 9, 2, 16), dtype=torch.uint8)
    pages = pages if dtype == torch.uint8 else pages.to(dtype).div_(7)
    slots = torch.randn(2, 4, 5)
    page_bytes, slot_bytes = pages[:, 0].nbytes, slots[:, 0].nbytes
    plan = MemoryPlan(9, 4, 64, page_bytes, slot_bytes, 0, 0, num_host_pages=6, num_host_slots=2)
    cache = HostCache([pages], [], [slots], plan)
    for pool in cache._pages:
        pool._group = 2
    before_pages, before_slots = pages.clone(), slots.clone()
    out = HostMoves(pages_out=[(7, 3), (0, 4), (2, 5), (8, 0)], slots_out=[(3, 1), (0, 0)])
    cache.move_out(out)
    pages.zero_()
    slots.zero_()
    cache.move_in(HostMoves(pages_in=[(4, 1), (5, 7), (3, 0), (0, 6)], slots_in=[(0, 2), (1, 1)]))
    for old, new in ((0, 1), (2, 7), (7, 0), (8, 6)):
        assert torch.equal(pages[:, new], before_pages[:, old])
    assert pages[:, [2, 3, 4, 5, 8]].abs().sum() == 0
    assert torch.equal(slots[:, 2], before_slots[:, 0])
    assert torch.equal(slots[:, 1], before_slots[:, 3])
