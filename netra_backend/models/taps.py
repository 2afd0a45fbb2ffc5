"""Taps: where a draft model listens to its target, and what it heard in one step.

Knows no architecture. A model calls `take` between its layers if it is given taps, and pays nothing otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Taps:
    """The residual stream after so many layers (`places`; 0: the embeddings) of one forward pass."""

    def __init__(self, places: Iterable[int]) -> None:
        self._places = tuple(places)
        self._taken: dict[int, torch.Tensor] = {}

    def take(self, num_layers: int, x: torch.Tensor) -> None:
        """Offer the stream x [num_tokens, hidden] after `num_layers` layers; it must not change later."""
        if num_layers in self._places:
            self._taken[num_layers] = x

    def joined(self) -> torch.Tensor:
        """[num_tokens, len(places) * hidden], in the order of the places."""
        return torch.cat([self._taken[place] for place in self._places], -1)
