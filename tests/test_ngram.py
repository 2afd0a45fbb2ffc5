"""Prompt lookup: finds what a full scan finds, costs O(new tokens) a step, follows chunks and preemption."""

from __future__ import annotations

import random

import pytest
import torch

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.forward_context import ForwardContext
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import Sequence
from netra_backend.spec.ngram import LONGEST_SUFFIX, NgramProposer, TokenIndex

CONTEXT = ForwardContext(torch.empty(0), torch.empty(0), None, [], torch.empty(0))


def make_sequence(prompt: list[int], seq_id: int = 0) -> Sequence:
    request = Request("r", tuple(prompt), SamplingParams(max_tokens=64), arrival_time=0.0)
    return Sequence(seq_id, request, list(prompt), len(prompt), seed=0)


def scan(tokens: list[int], count: int) -> list[int]:
    """The definition: longest agreement first, then the newest place."""
    for length in range(LONGEST_SUFFIX, 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                longer = list(tokens)
                for at in range(place, place + count):
                    longer.append(longer[at])
                return longer[len(tokens) :]
    return []


@pytest.mark.parametrize("vocab_size", [2, 4, 20])
@pytest.mark.parametrize("seed", range(4))
def test_finds_what_a_scan_finds_at_every_step(vocab_size: int, seed: int) -> None:
    source = random.Random(seed)
    tokens: list[int] = []
    index = TokenIndex()
    limit = 15 if vocab_size == 2 else 120  # the index looks at 16 candidates, the scan at all
    while len(tokens) < limit:
        new = [source.randrange(vocab_size) for _ in range(source.randint(1, 3))]
        tokens += new
        index.extend(new)
        assert index.continuation(5) == scan(tokens, 5), tokens


def test_a_repetition_goes_on_past_the_end() -> None:
    index = TokenIndex()
    index.extend([1, 2, 3, 1, 2, 3, 1, 2])
    assert index.continuation(7) == [3, 1, 2, 3, 1, 2, 3]


def test_a_short_agreement_can_be_refused() -> None:
    index = TokenIndex()
    index.extend([1, 2, 3, 9, 2, 3])
    assert index.continuation(2, shortest=2) == [9, 2]
    assert index.continuation(2, shortest=3) == []
    index.extend([9, 2, 3])
    assert index.continuation(2, shortest=4) == [9, 2]


def test_nothing_is_found_where_nothing_repeats() -> None:
    index = TokenIndex()
    for token in range(50):
        index.extend([token])
        assert index.continuation(4) == []


def test_a_long_context_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(0)
    prompt = [source.randrange(1000) for _ in range(32_000)]
    proposer = NgramProposer()
    seq = make_sequence(prompt)
    chunk = ScheduledSequence(seq, len(prompt), is_chunk=True, num_logits=1, num_wanted_drafts=4)
    proposer.propose([chunk], [SequenceOutput([1])], CONTEXT, torch.empty(0))
    reads = []
    extend = TokenIndex.extend
    monkeypatch.setattr(
        TokenIndex, "extend", lambda self, ids: (reads.append(len(ids)), extend(self, ids))[1]
    )
    for step in range(20):
        seq.num_computed_tokens = len(seq.token_ids)
        seq.token_ids.append(1 + step)
        item = ScheduledSequence(seq, 1, num_logits=1, num_wanted_drafts=4)
        proposer.propose([item], [SequenceOutput([2 + step])], CONTEXT, torch.empty(0))
    assert sum(reads) <= 40


def test_prompts_enter_chunk_by_chunk_and_survive_preemption() -> None:
    text = [5, 6, 7, 8, 9, 10]
    seq = make_sequence([*text, 40, 41, *text[:3]])
    proposer = NgramProposer()
    for start, count in ((0, 4), (4, 6)):
        seq.num_computed_tokens = start
        item = ScheduledSequence(seq, count, is_chunk=True, num_wanted_drafts=3)
        assert proposer.propose([item], [SequenceOutput()], CONTEXT, torch.empty(0)) == [[]]
    seq.num_computed_tokens = 10
    last = ScheduledSequence(seq, 1, num_logits=1, num_wanted_drafts=3)
    assert proposer.propose([last], [SequenceOutput([8])], CONTEXT, torch.empty(0)) == [[9, 10, 40]]
    seq.token_ids.append(8)
    seq.num_computed_tokens = 0  # preempted: everything is computed again
    again = ScheduledSequence(seq, 12, is_chunk=True, num_logits=1, num_wanted_drafts=2)
    assert proposer.propose([again], [SequenceOutput([9])], CONTEXT, torch.empty(0)) == [[10, 40]]
    proposer.free([0])
    assert proposer.propose([again], [SequenceOutput([9])], CONTEXT, torch.empty(0)) == [[10, 40]]


def test_accepted_drafts_are_not_entered_twice() -> None:
    seq = make_sequence([1, 2, 3, 4, 1, 2])
    proposer = NgramProposer()
    seq.num_computed_tokens = 5
    first = ScheduledSequence(seq, 1, num_logits=1, num_wanted_drafts=2)
    assert proposer.propose([first], [SequenceOutput([3])], CONTEXT, torch.empty(0)) == [[4, 1]]
    seq.token_ids.append(3)
    seq.num_computed_tokens = 6
    second = ScheduledSequence(seq, 3, False, [4, 1], num_logits=3, num_wanted_drafts=3)
    found = proposer.propose([second], [SequenceOutput([4, 9], 1)], CONTEXT, torch.empty(0))
    assert found == [[]]
    assert list(proposer._indexes[0].tokens) == [1, 2, 3, 4, 1, 2, 3, 4, 9]
