"""HostCache: copies of pages and slots of preempted sequences in host memory.

Knows tensors and pairs of ids, not whose they are (residence.py). An entry is copied as the bytes that it is, so
what comes back is equal bit for bit. On a GPU the host side is pinned, and copies are queued on the stream that
computes: it is ordered, so nothing waits for them. On a CPU the same code copies into a second pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from netra_backend.batch import HostMoves
from netra_backend.memory_plan import MemoryPlan

_GROUP_BYTES = 64 * 2**20
"""Bytes that are gathered on the device for one copy: bounds its memory, and is far above what a copy costs to
start."""


class _HostPool:
    """Host entries [num_entries, num_layers, ...] beside a device tensor [num_layers, num_ids, ...].

    Entries are whole, so that neighbouring ones are one transfer.
    """

    def __init__(self, device_pool: torch.Tensor, num_entries: int) -> None:
        layers, _, *shape = device_pool.shape
        self._device = device_pool
        self._host = torch.zeros(
            (num_entries, layers, *shape), dtype=device_pool.dtype, pin_memory=device_pool.is_cuda
        )
        self.nbytes = self._host.nbytes
        entry_bytes = max(1, self.nbytes // max(1, num_entries))
        self._group = max(1, _GROUP_BYTES // entry_bytes)

    def move_out(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (device id, host id)."""
        for first, ids in self._groups([(host, device) for device, host in pairs]):
            gathered = self._device.index_select(1, ids).transpose(0, 1).contiguous()
            self._host[first : first + len(ids)].copy_(gathered, non_blocking=True)

    def move_in(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (host id, device id)."""
        for first, ids in self._groups(pairs):
            entries = self._host[first : first + len(ids)]
            entries = entries.to(self._device.device, non_blocking=True)
            self._device.index_copy_(1, ids, entries.transpose(0, 1))

    def _groups(self, pairs: list[tuple[int, int]]) -> Iterator[tuple[int, torch.Tensor]]:
        """First host id, and device ids, of (host id, device id) with host ids in a row."""
        ordered = sorted((host % len(self._host), device) for host, device in pairs)
        runs = groupby(range(len(ordered)), lambda i: (ordered[i][0] - i, i // self._group))
        for _, places in runs:
            run = [ordered[i] for i in places]
            ids = [device % self._device.shape[1] for _, device in run]
            yield run[0][0], torch.tensor(ids, device=self._device.device)


class HostCache:
    """The host side of the tensors that hold pages, first pages (ids below 0) and slots, each [num_layers, ids, ...]."""

    def __init__(
        self,
        page_pools: list[torch.Tensor],
        opening_pools: list[torch.Tensor],
        slot_pools: list[torch.Tensor],
        plan: MemoryPlan,
    ) -> None:
        self._pages = [_HostPool(pool, plan.num_host_pages) for pool in page_pools]
        self._openings = [_HostPool(pool, plan.num_host_opening_pages) for pool in opening_pools]
        self._slots = [_HostPool(pool, plan.num_host_slots) for pool in slot_pools]
        pools = self._pages + self._openings + self._slots
        assert sum(pool.nbytes for pool in pools) == plan.host_bytes

    def move_in(self, moves: HostMoves) -> None:
        """Carry out the copies from the host."""
        for pool, pairs in self._split(moves.pages_in, moves.slots_in):
            pool.move_in(pairs)

    def move_out(self, moves: HostMoves) -> None:
        """Carry out the copies to the host."""
        for pool, pairs in self._split(moves.pages_out, moves.slots_out):
            pool.move_out(pairs)

    def _split(
        self, pages: list[tuple[int, int]], slots: list[tuple[int, int]]
    ) -> Iterator[tuple[_HostPool, list[tuple[int, int]]]]:
        """Each pool that has something to copy, with its pairs of ids."""
        plain = [pair for pair in pages if pair[0] >= 0]
        openings = [pair for pair in pages if pair[0] < 0]
        for pools, pairs in (
            (self._pages, plain),
            (self._openings, openings),
            (self._slots, slots),
        ):
            if pairs:
                yield from ((pool, pairs) for pool in pools)
