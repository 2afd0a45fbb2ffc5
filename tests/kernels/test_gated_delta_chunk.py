"""gated_delta_chunk against float64, on correlated keys too; cuts, checkpoints, ragged batches; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty
from test_gated_delta_rule import HK, HV, K, V, layer, projections

from netra_kernels.gated_delta_chunk import gated_delta_chunk, gated_delta_chunk_ref
from netra_kernels.gated_delta_rule import DeltaInputs


def chunk_inputs(query_lens, starts):
    count = len(query_lens)
    return DeltaInputs(
        torch.arange(count - 1, -1, -1, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.zeros(count, dtype=torch.int32),
        torch.tensor([0, *query_lens]).cumsum(0).int(),
        max(query_lens),
    )


def correlated(num_tokens, correlation, dtype):
    """Projections whose keys share a direction, as those of trained layers do."""
    mixed, a, b = projections(num_tokens, torch.float32)
    mixed = mixed.clone()
    shared = torch.randn(K)
    keys = mixed[:, HK * K : 2 * HK * K]
    keys.copy_(correlation**0.5 * shared + (1 - correlation) ** 0.5 * keys)
    return (
        mixed.to(dtype),
        (a - 4).to(dtype),
        (b + 2).to(dtype),
    )  # slow decay, beta near 1: the hard case


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_chunks_match_float64(monkeypatch, dtype):
    """One sequence starts fresh, one goes on in the middle of a page, both with a checkpoint; one is empty."""
    inputs = chunk_inputs([70, 90, 0], [0, 30, 5])
    state = torch.randn(3, HV, K, V, dtype=torch.float64)
    mixed, a, b = projections(160, dtype)
    weights = layer(dtype)
    ids = torch.tensor([[2, 3, 3], [1, -1, 0], [4, 4, 4]], dtype=torch.int32)
    state_ref, copies_ref = state.clone(), torch.zeros(5, HV, K, V, dtype=torch.float64)
    expected = gated_delta_chunk_ref(mixed, a, b, **weights, state=state_ref, inputs=inputs,
                                     checkpoint_ids=ids, checkpoints=copies_ref)  # fmt: skip
    poison_empty(monkeypatch)
    state, copies = state.float(), torch.zeros(5, HV, K, V)
    state[2] = float("nan")
    state_ref[2] = 0
    out = gated_delta_chunk(
        mixed, a, b, **weights, state=state, inputs=inputs, checkpoint_ids=ids, checkpoints=copies
    )
    assert_close(out, expected, 3e-3 if dtype == torch.bfloat16 else 1e-5)
    assert_close(state[:2], state_ref[:2], 1e-5)
    assert_close(copies[1:3], copies_ref[1:3], 1e-5)
    assert (copies[[0, 3, 4]] == 0).all()  # boundaries that the chunks do not reach


@pytest.mark.parametrize(
    "correlation",
    [pytest.param(0.5, marks=pytest.mark.slow), 0.9, pytest.param(0.99, marks=pytest.mark.slow)],
)
def test_correlated_keys_keep_their_digits(correlation):
    """The product form of the inverse fails here with errors of 1 to 1e9."""
    inputs = chunk_inputs([150], [0])
    mixed, a, b = correlated(150, correlation, torch.float32)
    weights, state = layer(torch.float32), torch.zeros(1, HV, K, V, dtype=torch.float64)
    out = gated_delta_chunk(mixed, a, b, **weights, state=(mine := state.float()), inputs=inputs)
    expected = gated_delta_chunk_ref(mixed, a, b, **weights, state=state, inputs=inputs)
    assert_close(out, expected, 3e-5)
    assert_close(mine, state, 3e-5)


def test_state_at_a_page_boundary_does_not_depend_on_the_cut():
    mixed, a, b = projections(140, torch.bfloat16)
    weights = layer(torch.bfloat16)
    whole, parts = torch.zeros(1, HV, K, V), torch.zeros(1, HV, K, V)
    gated_delta_chunk(mixed, a, b, **weights, state=whole, inputs=chunk_inputs([128], [0]))
    for start, end in ((0, 64), (64, 128)):
        rows = (x[start:end] for x in (mixed, a, b))
        gated_delta_chunk(
            *rows, **weights, state=parts, inputs=chunk_inputs([end - start], [start])
        )
    assert torch.equal(whole, parts)
