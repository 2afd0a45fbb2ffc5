"""Sampler: logits and drafts of a step -> tokens, by sample-match acceptance.

Every row is processed as if the drafts before it had been emitted, its token is chosen as plain
decoding would choose it, and a draft is accepted if it is that token. Knows neither where drafts
come from nor when a sequence ends. Invariant: what a sequence gets depends on its own logits,
tokens, parameters and seed; not on the batch, the drafts or earlier preemptions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.draw import DrawParams, draw, largest, most_likely, ranks, tile_masses, tile_max
from netra_backend.errors import EngineError
from netra_backend.logit_edits import SequenceEdits, StepEdits
from netra_backend.request import TokenLogprobs
from netra_backend.sequence import Sequence

_TOP_CANDIDATES = 32
"""Tokens looked at for top logprobs; at least the most that a request may ask for (20)."""


Draw = Callable[[torch.Tensor, torch.Tensor, list[int], list[int], list[DrawParams]], torch.Tensor]
"""See draw.draw."""


@dataclass(slots=True)
class _SequenceState:
    """What the sampler keeps of a sequence between steps; `draw` is None for greedy."""

    draw: DrawParams | None
    num_logprobs: int | None
    edits: SequenceEdits


class Sampler:
    """Chooses tokens for sequences with any parameters; keeps state by seq_id until `free`."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
        draw: Draw = draw,
    ) -> None:
        self._draw = draw
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = device
        self._states: dict[int, _SequenceState] = {}

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, items: list[ScheduledSequence]) -> list[SequenceOutput]:
        """One output per item: its accepted drafts, then one more token; none for num_logits 0.

        logits [sum of num_logits, vocab] float32, rows of the items in order: row j is the
        distribution after seq.token_ids + draft_token_ids[:j]. They are changed meanwhile, and
        restored. A row of which a request bans every token is taken without its bans, bias and
        penalties. Raises EngineError for a row with NaN or +inf, or with nothing but -inf.

        logprobs are of the logits as given (before bias, penalties and temperature), as in vLLM.
        """
        live = [item for item in items if item.num_logits]
        assert all(item.num_logits == 1 + len(item.draft_token_ids) for item in live)
        assert logits.shape == (sum(item.num_logits for item in live), self._vocab_size)
        if not live:
            return [SequenceOutput() for _ in items]
        states = [self._state(item.seq) for item in live]
        logits = logits.to(self._device, torch.float32).contiguous()
        token_ids = self._choose(logits, live, states)
        outputs = iter(_accept(token_ids, live))
        found = [next(outputs) if item.num_logits else SequenceOutput() for item in items]
        if any(state.num_logprobs is not None for state in states):
            self._add_logprobs(logits, live, states, [o for o in found if o.token_ids])
        return found

    def free(self, seq_ids: list[int]) -> None:
        """Forget sequences; one that comes back is read again from its token_ids."""
        for seq_id in seq_ids:
            self._states.pop(seq_id, None)

    def _state(self, seq: Sequence) -> _SequenceState:
        state = self._states.get(seq.seq_id)
        if state is None:
            params = seq.request.params
            edits = SequenceEdits(seq, self._vocab_size, self._eos_token_ids)
            how = None if params.greedy else DrawParams.of(params, self._vocab_size, seq.seed)
            state = _SequenceState(how, params.logprobs, edits)
            self._states[seq.seq_id] = state
        return state

    def _choose(
        self, logits: torch.Tensor, live: list[ScheduledSequence], states: list[_SequenceState]
    ) -> list[int]:
        """The token of every row; `logits` are as before afterwards."""
        edits = StepEdits()
        rows: list[int] = []
        positions: list[int] = []
        params: list[DrawParams] = []
        first_row = 0
        for item, state in zip(live, states, strict=True):
            num_rows = item.num_logits
            if state.edits.active:
                state.edits.collect(item, first_row, edits)
            if state.draw is not None:
                rows += range(first_row, first_row + num_rows)
                positions += range(item.seq.num_tokens, item.seq.num_tokens + num_rows)
                params += [state.draw] * num_rows
            first_row += num_rows
        edits.apply(logits)
        maxima = tile_max(logits)
        peaks, token_ids = most_likely(logits, maxima, _arange(logits))
        if not bool(peaks.isfinite().all()):
            self._lift_total_bans(logits, maxima, peaks, token_ids, edits)
        if rows:
            token_ids[torch.tensor(rows, device=logits.device)] = self._draw(
                logits, maxima, rows, positions, params
            )
        edits.undo(logits)
        chosen: list[int] = token_ids.tolist()
        return chosen

    def _lift_total_bans(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        peaks: torch.Tensor,
        token_ids: torch.Tensor,
        edits: StepEdits,
    ) -> None:
        """Undo the edits of rows that have no token left; in place in all arguments."""
        banned = (peaks == -math.inf).nonzero()[:, 0]
        edits.undo(logits, banned)
        maxima[banned] = tile_max(logits[banned])
        peaks[banned], token_ids[banned] = most_likely(logits, maxima, banned)
        wrong = int((~peaks.isfinite()).sum())
        if wrong:
            raise EngineError(f"{wrong} of {len(peaks)} rows of logits are not finite")

    def _add_logprobs(
        self,
        logits: torch.Tensor,
        live: list[ScheduledSequence],
        states: list[_SequenceState],
        outputs: list[SequenceOutput],
    ) -> None:
        wanted: list[tuple[SequenceOutput, int]] = []
        rows: list[int] = []
        token_ids: list[int] = []
        first_row = 0
        for item, state, output in zip(live, states, outputs, strict=True):
            if state.num_logprobs is not None:
                wanted += [(output, state.num_logprobs)] * len(output.token_ids)
                rows += range(first_row, first_row + len(output.token_ids))
                token_ids += output.token_ids
            first_row += item.num_logits
        found = _logprobs(logits, rows, token_ids, with_top=any(num_top for _, num_top in wanted))
        for (output, num_top), entry in zip(wanted, found, strict=True):
            output.logprobs.append(replace(entry, top=entry.top[:num_top]))


def _accept(token_ids: list[int], live: list[ScheduledSequence]) -> list[SequenceOutput]:
    """Per item: the chosen tokens up to and including the first that is not the draft."""
    outputs = []
    first_row = 0
    for item in live:
        num_accepted = 0
        for draft in item.draft_token_ids:
            if token_ids[first_row + num_accepted] != draft:
                break
            num_accepted += 1
        gained = token_ids[first_row : first_row + num_accepted + 1]
        outputs.append(SequenceOutput(token_ids=gained, num_accepted_tokens=num_accepted))
        first_row += item.num_logits
    return outputs


def _logprobs(
    logits: torch.Tensor, rows: list[int], token_ids: list[int], *, with_top: bool
) -> list[TokenLogprobs]:
    """Of the given token in each row; `with_top` also the most likely tokens of the row."""
    if len(rows) < len(logits):
        logits = logits[torch.tensor(rows, device=logits.device)]
    row = _arange(logits)[:, None]
    maxima = tile_max(logits)
    peaks = maxima.amax(-1)[row]
    log_sums = tile_masses(logits, row, peaks, torch.ones_like(peaks)).sum(-1, keepdim=True).log_()
    chosen = logits[row, torch.tensor(token_ids, device=logits.device)[:, None]]
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
    if with_top:
        values, ids = largest(logits, maxima, row, _TOP_CANDIDATES)
        tops = list(map(_descending, (values - peaks - log_sums).tolist(), ids.tolist()))
    logprobs = (chosen - peaks - log_sums)[:, 0].tolist()
    places = ranks(logits, maxima, row, chosen).tolist()
    return list(map(TokenLogprobs, token_ids, logprobs, places, tops))


def _descending(logprobs: list[float], token_ids: list[int]) -> tuple[tuple[int, float], ...]:
    """(id, logprob) of the tokens that are possible at all, equal ones by id."""
    pairs = zip(token_ids, logprobs, strict=True)
    possible = [pair for pair in pairs if pair[1] > -math.inf]
    return tuple(sorted(possible, key=lambda pair: (-pair[1], pair[0])))


def _arange(logits: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(logits), device=logits.device)
