"""BlockManager: neighbouring pages, lowest slots, reference counts, and a check that sees every
corruption."""

from __future__ import annotations

import itertools
import random

import pytest

from netra_backend.block_manager import RUN_PAGES, BlockManager
from netra_backend.prefix_cache import PrefixCache
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import Sequence


def sequence(seq_id: int, pages: list[int], slot: int) -> Sequence:
    request = Request(f"r{seq_id}", (1,), SamplingParams(), 0.0)
    return Sequence(seq_id, request, [1], 1, 0, block_table=pages, slot=slot)


def test_a_long_allocation_is_one_run() -> None:
    blocks = BlockManager(100, 1)
    assert blocks.allocate_pages(40, []) == list(range(40))


def test_growing_sequences_keep_runs_of_neighbours() -> None:
    """Sequences that grow a page at a time, in turns, still read long runs."""
    blocks = BlockManager(8 * RUN_PAGES, 4)
    tables: list[list[int]] = [[] for _ in range(4)]
    for _ in range(2 * RUN_PAGES):
        for table in tables:
            table += blocks.allocate_pages(1, table)
    for table in tables:
        breaks = sum(b != a + 1 for a, b in itertools.pairwise(table))
        assert breaks <= 1
    blocks.check([sequence(i, table, blocks.allocate_slot()) for i, table in enumerate(tables)])


def test_takes_single_pages_when_no_run_is_left() -> None:
    blocks = BlockManager(3 * RUN_PAGES + 5, 1)
    pages = blocks.allocate_pages(blocks.num_pages, [])
    assert sorted(pages) == list(range(blocks.num_pages))
    blocks.free_pages(pages[::2])
    assert blocks.num_free_pages == len(pages[::2])
    assert sorted(blocks.allocate_pages(len(pages[::2]), [])) == sorted(pages[::2])
    assert blocks.num_free_pages == 0


def test_allocating_too_much_is_a_bug() -> None:
    blocks = BlockManager(3, 1)
    with pytest.raises(AssertionError, match="4 pages wanted, 3 free"):
        blocks.allocate_pages(4, [])
    blocks.allocate_slot()
    with pytest.raises(AssertionError, match="no free slot"):
        blocks.allocate_slot()


def test_lowest_free_slot_comes_first() -> None:
    blocks = BlockManager(1, 4)
    assert [blocks.allocate_slot() for _ in range(4)] == [0, 1, 2, 3]
    blocks.free_slot(2)
    blocks.free_slot(1)
    assert blocks.allocate_slot() == 1
    assert blocks.num_used_slots == 3


def test_shared_pages_are_freed_with_the_last_owner() -> None:
    blocks = BlockManager(4, 2)
    pages = blocks.allocate_pages(2, [])
    blocks.share_pages(pages)
    blocks.check(
        [sequence(0, pages, blocks.allocate_slot()), sequence(1, pages, blocks.allocate_slot())]
    )
    blocks.free_pages(pages)
    assert blocks.num_free_pages == 2
    blocks.free_pages(pages)
    assert blocks.num_free_pages == 4
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free_pages(pages[:1])
    with pytest.raises(AssertionError, match="is free"):
        blocks.share_pages(pages[:1])


def test_freeing_a_slot_twice_is_a_bug() -> None:
    blocks = BlockManager(1, 1)
    blocks.free_slot(blocks.allocate_slot())
    with pytest.raises(AssertionError, match="freed twice"):
        blocks.free_slot(0)


def test_check_sees_leaks_theft_and_doubles() -> None:
    blocks = BlockManager(6, 2)
    pages = blocks.allocate_pages(3, [])
    slot = blocks.allocate_slot()
    blocks.check([sequence(0, pages[:2], slot)], pending_page_ids=pages[2:])
    wrong = (
        ([], pages),  # the slot leaks
        ([sequence(0, pages[:2], slot)], []),  # a page leaks
        ([sequence(0, [*pages, 5], slot)], []),  # a free page in a table
        ([sequence(0, [*pages, pages[0]], slot)], []),  # a page twice in a table
        ([sequence(0, pages, 1)], []),  # the wrong slot
        ([sequence(0, pages, slot), sequence(1, [], slot)], []),  # one slot, two owners
    )
    for running, pending in wrong:
        with pytest.raises(AssertionError):
            blocks.check(running, pending)
    blocks.num_free_pages += 1
    with pytest.raises(AssertionError):
        blocks.check([sequence(0, pages, slot)])


def test_first_pages_may_be_a_class_of_their_own() -> None:
    """Ids below 0, one per table, always to be had; found by prefix and evicted apart from the others."""
    index = PrefixCache(0, needs_checkpoints=False)
    blocks = BlockManager(4, 2, index, num_opening_pages=2)
    assert (blocks.longest_table, blocks.num_free_for([])) == (5, 5)
    table = blocks.allocate_pages(5, [])
    assert table[0] < 0
    assert sorted(table[1:]) == [0, 1, 2, 3]
    assert (blocks.num_free_for(table), blocks.num_free_for([])) == (0, 1)
    first, second = sequence(0, table, blocks.allocate_slot()), sequence(1, [], 1)
    second.slot = blocks.allocate_slot()
    second.block_table = blocks.allocate_pages(1, [])
    assert second.block_table[0] < 0
    blocks.check([first, second])
    for number, page in enumerate((*table, *second.block_table)):
        index.add_page(bytes([number]), page)
    for seq in (first, second):
        blocks.free_pages(seq.block_table)
        blocks.free_slot(seq.slot)
    assert blocks.num_free_pages == 4
    blocks.share_pages(second.block_table)  # used again: the other first page is the oldest
    assert blocks.allocate_pages(1, []) == table[:1]
    assert index.find_page(bytes([0])) is None
    assert index.find_page(bytes([1])) == table[1]
    blocks.free_pages([table[0], *second.block_table])
    blocks.check([])


@pytest.mark.parametrize("has_openings", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_invariants(seed: int, has_openings: bool) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(rng.randint(1, 60), 5, num_opening_pages=5 * has_openings)
    running: list[Sequence] = []
    for number in range(300):
        action = rng.random()
        if action < 0.3 and blocks.num_free_slots:
            running.append(sequence(number, [], blocks.allocate_slot()))
        elif action < 0.8 and running and blocks.num_free_pages:
            seq = rng.choice(running)
            count = rng.randint(1, min(4, blocks.num_free_pages))
            seq.block_table += blocks.allocate_pages(count, seq.block_table)
        elif running:
            seq = running.pop(rng.randrange(len(running)))
            blocks.free_pages(seq.block_table)
            blocks.free_slot(seq.slot)
        blocks.check(running)
