"""Sampler: drafts, batches and preemption change nothing; logprobs; broken logits."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_reference import (
    BAD_WORDS,
    FEATURES,
    GREEDY,
    PROMPT,
    Model,
    make_item,
    make_logits,
    make_sampler,
    make_sequence,
    random_model,
    reference_tokens,
)

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.errors import EngineError
from netra_backend.request import SamplingParams
from netra_backend.sequence import Sequence


@pytest.mark.parametrize("vocab_size", [50, 256, 300])
@pytest.mark.parametrize("name", FEATURES)
def test_any_draft_gives_the_tokens_of_plain_decoding(name: str, vocab_size: int) -> None:
    model = random_model(vocab_size)
    rng = random.Random(vocab_size)
    seq = make_sequence(FEATURES[name], PROMPT, [9, 3, 9], bad_word_ids=BAD_WORDS)
    truth = reference_tokens(seq, model, 9)
    sampler = make_sampler(vocab_size)
    for num_drafts in (0, 1, 2, 4, 8) if vocab_size < 300 else range(9):
        for num_right in range(num_drafts + 1):
            drafts = truth[:num_drafts]
            if num_right < num_drafts:
                wrong = (truth[num_right] + rng.randrange(1, vocab_size)) % vocab_size
                tail = [rng.randrange(vocab_size) for _ in range(num_drafts - num_right - 1)]
                drafts = [*truth[:num_right], wrong, *tail]
            item = make_item(seq, drafts)
            (output,) = sampler.sample(make_logits(model, [item]), [item])
            assert output.token_ids == truth[: num_right + 1]
            assert output.num_accepted_tokens == num_right


def decode(
    seqs: list[Sequence], model: Model, vocab_size: int, num_tokens: int, seed: int
) -> list[list[int]]:
    """Decode to `num_tokens` each, with random drafts, batches and preemptions."""
    rng = random.Random(seed)
    sampler = make_sampler(vocab_size)
    goals = [len(seq.token_ids) + num_tokens for seq in seqs]
    while True:
        live = [s for s, goal in zip(seqs, goals, strict=True) if len(s.token_ids) < goal]
        if not live:
            return [
                s.token_ids[goal - num_tokens : goal] for s, goal in zip(seqs, goals, strict=True)
            ]
        chosen = rng.sample(live, rng.randint(1, len(live)))
        items = []
        for seq in chosen:
            right = reference_tokens(seq, model, rng.randint(0, 4))
            junk = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))]
            items.append(make_item(seq, right + junk))
        chunk = ScheduledSequence(make_sequence(GREEDY, PROMPT, seq_id=10**6), 3, is_chunk=True)
        position = rng.randint(0, len(items))
        outputs = sampler.sample(
            make_logits(model, items), [*items[:position], chunk, *items[position:]]
        )
        assert outputs.pop(position) == SequenceOutput()
        for item, output in zip(items, outputs, strict=True):
            item.seq.token_ids += output.token_ids
        if rng.random() < 0.3:
            sampler.free([rng.choice(seqs).seq_id])


def test_output_does_not_depend_on_batch_drafts_or_preemption() -> None:
    vocab_size = 150
    model = random_model(vocab_size)

    def fresh() -> list[Sequence]:
        return [
            make_sequence(params, PROMPT, seq_id=i, seed=i % 5, bad_word_ids=BAD_WORDS)
            for i, params in enumerate(FEATURES.values())
        ]

    expected = [reference_tokens(seq, model, 12) for seq in fresh()]
    for seed in range(3):
        assert decode(fresh(), model, vocab_size, 12, seed) == expected


def test_counts_are_rebuilt_after_free() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=1.0)
    seq = make_sequence(params, [1], [], seq_id=4)
    row = torch.zeros(1, 64)
    row[0, 10:14] = torch.tensor([5.0, 4.0, 3.0, 2.5])
    sampler = make_sampler(64)
    for expected in (10, 11, 12, 13):
        (output,) = sampler.sample(row, [make_item(seq)])
        assert output.token_ids == [expected]
        seq.token_ids += output.token_ids
        sampler.free([4, 77])


def log_softmax(row: np.ndarray) -> np.ndarray:
    shifted = row.astype(np.float64) - row.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize("name", ["greedy", "everything", "min_tokens", "hot"])
@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_of_the_raw_logits(name: str, num_top: int) -> None:
    vocab_size = 300
    model = random_model(vocab_size)
    params = replace(FEATURES[name], logprobs=num_top)
    seq = make_sequence(params, PROMPT, [9, 3], bad_word_ids=BAD_WORDS)
    other = make_sequence(replace(GREEDY, logprobs=3), PROMPT, seq_id=1)
    silent = make_sequence(GREEDY, PROMPT, seq_id=2)
    drafts = [*reference_tokens(seq, model, 4), 0, 0]
    items = [make_item(silent), make_item(seq, drafts), make_item(other)]
    outputs = make_sampler(vocab_size).sample(make_logits(model, items), items)
    assert outputs[0].logprobs == []
    assert [len(entry.top) for entry in outputs[2].logprobs] == [3]
    tokens = list(seq.token_ids)
    assert len(outputs[1].logprobs) == len(outputs[1].token_ids) >= 5
    for token_id, entry in zip(outputs[1].token_ids, outputs[1].logprobs, strict=True):
        expected = log_softmax(model(tokens))
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(expected[token_id], abs=1e-5)
        assert entry.rank == 1 + (expected > expected[token_id]).sum()
        order = np.argsort(-expected, kind="stable")[:num_top]
        assert [i for i, _ in entry.top] == order.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[order], abs=1e-5)
        tokens.append(token_id)


def test_logprobs_with_ties_and_impossible_tokens() -> None:
    row = torch.full((1, 260), -math.inf)
    row[0, [200, 20, 130]] = torch.tensor([1.0, 2.0, 2.0])
    seq = make_sequence(replace(GREEDY, logprobs=20, logit_bias={200: 50.0}), [1])
    (output,) = make_sampler(260).sample(row, [make_item(seq)])
    (entry,) = output.logprobs
    assert (entry.token_id, entry.rank) == (200, 3)
    assert [i for i, _ in entry.top] == [20, 130, 200]
    (output,) = make_sampler(260).sample(
        row, [make_item(make_sequence(replace(GREEDY, logprobs=0), [1]))]
    )
    assert (output.token_ids, output.logprobs[0].rank) == ([20], 1)


def test_greedy_ties_go_to_the_lowest_id() -> None:
    rows = torch.zeros(4, 515)
    rows[1, [130, 131, 400]] = 1.0
    rows[2, [512, 514]] = 1.0
    rows[3] = -math.inf
    rows[3, [258, 257]] = -5.0
    items = [make_item(make_sequence(GREEDY, [1], seq_id=i)) for i in range(4)]
    outputs = make_sampler(515).sample(rows, items)
    assert [output.token_ids for output in outputs] == [[0], [130], [512], [257]]


@pytest.mark.parametrize("params", [GREEDY, FEATURES["temperature"], FEATURES["everything"]])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_engine_error(
    params: SamplingParams, value: float
) -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    logits[1, 150] = value
    items = [make_item(make_sequence(params, [1], seq_id=i)) for i in range(3)]
    with pytest.raises(EngineError, match="1 of 3 rows"):
        make_sampler(200).sample(logits, items)


def test_a_row_of_minus_infinity_is_an_engine_error() -> None:
    with pytest.raises(EngineError):
        make_sampler(200).sample(
            torch.full((1, 200), -math.inf), [make_item(make_sequence(GREEDY, [1]))]
        )


def test_min_tokens_and_accepted_eos_inside_the_window() -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    logits = torch.zeros(4, 64)
    logits[:, 2] = 5.0
    logits[:, 9] = 1.0
    seq = make_sequence(params, [1])
    (output,) = make_sampler(64).sample(logits, [make_item(seq, [9, 9, 2])])
    assert output.token_ids == [9, 9, 2, 2]


def test_nothing_to_sample() -> None:
    chunk = ScheduledSequence(make_sequence(GREEDY, PROMPT), 3, is_chunk=True)
    assert make_sampler(50).sample(torch.empty(0, 50), [chunk]) == [SequenceOutput()]
    assert make_sampler(50).sample(torch.empty(0, 50), []) == []
