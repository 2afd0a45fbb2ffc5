"""store_tail against its reference, and a chunk's way from attention to pages and tail; interpreted."""

from __future__ import annotations

import pytest
import torch

from netra_kernels.kv_codec import PAGE, page_layout
from netra_kernels.kv_tail import store_tail, store_tail_ref
from netra_kernels.seal import seal


@pytest.mark.parametrize(("heads", "dim"), [(3, 64), (2, 128)])
def test_store_tail_matches_reference(heads, dim):
    kv = torch.randn(5, 2 * heads, dim).bfloat16()
    tail = torch.randn(2, 2, heads, 128, dim).bfloat16()
    mapping = torch.tensor([-1, 127, 128, 5, -1], dtype=torch.int32)
    expected = tail.clone()
    store_tail_ref(kv[:, :heads], kv[:, heads:], expected, mapping)
    store_tail(kv[:, :heads], kv[:, heads:], tail, mapping)
    assert torch.equal(tail, expected)


def test_a_chunk_ends_in_pages_and_tail():
    """40 tokens wait in the tail, 100 come: two pages are sealed, 12 tokens become the tail."""
    keys, values = torch.randn(64 + 140, 1, 64), torch.randn(64 + 140, 1, 64)
    tail, pages = torch.zeros(1, 2, 1, 128, 64), torch.zeros(3, 2, 1, PAGE, 64)
    first = torch.arange(64, 104, dtype=torch.int32)
    store_tail(keys[64:104], values[64:104], tail, first % 128)
    ints = [torch.tensor([x], dtype=torch.int32) for x in (0, 64, 40)]
    new = (keys[104:], values[104:], torch.tensor([0, 100], dtype=torch.int32))
    seal(
        pages,
        tail,
        torch.tensor([[2, 0]], dtype=torch.int32),
        *ints,
        page_layout("plain", 1, 64),
        *new,
    )
    positions = torch.arange(104, 204, dtype=torch.int32)
    mapping = torch.where(positions >= 64 + 2 * PAGE, positions % 128, -1)
    store_tail(keys[104:], values[104:], tail, mapping)
    assert torch.equal(pages[2, 0, 0], keys[64:128, 0])
    assert torch.equal(pages[0, 1, 0], values[128:192, 0])
    rest = torch.arange(192, 204)
    assert torch.equal(tail[0, 0, 0, rest % 128], keys[rest, 0])
    assert torch.equal(tail[0, 1, 0, rest % 128], values[rest, 0])
