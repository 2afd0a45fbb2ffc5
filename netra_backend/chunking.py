"""Chunking: how the rows that a step has for prompts are divided among them.

Knows lengths and an order, no pages, no clock. Prompts that the step can complete are served whole,
from half of the rows if a long one competes. The long ones share the rest: the most urgent takes
all but a page for each other one, or half if one that is much shorter competes. So a long prompt
always advances, and a short newcomer never waits for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from netra_backend.sequence import PAGE_SIZE, Sequence, SequenceStatus


def divide_rows(
    prompts: Iterable[Sequence],
    budget: int,
    max_partial: int,
    start: Callable[[Sequence], bool],
    urgency: Callable[[Sequence], float],
) -> list[tuple[Sequence, int]]:
    """Rows for each prompt, `budget` at most in all.

    `prompts` are the part-done ones in order, then those that wait. A waiting one that gets a place
    is started with `start`, which may refuse. `max_partial` may be part-done after the step, and
    beyond that ones that are much shorter.
    """
    shares: list[tuple[Sequence, int]] = []
    long: list[Sequence] = []
    left = budget
    least = max(1, min(budget, PAGE_SIZE))
    for seq in prompts:
        remaining = seq.num_uncomputed_tokens
        waits = seq.status is SequenceStatus.WAITING
        fits = remaining <= (left - budget // 2 if long else left)
        if waits and not fits and (left < least or not _has_place(seq, long, max_partial)):
            continue
        if waits:
            if not start(seq):
                continue
            remaining = seq.num_uncomputed_tokens  # less if a prefix of it is resident
            fits = remaining <= (left - budget // 2 if long else left)
        if fits:
            shares.append((seq, remaining))
            left -= remaining
        else:
            long.append(seq)
    long.sort(key=urgency)
    splits = _put_shortest_second(long)
    for index, seq in enumerate(long):
        reserved = (len(long) - index - 1) * PAGE_SIZE
        if splits and index == 0:
            reserved = max(reserved, left // 2)
        rows = aligned_rows(seq, max(left - reserved, min(left, PAGE_SIZE)), budget)
        shares.append((seq, rows))
        left -= rows
    return shares


def _has_place(seq: Sequence, long: list[Sequence], max_partial: int) -> bool:
    """Each one beyond `max_partial` is at most half as long as the shortest there, so they stay
    few."""
    if len(long) < max_partial:
        return True
    return 2 * seq.num_uncomputed_tokens <= min(other.num_uncomputed_tokens for other in long)


def _put_shortest_second(long: list[Sequence]) -> bool:
    """Whether the most urgent prompt, by its age, should leave half to one that is much shorter."""
    shortest = min(long, key=lambda seq: seq.num_uncomputed_tokens, default=None)
    if shortest is None or 2 * shortest.num_uncomputed_tokens > long[0].num_uncomputed_tokens:
        return False
    long.remove(shortest)
    long.insert(1, shortest)
    return True


def aligned_rows(seq: Sequence, rows: int, budget: int) -> int:
    """At most `rows`, ending at the last token or on a multiple of PAGE_SIZE.

    Only if the whole `budget` is below a page may a chunk end elsewhere: better than never.
    """
    start, total = seq.num_computed_tokens, seq.num_tokens
    end = min(total, start + rows)
    if end < total:
        aligned = end // PAGE_SIZE * PAGE_SIZE
        # One row is no chunk: stopping there would leave the prompt where it is, step after step.
        if aligned > start + 1 or (budget >= PAGE_SIZE and aligned != start + 1):
            end = aligned
    return max(0, end - start)
