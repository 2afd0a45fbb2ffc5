"""draw.py's `draw` as one launch for all rows: no sorting, no waiting for the device in between.

The race and its keys are the same; its noise has 23 bits instead of 53, so that a token differs where two contestants
come that close.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from netra_backend.draw import DrawParams
from netra_kernels.sampling import SamplingRows


class Sample(Protocol):
    """Token ids int32 [num_rows] drawn from logits float32 [num_rows, vocab]."""

    def __call__(self, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor: ...


class KernelDraw:
    """See draw.draw; `sample` is the kernel or its reference."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def __call__(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        rows: list[int],
        positions: list[int],
        params: list[DrawParams],
    ) -> torch.Tensor:
        """Token ids [n] int64; rows of `logits` that are not among `rows` cost one pass."""
        count, device = len(logits), logits.device
        floats = torch.zeros(3, count)
        integers = torch.zeros(3, count, dtype=torch.int64)
        floats[1] = math.inf
        for row, position, p in zip(rows, positions, params, strict=True):
            floats[0, row], floats[1, row] = p.inverse_temperature, p.top_p
            floats[2, row] = math.exp(p.log_min_p)
            integers[0, row], integers[1, row], integers[2, row] = p.top_k, p.seed, position
        inverse_temperature, top_p, min_p = floats.to(device, non_blocking=True)
        top_k, seeds, at = integers.to(device, non_blocking=True)
        chosen = self._sample(
            logits, SamplingRows(inverse_temperature, top_k.int(), top_p, min_p, seeds, at)
        )
        return chosen[torch.tensor(rows, device=device)].long()
