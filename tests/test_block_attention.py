"""Attention of draft blocks against one masked softmax over everything: windows, causality, ragged contexts, codecs."""

from __future__ import annotations

import pytest
import torch

from netra_backend.cache.codecs import make_codec
from netra_backend.cache.kv_cache import LayerCache
from netra_backend.sequence import PAGE_SIZE
from netra_backend.torch_ops.block_attention import BlockRows, block_attention

HEADS, KV_HEADS, DIM, SIZE = 6, 2, 16, 5
CONTEXTS = (3, 64, 97, 200)
CPU = torch.device("cpu")


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, is_causal: bool
) -> torch.Tensor:
    """q [SIZE, HEADS, DIM] are the last rows of k, v [length, KV_HEADS, DIM]."""
    length = len(k)
    rows = torch.arange(length - SIZE, length)[:, None]
    places = torch.arange(length)
    visible = torch.ones(SIZE, length, dtype=torch.bool)
    if window:
        visible &= places > rows - window
    if is_causal:
        visible &= places <= rows
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * DIM**-0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(-1), v)


@pytest.mark.parametrize(("codec_name", "tolerance"), [("plain", 2e-6), ("int8", 0.03)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 4, 6, 63, 64, 65, 130, 500])
def test_blocks_see_what_one_masked_softmax_sees(
    window: int, is_causal: bool, codec_name: str, tolerance: float
) -> None:
    torch.manual_seed(0)
    codec = make_codec(codec_name, KV_HEADS, DIM, torch.float32, CPU)
    pages = torch.zeros(8, *codec.page_shape, dtype=codec.dtype)
    tails = torch.full((6, 2, KV_HEADS, PAGE_SIZE + 8, DIM), 1e4)  # also beyond the tails
    cache = LayerCache(codec, pages, tails)
    free, tables, wholes = [5, 2, 7, 0, 1, 6], [], []
    for slot, length in enumerate(CONTEXTS):
        keys, values = torch.randn(2, length + SIZE, KV_HEADS, DIM)
        wholes.append((keys, values))
        table = [free.pop() for _ in range(length // PAGE_SIZE)]
        for index, page in enumerate(table):
            span = slice(index * PAGE_SIZE, (index + 1) * PAGE_SIZE)
            pages[page] = codec.seal(keys[span].transpose(0, 1), values[span].transpose(0, 1))
        rest = slice(len(table) * PAGE_SIZE, length)
        tails[slot, 0, :, : length % PAGE_SIZE] = keys[rest].transpose(0, 1)
        tails[slot, 1, :, : length % PAGE_SIZE] = values[rest].transpose(0, 1)
        tables.append(torch.tensor(table, dtype=torch.int64))
    lengths = torch.tensor(CONTEXTS)
    rows = BlockRows(
        lengths[:, None] + torch.arange(SIZE),
        torch.arange(len(CONTEXTS)),
        lengths % PAGE_SIZE,
        int((lengths % PAGE_SIZE).max()),
        tables,
    )
    q = torch.randn(len(CONTEXTS) * SIZE, HEADS, DIM)
    own = [torch.cat((k[-SIZE:], v[-SIZE:]), 1) for k, v in wholes]
    out = block_attention(q, torch.cat(own), rows, rows.mask(window, is_causal), window, cache)
    for index, (keys, values) in enumerate(wholes):
        span = slice(index * SIZE, (index + 1) * SIZE)
        right = dense(q[span], keys, values, window, is_causal)
        torch.testing.assert_close(out[span], right, atol=tolerance, rtol=tolerance)
