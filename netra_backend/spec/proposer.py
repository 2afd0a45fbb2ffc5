"""Proposer: guesses the next tokens of sequences after a step, to be verified by the next one.

A guess never changes what a sequence gets (sampler.py accepts only what it would have chosen itself), so a
proposer is judged by speed alone: it may be wrong, and it may return fewer drafts than wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
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
        model's final hidden states of these rows, after the final norm. The sequences are as they were
        before the step.
        """
        ...

    def free(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences."""
        ...
