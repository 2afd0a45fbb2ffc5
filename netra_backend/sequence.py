"""Sequence: the live state of one request between its arrival and its last token.

Plain integers and lists; no torch, no policy. Written by the scheduler and the block manager only;
the runner reads it. Storage invariant, with P = PAGE_SIZE tokens a page:

    0 ......... num_sealed_tokens ......... num_computed_tokens ......... len(token_ids)
    | block_table: len * P tokens | tail rows of `slot`            | not computed yet

    the recurrent state of `slot` holds the first num_computed_tokens - num_replay_tokens tokens;
    the records of the last num_replay_tokens ones lie beside it and are absorbed by the next step.

Ids of pages that are stored at a higher precision are negative: with such a class, the first page of every table, and
no other, is of it. They index its pages from the end.

A waiting sequence owns nothing on the device. With `host_slot` >= 0 everything above lies in the host tier
instead, in `host_block_table` and `host_slot`; otherwise nothing of it is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from netra_backend.request import FinishReason, Request, TokenLogprobs

PAGE_SIZE = 64
"""Tokens per sealed page; also the granularity of prefix hashes (kernels use BLOCK_N = 64)."""


TAIL_ROWS = 2 * PAGE_SIZE
"""Rows of a tail: up to a page of committed tokens, one more while it waits for its seal, and the
drafts."""


class SequenceStatus(Enum):
    """WAITING also covers preempted sequences: they wait with tokens already produced."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Live state of one request. `token_ids` = prompt, then every committed output token.

    The answer ends when `token_ids` holds `max_num_tokens`, or with a token of `end_token_ids`.
    `page_keys` are chained hashes of the first pages, as far as they were asked for.
    """

    seq_id: int
    request: Request
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    max_num_tokens: int = 2**63
    end_token_ids: frozenset[int] = frozenset()
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_replay_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    page_keys: list[bytes] = field(default_factory=list)
    slot: int = -1
    host_block_table: list[int] = field(default_factory=list)
    host_slot: int = -1
    draft_token_ids: list[int] = field(default_factory=list)
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Committed tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_sealed_tokens(self) -> int:
        """Tokens whose K/V lie in sealed pages."""
        return len(self.block_table) * PAGE_SIZE

    @property
    def num_tail_tokens(self) -> int:
        """Committed tokens whose K/V lie in the tail of `slot`."""
        return self.num_computed_tokens - self.num_sealed_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the model has not read yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens
