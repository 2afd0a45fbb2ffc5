"""Attention of draft blocks in torch: a block of rows per sequence over its context and, both ways, over itself.

The context lies in sealed pages and tails as for every layer; the block's own keys and values are never stored,
so a block that is not accepted leaves nothing behind. A layer may see a window only, exact to the token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from netra_backend.cache.codecs import Codec, PlainCodec
from netra_backend.cache.kv_cache import LayerCache
from netra_backend.forward_context import ForwardContext
from netra_backend.sequence import PAGE_SIZE
from netra_backend.torch_ops.attention import attend_groups, merge

_HIDDEN = -1e30
"""Added to scores of what a row does not see; finite, so that a row that sees no page weighs 0 and is no NaN."""


@dataclass(slots=True)
class BlockRows:
    """Blocks of equal size, one per sequence, behind the context that a step leaves.

    positions [num_seqs, block_size]; slots, num_tail [num_seqs]: the context rows in each tail. tables: page
    ids of each sequence's sealed context. max_tail: the most rows of a tail.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    num_tail: torch.Tensor
    max_tail: int
    tables: list[torch.Tensor]

    def mask(self, window: int, is_causal: bool) -> torch.Tensor:
        """[num_seqs, 1, block_size, max_tail + block_size]: 0 where a row sees a tail row or a block row."""
        size = self.positions.shape[1]
        device = self.positions.device
        first = self.positions[:, :1] - self.num_tail[:, None]  # position of the first tail row
        columns = torch.arange(self.max_tail, device=device)
        places = torch.cat((first + columns, self.positions), 1)
        is_there = torch.cat(
            (columns < self.num_tail[:, None], torch.ones_like(self.positions, dtype=torch.bool)), 1
        )
        visible = is_there[:, None].expand(-1, size, -1).clone()
        if is_causal:
            visible &= places[:, None] <= self.positions[:, :, None]
        if window:
            visible &= places[:, None] > self.positions[:, :, None] - window
        mask = torch.zeros(visible.shape, device=device).masked_fill_(~visible, _HIDDEN)
        return mask[:, None]


def store_rows(kv: torch.Tensor, context: ForwardContext, cache: LayerCache) -> None:
    """Keep keys and values of a step's rows, kv [num_tokens, 2 * num_kv_heads, head_dim], without attention."""
    short = context.short
    if short is not None:
        cache.append(short, kv[: short.num_rows])
    for chunk in context.chunks:
        keys, values = kv[chunk.start : chunk.stop].transpose(0, 1).chunk(2)
        if chunk.num_tail:
            tail = cache.tails[chunk.slot, :, :, : chunk.num_tail]
            keys, values = torch.cat((tail[0], keys), 1), torch.cat((tail[1], values), 1)
        cache.seal_chunk(chunk, keys, values)


def block_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    rows: BlockRows,
    mask: torch.Tensor,
    window: int,
    cache: LayerCache,
) -> torch.Tensor:
    """Attention of all blocks; scale head_dim ** -0.5.

    q [num_seqs * block_size, num_heads, head_dim]; kv [.., 2 * num_kv_heads, head_dim], keys and then values;
    mask of `rows` for the layer's window (0: none) and causality; returns q's shape.
    """
    num_seqs, size = rows.positions.shape
    num_heads, dim = q.shape[1:]
    num_kv_heads = kv.shape[1] // 2
    group = num_heads // num_kv_heads
    # [num_seqs, num_kv_heads, group * block_size, head_dim]: all query rows of a KV head together
    queries = q.view(num_seqs, size, num_kv_heads, group, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    own = kv.view(num_seqs, size, 2, num_kv_heads, dim).permute(0, 2, 3, 1, 4)
    near = torch.cat((cache.tails[rows.slots, :, :, : rows.max_tail], own), 3)
    out, lse = _attend(queries, near[:, 0], near[:, 1], mask.repeat(1, 1, group, 1), dim**-0.5)
    for index, table in enumerate(rows.tables):
        item = slice(index, index + 1)
        if window:
            edges = rows.positions[index] - window
            past = _window_of_pages(queries[item], table, edges.repeat(group), cache)
        else:
            past = _all_pages(queries[item], table, cache)
        if past is not None:
            out[item] = merge(out[item], lse[item], past[0].to(out.dtype), past[1])
    return out.reshape(num_seqs, num_heads, size, dim).transpose(1, 2).reshape(q.shape)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of few rows, [.., rows, head_dim], and the log-sum-exp of their scores [.., rows]."""
    scores = (q @ k.transpose(-1, -2)).float().mul_(scale).add_(mask)
    lse = scores.logsumexp(-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return weights.to(v.dtype) @ v, lse


def _all_pages(
    queries: torch.Tensor, table: torch.Tensor, cache: LayerCache
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if not len(table):
        return None
    codec, prepared = cache.codec, cache.codec.queries(queries)
    groups = (cache.pages[ids] for ids in table.split(codec.group_pages(queries.shape[2])))
    out, lse = attend_groups(codec, prepared, groups)
    return codec.restore(out), lse


def _window_of_pages(
    queries: torch.Tensor, table: torch.Tensor, edges: torch.Tensor, cache: LayerCache
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The same where row i sees positions above edges[i]: at most a window and two pages are expanded."""
    first = max(0, int(edges.min()) + 1) // PAGE_SIZE
    if first >= len(table):
        return None
    keys, values, prepared, scale = _expanded(queries, cache.pages[table[first:]], cache.codec)
    places = first * PAGE_SIZE + torch.arange(keys.shape[2], device=edges.device)
    mask = torch.zeros(len(edges), len(places), device=edges.device)
    mask.masked_fill_(places <= edges[:, None], _HIDDEN)
    out, lse = _attend(prepared, keys, values, mask, scale)
    return cache.codec.restore(out), lse


def _expanded(
    queries: torch.Tensor, pages: torch.Tensor, codec: Codec
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """Keys and values [1, num_kv_heads, num_tokens, head_dim] of pages, queries in their basis, the scale."""
    if isinstance(codec, PlainCodec):
        keys, values = (pages[:, part].transpose(0, 1).flatten(1, 2)[None] for part in (0, 1))
        return keys, values, queries, queries.shape[-1] ** -0.5
    keys, values = codec.expand(pages[None])
    return keys, values, codec.queries(queries), 1.0
