"""Decoding steps without a scheduler, and everything that a KernelRunner keeps between steps."""

from __future__ import annotations

import dataclasses

import torch

from netra_backend.batch import ScheduledSequence
from netra_backend.gpu.runner import KernelRunner
from netra_backend.request import Request, SamplingParams
from netra_backend.sequence import Sequence


def decoding(
    seq_id: int, slot: int, pages: list[int], num_tail: int, drafts: int
) -> ScheduledSequence:
    """A sequence behind `pages` and a tail, with as many tokens to replay as it computes."""
    computed, rows = 64 * len(pages) + num_tail, 1 + drafts
    tokens = [3 + (i + seq_id) % 200 for i in range(computed + 1)]
    request = Request(str(seq_id), (3,), SamplingParams(temperature=0.0), 0.0)
    seq = Sequence(seq_id, request, tokens, computed, seed=0, num_computed_tokens=computed,
                   num_replay_tokens=rows, block_table=pages, slot=slot)  # fmt: skip
    draft_ids = list(range(5, 5 + drafts))
    return ScheduledSequence(
        seq, rows, draft_token_ids=draft_ids, num_logits=rows, num_wanted_drafts=2
    )


def pools(runner: KernelRunner) -> list[torch.Tensor]:
    """Pages, tails, recurrent states and their checkpoints, of every layer."""
    caches = [t for c in runner._caches + runner._draft_caches for t in (c.pages, c.tails)]
    states = [
        tensor
        for s in runner._states.layers
        for tensor in (s.states, s.columns, *dataclasses.astuple(s.records), s.saved_states,
                       s.saved_columns)
    ]  # fmt: skip
    return caches + states


def fill_with_noise(runner: KernelRunner) -> list[torch.Tensor]:
    """Random numbers in every pool, the same every time; copies of them."""
    generator = torch.Generator().manual_seed(0)
    for pool in pools(runner):
        pool.copy_(torch.rand(pool.shape, generator=generator))
    return [pool.clone() for pool in pools(runner)]
