"""Prompt lookup: what followed the last time the text ended like this (Saxena, "Prompt Lookup Decoding", 2023).

Needs no model and knows no tensors. An index per sequence maps each pair of neighbouring tokens to its last
occurrence and chains earlier ones, so a step costs O(new tokens) however long the context is: 5 bytes a
token for the chain, one dict entry per distinct pair.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import torch

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.forward_context import ForwardContext

LONGEST_SUFFIX = 4
"""Tokens of agreement that are as good as any more."""

_MAX_CANDIDATES = 16
"""Occurrences of the last pair that are compared, newest first: bounds a step on repetitive text."""


class TokenIndex:
    """The tokens of one sequence, searchable by the pair they end with."""

    def __init__(self) -> None:
        self.tokens = array("i")
        self._last: dict[tuple[int, int], int] = {}
        self._previous = array(
            "i"
        )  # [i]: the earlier place after the pair that ends before place i, or -1

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens. The newest pair is entered once something follows it."""
        self.tokens.extend(token_ids)
        tokens, previous, last = self.tokens, self._previous, self._last
        for place in range(len(previous), len(tokens)):
            if place < 2:
                previous.append(-1)
                continue
            pair = (tokens[place - 2], tokens[place - 1])
            previous.append(last.get(pair, -1))
            last[pair] = place

    def continuation(self, num_tokens: int, shortest: int = 2) -> list[int]:
        """What followed the longest, then newest earlier occurrence of the end; [] if none has `shortest` tokens.

        A continuation that runs into the end goes on with itself: a repetition is taken to repeat.
        """
        tokens = self.tokens
        size = len(tokens)
        if size < 3:
            return []
        place = self._last.get((tokens[size - 2], tokens[size - 1]), -1)
        best, best_len = -1, shortest - 1
        for _ in range(_MAX_CANDIDATES):
            if place < 0:
                break
            length = self._agreement(place)
            if length > best_len:
                best, best_len = place, length
                if length == LONGEST_SUFFIX:
                    break
            place = self._previous[place]
        if best < 0:
            return []
        drafts: list[int] = []
        for at in range(best, best + num_tokens):
            drafts.append(tokens[at] if at < size else drafts[at - size])
        return drafts

    def _agreement(self, place: int) -> int:
        """How many tokens before `place` equal the last ones, LONGEST_SUFFIX at most; at least 2."""
        tokens, size = self.tokens, len(self.tokens)
        length = 2
        while (
            length < LONGEST_SUFFIX
            and length < place
            and tokens[place - 1 - length] == tokens[size - 1 - length]
        ):
            length += 1
        return length


class NgramProposer:
    """Looks drafts up in prompt and answer, where at least the last `shortest` tokens (2 or more) occurred."""

    def __init__(self, shortest: int = 2) -> None:
        self._shortest = shortest
        self._indexes: dict[int, TokenIndex] = {}

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        """See Proposer. Prompts are entered chunk by chunk, as they are computed."""
        return [self._propose(item, output) for item, output in zip(items, outputs, strict=True)]

    def _propose(self, item: ScheduledSequence, output: SequenceOutput) -> list[int]:
        seq = item.seq
        index = self._indexes.get(seq.seq_id)
        if index is None:
            index = self._indexes[seq.seq_id] = TokenIndex()
        end = seq.num_computed_tokens + item.num_scheduled_tokens - len(item.draft_token_ids)
        index.extend(seq.token_ids[len(index.tokens) : end])
        if not item.num_logits:
            return []
        index.extend(output.token_ids)
        return index.continuation(item.num_wanted_drafts, self._shortest)

    def free(self, seq_ids: Iterable[int]) -> None:
        """Forget sequences."""
        for seq_id in seq_ids:
            self._indexes.pop(seq_id, None)
