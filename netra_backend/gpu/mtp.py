"""MTP drafting on the kernel path: follow every row of a step with the draft layer, then chain it.

The rules of what a slot of its cache holds are those of spec/mtp.py; here they are in terms of StepInputs. The
drafts of a sequence are computed from the rows behind its tokens, in the rings, so nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.forward_context import ForwardContext
from netra_backend.gpu.graphs import Recorder, Replay
from netra_backend.gpu.layers import KernelCache
from netra_backend.gpu.models import KernelModel, KernelMtpHead
from netra_backend.gpu.step_inputs import Group, GroupShape, StepInputs, num_splits
from netra_backend.sequence import PAGE_SIZE
from netra_backend.spec.proposer import computed_after, following_tokens


@dataclass(frozen=True, slots=True)
class _Chain:
    """One row per sequence. states [num_seqs, hidden]: what the next drafts are made of, to be filled before `link`, which
    gives these drafts, int32 [num_seqs], and makes the states of those after them.
    """

    step: StepInputs
    states: torch.Tensor
    link: Replay


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
        self._follows: dict[Group, tuple[torch.Tensor, Replay]] = {}
        self._chains: list[_Chain] = []

    def run_inert(self, step: StepInputs, hidden: torch.Tensor) -> None:
        """What would follow a step that has no rows in use, for what it compiles."""
        ids = torch.zeros(len(hidden), dtype=torch.int32, device=hidden.device)
        self._head(hidden, ids, step, self._cache)

    def record_step(self, recorder: Recorder, step: StepInputs, hidden: torch.Tensor) -> None:
        """Record what follows a step whose hidden states will always be in `hidden`."""
        ids = torch.zeros(len(hidden), dtype=torch.int32, device=hidden.device)
        follow = partial(self._head, hidden, ids, step, self._cache)
        self._follows[step.groups[0]] = ids, recorder.record(follow)

    def record_chains(self, recorder: Recorder, counts: list[int], max_pages: int) -> None:
        """Record the chains of so many sequences, in ascending order."""
        for count in reversed(counts):
            group = self._chain_group(count, max_pages)
            group.fill_rows([], [], [], [], self._tail_rows)
            group.upload()
            none = torch.empty(0, dtype=torch.int64)
            step = StepInputs([group], 0, none, live_rows=group.live_rows)
            size = self._model.setting.config.hidden_size
            device, dtype = self._cache.tails.device, self._model.setting.dtype
            states = torch.zeros(count, size, dtype=dtype, device=device)
            link = recorder.record(partial(self._link, states, step))
            self._chains.insert(0, _Chain(step, states, link))

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        """See Proposer. Drafts are the layer's most likely tokens."""
        following = [
            t for item, out in zip(items, outputs, strict=True) for t in following_tokens(item, out)
        ]
        following += [0] * (len(hidden) - len(following))
        ids = torch.tensor(following, dtype=torch.int32, device=hidden.device)
        states = self._follow(hidden, ids)
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
            found = self._draft(chosen, states[torch.tensor(rows, device=states.device)])
            for index, tokens in zip(drafting, found, strict=True):
                drafts[index] = tokens[: items[index].num_wanted_drafts]
        return drafts

    def _follow(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The layer's outputs for all rows of the current step."""
        step = self._current()
        recorded = self._follows.get(step.groups[0])
        if recorded is None:
            return self._head(hidden, ids, step, self._cache)
        following, replay = recorded
        following.copy_(ids)
        return replay()

    def _draft(
        self, sequences: list[tuple[ScheduledSequence, SequenceOutput]], states: torch.Tensor
    ) -> list[list[int]]:
        """As many drafts for each as any wants: one pass for all costs what one pass for some does."""
        most, count = max(item.num_wanted_drafts for item, _ in sequences), len(sequences)
        chain = self._chain(sequences, states)
        found = [chain.link()[:count].clone() for _ in range(most - 1)]
        found.append(self._most_likely(chain.states[:count]))
        return torch.stack(found, 1).tolist()

    def _most_likely(self, states: torch.Tensor) -> torch.Tensor:
        return self._model.logits(states).argmax(-1).int()

    def _link(self, states: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """Drafts after `states`, which become those of the drafts; see _Chain."""
        ids = self._most_likely(states)
        states.copy_(self._head(states, ids, step, self._cache))
        step.groups[0].advance(self._tail_rows)
        return ids

    def _chain(
        self, sequences: list[tuple[ScheduledSequence, SequenceOutput]], states: torch.Tensor
    ) -> _Chain:
        """At the first position of each sequence that its step has not committed."""
        tables = [item.seq.block_table + item.seal_block_ids for item, _ in sequences]
        count = len(sequences)
        chain = next((x for x in self._chains if len(x.states) >= count), None)
        if chain is None:
            group = self._chain_group(count, max(map(len, tables)))
            step = StepInputs([group], count, torch.empty(0, dtype=torch.int64))
            chain = _Chain(step, states, partial(self._link, states, step))
        else:
            chain.states[:count] = states
        positions = [computed_after(item, output) for item, output in sequences]
        tails = [at - PAGE_SIZE * len(table) for at, table in zip(positions, tables, strict=True)]
        slots = [item.seq.slot for item, _ in sequences]
        group = chain.step.groups[0]
        group.fill_rows(slots, positions, tails, tables, self._tail_rows)
        group.upload()
        return chain

    def _chain_group(self, num_seqs: int, max_pages: int) -> Group:
        splits = num_splits(num_seqs, self._cache.layout.num_kv_heads, max_pages)
        shape = GroupShape(num_seqs, num_seqs, 1, 0, max_pages, splits)
        return Group(shape, self._cache.tails.device, is_chunks=False)

    @property
    def _tail_rows(self) -> int:
        return self._cache.tails.shape[3]

    def free(self, seq_ids: Iterable[int]) -> None:
        """Nothing is kept outside the KV cache."""
