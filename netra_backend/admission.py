"""Admission: in which order waiting sequences start, and whether their memory will suffice.

Knows tokens and seconds, not pages or batches. Order: shortest prompt first with ageing, which a
fixed key expresses (arrival + weight * service time), so nobody is overtaken for ever. Memory: the
predicted peak of all running sequences over their remaining outputs (Past-Future, arXiv 2507.10150)
must fit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice

from netra_backend.request import Request
from netra_backend.sequence import Sequence

_AGEING = 2.0
"""A prompt that takes s seconds to compute is overtaken by shorter ones that arrive within 2 s
after it."""

_PRIORITY_SECONDS = 30.0
"""One level of `priority` counts like this many seconds of waiting: a preference that ends, not a
ban."""

_MAX_SCANNED, _MAX_REFUSED = 128, 4
"""How far a step looks for sequences that may start. A refusal costs 0.1 to 0.2 ms with 256 running ones,
once until one of those leaves; passing over one 0.1 us."""

_HISTORY = 512
_MIN_HISTORY = 16
_QUANTILE = 0.7
"""Predict the 0.7 quantile of the outputs that got as far: errors to the low side cost a
recomputation."""


def rank(request: Request) -> float:
    """Seniority: lower is older or more important. Preemption takes the highest."""
    return request.arrival_time + _PRIORITY_SECONDS * request.priority


def urgency(request: Request, remaining_seconds: float) -> float:
    """Order among prompts: lower goes first. `remaining_seconds` is the time its prompt still
    takes."""
    return rank(request) + _AGEING * remaining_seconds


class WaitingQueue:
    """Sequences that wait, most urgent first; insertion and removal anywhere cost O(log n)
    comparisons."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._entries: list[tuple[float, int, Sequence]] = []
        self._keys: dict[int, float] = {}
        self._overtaken_id = -1
        self._passed_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, _, seq in self._entries)

    def add(self, seq: Sequence, key: float) -> None:
        """Queue a sequence under its urgency."""
        self._keys[seq.seq_id] = key
        insort(self._entries, (key, seq.seq_id, seq))
        self.num_tokens += seq.num_uncomputed_tokens

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out, wherever it is."""
        key = self._keys.pop(seq.seq_id)
        index = bisect_left(self._entries, (key, seq.seq_id))
        assert self._entries[index][2] is seq
        del self._entries[index]
        self.num_tokens -= seq.num_uncomputed_tokens

    def candidates(self) -> Iterator[Sequence]:
        """Those that may start, in order: whoever starts one removes it before asking for the next.

        If the first cannot start, shorter ones behind it may, as long as all that passed it add up
        to at most half of its tokens. So a short one need not wait for the memory that a long one
        needs, and the long one waits longer by at most a part of its own time.
        """
        entries = self._entries
        index = num_refused = 0
        while index < len(entries) and num_refused < _MAX_REFUSED:
            seq = entries[index][2]
            yield seq
            if index < len(entries) and entries[index][2] is seq:
                num_refused += 1
                index += 1
            elif index:
                self._passed_tokens += seq.max_num_tokens
            if index:
                index = self._next_candidate(index)

    def _next_candidate(self, index: int) -> int:
        """Index of the next sequence that is short enough to pass the first."""
        _, first_id, first = self._entries[0]
        if first_id != self._overtaken_id:
            self._overtaken_id, self._passed_tokens = first_id, 0
        allowed = first.max_num_tokens // 2 - self._passed_tokens
        for _, _, seq in islice(self._entries, index, _MAX_SCANNED):
            if seq.max_num_tokens <= allowed:
                return index
            index += 1
        return len(self._entries)


class MemoryForecast:
    """Whether the predicted peak of all outputs fits `num_tokens`, from the lengths of finished
    outputs."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []
        self._expected: dict[int, int] = {}
        self._refused_ids: set[int] = set()

    def fits(self, seq: Sequence, running: list[Sequence]) -> bool:
        """Whether `seq` may run beside `running`. A refusal stands until one of those leaves."""
        if seq.seq_id in self._refused_ids:
            return False
        loads = []
        for each in (*running, seq):
            tokens = len(each.token_ids)
            produced = tokens - each.num_prompt_tokens
            loads.append((self.expected(each, produced) - produced, tokens))
        if peak_tokens(loads) <= self._num_tokens:
            return True
        self._expected.pop(seq.seq_id, None)
        self._refused_ids.add(seq.seq_id)
        return False

    def record(self, seq: Sequence) -> None:
        """Remember how long the answer of `seq` became, unless its length was forced."""
        if _is_forced(seq.request):
            return
        if len(self._recent) == _HISTORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
        self._recent.append(seq.num_output_tokens)
        insort(self._sorted, seq.num_output_tokens)

    def expected(self, seq: Sequence, produced: int) -> int:
        """Expected output of `seq`, which has `produced`; all it may have if that is forced."""
        expected = self._expected.get(seq.seq_id, 0)
        if expected <= produced:
            expected = self._predict(seq, produced)
            self._expected[seq.seq_id] = expected
        return expected

    def forget(self, seq: Sequence) -> None:
        """Drop what is kept about a sequence that left the running set."""
        self._expected.pop(seq.seq_id, None)
        self._refused_ids.clear()

    def _predict(self, seq: Sequence, produced: int) -> int:
        limit = seq.max_num_tokens - seq.num_prompt_tokens
        if _is_forced(seq.request) or len(self._sorted) < _MIN_HISTORY:
            return limit
        longer = bisect_right(self._sorted, produced)
        if longer == len(self._sorted):
            return min(limit, 2 * produced + 1)
        index = longer + int(_QUANTILE * (len(self._sorted) - longer))
        return min(limit, max(self._sorted[index], seq.request.params.min_tokens))


def peak_tokens(loads: Iterable[tuple[int, int]]) -> int:
    """Most tokens held at once by sequences given as (remaining output, tokens now), one token each
    per step.

    When the sequence with remaining output r ends, all with at least r still live and each has
    grown by r.
    """
    peak = held = 0
    for alive, (remaining, tokens) in enumerate(sorted(loads, reverse=True), start=1):
        held += tokens
        peak = max(peak, held + alive * remaining)
    return peak


def _is_forced(request: Request) -> bool:
    params = request.params
    return params.ignore_eos or params.min_tokens == params.max_tokens
