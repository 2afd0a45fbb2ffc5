"""merge against its reference: splits without pages, rotation, gate, FP8; interpreted."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import assert_close, poison_empty

from netra_kernels.attention_merge import merge, merge_ref


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (3, 128)])
def test_merge_matches_reference(monkeypatch, splits, rotated, heads, dim):
    parts, lse = torch.randn(splits + 1, 3, heads, dim), 4 * torch.randn(splits + 1, 3, heads)
    lse[:-1, 1] = -torch.inf  # a sequence without history
    if splits > 1:
        lse[1] = -torch.inf
    parts[lse == -torch.inf] = torch.nan
    gate = torch.randn(3, heads, 2 * dim)[..., dim:]
    expected = merge_ref(parts, lse, torch.float32, rotated, gate, fp8=True)
    poison_empty(monkeypatch)
    out = merge(parts, lse, torch.float32, rotated, gate, fp8=True)
    assert_close(out.hidden, expected.hidden, 1e-6)
    restored = out.fp8.float().unflatten(-1, (-1, 128)) * out.scales[..., None]
    assert_close(restored.flatten(1), expected.hidden.flatten(1), 0.04)
