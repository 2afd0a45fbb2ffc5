"""MTP drafting on the kernel path: follow every row of a step with the draft layer, then chain it.

The rules of what a slot of its cache holds are those of spec/mtp.py; here they are in terms of StepInputs. The
drafts of a sequence are computed from the rows behind its tokens, in the rings, so nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.forward_context import ForwardContext
from netra_backend.gpu.layers import KernelCache
from netra_backend.gpu.models import KernelModel, KernelMtpHead
from netra_backend.gpu.step_inputs import Group, GroupShape, StepInputs, num_splits
from netra_backend.sequence import PAGE_SIZE
from netra_backend.spec.proposer import computed_after, following_tokens


class KernelMtpProposer:
    """A Proposer. `current` gives the StepInputs of the step that it is called after."""

    def __init__(
        self,
        head: KernelMtpHead,
        model: KernelModel,
        cache: KernelCache,
        current: Callable[[], StepInputs],
    ) -> None:
        self._head = head
        self._model = model
        self._cache = cache
        self._current = current

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        """See Proposer. Drafts are the layer's most likely tokens."""
        step = self._current()
        following = [
            t for item, out in zip(items, outputs, strict=True) for t in following_tokens(item, out)
        ]
        following += [0] * (len(hidden) - len(following))
        ids = torch.tensor(following, dtype=torch.int32, device=hidden.device)
        states = self._head(hidden, ids, step, self._cache)
        rows, drafting, first = [], [], 0
        for index, (item, output) in enumerate(zip(items, outputs, strict=True)):
            if item.num_logits and item.num_wanted_drafts:
                last = (
                    item.num_scheduled_tokens - 1 if item.is_chunk else output.num_accepted_tokens
                )
                rows.append(first + last)
                drafting.append(index)
            first += item.num_scheduled_tokens
        drafts: list[list[int]] = [[] for _ in items]
        if drafting:
            chosen = [(items[i], outputs[i]) for i in drafting]
            found = self._chain(chosen, states[torch.tensor(rows, device=states.device)])
            for index, tokens in zip(drafting, found, strict=True):
                drafts[index] = tokens[: items[index].num_wanted_drafts]
        return drafts

    def _chain(
        self, sequences: list[tuple[ScheduledSequence, SequenceOutput]], states: torch.Tensor
    ) -> list[list[int]]:
        """As many drafts for each as any wants: one pass for all costs what one pass for some does."""
        most = max(item.num_wanted_drafts for item, _ in sequences)
        group = self._chain_group(sequences)
        step = StepInputs([group], len(sequences), torch.empty(0, dtype=torch.int64))
        found = []
        for count in range(most):
            ids = self._model.logits(states).argmax(-1).int()
            found.append(ids)
            if count + 1 < most:
                states = self._head(states, ids, step, self._cache)
                group.advance(self._cache.tails.shape[3])
        return torch.stack(found, 1).tolist()

    def _chain_group(self, sequences: list[tuple[ScheduledSequence, SequenceOutput]]) -> Group:
        """One row per sequence, at the first position that its step has not committed."""
        tables = [item.seq.block_table + item.seal_block_ids for item, _ in sequences]
        most, count = max(map(len, tables)), len(sequences)
        splits = num_splits(count, self._cache.layout.num_kv_heads, most)
        group = Group(
            GroupShape(count, count, 1, 0, most, splits), self._cache.tails.device, is_chunks=False
        )
        positions = [computed_after(item, output) for item, output in sequences]
        tails = [at - PAGE_SIZE * len(table) for at, table in zip(positions, tables, strict=True)]
        slots = [item.seq.slot for item, _ in sequences]
        group.fill_rows(slots, positions, tails, tables, self._cache.tails.shape[3])
        group.upload()
        return group

    def free(self, seq_ids: Iterable[int]) -> None:
        """Nothing is kept outside the KV cache."""
