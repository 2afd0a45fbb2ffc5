"""The draw: exact distributions, independent noise, ties, extreme values."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sampling_reference import (
    FEATURES,
    PROMPT,
    filtered_weights,
    make_item,
    make_logits,
    make_sampler,
    make_sequence,
    random_model,
    reference_tokens,
)
from scipy import stats

from netra_backend.request import SamplingParams


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p_wide", "filters", "min_p_wide"])
def test_large_vocabulary(name: str) -> None:
    """Wider than every candidate set, so that the paths over whole rows are taken too."""
    model = random_model(2500, scale=1.0)
    for params in (FEATURES[name], replace(FEATURES[name], top_k=1500)):
        seqs = [make_sequence(params, PROMPT, seq_id=i, seed=i) for i in range(6)]
        items = [make_item(seq) for seq in seqs]
        outputs = make_sampler(2500).sample(make_logits(model, items), items)
        for seq, output in zip(seqs, outputs, strict=True):
            assert output.token_ids == reference_tokens(seq, model, 1)


def test_rows_of_all_kinds_in_one_step() -> None:
    model = random_model(1100, scale=1.0)
    names = ["hot", "top_p_wide", "temperature", "top_k", "min_p_wide", "greedy", "filters_wide"]
    seqs = [
        make_sequence(FEATURES[name], PROMPT, seq_id=i, seed=i)
        for i, name in enumerate(names + names[::-1])
    ]
    for subset in (seqs, seqs[:2], seqs[1:3], seqs[::3], [seqs[0], seqs[1], seqs[-1]]):
        items = [make_item(seq) for seq in subset]
        outputs = make_sampler(1100).sample(make_logits(model, items), items)
        for seq, output in zip(subset, outputs, strict=True):
            assert output.token_ids == reference_tokens(seq, model, 1)


@pytest.mark.parametrize("name", ["top_k", "top_k_1", "top_p", "min_p", "filters", "everything"])
def test_tokens_that_tie_at_the_edge_of_a_filter_stay(name: str) -> None:
    model = random_model(400, scale=1.0, step=1.0)
    seqs = [make_sequence(FEATURES[name], PROMPT, seq_id=i, seed=i) for i in range(40)]
    items = [make_item(seq) for seq in seqs]
    outputs = make_sampler(400).sample(make_logits(model, items), items)
    for seq, output in zip(seqs, outputs, strict=True):
        assert output.token_ids == reference_tokens(seq, model, 1)


def tied_past_the_candidates() -> np.ndarray:
    """Half the mass in 10 tokens, half in 200 that tie: top-p 0.52 keeps them all."""
    row = np.full(400, -9.0, dtype=np.float32)
    row[:10] = 3.0
    row[100:300] = 0.0
    return row


def one_above_a_crowd() -> np.ndarray:
    """100 tokens tie for the second place: top-k 3 keeps them, with five sixths of the mass."""
    row = np.full(400, -9.0, dtype=np.float32)
    row[250] = 3.0
    row[100:200] = 0.0
    return row


def edge_in_a_crowd() -> np.ndarray:
    """Top-p 0.8 cuts in the middle of 1500 tokens that differ by 1e-6 each."""
    row = np.ones(2000, dtype=np.float32)
    row[500:] = -1e-6 * np.arange(1500, dtype=np.float32)
    return row


@pytest.mark.parametrize(
    ("row", "top_k", "top_p"),
    [
        (tied_past_the_candidates(), 0, 0.52),
        (edge_in_a_crowd(), 0, 0.8),
        (edge_in_a_crowd(), 1200, 0.6),
        (edge_in_a_crowd(), 1200, 0.8),
        (one_above_a_crowd(), 3, 0.3),
    ],
)
def test_large_nuclei_are_cut_exactly(row: np.ndarray, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    items = [make_item(make_sequence(params, PROMPT, seq_id=i, seed=i)) for i in range(80)]
    outputs = make_sampler(len(row)).sample(torch.from_numpy(row).repeat(80, 1), items)
    for item, output in zip(items, outputs, strict=True):
        assert output.token_ids == reference_tokens(item.seq, lambda _: row, 1)


def test_seed_and_position_select_the_noise() -> None:
    flat = SamplingParams(temperature=1.0)
    row = torch.zeros(1, 1000)

    def token(seed: int, length: int) -> int:
        seq = make_sequence(flat, [1] * length, seed=seed)
        (output,) = make_sampler(1000).sample(row, [make_item(seq)])
        return output.token_ids[0]

    assert token(3, 5) == token(3, 5)
    assert token(2**64 - 1, 5) == token(-1, 5)
    assert len({token(seed, 5) for seed in (-(2**63), -1, 0, 1, 2, 2**62, 2**64 - 2)}) == 7
    assert len({token(3, length) for length in range(1, 40)}) > 35


@pytest.mark.parametrize(
    "name", ["temperature", "hot", "top_k", "top_p", "top_p_wide", "min_p", "min_p_wide", "filters"]
)
def test_draws_follow_the_exact_distribution(name: str) -> None:
    vocab_size, num_draws = 200, 4000
    params = FEATURES[name]
    row = random_model(vocab_size, scale=1.5)(PROMPT)
    items = [make_item(make_sequence(params, PROMPT, seq_id=i, seed=i)) for i in range(num_draws)]
    logits = torch.from_numpy(row).repeat(num_draws, 1)
    outputs = make_sampler(vocab_size).sample(logits, items)
    counts = np.bincount([output.token_ids[0] for output in outputs], minlength=vocab_size)
    expected = filtered_weights(params, row)
    expected *= num_draws / expected.sum()
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed = [*counts[common], counts[~common].sum()]
    theory = [*expected[common], expected[~common].sum()]
    if theory[-1] == 0:
        observed, theory = observed[:-1], theory[:-1]
    assert stats.chisquare(observed, theory).pvalue > 0.001


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    params = SamplingParams(temperature=1.0)
    num_seqs, num_tokens = 1500, 5
    seqs = [make_sequence(params, [1], [0] * 4, seq_id=i, seed=i) for i in range(num_seqs)]
    items = [make_item(seq, [0] * (num_tokens - 1)) for seq in seqs]
    outputs = make_sampler(4).sample(torch.zeros(num_seqs * num_tokens, 4), items)
    # A draft of token 0 is accepted with probability 1/4, whatever came before it.
    accepted = np.bincount([o.num_accepted_tokens for o in outputs], minlength=num_tokens)
    theory = num_seqs * np.array([0.75 * 0.25**j for j in range(num_tokens - 1)] + [0.25**4])
    assert (
        stats.chisquare(accepted[:4], theory[:4] * accepted[:4].sum() / theory[:4].sum()).pvalue
        > 0.001
    )
    firsts = np.array([output.token_ids[0] for output in outputs])
    table = np.zeros((4, 4))
    np.add.at(table, (firsts[:-1], firsts[1:]), 1)
    assert stats.chi2_contingency(table).pvalue > 0.001


@pytest.mark.parametrize("name", ["hot", "top_k_100", "top_p_wide", "min_p", "filters"])
def test_impossible_tokens_are_never_drawn(name: str) -> None:
    logits = torch.full((50, 700), -math.inf)
    logits[:, [3, 300, 699]] = torch.tensor([0.0, 1.0, 0.5])
    items = [make_item(make_sequence(FEATURES[name], [1], seq_id=i, seed=i)) for i in range(50)]
    outputs = make_sampler(700).sample(logits, items)
    drawn = {output.token_ids[0] for output in outputs}
    assert drawn <= {3, 300, 699}
    assert len(drawn) > 1


@pytest.mark.parametrize("temperature", [1.0001e-5, 1e-4, 1e6, 1e30, 1e300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.3}])
def test_extreme_temperatures(temperature: float, filters: dict[str, float]) -> None:
    params = replace(SamplingParams(temperature=temperature), **filters)
    logits = torch.randn(60, 300, generator=torch.Generator().manual_seed(1)) * 50
    logits[:, 40:60] = -math.inf
    items = [make_item(make_sequence(params, [1], seq_id=i, seed=i)) for i in range(60)]
    tokens = [output.token_ids[0] for output in make_sampler(300).sample(logits, items)]
    assert not {*range(40, 60)}.intersection(tokens)
    likely = logits.argmax(-1).tolist()
    num_likely = sum(a == b for a, b in zip(tokens, likely, strict=True))
    assert num_likely == 60 if temperature < 1 else num_likely < 30
