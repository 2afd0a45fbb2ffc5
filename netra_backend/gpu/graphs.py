"""Steps of short sequences as recorded graphs: one for each bucket of sizes, all of them before the first request.

A graph repeats the same launches with the same grids, addresses and scalars, so whatever differs from step to step lies in
the Group of its bucket. Rows and sequences past those in use are inert (step_inputs.py): a recording, whose Group is empty,
leaves the pools as they were. Steps with prompt chunks and those beyond the largest bucket are launched one operation at a
time: they keep a device busy for longer than that takes. Knows no model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from netra_backend.batch import ScheduledSequence
from netra_backend.config import ModelConfig
from netra_backend.gpu.step_inputs import Group, GroupShape, StepInputs, num_splits

logger = logging.getLogger(__name__)

_MAX_ROWS = 1024
"""Rows of the largest bucket. Beyond, a step computes for 10 ms and more, in which some 500 operations can be launched one by
one (20 to 40 us each: an estimate, not measured on a device)."""

_QUERY_LENS = (2, 4, 8, 16)
"""With eight query heads to a key head, attention pads 1 and 2 rows to 16, 4 to 32, 8 to 64: others would gain nothing."""

_GRAPH_BYTES = 2**22
"""What the driver takes for a graph of some 500 launches: a guess, which the log of a device's start corrects."""

Replay = Callable[[], torch.Tensor]
"""Runs a recording again on what its tensors hold by now; the result lies in the same place every time."""


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        """Run `work` once, for all that a first run compiles, then record it."""
        ...


class CudaRecorder:
    """A Recorder of CUDA graphs. They share one pool of memory: what one leaves is read before the next is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        """See Recorder. The first run is on the recording stream, for the workspaces that libraries keep by stream."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            output = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Sizes of a step of short sequences, or the most that it may have: sequences, rows of one of them, rows in all."""

    num_seqs: int
    max_query_len: int
    num_rows: int

    @classmethod
    def of(cls, items: Sequence[ScheduledSequence]) -> Bucket | None:
        """The sizes of a step; None if it has chunks, or a sequence that fills two pages, and so fits no bucket."""
        if any(item.is_chunk or len(item.seal_block_ids) > 1 for item in items):
            return None
        counts = [item.num_scheduled_tokens for item in items]
        return cls(len(items), max(counts, default=0), sum(counts))

    def holds(self, other: Bucket) -> bool:
        """Whether a step of the other's sizes can run in this one."""
        return (
            other.num_seqs <= self.num_seqs
            and other.max_query_len <= self.max_query_len
            and other.num_rows <= self.num_rows
        )

    def step(self, num_kv_heads: int, max_pages: int, device: torch.device) -> StepInputs:
        """An empty step. Every replay has the programs that seal pages, where there are any to seal: that they find none
        costs less than a second graph without them for each bucket.
        """
        splits = num_splits(self.num_seqs, num_kv_heads, max_pages)
        shape = GroupShape(self.num_rows, self.num_seqs, self.max_query_len, 1, max_pages, splits)
        group = Group(shape, device, is_chunks=False)
        group.fill([], 1, {})
        group.upload()
        none = torch.empty(0, dtype=torch.int64, device=device)
        return StepInputs([group], 0, none, live_rows=group.live_rows)


def seq_counts(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 12, 16, 24, 32, 48, ..., max_num_seqs."""
    powers = [2**i for i in range(max_num_seqs.bit_length())]
    between = [3 * n // 2 for n in powers if n >= 8]
    return sorted({n for n in powers + between if n < max_num_seqs} | {max_num_seqs})


def make_buckets(max_num_seqs: int, max_draft_tokens: int, max_rows: int) -> list[Bucket]:
    """Buckets for all steps of up to `max_rows` (and _MAX_ROWS) rows, in the order in which they are tried. Drafts make
    batches ragged: rows in all, which most products pay for, are a size of their own besides the longest sequence's, which
    attention pays for.
    """
    most = min(max_rows, _MAX_ROWS)
    lens = [n for n in _QUERY_LENS if n <= max_draft_tokens] + [1 + max_draft_tokens]
    found, fewer = [], 0
    for num_seqs in seq_counts(max_num_seqs):
        for index, longest in enumerate(lens):
            # Any step that fits no smaller bucket has one row for each sequence, and one sequence longer than those allow.
            least = fewer + 1 + (lens[index - 1] if index else 0)
            totals = {min(most, num_seqs * mean) for mean in (1, *lens[: index + 1])}
            found += [Bucket(num_seqs, longest, n) for n in sorted(totals) if n >= least]
        fewer = num_seqs
    return found


def reserved_bytes(
    model: ModelConfig, buckets: list[Bucket], max_pages: int, element_bytes: int, num_passes: int
) -> int:
    """What recorded steps of `num_passes` graphs take beside the pools, estimated from above: the buckets' inputs and outputs,
    the graphs themselves, and of the largest one the logits and all intermediates of one layer of each kind.
    """
    if not buckets:
        return 0
    heads, dim, hidden = model.num_attention_heads, model.head_dim, model.hidden_size
    rows = max(bucket.num_rows for bucket in buckets)
    slots = model.num_experts_per_tok + 1
    values = model.linear_num_value_heads * model.linear_value_head_dim
    attention = (6 * heads + 4 * model.num_kv_heads) * dim
    recurrent = 2 * model.conv_channels + 4 * values
    mlp = 4 * model.intermediate_size + slots * (hidden + model.moe_intermediate_size)
    padding = min(model.num_experts + 1, rows * slots) * 64 * model.moe_intermediate_size
    elements = rows * (8 * hidden + attention + recurrent + mlp) + padding
    parts = max(
        (1 + num_splits(b.num_seqs, model.num_kv_heads, max_pages)) * b.num_rows for b in buckets
    )
    logits = rows * model.vocab_size * (4 + element_bytes)
    inputs = sum(b.num_seqs * max_pages + 8 * (b.num_seqs + b.num_rows) for b in buckets) * 4
    outputs = num_passes * sum(b.num_rows for b in buckets) * hidden * element_bytes
    graphs = num_passes * len(buckets) * _GRAPH_BYTES
    total = elements * element_bytes + parts * heads * (dim + 1) * 4
    return total + logits + inputs + outputs + graphs


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A bucket's inputs, to be filled before the replay, which gives the final hidden states of all its rows."""

    step: StepInputs
    forward: Replay


class StepGraphs:
    """The recordings by bucket; empty where steps are launched one operation at a time."""

    def __init__(self) -> None:
        self._graphs: dict[Bucket, StepGraph] = {}

    def record(
        self,
        buckets: list[Bucket],
        make_step: Callable[[Bucket], StepInputs],
        forward: Callable[[StepInputs], Replay],
    ) -> None:
        """Record `forward` of every bucket, the largest first: the others then fit into its memory."""
        started = time.perf_counter()
        by_size = sorted(buckets, key=lambda bucket: bucket.num_rows, reverse=True)
        for number, bucket in enumerate(by_size, 1):
            step = make_step(bucket)
            self._graphs[bucket] = StepGraph(step, forward(step))
            logger.info(
                "graph %d of %d: %d sequences of up to %d rows, %d rows in all, %.0f s",
                number, len(buckets), bucket.num_seqs, bucket.max_query_len, bucket.num_rows,
                time.perf_counter() - started,
            )  # fmt: skip
        self._graphs = {bucket: self._graphs[bucket] for bucket in buckets}

    def find(self, items: Sequence[ScheduledSequence]) -> StepGraph | None:
        """Of the smallest bucket that holds a step of `items`."""
        sizes = Bucket.of(items)
        if sizes is None:
            return None
        return next((graph for b, graph in self._graphs.items() if b.holds(sizes)), None)
