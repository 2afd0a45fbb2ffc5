"""What requests change in their logits before a token is chosen: bias, bans and penalties.

Knows logits as places in one flat tensor, and nothing of how a token is chosen afterwards. Only the
tokens concerned are touched: the changes of all rows of a step are collected, applied in place in
vLLM's order, and taken back exactly. Row j of a sequence sees its first j drafts as emitted.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from netra_backend.batch import ScheduledSequence
from netra_backend.sequence import Sequence

_MAX_BIAS = 1e30
"""Nothing sensible comes near; beyond it, float32 logits would overflow."""

_MAX_REPETITION_PENALTY = 1e6

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class TokenCounts:
    """The distinct tokens of a sequence and how often each was produced, kept from step to step.

    Prompt tokens have count 0 and are there only `with_prompt`: the repetition penalty asks for
    presence in prompt or output, the others for counts in the output.
    """

    def __init__(self, seq: Sequence, with_prompt: bool) -> None:
        prompt = seq.token_ids[: seq.num_prompt_tokens] if with_prompt else []
        self._ids: Ids = np.unique(np.array(prompt, dtype=np.int64))
        self._counts: Floats = np.zeros(len(self._ids), dtype=np.float32)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}
        self._num_read = seq.num_prompt_tokens

    def update(self, token_ids: list[int]) -> None:
        """Count what `token_ids` gained since the last call."""
        for token_id in token_ids[self._num_read :]:
            place = self._places.get(token_id)
            if place is None:
                place = self._append(token_id)
            self._counts[place] += 1
        self._num_read = len(token_ids)

    def _append(self, token_id: int) -> int:
        place = len(self._places)
        if place == len(self._ids):
            room = np.zeros(place + 64, dtype=np.int64)
            self._ids = np.concatenate((self._ids, room))
            self._counts = np.concatenate((self._counts, room.astype(np.float32)))
        self._ids[place] = token_id
        self._places[token_id] = place
        return place

    def rows(self, draft_token_ids: list[int]) -> tuple[Ids, Ids, Floats]:
        """(row, token id, count) of every token present in each of the 1 + len(drafts) rows."""
        num_known, num_rows = len(self._places), 1 + len(draft_token_ids)
        counts = np.repeat(self._counts[None, :num_known], num_rows, axis=0)
        new: dict[int, Floats] = {}
        for j, token_id in enumerate(draft_token_ids, 1):
            place = self._places.get(token_id)
            if place is not None:
                counts[j:, place] += 1
            else:
                new.setdefault(token_id, np.zeros(num_rows, dtype=np.float32))[j:] += 1
        rows, ids, all_counts = [], [], [counts.ravel()]
        rows.append(np.repeat(np.arange(num_rows), num_known))
        ids.append(np.tile(self._ids[:num_known], num_rows))
        for token_id, column in new.items():
            present = column.nonzero()[0]
            rows.append(present)
            ids.append(np.full(len(present), token_id, dtype=np.int64))
            all_counts.append(column[present])
        return np.concatenate(rows), np.concatenate(ids), np.concatenate(all_counts)


class SequenceEdits:
    """What one request changes, worked out once; `counts` follow its tokens."""

    def __init__(self, seq: Sequence, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        params = seq.request.params
        self._params = params
        self._vocab_size = vocab_size
        bias = {i: v for i, v in params.logit_bias.items() if 0 <= i < vocab_size}
        self._bias_ids = _ids(list(bias))
        values = np.array(list(bias.values()), dtype=np.float64)
        self._bias: Floats = values.clip(-_MAX_BIAS, _MAX_BIAS).astype(np.float32)
        # With ignore_eos an EOS does not end the output, so it may come before min_tokens.
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
        self._stop_ids = _ids([i for i in sorted(stops) if 0 <= i < vocab_size])
        words = [word for word in seq.request.bad_word_ids if word and 0 <= word[-1] < vocab_size]
        self._banned_ids = _ids([word[0] for word in words if len(word) == 1])
        self._phrases = [list(word) for word in words if len(word) > 1]
        self._longest_phrase = max(map(len, self._phrases), default=0)
        self._repetition = min(
            max(params.repetition_penalty, 1 / _MAX_REPETITION_PENALTY), _MAX_REPETITION_PENALTY
        )
        self._counts: TokenCounts | None = None
        penalised = params.presence_penalty != 0 or params.frequency_penalty != 0
        if self._repetition != 1 or penalised:
            self._counts = TokenCounts(seq, with_prompt=self._repetition != 1)
        self.active = bool(
            len(self._bias_ids) or params.min_tokens or words or self._counts is not None
        )

    def collect(self, item: ScheduledSequence, first_row: int, edits: StepEdits) -> None:
        """Add this step's changes; the item's rows start at `first_row`."""
        start = first_row * self._vocab_size
        for j in range(item.num_logits):
            base = start + j * self._vocab_size
            if len(self._bias_ids):
                edits.add_bias(base + self._bias_ids, self._bias)
            if len(self._banned_ids):
                edits.add_ban(base + self._banned_ids)
            if item.seq.num_output_tokens + j < self._params.min_tokens:
                edits.add_ban(base + self._stop_ids)
            if self._phrases:
                edits.add_ban(base + self._completed_phrases(item.seq, item.draft_token_ids[:j]))
        if self._counts is not None:
            self._counts.update(item.seq.token_ids)
            rows, ids, counts = self._counts.rows(item.draft_token_ids)
            offsets = self._params.frequency_penalty * counts
            offsets += self._params.presence_penalty * (counts > 0)
            edits.add_penalty(start + rows * self._vocab_size + ids, self._repetition, offsets)

    def _completed_phrases(self, seq: Sequence, drafts: list[int]) -> Ids:
        """Last tokens of the bad phrases whose other tokens end the output (not the prompt)."""
        first = max(seq.num_prompt_tokens, seq.num_tokens - self._longest_phrase)
        output = seq.token_ids[first:] + drafts
        return _ids([p[-1] for p in self._phrases if output[1 - len(p) :] == p[:-1]])


class StepEdits:
    """The changes of all rows of one step, as places in the flat logits."""

    def __init__(self) -> None:
        self._bias: tuple[list[Ids], list[Floats]] = ([], [])
        self._bans: list[Ids] = []
        self._penalties: tuple[list[Ids], list[Floats], list[Floats]] = ([], [], [])
        self._undo: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add_bias(self, places: Ids, values: Floats) -> None:
        self._bias[0].append(places)
        self._bias[1].append(values)

    def add_ban(self, places: Ids) -> None:
        self._bans.append(places)

    def add_penalty(self, places: Ids, repetition: float, offsets: Floats) -> None:
        self._penalties[0].append(places)
        self._penalties[1].append(np.full(len(places), repetition, dtype=np.float32))
        self._penalties[2].append(offsets.astype(np.float32, copy=False))

    def apply(self, logits: torch.Tensor) -> None:
        """Change `logits` [num_rows, vocab] in place: bias, bans, then penalties."""
        if self._bias[0]:
            places, values = _tensors(logits, *self._bias)
            self._write(logits, places, logits.view(-1)[places] + values)
        if self._bans:
            (places,) = _tensors(logits, self._bans)
            self._write(logits, places, torch.full_like(places, -math.inf, dtype=logits.dtype))
        if self._penalties[0]:
            places, repetition, offsets = _tensors(logits, *self._penalties)
            old = logits.view(-1)[places]
            scaled = torch.where(old > 0, old / repetition, old * repetition)
            self._write(logits, places, scaled - offsets)

    def _write(self, logits: torch.Tensor, places: torch.Tensor, values: torch.Tensor) -> None:
        flat = logits.view(-1)
        self._undo.append((places, flat[places]))
        flat[places] = values

    def undo(self, logits: torch.Tensor, rows: torch.Tensor | None = None) -> None:
        """Put back what `apply` changed, in the given rows only or everywhere."""
        for places, values in reversed(self._undo):
            if rows is None:
                logits.view(-1)[places] = values
            else:
                inside = torch.isin(places // logits.shape[1], rows)
                logits.view(-1)[places[inside]] = values[inside]


def _ids(values: list[int]) -> Ids:
    return np.array(values, dtype=np.int64)


def _tensors(logits: torch.Tensor, *columns: list[Ids] | list[Floats]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.concatenate(column)).to(logits.device) for column in columns]
