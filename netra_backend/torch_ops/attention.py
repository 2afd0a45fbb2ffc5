"""Attention over sealed pages and tails in torch: what a CPU runs for paged_attention.

Sealed history precedes every query of the step, so it needs no causal mask, and the query heads of a KV head
are stacked as rows. History and tail are attended separately and merged by their log-sum-exp. The codec knows
what pages hold; a context is read in bounded groups of pages and never expanded or copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from netra_backend.cache.codecs import Codec, PlainCodec
from netra_backend.cache.kv_cache import LayerCache
from netra_backend.forward_context import (
    ChunkRows,
    ForwardContext,
    OpeningWork,
    PageWork,
    ShortRows,
)

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

_MIN_JOINED_PAGES = 8
"""Pages per sequence from which a call per sequence beats one over all pages (int8, head size 64, 3 KV heads); plain
pages of sequences with fewer are copied where they lie apart."""

_COPIED_PAGES = 64
"""Plain pages that are copied at a time: they are read again at once, from a cache where they fit."""


def paged_attention(
    q: torch.Tensor, kv: torch.Tensor, context: ForwardContext, cache: LayerCache
) -> torch.Tensor:
    """Causal attention of this step's tokens over everything before them; stores their K and V.

    q [num_tokens, num_heads, head_dim]; kv [num_tokens, 2 * num_kv_heads, head_dim], keys and then values;
    returns q's shape. Scale head_dim ** -0.5.
    """
    short = context.short
    if short is not None and not context.chunks:
        return _short_attention(q, kv, short, cache)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if short is not None:
        n = short.num_rows
        out[:n] = _short_attention(q[:n], kv[:n], short, cache)
    for chunk in context.chunks:
        rows = slice(chunk.start, chunk.stop)
        out[rows] = _chunk_attention(q[rows], kv[rows], chunk, cache)
    return out


def _short_attention(
    q: torch.Tensor, kv: torch.Tensor, short: ShortRows, cache: LayerCache
) -> torch.Tensor:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.shape[1] // 2
    cache.append(short, kv)
    rows = _rows_by_kv_head(q, short, num_kv_heads)
    slots = slice(*short.slot_range) if short.slot_range else short.slots
    keys, values = cache.tails[slots, :, :, : short.num_tail_rows].unbind(1)
    if short.row_mask is None and short.tail_mask is not None:
        short.row_mask = short.tail_mask.repeat(1, 1, num_heads // num_kv_heads, 1)
    out, lse = _flash(rows, keys, values, attn_mask=short.row_mask)
    if short.pages is not None:
        out = _with_history(rows, out, lse, short.pages, cache)
    if short.width == 1:
        return out.reshape(-1, num_heads, head_dim)
    out = (
        out.view(short.num_seqs, num_kv_heads, -1, short.width, head_dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(-1, num_heads, head_dim)
    )
    return out if short.flat is None else out[short.flat]


def _rows_by_kv_head(q: torch.Tensor, short: ShortRows, num_kv_heads: int) -> torch.Tensor:
    """[num_seqs, num_kv_heads, group * width, head_dim]: all query rows of a KV head together."""
    head_dim = q.shape[-1]
    if short.width == 1:
        return q.view(short.num_seqs, num_kv_heads, -1, head_dim)
    padded = q if short.flat is None else q[short.rows.flatten()]
    return (
        padded.view(short.num_seqs, short.width, num_kv_heads, -1, head_dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(short.num_seqs, num_kv_heads, -1, head_dim)
    )


def _with_history(
    rows: torch.Tensor,
    tail_out: torch.Tensor,
    tail_lse: torch.Tensor,
    work: PageWork,
    cache: LayerCache,
) -> torch.Tensor:
    """Attention to pages merged with the tails' by log-sum-exp.

    Few long sequences are read one after the other, and plain pages that lie apart copied to their sequence's; otherwise
    each page is read by itself, for its owner's rows.
    """
    if work.opening is not None:
        tail_out, tail_lse = _with_openings(rows, tail_out, tail_lse, work.opening, cache)
        if len(work.page_ids) == 0:
            return tail_out
    codec = cache.codec
    queries = codec.queries(rows)
    if isinstance(codec, PlainCodec):
        by_sequence = len(rows) > 1 and work.first < 0
    else:
        by_sequence = len(work.page_ids) >= _MIN_JOINED_PAGES * len(rows)
    if by_sequence:
        out, lse = _each_sequence(queries, work, cache)
        return merge(codec.restore(out).to(rows.dtype), lse, tail_out, tail_lse)
    many = rows.shape[0] > 1
    readers = (
        queries.index_select(0, work.owner) if many else queries.expand(len(work.owner), -1, -1, -1)
    )
    pages = (
        cache.pages[work.first : work.last]
        if work.first >= 0
        else cache.pages.index_select(0, work.page_ids)
    )
    page_out, page_lse = codec.attend(readers, pages.unsqueeze(1))
    if not many and page_lse.shape[0] == work.gather.shape[1] - 1:
        weights = torch.softmax(torch.cat((tail_lse, page_lse)), 0).unsqueeze(-1)
        tail_weight, page_weights = weights.split((1, len(page_lse)))
        history = (page_out * page_weights).sum(0, keepdim=True)
        return _add_tail(codec.restore(history), tail_out, tail_weight)
    # [num_seqs, 1 + max_pages, num_kv_heads, rows]; padding points at a tail and has weight 0
    lse = torch.cat((tail_lse, page_lse))[work.gather]
    lse.masked_fill_(work.absent[:, :, None, None], float("-inf"))
    weights = torch.softmax(lse, 1).unsqueeze(-1)
    chosen = work.gather[:, 1:]
    parts = torch.cat((tail_out, page_out)).index_select(0, chosen.flatten())
    history = codec.restore((parts.unflatten(0, chosen.shape) * weights[:, 1:]).sum(1))
    return _add_tail(history, tail_out, weights[:, 0])


def _with_openings(
    rows: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    opening: OpeningWork,
    cache: LayerCache,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention merged with that to the sequences' first pages; out and its log-sum-exp."""
    assert cache.opening is not None
    owners = opening.owners
    past, past_lse = cache.opening.attend(
        rows if owners is None else rows[owners], opening.page_ids
    )
    past = past.to(out.dtype)
    if owners is None:
        return merge(past, past_lse, out, lse), torch.logaddexp(past_lse, lse)
    merged = merge(past, past_lse, out[owners], lse[owners])
    out = out.index_copy(0, owners, merged)
    return out, lse.index_copy(0, owners, torch.logaddexp(past_lse, lse[owners]))


def _add_tail(history: torch.Tensor, tail_out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(history, tail_out.to(history.dtype), weight).to(tail_out.dtype)


def _each_sequence(
    queries: torch.Tensor, work: PageWork, cache: LayerCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's rows to its pages; log-sum-exp -inf where there are none."""
    if work.segments is None:
        _plan_reading(work, cache, queries.shape[2])
    assert work.segments is not None
    if len(work.copies) == 1 and len(work.copies[0][0]) == len(queries):
        return _copied(queries, work.copies[0][1], cache)
    out = torch.zeros_like(queries)
    lse = out.new_full(out.shape[:3], float("-inf"))
    for index, segments in work.segments:
        item = slice(index, index + 1)
        parts = (cache.pages[segment] for segment in segments)
        out[item], lse[item] = attend_groups(cache.codec, queries[item], parts)
    for owners, matrices in work.copies:
        part, part_lse = _copied(queries.index_select(0, owners), matrices, cache)
        out.index_copy_(0, owners, part)
        lse.index_copy_(0, owners, part_lse)
    return out, lse


def _copied(
    queries: torch.Tensor, matrices: torch.Tensor, cache: LayerCache
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of sequences with as many plain pages each, from a copy of those `matrices` (see _matrices)."""
    num_seqs, num_kv_heads, _, head_dim = queries.shape
    copied = cache.pages.view(-1, *cache.pages.shape[-2:]).index_select(0, matrices)
    keys, values = copied.view(2, num_seqs, num_kv_heads, -1, head_dim)
    out, lse = _flash(queries, keys, values)
    return out, lse


def _plan_reading(work: PageWork, cache: LayerCache, num_rows: int) -> None:
    """Set `segments` and `copies` of `work`: plain pages of short sequences are copied, others read in segments."""
    codec, device = cache.codec, work.owner.device
    size = codec.group_pages(num_rows)
    most = _MIN_JOINED_PAGES - 1 if isinstance(codec, PlainCodec) else 0
    work.segments = [
        (index, _segments(table, size, device))
        for index, table in enumerate(work.tables)
        if len(table) > most
    ]
    by_length: dict[int, list[int]] = {}
    for index, table in enumerate(work.tables):
        if 0 < len(table) <= most:
            by_length.setdefault(len(table), []).append(index)
    for length, indices in by_length.items():
        owners = torch.tensor(indices, device=device)
        for some in owners.split(max(1, _COPIED_PAGES // length)):
            pages = torch.tensor([work.tables[index] for index in some.tolist()], device=device)
            work.copies.append((some, _matrices(pages, cache.pages.shape[2])))


def _matrices(table: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """Numbers of the matrices [PAGE_SIZE, head_dim] of plain pages table [n, count], in the order keys and values,
    sequences, heads, pages: [2 * n * num_kv_heads * count].
    """
    parts = torch.arange(2 * num_kv_heads, device=table.device).view(2, 1, num_kv_heads, 1)
    return (table[:, None, :] * (2 * num_kv_heads) + parts).flatten()


def _segments(table: list[int], size: int, device: torch.device) -> list[slice | torch.Tensor]:
    """Groups of at most `size` pages: a slice where they lie in a row, else their indices."""
    segments: list[slice | torch.Tensor] = []
    for start in range(0, len(table), size):
        ids = table[start : start + size]
        in_a_row = ids == list(range(ids[0], ids[0] + len(ids)))
        segments.append(
            slice(ids[0], ids[0] + len(ids)) if in_a_row else torch.tensor(ids, device=device)
        )
    return segments


def attend_groups(
    codec: Codec, queries: torch.Tensor, groups: Iterable[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence's `queries` [1, num_kv_heads, num_rows, head_dim] to groups of its pages, one
    after the other; out and log-sum-exp as codec.attend returns them.
    """
    parts = (codec.attend(queries, pages.unsqueeze(0)) for pages in groups)
    out, lse = next(parts)
    for part_out, part_lse in parts:
        out = merge(out, lse, part_out, part_lse)
        lse = torch.logaddexp(lse, part_lse)
    return out, lse


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> torch.Tensor:
    """Attention over the union of two disjoint key sets from each one's output [..., rows, head_dim] and
    log-sum-exp [..., rows].
    """
    weight = torch.sigmoid(lse_b - lse_a).unsqueeze(-1).to(out_a.dtype)
    return torch.lerp(out_a, out_b, weight)


def _chunk_attention(
    q: torch.Tensor, kv: torch.Tensor, chunk: ChunkRows, cache: LayerCache
) -> torch.Tensor:
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = kv.shape[1] // 2
    keys, values = kv.transpose(0, 1).split(num_kv_heads)
    group = num_heads // num_kv_heads
    queries = q.transpose(0, 1)[None]
    out, lse = _flash(
        queries,
        keys.repeat_interleave(group, 0)[None],
        values.repeat_interleave(group, 0)[None],
        is_causal=True,
    )
    stacked = queries.reshape(1, num_kv_heads, -1, head_dim)
    shape = (out.shape, lse.shape)
    for codec, groups in _histories(chunk, cache, stacked.shape[2]):
        past, past_lse = attend_groups(codec, codec.queries(stacked), groups)
        past = codec.restore(past).to(q.dtype).reshape(shape[0])
        past_lse = past_lse.reshape(shape[1])
        out, lse = merge(past, past_lse, out, lse), torch.logaddexp(past_lse, lse)
    if chunk.num_tail:
        tail = cache.tails[chunk.slot, :, :, : chunk.num_tail]
        past, past_lse = _flash(stacked, tail[0][None], tail[1][None])
        out = merge(past.reshape(shape[0]), past_lse.reshape(shape[1]), out, lse)
        keys, values = torch.cat((tail[0], keys), 1), torch.cat((tail[1], values), 1)
    cache.seal_chunk(chunk, keys, values)
    return out[0].transpose(0, 1)


def _histories(
    chunk: ChunkRows, cache: LayerCache, num_rows: int
) -> Iterator[tuple[Codec, Iterable[torch.Tensor]]]:
    """Each codec of the chunk's sealed pages with bounded groups of them."""
    if chunk.opening_id < 0:
        assert cache.opening is not None
        yield cache.opening.codec, [cache.opening.pages[chunk.opening_id].unsqueeze(0)]
    if len(chunk.page_ids):
        size = cache.codec.group_pages(num_rows)
        yield cache.codec, (cache.pages[ids] for ids in chunk.page_ids.split(size))
