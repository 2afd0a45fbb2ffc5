"""Batch: what one step runs; StepOutput: what it gave. The only things that pass between scheduler and runner.

No torch. A step computes, for each sequence, tokens [num_computed_tokens, + num_scheduled_tokens): prompt
chunks, single decode tokens and a token with its drafts differ in that count alone. Sequences are passed by
reference and must not change between `launch` and `update`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from netra_backend.request import TokenLogprobs
from netra_backend.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """One sequence's part of a step.

    num_scheduled_tokens: tokens to compute, the `draft_token_ids` at the end included; the others are
    committed ones, `seq.token_ids[num_computed : num_computed + num_scheduled - len(drafts)]`.
    is_chunk: more than one committed token (then without drafts). The recurrent state is committed at
    once; a step that is no chunk leaves records instead, which the next step absorbs (num_replay_tokens).
    seal_block_ids: fresh pages to fill in this step, in order, with the sequence's oldest unsealed tokens;
    not in `seq.block_table` yet (update appends them). A chunk fills them at its end from the tail and its
    own K/V; a step that is no chunk fills them from the tail before anything else.
    num_logits: rows to sample from, the last ones: 0 inside a prompt, else 1 + len(drafts).
    num_wanted_drafts: drafts to propose for the step after this one.
    checkpoints: (number of tokens, checkpoint id): copy the recurrent state as it is once that many of the
    chunk's tokens (of the records, if it is no chunk) are absorbed.
    """

    seq: Sequence
    num_scheduled_tokens: int
    is_chunk: bool = False
    draft_token_ids: list[int] = field(default_factory=list)
    seal_block_ids: list[int] = field(default_factory=list)
    num_logits: int = 0
    num_wanted_drafts: int = 0
    checkpoints: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class HostMoves:
    """Copies between the device and the host tier, as (source id, target id): sealed pages of all layers, and
    slots (tail, recurrent state and records).
    """

    pages_in: list[tuple[int, int]] = field(default_factory=list)
    slots_in: list[tuple[int, int]] = field(default_factory=list)
    pages_out: list[tuple[int, int]] = field(default_factory=list)
    slots_out: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.slots_in or self.slots_out)


@dataclass(slots=True)
class Batch:
    """What this step runs, and which sequences are gone since the last one (their sampler state may go).

    Before anything else, in this order: copies of `moves` from the host; `restored`, (checkpoint id, slot),
    states to copy into slots; copies of `moves` to the host. No sequence starts in a step after one was
    moved out, so nothing is overwritten before it is read.
    """

    scheduled: list[ScheduledSequence]
    freed_seq_ids: list[int] = field(default_factory=list)
    restored: list[tuple[int, int]] = field(default_factory=list)
    moves: HostMoves = field(default_factory=HostMoves)

    @property
    def num_tokens(self) -> int:
        """Rows of the forward pass."""
        return sum(item.num_scheduled_tokens for item in self.scheduled)


@dataclass(slots=True)
class SequenceOutput:
    """Tokens that one sequence gained: accepted drafts, then one sampled token (empty inside a prompt).

    draft_token_ids: guesses at the tokens after those.
    """

    token_ids: list[int] = field(default_factory=list)
    num_accepted_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepOutput:
    """Outputs aligned with `Batch.scheduled`, and how long the step took on the runner's clock."""

    outputs: list[SequenceOutput]
    seconds: float
