"""DFlash (z-lab, 2026): a block of drafts in one pass, from mask tokens that see the target's hidden states.

Features of a computed token are hidden_norm(fc(tapped states)); every layer keeps keys and values of them in its
layer of the KV cache ("KV injection"). A block [last token, masks] then attends to that context and to itself,
and row i predicts token i of the block. What the checkpoint's config asks for is added: sliding windows, and
DFlash2's convolutions inside the block and its walk over candidates. Formulas and names as in z-lab's model.

    KV slot of position p     holds
    accepted token            features at p, written by the step that computed it
    rejected draft            features of a wrong token, beyond the computed ones: never read, overwritten
    block                     nothing: its own keys and values live for one pass
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.cache.kv_cache import LayerCache
from netra_backend.errors import ConfigError
from netra_backend.forward_context import ForwardContext
from netra_backend.models.layers import GatedMlp
from netra_backend.models.registry import Model
from netra_backend.models.weights import Weights
from netra_backend.ops import Linear, apply_rope
from netra_backend.sequence import PAGE_SIZE
from netra_backend.spec.block_parts import BlockConv, CandidateSelector
from netra_backend.spec.drafter_config import BlockAttention, DrafterConfig
from netra_backend.spec.drafter_layers import (
    DrafterRotary,
    TokenHead,
    paired_norm,
    plain_norm,
    projections,
)
from netra_backend.spec.proposer import computed_after
from netra_backend.torch_ops.block_attention import BlockRows, block_attention, store_rows


class _Layer:
    """A Qwen3 layer whose keys and values also come from the context's features."""

    def __init__(
        self, weights: Weights, config: DrafterConfig, index: int, qkv: torch.Tensor
    ) -> None:
        prefix = f"layers.{index}"
        hidden, dim, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self._config = config
        self.attention = config.attentions[index]
        self._qkv = Linear(qkv)
        self._q_norm = paired_norm(weights, f"{prefix}.self_attn.q_norm", dim, eps)
        self.k_norm = paired_norm(weights, f"{prefix}.self_attn.k_norm", dim, eps)
        width = config.num_attention_heads * dim
        self._out = Linear(weights.get(f"{prefix}.self_attn.o_proj.weight", (hidden, width)))
        self._attention_norm, self._mlp_norm = (
            plain_norm(weights, f"{prefix}.{name}", hidden, eps)
            for name in ("input_layernorm", "post_attention_layernorm")
        )
        self._mlp = GatedMlp(weights, f"{prefix}.mlp", hidden, config.intermediate_size)
        self._convs: tuple[BlockConv, BlockConv] | None = None
        if config.conv_kernel:
            self._convs = (
                BlockConv(weights, config, f"{prefix}.attention_conv"),
                BlockConv(weights, config, f"{prefix}.mlp_conv"),
            )

    def __call__(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        rows: BlockRows,
        mask: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        """x [num_seqs * block_size, hidden]."""
        normed = self._attention_norm(x)
        if self._convs is None:
            x = self._out(self._attend(normed, rotation, rows, mask, cache), x)
            return self._mlp(self._mlp_norm(x), x)
        attention_conv, mlp_conv = self._convs
        normed, kernel = attention_conv.before(normed)
        attended = self._out(self._attend(normed, rotation, rows, mask, cache))
        x = x + attention_conv.after(attended, kernel)
        normed, kernel = mlp_conv.before(self._mlp_norm(x))
        return x + mlp_conv.after(self._mlp(normed, torch.zeros_like(x)), kernel)

    def _attend(
        self,
        normed: torch.Tensor,
        rotation: torch.Tensor,
        rows: BlockRows,
        mask: torch.Tensor,
        cache: LayerCache,
    ) -> torch.Tensor:
        config = self._config
        num_q, num_kv = config.num_attention_heads, config.num_kv_heads
        qkv = self._qkv(normed).view(-1, num_q + 2 * num_kv, config.head_dim)
        q = self._q_norm(qkv[:, :num_q])
        k = self.k_norm(qkv[:, num_q : num_q + num_kv])
        apply_rope(q, rotation)
        apply_rope(k, rotation)
        kv = torch.cat((k, qkv[:, num_q + num_kv :]), 1)
        return block_attention(q, kv, rows, mask, self.attention.window, cache).flatten(1)


class DflashDrafter:
    """The drafter's layers, the projection of tapped states and the tokens' head."""

    def __init__(
        self, weights: Weights, config: DrafterConfig, model: Model, rope: DrafterRotary
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self._rope = rope
        self._tokens = TokenHead(weights, config, model)
        self._fc = Linear(weights.get("fc.weight", (hidden, len(config.tap_places) * hidden)))
        self._hidden_norm = plain_norm(weights, "hidden_norm", hidden, eps)
        parts = [
            projections(weights, f"layers.{index}.self_attn", config, hidden)
            for index in range(config.num_layers)
        ]
        self._layers = [
            _Layer(weights, config, index, torch.cat(qkv)) for index, qkv in enumerate(parts)
        ]
        self._context_kv = Linear(torch.cat([part for _, *kv in parts for part in kv]))
        self._norm = plain_norm(weights, "norm", hidden, eps)
        self._selector: CandidateSelector | None = None
        if config.selector_rank:
            self._selector = CandidateSelector(weights, config)

    def inject(
        self, tapped: torch.Tensor, context: ForwardContext, caches: list[LayerCache]
    ) -> None:
        """Store each layer's keys and values of a step's rows; tapped [num_tokens, num_taps * hidden]."""
        config = self.config
        num_kv = config.num_kv_heads
        features = self._hidden_norm(self._fc(tapped))
        kv = self._context_kv(features)
        kv = kv.view(-1, config.num_layers, 2 * num_kv, config.head_dim)
        rotation = self._rope(context.positions)
        for index, (layer, cache) in enumerate(zip(self._layers, caches, strict=True)):
            keys = layer.k_norm(kv[:, index, :num_kv])
            apply_rope(keys, rotation)
            store_rows(torch.cat((keys, kv[:, index, num_kv:]), 1), context, cache)

    def draft(
        self, anchors: torch.Tensor, rows: BlockRows, caches: list[LayerCache]
    ) -> torch.Tensor:
        """Drafts [num_seqs, block_size - 1] after the tokens `anchors` [num_seqs]."""
        num_seqs, size = rows.positions.shape
        ids = anchors.new_full((num_seqs, size), self.config.mask_token_id)
        ids[:, 0] = anchors
        x = self._tokens.embed(ids.flatten())
        rotation = self._rope(rows.positions.flatten())
        masks: dict[BlockAttention, torch.Tensor] = {}
        for layer, cache in zip(self._layers, caches, strict=True):
            kind = layer.attention
            if kind not in masks:
                masks[kind] = rows.mask(kind.window, kind.causal)
            x = layer(x, rotation, rows, masks[kind], cache)
        states = self._norm(x).view(num_seqs, size, -1)[:, 1:]
        logits = self._tokens.logits(states.flatten(0, 1)).view(num_seqs, size - 1, -1)
        if self._selector is None:
            return self._tokens.target_ids(logits.argmax(-1))
        return self._selector.walk(states, logits, anchors)


def load_dflash(
    directory: Path,
    config: DrafterConfig,
    model: Model,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DflashDrafter:
    """Load a drafter. Raises ConfigError that names missing, misshapen and surplus tensors."""
    if (directory / "mask_embedding.pt").exists():
        raise ConfigError("a mask embedding of its own (mask_embedding.pt) is not supported")
    weights = Weights(directory, dtype, device, fp8_block=0)
    rope = DrafterRotary(config.rope, config.head_dim, max_len, device)
    drafter = DflashDrafter(weights, config, model, rope)
    weights.finish(())
    return drafter


class DflashProposer:
    """Injects every row of every step, and drafts a block for the sequences that want drafts."""

    def __init__(self, drafter: DflashDrafter, caches: list[LayerCache]) -> None:
        self._drafter = drafter
        self._caches = caches

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        """See Proposer. A block is drafted whole, whatever part of it is wanted."""
        context = replace(context, short=context.short and context.short.for_other_heads())
        self._drafter.inject(hidden, context, self._caches)
        drafts: list[list[int]] = [[] for _ in items]
        wanted = [i for i, item in enumerate(items) if item.num_logits and item.num_wanted_drafts]
        if not wanted:
            return drafts
        chosen, given = [items[i] for i in wanted], [outputs[i] for i in wanted]
        anchors = torch.tensor([out.token_ids[-1] for out in given], device=hidden.device)
        rows = _block_rows(chosen, given, self._drafter.config.block_size, hidden.device)
        found = self._drafter.draft(anchors, rows, self._caches).tolist()
        for index, item, tokens in zip(wanted, chosen, found, strict=True):
            drafts[index] = tokens[: item.num_wanted_drafts]
        return drafts

    def free(self, seq_ids: Iterable[int]) -> None:
        """Nothing is kept outside the KV cache."""


def _block_rows(
    items: list[ScheduledSequence],
    outputs: list[SequenceOutput],
    block_size: int,
    device: torch.device,
) -> BlockRows:
    lens = [computed_after(item, out) for item, out in zip(items, outputs, strict=True)]
    tables = [item.seq.block_table + item.seal_block_ids for item in items]
    tails = [length - PAGE_SIZE * len(table) for length, table in zip(lens, tables, strict=True)]
    starts = torch.tensor(lens, device=device)
    return BlockRows(
        positions=starts[:, None] + torch.arange(block_size, device=device),
        slots=torch.tensor([item.seq.slot for item in items], device=device),
        num_tail=torch.tensor(tails, device=device),
        max_tail=max(tails),
        tables=[torch.tensor(table, dtype=torch.int64, device=device) for table in tables],
    )
