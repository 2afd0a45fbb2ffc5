"""Proposer: guesses the next tokens of sequences after a step, to be verified by the next one.

A guess never changes what a sequence gets (sampler.py accepts only what it would have chosen itself), so a
proposer is judged by speed alone: it may be wrong, and it may return fewer drafts than wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import torch

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.forward_context import ForwardContext


class Proposer(Protocol):
    """One method of drafting. Called after every step, so that it can follow sequences that want no drafts."""

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        """For each item up to item.num_wanted_drafts guesses at the tokens after its outputs.

        items and outputs are in the order of the step's rows; hidden [num_tokens, hidden_size] are the
        model's final hidden states of these rows, after the final norm, or where a draft model taps other
        layers, what was tapped, side by side. The sequences are as they were before the step.
        """
        ...

    def free(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences."""
        ...


class LookupFirst:
    """Drafts of `lookup`, which cost nothing, and of `model` for the sequences where it found none."""

    def __init__(self, lookup: Proposer, model: Proposer) -> None:
        self._lookup = lookup
        self._model = model

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        """See Proposer. The model follows every sequence, whoever drafts."""
        found = self._lookup.propose(items, outputs, context, hidden)
        left = [
            replace(item, num_wanted_drafts=0) if drafts else item
            for item, drafts in zip(items, found, strict=True)
        ]
        drafted = self._model.propose(left, outputs, context, hidden)
        return [first or second for first, second in zip(found, drafted, strict=True)]

    def free(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences."""
        seq_ids = list(seq_ids)
        self._lookup.free(seq_ids)
        self._model.free(seq_ids)


def computed_after(item: ScheduledSequence, output: SequenceOutput) -> int:
    """The sequence's num_computed_tokens once the step is applied."""
    rows = item.num_scheduled_tokens if item.is_chunk else 1 + output.num_accepted_tokens
    return item.seq.num_computed_tokens + rows


def following_tokens(item: ScheduledSequence, output: SequenceOutput) -> list[int]:
    """The token after each of the item's rows; anything after a rejected draft."""
    seq, count = item.seq, item.num_scheduled_tokens
    if not item.is_chunk:
        return output.token_ids + [0] * (count - len(output.token_ids))
    start = seq.num_computed_tokens + 1
    return seq.token_ids[start : start + count] + output.token_ids
