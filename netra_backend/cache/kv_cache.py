"""KVCache: keys and values of all attention layers, as sealed pages and one tail per slot.

Knows how rows move between tail and page; not what bytes a page holds (codecs.py), who owns which page
(block_manager.py) nor how attention reads them (torch_ops/attention.py). A sealed page is never written again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from netra_backend.cache.codecs import Codec, make_codec
from netra_backend.cache.opening_pages import OpeningPages
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
    opening: OpeningPages | None = None

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
        done = PAGE_SIZE if chunk.seal_opening_id < 0 else 0
        if done:
            assert self.opening is not None
            sealed = self.opening.codec.seal(keys[:, :done], values[:, :done])
            self.opening.pages[chunk.seal_opening_id] = sealed
        num_sealed = done + len(chunk.seal_page_ids) * PAGE_SIZE
        if num_sealed > done:
            paged = (
                rows[:, done:num_sealed].unflatten(1, (-1, PAGE_SIZE)).transpose(0, 1)
                for rows in (keys, values)
            )
            self.pages[chunk.seal_page_ids] = self.codec.seal(*paged)
        rest = keys.shape[1] - num_sealed
        for part, rows in enumerate((keys, values)):
            self.tails[chunk.slot, part, :, :rest] = rows[:, num_sealed:]


@dataclass(frozen=True, slots=True)
class _Pool:
    """Layers that share a codec: pages [num_layers, num_pages, ...], tails [num_layers, num_slots, ...], and codec and
    pages [num_layers, num_opening_pages, ...] of first pages, if they have their own.
    """

    codec: Codec
    pages: torch.Tensor
    tails: torch.Tensor
    opening: tuple[Codec, torch.Tensor] | None

    def seal(self, slots: list[int], page_ids: list[int]) -> None:
        tails = self.tails[:, slots]
        classes = [(self.codec, self.pages, [i for i, page in enumerate(page_ids) if page >= 0])]
        if self.opening is not None:
            classes.append((*self.opening, [i for i, page in enumerate(page_ids) if page < 0]))
        for codec, pages, chosen in classes:
            if chosen:
                full = tails[:, chosen, :, :, :PAGE_SIZE]
                ids = [page_ids[i] for i in chosen]
                pages[:, ids] = codec.seal(full[:, :, 0], full[:, :, 1])
        num_left = tails.shape[-2] - PAGE_SIZE
        if num_left:
            self.tails[:, slots, :, :, :num_left] = tails[..., PAGE_SIZE:, :]

    def layers(self) -> list[LayerCache]:
        made = []
        for layer, (pages, tails) in enumerate(zip(self.pages, self.tails, strict=True)):
            opening = None
            if self.opening is not None:
                opening = OpeningPages(self.opening[0], self.opening[1][layer])
            made.append(LayerCache(self.codec, pages, tails, opening))
        return made


class KVCache:
    """Pages and tails of the model's attention layers (`layers`) and of its draft model's (`draft_layers`)."""

    def __init__(
        self, model: ModelConfig, plan: MemoryPlan, dtype: torch.dtype, device: torch.device
    ) -> None:
        def pages(
            num_layers: int, name: str, count: int, shapes: ModelConfig
        ) -> tuple[Codec, torch.Tensor]:
            heads, dim = shapes.num_kv_heads, shapes.head_dim
            codec = make_codec(name, heads, dim, dtype, device)
            shape = (num_layers, count, *codec.page_shape)
            return codec, torch.zeros(shape, dtype=codec.dtype, device=device)

        def pool(num_layers: int, name: str, opening_name: str, shapes: ModelConfig) -> _Pool:
            opening = None
            if plan.num_opening_pages:
                opening = pages(num_layers, opening_name, plan.num_opening_pages, shapes)
            heads, dim = shapes.num_kv_heads, shapes.head_dim
            tails = (num_layers, plan.num_slots, 2, heads, plan.kv.tail_rows, dim)
            tail = torch.zeros(tails, dtype=dtype, device=device)
            return _Pool(*pages(num_layers, name, plan.num_pages, shapes), tail, opening)

        kv = plan.kv
        main = pool(model.num_attention_layers, kv.codec, kv.opening_codec, model)
        drafts = pool(kv.num_draft_layers, kv.draft_codec, kv.draft_codec, kv.draft_shapes(model))
        self._pools = (main, drafts)
        openings = sum(pool.nbytes for pool in self.opening_pools)
        assert openings == plan.num_opening_pages * plan.opening_bytes
        assert sum(p.pages.nbytes for p in self._pools) == plan.num_pages * plan.page_bytes
        assert sum(p.tails.nbytes for p in self._pools) == plan.num_slots * plan.tail_bytes
        self.layers = main.layers()
        self.draft_layers = drafts.layers()

    @property
    def page_pools(self) -> list[torch.Tensor]:
        """Pages [num_layers, num_pages, ...] of the model and of the draft model."""
        return [pool.pages for pool in self._pools]

    @property
    def opening_pools(self) -> list[torch.Tensor]:
        """First pages [num_layers, num_opening_pages, ...] of both, if they have pools of their own."""
        return [pool.opening[1] for pool in self._pools if pool.opening is not None]

    @property
    def slot_pools(self) -> list[torch.Tensor]:
        """Tails [num_layers, num_slots, ...] of both."""
        return [pool.tails for pool in self._pools]

    def seal_tails(self, slots: list[int], page_ids: list[int]) -> None:
        """Seal the first PAGE_SIZE tail rows of each slot into its page and move the other rows down."""
        for pool in self._pools:
            pool.seal(slots, page_ids)
