"""ChainProposer: a draft layer that guesses one token after the other, MTP or EAGLE-3.

The layer reads (token p+1, features at p) and predicts token p+2; later drafts take its own output as features.
Its keys and values are one more layer of the KV cache with the pages and tails of the sequence: slot p holds
(token p+1, features at p). Knows neither how features are made nor how a token is chosen.

    row of the step            token p+1                   its slot is then
    prompt                     the next prompt token       final
    last row before a token    the token chosen            final
    accepted draft             the next accepted or chosen final: rebuilt from the model's hidden state
    rejected draft             anything                    beyond the computed tokens, overwritten later

A page that is shared by a prefix hit ends with the token that followed it the first time: one slot of the past
may be off, which costs a little acceptance there and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.cache.kv_cache import LayerCache
from netra_backend.forward_context import ForwardContext, draft_context, draft_pages
from netra_backend.spec.eagle3 import Eagle3Head
from netra_backend.spec.mtp import MtpHead
from netra_backend.spec.proposer import computed_after, following_tokens


class ChainProposer:
    """Follows every row of every step with the layer, and chains it for the sequences that want drafts."""

    def __init__(self, head: MtpHead | Eagle3Head, cache: LayerCache) -> None:
        self._head = head
        self._cache = cache

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        """See Proposer. Drafts are the layer's most likely tokens."""
        following: list[int] = []
        live: list[tuple[int, int, int]] = []  # slot, index, row that the first draft comes from
        for index, (item, output) in enumerate(zip(items, outputs, strict=True)):
            if item.num_logits and item.num_wanted_drafts:
                accepted = output.num_accepted_tokens
                row = item.num_scheduled_tokens - 1 if item.is_chunk else accepted
                live.append((item.seq.slot, index, len(following) + row))
            following += following_tokens(item, output)
        ids = torch.tensor(following, dtype=torch.int64, device=hidden.device)
        short = context.short and context.short.for_other_heads()
        shifted = replace(context, token_ids=ids, short=short)
        states = self._head(self._head.features(hidden), shifted, self._cache)
        drafts: list[list[int]] = [[] for _ in items]
        if live:
            live.sort()
            rows = torch.tensor([row for _, _, row in live], device=hidden.device)
            chosen = [index for _, index, _ in live]
            found = self._chain(
                [items[index] for index in chosen],
                [outputs[index] for index in chosen],
                states[rows],
                shifted,
            )
            for index, tokens in zip(chosen, found, strict=True):
                drafts[index] = tokens
        return drafts

    def _chain(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        states: torch.Tensor,
        step_context: ForwardContext,
    ) -> list[list[int]]:
        """Drafts of `items` (by slot) from the head's states [num_items, hidden] at their last tokens."""
        lens = [computed_after(item, out) for item, out in zip(items, outputs, strict=True)]
        live = list(range(len(items)))
        drafts: list[list[int]] = [[] for _ in items]
        short = step_context.short
        same = short is not None and not step_context.chunks and short.num_seqs == len(items)
        pages = short.pages if short and same else draft_pages(items, states.device)
        found: list[tuple[list[int], torch.Tensor]] = []
        ids = torch.empty(0, dtype=torch.int64, device=states.device)
        for step in range(max(item.num_wanted_drafts for item in items)):
            keep = [i for i, index in enumerate(live) if items[index].num_wanted_drafts > step]
            if step:
                if len(keep) < len(live):
                    live = [live[i] for i in keep]
                    kept = torch.tensor(keep, device=states.device)
                    states, ids = states[kept], ids[kept]
                    pages = draft_pages([items[index] for index in live], states.device)
                positions = [lens[index] - 1 + step for index in live]
                context = draft_context([items[index] for index in live], positions, ids, pages)
                states = self._head(states, context, self._cache)
            ids = self._head.next_tokens(states)
            found.append((live, ids))
        for indexes, ids in found:
            for index, token_id in zip(indexes, ids.tolist(), strict=True):
                drafts[index].append(token_id)
        return drafts

    def free(self, seq_ids: Iterable[int]) -> None:
        """Nothing is kept outside the KV cache."""
