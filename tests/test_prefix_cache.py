"""PrefixCache alone: chains, checkpoints, and what eviction takes with it."""

from __future__ import annotations

import random

from netra_backend.prefix_cache import PrefixCache, extend_keys, root_key
from netra_backend.sequence import PAGE_SIZE


def keys_of(tokens: list[int], *salts: str) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, root_key(*salts), tokens, len(tokens) // PAGE_SIZE)
    return keys


def test_a_key_depends_on_everything_before_it_and_on_the_salt() -> None:
    tokens = list(range(4 * PAGE_SIZE))
    keys = keys_of(tokens, "model")
    assert len(set(keys)) == 4
    changed = [999, *tokens[1:]]
    assert not set(keys_of(changed, "model")) & set(keys)
    assert not set(keys_of(tokens, "model", "tenant")) & set(keys)
    later = [*tokens[:-1], 999]
    assert keys_of(later, "model")[:3] == keys[:3]
    assert keys_of(later, "model")[3] != keys[3]


def test_keys_grow_incrementally() -> None:
    tokens = list(range(5 * PAGE_SIZE))
    keys: list[bytes] = []
    for pages in (1, 3, 5):
        extend_keys(keys, root_key("m"), tokens, pages)
    assert keys == keys_of(tokens, "m")


def test_salts_cannot_be_confused_by_where_they_are_cut() -> None:
    assert root_key("ab", "c") != root_key("a", "bc")


def test_dense_hit_is_the_longest_resident_chain() -> None:
    cache = PrefixCache(0, needs_checkpoints=False)
    keys = keys_of(list(range(4 * PAGE_SIZE)))
    for page_id, key in ((7, keys[0]), (9, keys[1]), (5, keys[3])):
        cache.add_page(key, page_id)
    hit = cache.match(keys)
    assert (hit.page_ids, hit.checkpoint_id) == ([7, 9], -1)


def test_hybrid_hit_ends_at_a_checkpoint() -> None:
    cache = PrefixCache(2, needs_checkpoints=True)
    keys = keys_of(list(range(4 * PAGE_SIZE)))
    for page_id, key in enumerate(keys):
        cache.add_page(key, page_id)
    assert cache.match(keys).page_ids == []
    checkpoint_id = cache.reserve_checkpoint()
    cache.add_checkpoint(keys[1], checkpoint_id)
    hit = cache.match(keys)
    assert (hit.page_ids, hit.checkpoint_id) == ([0, 1], checkpoint_id)


def test_a_dropped_page_takes_its_stranded_checkpoint_with_it() -> None:
    cache = PrefixCache(1, needs_checkpoints=True)
    keys = keys_of(list(range(2 * PAGE_SIZE)))
    for page_id, key in enumerate(keys):
        cache.add_page(key, page_id)
    cache.add_checkpoint(keys[1], cache.reserve_checkpoint())
    cache.drop_page(1)
    cache.check(1, num_reserved=0)
    assert cache.num_checkpoints == 0
    assert cache.match(keys).page_ids == []
    assert cache.reserve_checkpoint() == 0


def test_the_least_recently_used_checkpoint_makes_room() -> None:
    cache = PrefixCache(2, needs_checkpoints=True)
    first, second = keys_of(list(range(PAGE_SIZE))), keys_of(list(range(1, PAGE_SIZE + 1)))
    for page_id, keys in enumerate((first, second)):
        cache.add_page(keys[0], page_id)
        cache.add_checkpoint(keys[0], cache.reserve_checkpoint())
    cache.match(first)
    cache.reserve_checkpoint()
    assert cache.match(first).page_ids == [0]
    assert cache.match(second).page_ids == []


def test_a_checkpoint_of_a_page_that_is_gone_is_given_back() -> None:
    cache = PrefixCache(1, needs_checkpoints=True)
    cache.add_checkpoint(b"nowhere", cache.reserve_checkpoint())
    cache.check(1, num_reserved=0)
    assert cache.num_checkpoints == 0


def test_equal_pages_are_indexed_once() -> None:
    cache = PrefixCache(0, needs_checkpoints=False)
    key = keys_of(list(range(PAGE_SIZE)))[0]
    cache.add_page(key, 3)
    cache.add_page(key, 4)
    assert cache.match([key]).page_ids == [3]
    assert not cache.has_page(4)
    cache.drop_page(4)
    assert cache.match([key]).page_ids == [3]


def test_random_operations_keep_every_invariant() -> None:
    rng = random.Random(0)
    cache = PrefixCache(4, needs_checkpoints=True)
    chains = [keys_of([rng.randrange(50) for _ in range(8 * PAGE_SIZE)]) for _ in range(6)]
    for _ in range(2000):
        keys = rng.choice(chains)
        action = rng.randrange(4)
        if action == 0:
            cache.add_page(rng.choice(keys), rng.randrange(30))
        elif action == 1:
            cache.drop_page(rng.randrange(30))
        elif action == 2:
            checkpoint_id = cache.reserve_checkpoint()
            if checkpoint_id >= 0:
                cache.add_checkpoint(rng.choice(keys), checkpoint_id)
        else:
            hit = cache.match(keys)
            assert bool(hit.page_ids) == (hit.checkpoint_id >= 0)
        cache.check(4, num_reserved=0)
