"""Steps to look at: what a step serves, and the batch that says so to a runner.

Knows the storage rules of sequence.py and batch.py; not what a step costs. Token ids are random: rows of equal tokens
would all go to the same experts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from netra_backend.batch import Batch, ScheduledSequence
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import PAGE_SIZE, Sequence

DECODE_TAIL = PAGE_SIZE // 2
"""Unsealed tokens of a decoding sequence: between none and a page, the mean."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the step serves: users with `rows` tokens each (one and its drafts) behind `context` sealed tokens; or, of
    one user, a prompt chunk of `rows` tokens that ends the prompt.
    """

    users: int
    rows: int
    context: int
    is_chunk: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the forward pass."""
        return self.users * self.rows

    @property
    def tail(self) -> int:
        """Unsealed tokens of each sequence before the step."""
        return 0 if self.is_chunk else DECODE_TAIL

    @property
    def num_logits(self) -> int:
        """Rows to sample from."""
        return self.users if self.is_chunk else self.num_rows

    def __str__(self) -> str:
        if self.is_chunk:
            return f"prompt chunk of {self.rows} behind {self.context}"
        return f"decode users={self.users} rows={self.rows} context={self.context}"


def batch_of(load: Load, vocab_size: int, num_pages: int = 0) -> Batch:
    """The step; sequences replay as many tokens as they compute. Greedy.

    With `num_pages` fewer than the users' pages, their block tables share pages: the reads are as many.
    """
    pages = load.context // PAGE_SIZE
    num_pages = num_pages or load.users * pages + load.rows // PAGE_SIZE
    draws = random.Random(0)
    greedy = SamplingParams(temperature=0.0)
    items = []
    for user in range(load.users):
        computed = pages * PAGE_SIZE + load.tail
        table = [(user * pages + page) % num_pages for page in range(pages)]
        new = [draws.randrange(vocab_size) for _ in range(load.rows)]
        committed = load.rows if load.is_chunk else 1
        tokens = [0] * computed + new[:committed]
        replay = 0 if load.is_chunk else load.rows
        seq = Sequence(user, Request(str(user), (0,), greedy, 0.0), tokens, computed, seed=0, num_computed_tokens=computed,
                       num_replay_tokens=replay, block_table=table, slot=user)  # fmt: skip
        sealed = range(load.rows // PAGE_SIZE) if load.is_chunk else range(0)
        fresh = [(pages + i) % num_pages for i in sealed]
        items.append(
            ScheduledSequence(
                seq, load.rows, load.is_chunk, new[committed:], fresh, load.rows - committed + 1
            )
        )
    return Batch(items)
