"""Drives one attention layer through steps of several sequences, with given queries, keys and values, and
computes what it should have answered. Tests decide the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from netra_backend.batch import Batch, ScheduledSequence
from netra_backend.cache.kv_cache import KVCache
from netra_backend.config import ModelConfig
from netra_backend.forward_context import build_context
from netra_backend.memory_plan import KVLayout, plan_memory, tail_rows
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import PAGE_SIZE, Sequence
from netra_backend.torch_ops.attention import paged_attention
from netra_kernels.kv_codec import decode_page_ref, page_layout

KV_HEADS = 2
GROUP = 3


def config(head_dim: int) -> ModelConfig:
    """A model of one attention layer."""
    return ModelConfig(
        "llama", 512, 96, ("full_attention",), KV_HEADS * GROUP, KV_HEADS, head_dim, 1e-5, 8192, 1e4,
        head_dim, True,
    )  # fmt: skip


@dataclass(slots=True)
class Rows:
    """One sequence: its state, and q [length, heads, dim], kv [length, 2 * KV_HEADS, dim] of its tokens."""

    seq: Sequence
    q: torch.Tensor
    kv: torch.Tensor
    pages: list[int] = field(default_factory=list)


class AttentionDriver:
    """A KVCache of one layer, sequences of `lengths` tokens, one slot each. codec: name, or name/name of first
    pages.
    """

    def __init__(
        self,
        codec: str,
        head_dim: int,
        lengths: list[int],
        max_drafts: int = 0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        codec, _, opening = codec.partition("/")
        self._generator, self._codec, self._dim = generator, codec, head_dim
        self._opening = opening
        self._dtype = dtype
        num_pages = sum(length // PAGE_SIZE for length in lengths) + 1
        plan = plan_memory(
            config(head_dim),
            budget_bytes=2**30,
            num_slots=len(lengths),
            max_model_len=4096,
            element_bytes=dtype.itemsize,
            state_element_bytes=dtype.itemsize,
            max_draft_tokens=max_drafts,
            kv=KVLayout(codec, tail_rows(max_drafts), opening_codec=opening),
        )
        assert plan.num_pages >= num_pages
        self.cache = KVCache(config(head_dim), plan, dtype, torch.device("cpu"))
        order = torch.randperm(num_pages, generator=generator).tolist()
        self._free_pages: list[int] = order
        self.sequences = []
        for index, length in enumerate(lengths):
            request = Request(str(index), (1,) * length, SamplingParams(), 0.0)
            seq = Sequence(index, request, [1] * length, length, 0, slot=index)
            self.sequences.append(
                Rows(seq, self._random(length, KV_HEADS * GROUP), self._keys(length))
            )

    def pages_in_order(self) -> None:
        """Hand pages out by number from now on, so that neighbours are read as views."""
        self._free_pages.sort()

    def step(self, work: list[tuple[Rows, int, int]], accepted: int = 0) -> float:
        """Compute `count` committed tokens and `num_drafts` random drafts of each sequence, of which the first
        `accepted` are the sequence's own next tokens. Returns the largest error.
        """
        items, blocks_q, blocks_kv = {}, {}, {}
        for rows, count, num_drafts in work:
            seq = rows.seq
            is_chunk = count > 1
            end = seq.num_computed_tokens + (count if is_chunk else 0)
            fresh = end // PAGE_SIZE - len(seq.block_table)
            seals = [self._free_pages.pop(0) for _ in range(fresh)]
            if seals and self._opening and not seq.block_table:
                seals[0] = -1 - seq.slot
            drafts = [1] * num_drafts
            items[seq.seq_id] = ScheduledSequence(seq, count + num_drafts, is_chunk, drafts, seals)
            start = seq.num_computed_tokens
            own = slice(start, start + count + min(accepted, num_drafts))
            guessed = max(0, num_drafts - accepted)
            blocks_q[seq.seq_id] = torch.cat((rows.q[own], self._random(guessed, KV_HEADS * GROUP)))
            blocks_kv[seq.seq_id] = torch.cat((rows.kv[own], self._keys(guessed)))
        sealing = [i for i in items.values() if not i.is_chunk and i.seal_block_ids]
        self.cache.seal_tails([i.seq.slot for i in sealing], [i.seal_block_ids[0] for i in sealing])
        context, ordered = build_context(Batch(list(items.values())), torch.device("cpu"))
        q = torch.cat([blocks_q[item.seq.seq_id] for item in ordered])
        kv = torch.cat([blocks_kv[item.seq.seq_id] for item in ordered])
        out = paged_attention(q, kv, context, self.cache.layers[0])
        assert out.shape == q.shape
        error, row = 0.0, 0
        for item in ordered:
            count = item.num_scheduled_tokens
            ids = item.seq.block_table + ([] if item.is_chunk else item.seal_block_ids)
            expected = self._expected(item, ids, q[row : row + count], kv[row : row + count])
            error = max(error, (out[row : row + count] - expected).abs().max().item())
            row += count
            item.seq.block_table.extend(item.seal_block_ids)
            committed = count - len(item.draft_token_ids)
            item.seq.num_computed_tokens += committed + min(accepted, len(item.draft_token_ids))
        return error

    def _random(self, count: int, heads: int) -> torch.Tensor:
        rows = torch.randn(count, heads, self._dim, generator=self._generator)
        return rows.to(self._dtype)

    def _keys(self, count: int) -> torch.Tensor:
        kv = self._random(count, 2 * KV_HEADS)
        kv[:, :KV_HEADS] += torch.linspace(-2, 2, self._dim).to(self._dtype)
        return kv

    def _expected(
        self, item: ScheduledSequence, page_ids: list[int], q: torch.Tensor, kv: torch.Tensor
    ) -> torch.Tensor:
        """Dense attention over what the pages stand for, the committed rows after them, and the new ones."""
        seq = item.seq
        past = self.sequences[seq.seq_id].kv[len(page_ids) * PAGE_SIZE : seq.num_computed_tokens]
        exact = torch.cat((past, kv)).transpose(0, 1).float()
        pages = [self._decode(page) for page in page_ids]
        keys = torch.cat([k for k, _ in pages] + [exact[:KV_HEADS]], 1).repeat_interleave(GROUP, 0)
        values = torch.cat([v for _, v in pages] + [exact[KV_HEADS:]], 1).repeat_interleave(
            GROUP, 0
        )
        scores = q.transpose(0, 1).float() @ keys.transpose(1, 2) * self._dim**-0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        scores[:, :, keys.shape[1] - len(q) :].masked_fill_(hidden, float("-inf"))
        return (scores.softmax(-1) @ values).transpose(0, 1)

    def stored(self, page_ids: list[int]) -> list[torch.Tensor]:
        """What the pages hold."""
        layer = self.cache.layers[0]
        openings = layer.opening.pages if layer.opening is not None else layer.pages
        return [(layer.pages if page >= 0 else openings)[page].clone() for page in page_ids]

    def _decode(self, page: int) -> tuple[torch.Tensor, torch.Tensor]:
        codec = self._codec if page >= 0 else self._opening
        (stored,) = self.stored([page])
        if codec == "plain":
            return stored[0].float(), stored[1].float()
        return decode_page_ref(stored, page_layout(codec, KV_HEADS, self._dim))
