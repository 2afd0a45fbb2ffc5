"""KVCache: keys and values of all attention layers, as sealed pages and one tail per slot.

Knows how rows move between tail and page; not what bytes a page holds (codecs.py), who owns which page
(block_manager.py) nor how attention reads them (torch_ops/attention.py). A sealed page is never written again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from netra_backend.cache.codecs import Codec, make_codec
from netra_backend.config import ModelConfig
from netra_backend.forward_context import ChunkRows, ShortRows
from netra_backend.memory_plan import MemoryPlan
from netra_backend.sequence import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's view: pages [num_pages, *codec.page_shape], tails [num_slots, 2 (K then V), num_kv_heads,
    tail_rows, head_dim] of the compute type.
    """

    codec: Codec
    pages: torch.Tensor
    tails: torch.Tensor

    def append(self, short: ShortRows, kv: torch.Tensor) -> None:
        """Write the short sequences' rows, kv [num_rows, 2 * num_kv_heads, head_dim], to their tails."""
        _, parts, heads, rows, dim = self.tails.shape
        assert short.num_tail_rows <= rows, "more drafts than the tail was made for"
        if short.tail_index is None:
            lanes = torch.arange(parts * heads, device=kv.device)
            tail = short.write_slots[:, None] * (parts * heads) + lanes
            short.tail_index = (tail * rows + short.write_rows[:, None]).flatten()
        self.tails.view(-1, dim).index_copy_(0, short.tail_index, kv.reshape(-1, dim))

    def seal_chunk(self, chunk: ChunkRows, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Fill the chunk's fresh pages from `keys`, `values` [num_kv_heads, num_tail + num_rows, head_dim]
        (the tail's rows and then the chunk's); what is left over becomes the tail.
        """
        num_sealed = len(chunk.seal_page_ids) * PAGE_SIZE
        if num_sealed:
            paged = (
                rows[:, :num_sealed].unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
                for rows in (keys, values)
            )
            self.pages[chunk.seal_page_ids] = self.codec.seal(*paged)
        rest = keys.shape[1] - num_sealed
        for part, rows in enumerate((keys, values)):
            self.tails[chunk.slot, part, :, :rest] = rows[:, num_sealed:]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Layers that share a codec: pages [num_layers, num_pages, ...] and tails [num_layers, num_slots, ...]."""

    codec: Codec
    pages: torch.Tensor
    tails: torch.Tensor

    def seal(self, slots: list[int], page_ids: list[int]) -> None:
        tails = self.tails[:, slots]
        self.pages[:, page_ids] = self.codec.seal(
            tails[:, :, 0, :, :PAGE_SIZE], tails[:, :, 1, :, :PAGE_SIZE]
        )
        num_left = tails.shape[-2] - PAGE_SIZE
        if num_left:
            self.tails[:, slots, :, :, :num_left] = tails[..., PAGE_SIZE:, :]

    def layers(self) -> list[LayerCache]:
        return [
            LayerCache(self.codec, pages, tails)
            for pages, tails in zip(self.pages, self.tails, strict=True)
        ]


class KVCache:
    """Pages and tails of the model's attention layers (`layers`) and of its draft model's (`draft_layers`)."""

    def __init__(
        self, model: ModelConfig, plan: MemoryPlan, dtype: torch.dtype, device: torch.device
    ) -> None:
        def pool(num_layers: int, name: str, shapes: ModelConfig) -> _Pool:
            heads, dim = shapes.num_kv_heads, shapes.head_dim
            codec = make_codec(name, heads, dim, dtype, device)
            pages = (num_layers, plan.num_pages, *codec.page_shape)
            tails = (num_layers, plan.num_slots, 2, heads, plan.kv.tail_rows, dim)
            return _Pool(
                codec,
                torch.zeros(pages, dtype=codec.dtype, device=device),
                torch.zeros(tails, dtype=dtype, device=device),
            )

        main = pool(model.num_attention_layers, plan.kv.codec, model)
        draft_shapes = plan.kv.draft_shapes(model)
        drafts = pool(plan.kv.num_draft_layers, plan.kv.draft_codec, draft_shapes)
        self._pools = (main, drafts)
        assert sum(p.pages.nbytes for p in self._pools) == plan.num_pages * plan.page_bytes
        assert sum(p.tails.nbytes for p in self._pools) == plan.num_slots * plan.tail_bytes
        self.layers = main.layers()
        self.draft_layers = drafts.layers()

    @property
    def page_pools(self) -> list[torch.Tensor]:
        """Pages [num_layers, num_pages, ...] of the model and of the draft model."""
        return [pool.pages for pool in self._pools]

    @property
    def slot_pools(self) -> list[torch.Tensor]:
        """Tails [num_layers, num_slots, ...] of both."""
        return [pool.tails for pool in self._pools]

    def seal_tails(self, slots: list[int], page_ids: list[int]) -> None:
        """Seal the first PAGE_SIZE tail rows of each slot into its page and move the other rows down."""
        for pool in self._pools:
            pool.seal(slots, page_ids)
