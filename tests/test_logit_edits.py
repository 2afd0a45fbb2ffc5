"""Bias, bans and penalties where the sampler's own tests do not reach: their edges."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_reference import (
    BAD_WORDS,
    EOS,
    FEATURES,
    GREEDY,
    PROMPT,
    edited_logits,
    make_item,
    make_logits,
    make_sampler,
    make_sequence,
    random_model,
)

from netra_backend.logit_edits import SequenceEdits, StepEdits
from netra_backend.request import SamplingParams


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("shift", [-9.0, 0.0, 9.0])
def test_edited_logits_are_the_references(name: str, shift: float) -> None:
    """For two sequences in one step, each row with the drafts before it; signs of logits mixed."""
    model = random_model(90)
    step, items, first_row = StepEdits(), [], 0
    for params in (FEATURES[name], FEATURES["everything"]):
        seq = make_sequence(params, PROMPT, [9, 30, 50, 31], bad_word_ids=BAD_WORDS)
        items.append(make_item(seq, [5, 8, 50, 60, 60, 60]))
        edits = SequenceEdits(seq, 90, EOS)
        if edits.active:
            edits.collect(items[-1], first_row, step)
        first_row += items[-1].num_logits
    raw = make_logits(model, items) + shift
    logits = raw.clone()
    step.apply(logits)
    expected = [
        edited_logits(item.seq, item.seq.token_ids + item.draft_token_ids[:j], row)
        for item, rows in zip(items, raw.numpy().reshape(2, -1, 90), strict=True)
        for j, row in enumerate(rows)
    ]
    np.testing.assert_allclose(logits.numpy(), np.stack(expected), rtol=1e-5, atol=1e-5)
    step.undo(logits)
    assert torch.equal(logits, raw)


def test_a_seq_id_may_be_used_again_once_it_is_free() -> None:
    sampler = make_sampler(64)
    row = torch.arange(64.0)[None]
    banned = make_sequence(GREEDY, [1], seq_id=3, bad_word_ids=((63,),))
    other = make_sequence(GREEDY, [1], seq_id=3)
    assert sampler.sample(row, [make_item(banned)])[0].token_ids == [62]
    sampler.free([3])
    assert sampler.sample(row, [make_item(other)])[0].token_ids == [63]


def test_absurd_bias_and_penalties_do_not_break_a_row() -> None:
    params = SamplingParams(
        temperature=0.7, logit_bias={4: 1e300, 5: -1e300, 6: 1e300}, repetition_penalty=1e-300
    )
    items = [make_item(make_sequence(params, [4, 5, 8], [5], seq_id=i, seed=i)) for i in range(20)]
    outputs = make_sampler(64).sample(torch.zeros(20, 64), items)
    assert {output.token_ids[0] for output in outputs} <= {4, 6}


@pytest.mark.parametrize("params", [GREEDY, FEATURES["top_k_1"]])
def test_bans_are_lifted_for_a_row_in_which_all_tokens_are_banned(params: SamplingParams) -> None:
    words = tuple((i,) for i in range(64))
    logits = torch.zeros(2, 64)
    logits[:, 33] = 1.0
    biased = replace(params, logit_bias={7: 100.0})
    items = [
        make_item(make_sequence(biased, [1], seq_id=0, bad_word_ids=words)),
        make_item(make_sequence(params, [1], seq_id=1, bad_word_ids=words[:34])),
    ]
    logits[1, 50] = 0.5
    outputs = make_sampler(64).sample(logits, items)
    assert [output.token_ids for output in outputs] == [[33], [50]]


def test_bad_words_match_across_output_and_drafts_but_not_the_prompt() -> None:
    seq = make_sequence(GREEDY, [20, 21], [30], bad_word_ids=((21, 30, 5), (30, 31, 5), (31, 6)))
    logits = torch.zeros(3, 64)
    logits[:, [31, 5, 6]] = torch.tensor([9.0, 8.0, 7.0])
    logits[1, 31] = 0.0
    (output,) = make_sampler(64).sample(logits, [make_item(seq, [31, 7])])
    assert output.token_ids == [31, 0]
    fresh = make_sequence(GREEDY, [20, 21], [30], seq_id=1, bad_word_ids=((21, 30, 31),))
    (output,) = make_sampler(64).sample(logits[:1], [make_item(fresh)])
    assert output.token_ids == [31]


def test_logits_are_restored_and_may_be_strided() -> None:
    seqs = [
        make_sequence(params, PROMPT, [9, 3], seq_id=i, bad_word_ids=BAD_WORDS)
        for i, params in enumerate(FEATURES.values())
    ]
    items = [make_item(seq, [4, 5]) for seq in seqs]
    logits = torch.randn(len(items) * 3, 200, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    outputs = make_sampler(200).sample(logits, items)
    assert torch.equal(logits, before)
    strided = logits.T.contiguous().T
    assert make_sampler(200).sample(strided, items) == outputs
