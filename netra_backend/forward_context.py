"""ForwardContext: one step's batch as tensors. Layers receive it as an argument; there is no global one.

Knows the storage rules of sequence.py but no model. Rows of the forward pass are ordered: first the *short*
sequences (one committed token and its drafts), by slot, so that neighbouring tails and states are views;
then the *chunks* (more than one committed token), each computed on its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from netra_backend.batch import Batch, ScheduledSequence
from netra_backend.sequence import PAGE_SIZE


@dataclass(slots=True)
class OpeningWork:
    """First pages of short sequences where those have a codec of their own: their ids [count], below 0, and the
    short sequence that each belongs to [count]; None if each one in turn has its own.
    """

    page_ids: torch.Tensor
    owners: torch.Tensor | None


@dataclass(slots=True)
class PageWork:
    """Sealed pages of the short sequences: each page is read once, for the sequence that owns it. First pages
    with a codec of their own are in `opening` only.

    first, last: the pages are the view pages[first:last], or first = -1 and they are gathered by `page_ids`.
    owner [num_pages]: short sequence that reads the page. gather [num_seqs, 1 + max_pages]: where a
    sequence's tail and its pages stand when all tails, then all pages are in a row; `absent` marks padding.
    tables: each sequence's page ids in order. The first layer that reads by sequence works out, for the others,
    segments: sequences and bounded groups of their pages, views or indices; and copies: sequences with as many pages
    each, and which matrices to copy to read them joined.
    """

    first: int
    last: int
    page_ids: torch.Tensor
    owner: torch.Tensor
    gather: torch.Tensor
    absent: torch.Tensor
    tables: list[list[int]]
    segments: list[tuple[int, list[slice | torch.Tensor]]] | None = None
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    opening: OpeningWork | None = None


@dataclass(slots=True)
class Falling:
    """Sequences in the order of falling counts, for loops over tokens: those with more than t are the first live[t].

    order [num_seqs]: their indices; None if all counts are equal.
    """

    live: list[int]
    order: torch.Tensor | None = None

    @classmethod
    def of(cls, counts: list[int], device: torch.device) -> Falling:
        """The order of `counts`; equal ones stay as they are."""
        if min(counts) == max(counts):
            return cls([len(counts)] * counts[0])
        order = sorted(range(len(counts)), key=counts.__getitem__, reverse=True)
        live = [sum(count > t for count in counts) for t in range(max(counts))]
        return cls(live, _int_tensor(order, device))


@dataclass(slots=True)
class ShortRows:
    """All short sequences, padded to `width` = the largest 1 + drafts. Tensors are int64 on the device.

    rows [num_seqs, width]: row of the forward pass (padding repeats the last one).
    flat [num_rows]: where each real row stands in the padded order; None if nothing is padded.
    falling: sequences by rows. slots [num_seqs], and the same as a
    range if they are neighbours. write_slots, write_rows [num_rows]: tail row of each token.
    tail_mask [num_seqs, 1, width, num_tail_rows]: 0 or -inf; None if all see everything.
    num_replay [num_seqs]: records to absorb before this step; replay: sequences by them. tail_index: row numbers
    of write_slots and write_rows in a layer's tails; row_mask: tail_mask for all rows of a KV head. The first layer
    works out both.
    checkpoints: (sequence, records absorbed, checkpoint id) where the recurrent state is to be copied.
    """

    num_seqs: int
    width: int
    num_rows: int
    rows: torch.Tensor
    flat: torch.Tensor | None
    falling: Falling
    slots: torch.Tensor
    slot_range: tuple[int, int] | None
    write_slots: torch.Tensor
    write_rows: torch.Tensor
    num_tail_rows: int
    tail_mask: torch.Tensor | None
    pages: PageWork | None
    num_replay: torch.Tensor
    replay: Falling
    tail_index: torch.Tensor | None = None
    row_mask: torch.Tensor | None = None
    checkpoints: list[tuple[int, int, int]] = field(default_factory=list)

    def for_other_heads(self) -> ShortRows:
        """The same without what layers of one shape worked out for each other."""
        pages = self.pages and replace(self.pages, segments=None, copies=[])
        return replace(self, tail_index=None, row_mask=None, pages=pages)


@dataclass(slots=True)
class ChunkRows:
    """One chunk: rows [start, stop) of the forward pass; sealed pages and tail rows before it.

    checkpoints: (rows absorbed, checkpoint id) where the recurrent state is to be copied, ascending.
    opening_id, seal_opening_id: a first page with a codec of its own that is read or filled; 0 if there is none.
    """

    start: int
    stop: int
    slot: int
    num_tail: int
    num_computed: int
    num_replay: int
    page_ids: torch.Tensor
    seal_page_ids: torch.Tensor
    checkpoints: list[tuple[int, int]]
    opening_id: int = 0
    seal_opening_id: int = 0


@dataclass(slots=True)
class ForwardContext:
    """token_ids, positions [num_tokens]; the two groups; logit_rows [num_logits] in the items' order."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    short: ShortRows | None
    chunks: list[ChunkRows]
    logit_rows: torch.Tensor


def build_context(
    batch: Batch, device: torch.device
) -> tuple[ForwardContext, list[ScheduledSequence]]:
    """The step's tensors, and the batch's items in the order of their rows and logits."""
    short = sorted((i for i in batch.scheduled if not i.is_chunk), key=lambda item: item.seq.slot)
    chunks = [item for item in batch.scheduled if item.is_chunk]
    ordered = short + chunks
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    starts: list[int] = []
    for item in ordered:
        seq, start = item.seq, item.seq.num_computed_tokens
        starts.append(len(token_ids))
        committed = item.num_scheduled_tokens - len(item.draft_token_ids)
        token_ids += seq.token_ids[start : start + committed]
        token_ids += item.draft_token_ids
        positions += range(start, start + item.num_scheduled_tokens)
        logit_rows += range(len(token_ids) - item.num_logits, len(token_ids))
    context = ForwardContext(
        token_ids=_int_tensor(token_ids, device),
        positions=_int_tensor(positions, device),
        short=_scheduled_rows(short, device) if short else None,
        chunks=[
            _chunk_rows(item, start, device)
            for item, start in zip(chunks, starts[len(short) :], strict=True)
        ],
        logit_rows=_int_tensor(logit_rows, device),
    )
    return context, ordered


def _int_tensor(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def _chunk_rows(item: ScheduledSequence, start: int, device: torch.device) -> ChunkRows:
    seq = item.seq
    opening_id, page_ids = _split_table(seq.block_table)
    seal_opening_id, seal_page_ids = _split_table(item.seal_block_ids)
    return ChunkRows(
        start=start,
        stop=start + item.num_scheduled_tokens,
        slot=seq.slot,
        num_tail=seq.num_tail_tokens,
        num_computed=seq.num_computed_tokens,
        num_replay=seq.num_replay_tokens,
        page_ids=_int_tensor(page_ids, device),
        seal_page_ids=_int_tensor(seal_page_ids, device),
        checkpoints=item.checkpoints,
        opening_id=opening_id,
        seal_opening_id=seal_opening_id,
    )


def _split_table(table: list[int]) -> tuple[int, list[int]]:
    """A first page with a codec of its own (0: none), and the other pages."""
    return (table[0], table[1:]) if table and table[0] < 0 else (0, table)


def _scheduled_rows(items: list[ScheduledSequence], device: torch.device) -> ShortRows:
    rows = _short_rows(
        slots=[item.seq.slot for item in items],
        tails=[item.seq.num_tail_tokens - PAGE_SIZE * len(item.seal_block_ids) for item in items],
        counts=[item.num_scheduled_tokens for item in items],
        replay=[item.seq.num_replay_tokens for item in items],
        pages=draft_pages(items, device),
        device=device,
    )
    rows.checkpoints = [
        (index, *checkpoint) for index, item in enumerate(items) for checkpoint in item.checkpoints
    ]
    return rows


def draft_context(
    items: list[ScheduledSequence],
    positions: list[int],
    token_ids: torch.Tensor,
    pages: PageWork | None,
) -> ForwardContext:
    """One row per item behind what its step computed: for a draft model that runs ahead in the tails.

    items: by slot. positions: of the rows, counted from 0. pages: the items' sealed ones (`draft_pages`).
    """
    device = token_ids.device
    sealed = [len(item.seq.block_table) + len(item.seal_block_ids) for item in items]
    short = _short_rows(
        slots=[item.seq.slot for item in items],
        tails=[at - count * PAGE_SIZE for at, count in zip(positions, sealed, strict=True)],
        counts=[1] * len(items),
        replay=[0] * len(items),
        pages=pages,
        device=device,
    )
    none = _int_tensor([], device)
    return ForwardContext(token_ids, _int_tensor(positions, device), short, [], none)


def draft_pages(items: list[ScheduledSequence], device: torch.device) -> PageWork | None:
    """The pages of `items` once the step has sealed its own."""
    return _page_work([item.seq.block_table + item.seal_block_ids for item in items], device)


def _short_rows(
    slots: list[int],
    tails: list[int],
    counts: list[int],
    replay: list[int],
    pages: PageWork | None,
    device: torch.device,
) -> ShortRows:
    width = max(counts)
    rows: list[list[int]] = []
    flat: list[int] = []
    write_slots: list[int] = []
    write_rows: list[int] = []
    start = 0
    for index, (count, slot, tail) in enumerate(zip(counts, slots, tails, strict=True)):
        rows.append([start + min(j, count - 1) for j in range(width)])
        flat += range(index * width, index * width + count)
        write_slots += [slot] * count
        write_rows += range(tail, tail + count)
        start += count
    num_tail_rows = max(tail + count for tail, count in zip(tails, counts, strict=True))
    is_range = slots == list(range(slots[0], slots[0] + len(slots)))
    return ShortRows(
        num_seqs=len(slots),
        width=width,
        num_rows=start,
        rows=torch.tensor(rows, dtype=torch.int64, device=device),
        flat=_int_tensor(flat, device) if start < width * len(counts) else None,
        falling=Falling.of(counts, device),
        slots=_int_tensor(slots, device),
        slot_range=(slots[0], slots[0] + len(slots)) if is_range else None,
        write_slots=_int_tensor(write_slots, device),
        write_rows=_int_tensor(write_rows, device),
        num_tail_rows=num_tail_rows,
        tail_mask=_tail_mask(tails, width, num_tail_rows, device),
        pages=pages,
        num_replay=_int_tensor(replay, device),
        replay=Falling.of(replay, device),
    )


def _tail_mask(
    tails: list[int], width: int, num_rows: int, device: torch.device
) -> torch.Tensor | None:
    """Row j of a sequence sees its tail, its own token and the j before: columns <= tail + j."""
    if width == 1 and min(tails) + 1 == num_rows:
        return None
    last = _int_tensor(tails, device)[:, None] + torch.arange(width, device=device)
    hidden = torch.arange(num_rows, device=device) > last[:, :, None]
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))
    return mask[:, None]


def _page_work(tables: list[list[int]], device: torch.device) -> PageWork | None:
    """Read pages in place where they lie close together (a view), else gather them.

    A page shared by two sequences, or a range that is more than half foreign, is gathered.
    """
    split = [_split_table(table) for table in tables]
    opening = [(page, index) for index, (page, _) in enumerate(split) if page < 0]
    tables = [table for _, table in split]
    total = sum(map(len, tables))
    if total == 0 and not opening:
        return None
    owners = [(page, index) for index, table in enumerate(tables) for page in table]
    page_ids = [page for page, _ in owners]
    first, last = min(page_ids, default=0), max(page_ids, default=-1) + 1
    in_place = last - first <= 2 * total and len(set(page_ids)) == total
    position = {page: page - first for page in page_ids} if in_place else {}
    owner = [0] * (last - first) if in_place else [index for _, index in owners]
    if in_place:
        for page, index in owners:
            owner[page - first] = index
    longest = max(map(len, tables))
    gather, absent, taken = [], [], len(tables)
    for index, table in enumerate(tables):
        if in_place:
            places = [len(tables) + position[page] for page in table]
        else:
            places = list(range(taken, taken + len(table)))
        taken += len(table)
        gather.append([index, *places] + [0] * (longest - len(table)))
        absent.append([False] * (1 + len(table)) + [True] * (longest - len(table)))
    return PageWork(
        first=first if in_place else -1,
        last=last,
        page_ids=_int_tensor(page_ids, device),
        owner=_int_tensor(owner, device),
        gather=torch.tensor(gather, dtype=torch.int64, device=device),
        absent=torch.tensor(absent, device=device),
        tables=tables,
        opening=_opening_work(opening, len(tables), device) if opening else None,
    )


def _opening_work(pages: list[tuple[int, int]], num_seqs: int, device: torch.device) -> OpeningWork:
    ids, owners = (_int_tensor(list(part), device) for part in zip(*pages, strict=True))
    return OpeningWork(ids, owners if len(owners) < num_seqs else None)
