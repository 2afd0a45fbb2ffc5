"""A step's integers on the device: what the kernels need to know of every sequence, in one buffer and one copy.

Knows the storage rules of sequence.py and the kernels' rings (position p of slot s lies in tail row p % tail_rows);
no model. The sequences of a group are treated alike: *short* ones (one committed token and its drafts) or *chunks*.
Views start at multiples of 16 bytes, so a kernel compiled for one step serves every other. Rows and sequences past
those in use are harmless: such a sequence has no rows, such a row goes nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from netra_backend.batch import ScheduledSequence
from netra_backend.sequence import PAGE_SIZE
from netra_kernels.gated_delta_chunk import num_boundaries
from netra_kernels.gated_delta_rule import DeltaInputs
from netra_kernels.paged_attention import AttentionInputs
from netra_kernels.tuning import tiling

_ALIGNMENT = 4
"""int32 elements in 16 bytes."""

_PROGRAMS = 264
"""Two programs per multiprocessor of an H200: how many the history of all sequences is cut into."""

_MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Sizes that grids and buffers depend on. max_seals: pages that a sequence fills at most in the step.

    num_splits: programs per sequence over sealed pages, 0 if there are none. boundaries: columns of checkpoint_ids.
    """

    num_rows: int
    num_seqs: int
    max_query_len: int
    max_seals: int
    table_width: int
    num_splits: int
    boundaries: int = 0


def num_splits(num_seqs: int, num_kv_heads: int, max_pages: int) -> int:
    """Programs per sequence that fill the device without more of them than pages."""
    if max_pages == 0:
        return 0
    return max(1, min(_MAX_SPLITS, max_pages, _PROGRAMS // (num_seqs * num_kv_heads)))


class Group:
    """Buffers of a group and the kernels' views of them; `fill` and `upload` bring in a step's sequences.

    token_ids, positions, tail_mapping [num_rows]: tail_mapping = slot * tail_rows + row, or -1 for rows that do not go
    into the tail. sealed_before, tail_before [num_seqs]: before this step's seal. seal_pages [num_seqs, max_seals].
    live_rows [1]: rows in use.
    """

    def __init__(self, shape: GroupShape, device: torch.device, is_chunks: bool) -> None:
        self.shape = shape
        self.is_chunks = is_chunks
        rows, seqs = shape.num_rows, shape.num_seqs
        sizes = {
            "token_ids": rows, "positions": rows, "tail_mapping": rows, "cu_seqlens": seqs + 1, "slots": seqs,
            "num_computed": seqs, "num_replay": seqs, "sealed_before": seqs, "tail_before": seqs,
            "num_sealed": seqs, "num_tail": seqs, "live_rows": 1, "seal_pages": seqs * shape.max_seals,
            "checkpoint_ids": seqs * shape.boundaries, "block_tables": seqs * max(1, shape.table_width),
        }  # fmt: skip
        ends = np.cumsum([-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes.values()]).tolist()
        starts = [0, *ends[:-1]]
        self._head = starts[-1]  # everything before the block tables
        host = torch.zeros(ends[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        self._host = host
        self._device = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        spans = dict(zip(sizes, zip(starts, sizes.values(), strict=True), strict=True))
        self._rows = {name: host[at : at + size].numpy() for name, (at, size) in spans.items()}
        device_views = {name: self._device[at : at + size] for name, (at, size) in spans.items()}
        self.token_ids, self.positions = device_views["token_ids"], device_views["positions"]
        self.tail_mapping = device_views["tail_mapping"]
        self.live_rows = device_views["live_rows"]
        self.sealed_before = device_views["sealed_before"]
        self.tail_before = device_views["tail_before"]
        self.seal_pages = device_views["seal_pages"].view(seqs, shape.max_seals)
        self.checkpoint_ids = (
            device_views["checkpoint_ids"].view(seqs, shape.boundaries)
            if shape.boundaries
            else None
        )
        v = device_views
        self.attention = AttentionInputs(
            v["block_tables"].view(seqs, -1), v["slots"], v["num_sealed"], v["num_tail"], v["cu_seqlens"],
            shape.max_query_len, shape.num_splits,
        )  # fmt: skip
        self.delta = DeltaInputs(
            v["slots"], v["num_computed"], v["num_replay"], v["cu_seqlens"], shape.max_query_len
        )

    def fill(
        self, items: list[ScheduledSequence], tail_rows: int, absorbed: dict[int, int]
    ) -> None:
        """Write the items into the host buffer; `absorbed`: records of a slot that its state already holds."""
        host = self._rows
        self._clear()
        for name in ("tail_mapping", "seal_pages", "checkpoint_ids"):
            host[name].fill(-1)
        tables = host["block_tables"].reshape(self.shape.num_seqs, -1)
        seals = host["seal_pages"].reshape(self.shape.num_seqs, -1)
        row = 0
        for index, item in enumerate(items):
            seq, count = item.seq, item.num_scheduled_tokens
            start, pages = seq.num_computed_tokens, item.seal_block_ids
            rows = slice(row, row + count)
            positions = np.arange(start, start + count, dtype=np.int32)
            committed = seq.token_ids[start : start + count - len(item.draft_token_ids)]
            host["token_ids"][rows] = committed + item.draft_token_ids
            host["positions"][rows] = positions
            sealed_after = seq.num_sealed_tokens + len(pages) * PAGE_SIZE
            places = seq.slot * tail_rows + positions % tail_rows
            host["tail_mapping"][rows] = np.where(positions >= sealed_after, places, -1)
            host["slots"][index] = seq.slot
            host["num_computed"][index] = start
            host["num_replay"][index] = seq.num_replay_tokens - absorbed.get(seq.slot, 0)
            host["sealed_before"][index] = seq.num_sealed_tokens
            host["tail_before"][index] = seq.num_tail_tokens
            # A chunk attends before it seals, a short sequence after.
            sealed = seq.num_sealed_tokens if self.is_chunks else sealed_after
            host["num_sealed"][index], host["num_tail"][index] = sealed, start - sealed
            table = seq.block_table if self.is_chunks else seq.block_table + pages
            tables[index, : len(table)] = table
            seals[index, : len(pages)] = pages
            row += count
            host["cu_seqlens"][index + 1] = row
            self._fill_checkpoints(index, item)
        host["cu_seqlens"][len(items) + 1 :] = row
        host["live_rows"][0] = row

    def fill_rows(
        self,
        slots: list[int],
        positions: list[int],
        tails: list[int],
        tables: list[list[int]],
        tail_rows: int,
    ) -> None:
        """One row per sequence at `positions`, behind `tails` rows in the tail: for a draft layer's chain."""
        host, count = self._rows, len(slots)
        self._clear()
        host["tail_mapping"].fill(-1)
        host["slots"][:count], host["positions"][:count] = slots, positions
        host["num_tail"][:count] = tails
        host["num_sealed"][:count] = [PAGE_SIZE * len(table) for table in tables]
        rows = [
            slot * tail_rows + at % tail_rows for slot, at in zip(slots, positions, strict=True)
        ]
        host["tail_mapping"][:count] = rows
        host["cu_seqlens"][1 : count + 1] = range(1, count + 1)
        host["cu_seqlens"][count + 1 :] = host["live_rows"][0] = count
        padded = host["block_tables"].reshape(self.shape.num_seqs, -1)
        for index, table in enumerate(tables):
            padded[index, : len(table)] = table

    def advance(self, tail_rows: int) -> None:
        """Move the rows that `fill_rows` wrote one position on, on the device."""
        self.positions.add_(1)
        self.attention.num_tail.add_(1)
        rows = self.attention.slots * tail_rows + self.positions % tail_rows
        self.tail_mapping.copy_(torch.where(self.tail_mapping < 0, self.tail_mapping, rows))

    @staticmethod
    def absorbing(sequences: list[tuple[int, int, int]], device: torch.device) -> DeltaInputs:
        """Inputs without new tokens for (slot, position that absorbing ends at, records to absorb)."""
        padded = -(-len(sequences) // _ALIGNMENT) * _ALIGNMENT
        columns = torch.zeros(4, padded + _ALIGNMENT, dtype=torch.int32)
        columns[:3, : len(sequences)] = torch.tensor(sequences, dtype=torch.int32).t()
        on_device = columns.to(device)
        count = len(sequences)
        slots, ends, replay = (on_device[i, :count] for i in range(3))
        return DeltaInputs(slots, ends, replay, on_device[3, : count + 1], 0)

    def _fill_checkpoints(self, index: int, item: ScheduledSequence) -> None:
        if not self.is_chunks or not item.checkpoints:
            return
        start = item.seq.num_computed_tokens
        ids = self._rows["checkpoint_ids"].reshape(self.shape.num_seqs, -1)
        for count, checkpoint_id in item.checkpoints:
            assert (start + count) % PAGE_SIZE == 0, "states are copied at page boundaries only"
            ids[index, (start + count) // PAGE_SIZE - start // PAGE_SIZE - 1] = checkpoint_id

    def upload(self) -> None:
        """Begin to copy the host buffer to the device; filling it again waits for that."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def _clear(self) -> None:
        """Zeros before the block tables, whose padding is never read, once the last copy is done."""
        if self._copied is not None:
            self._copied.synchronize()
        self._host[: self._head].zero_()


def group_of(
    items: list[ScheduledSequence], num_kv_heads: int, device: torch.device, is_chunks: bool
) -> Group:
    """A group that just fits `items`, not filled yet."""
    counts = [item.num_scheduled_tokens for item in items]
    seals = [len(item.seal_block_ids) for item in items]
    pages = [len(item.seq.block_table) + (0 if is_chunks else len(item.seal_block_ids)) for item in items]  # fmt: skip
    saves = is_chunks and any(item.checkpoints for item in items)
    tiles = tiling(max(counts), group=1).tiles  # programs that a chunk fills at least, unsplit
    shape = GroupShape(
        num_rows=sum(counts),
        num_seqs=len(items),
        max_query_len=max(counts),
        max_seals=max(seals),
        table_width=max(pages),
        num_splits=num_splits(len(items) * tiles, num_kv_heads, max(pages)),
        boundaries=num_boundaries(max(counts)) if saves else 0,
    )
    return Group(shape, device, is_chunks)


@dataclass(frozen=True, slots=True)
class ColumnCopy:
    """Convolution inputs to keep beside a chunk's checkpoint: those of the taps - 1 tokens before token `stop` of the
    chunk, which starts at `row` of its group and at position `start` of slot `slot`.
    """

    slot: int
    start: int
    row: int
    stop: int
    checkpoint_id: int


@dataclass(slots=True)
class StepInputs:
    """The groups of a step, short sequences first; rows of the forward pass in that order.

    num_rows: rows in use. logit_rows int64 [num_logits]. column_copies: see ColumnCopy. live_rows int32 [1]: rows in
    use as the device knows them, for a step that may have more; None where there are no others.
    """

    groups: list[Group]
    num_rows: int
    logit_rows: torch.Tensor
    column_copies: list[ColumnCopy] = field(default_factory=list)
    live_rows: torch.Tensor | None = None

    def token_ids(self) -> torch.Tensor:
        """Of all rows, int32."""
        parts = [group.token_ids for group in self.groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows(self) -> list[tuple[Group, slice]]:
        """Each group and its rows of the forward pass."""
        found, start = [], 0
        for group in self.groups:
            found.append((group, slice(start, start + group.shape.num_rows)))
            start += group.shape.num_rows
        return found
