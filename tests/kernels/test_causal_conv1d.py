"""causal_conv1d against its reference: ragged steps, chunks that wrap the ring, fresh sequences; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import Guarded, assert_close, poison_empty
from test_gated_delta_chunk import chunk_inputs

from netra_kernels.causal_conv1d import causal_conv1d, causal_conv1d_ref


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [6, 11])
@pytest.mark.parametrize(
    ("query_lens", "starts"),
    [([1, 2, 3], [0, 1, 97]), ([0, 1], [5, 2]), ([70, 5, 40], [0, 13, 64]), ([4], [2])],
)
def test_matches_reference(monkeypatch, dtype, width, query_lens, starts):
    channels = 40
    x = torch.randn(sum(query_lens), channels + 7).to(dtype)[:, :channels]
    weight, inputs = torch.randn(channels, 4).to(dtype), chunk_inputs(query_lens, starts)
    guarded = Guarded(len(query_lens), width, channels, dtype=dtype)
    guarded.view.copy_(torch.randn(guarded.view.shape))
    columns = guarded.view.clone()
    expected = causal_conv1d_ref(x, weight, columns, inputs)
    poison_empty(monkeypatch)
    out = causal_conv1d(x, weight, guarded.view, inputs)
    assert_close(out, expected, 3e-3 if dtype == torch.bfloat16 else 1e-6)
    for s, start in enumerate(starts):  # the columns that a next step can read
        end = start + query_lens[s]
        first = max(0, end - 3 if query_lens[s] > width - 3 else start - 3, end - width)
        for position in range(first, end):
            slot, column = inputs.slots[s], position % width
            assert torch.equal(guarded.view[slot, column], columns[slot, column])
    guarded.assert_margins_untouched()


def test_steps_of_one_token_equal_a_chunk():
    x, weight = torch.randn(9, 32), torch.randn(32, 4)
    whole = causal_conv1d(x, weight, torch.zeros(1, 8, 32), chunk_inputs([9], [0]))
    columns = torch.full((1, 8, 32), float("nan"))
    steps = [causal_conv1d(x[t : t + 1], weight, columns, chunk_inputs([1], [t])) for t in range(9)]
    assert_close(torch.cat(steps), whole, 1e-6)


def test_rejected_tokens_are_overwritten():
    """Three tokens are tried, one is kept, the next step starts behind it."""
    x, weight = torch.randn(5, 32), torch.randn(32, 4)
    whole = causal_conv1d(x, weight, torch.zeros(1, 8, 32), chunk_inputs([5], [0]))
    columns = torch.zeros(1, 8, 32)
    causal_conv1d(x[:2], weight, columns, chunk_inputs([2], [0]))
    causal_conv1d(torch.cat([x[2:3], torch.randn(2, 32)]), weight, columns, chunk_inputs([3], [2]))
    assert_close(causal_conv1d(x[3:5], weight, columns, chunk_inputs([2], [3])), whole[3:5], 1e-6)
