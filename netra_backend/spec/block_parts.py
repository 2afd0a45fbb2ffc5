"""What DFlash2 adds to DFlash: convolutions inside a block, and a walk over the likeliest candidates.

Knows blocks of rows only, neither contexts nor caches. Formulas and names as in the public DFlash2 checkpoints
(inco.ai, 2026).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from netra_backend.errors import ConfigError
from netra_backend.models.weights import Weights
from netra_backend.ops import Linear
from netra_backend.spec.drafter_config import DrafterConfig


class BlockConv:
    """out[i, c] = sum_t (base[t, c] + delta[i, t, group of c]) x[i - t, c], zero before the block.

    One set of kernels goes before a sub-layer and one behind it; the deltas of both come from its input.
    """

    def __init__(self, weights: Weights, config: DrafterConfig, prefix: str) -> None:
        hidden, taps, group = config.hidden_size, config.conv_kernel, config.conv_group
        if not group or hidden % group:
            raise ConfigError(f"conv_group_size {group} does not divide hidden_size {hidden}")
        self._block_size = config.block_size
        self._shape = (2, taps, hidden // group)
        self._base = weights.get(f"{prefix}.base_kernel", (2, taps, hidden))
        rows = 2 * taps * hidden // group
        self._projection = Linear(weights.get(f"{prefix}.kernel_projection.weight", (rows, hidden)))

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The sub-layer's input from x [num_rows, hidden], and the deltas for `after`."""
        deltas = self._projection(x).view(-1, *self._shape)
        return self._convolve(x, deltas[:, 0], self._base[0]), deltas[:, 1]

    def after(self, x: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        """The sub-layer's output x [num_rows, hidden], convolved."""
        return self._convolve(x, deltas, self._base[1])

    def _convolve(self, x: torch.Tensor, deltas: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        hidden, groups = x.shape[-1], deltas.shape[-1]
        blocks = x.view(-1, self._block_size, hidden)
        out = torch.zeros_like(x)
        for tap in range(len(base)):
            shifted = F.pad(blocks, (0, 0, tap, 0))[:, : self._block_size]
            kernel = deltas[:, tap].repeat_interleave(hidden // groups, -1) + base[tap]
            out += kernel * shifted.reshape(x.shape)
        return out


class CandidateSelector:
    """Chooses each draft among the likeliest of its slot, with a bonus for pairs of neighbours:
    unary[c] + <A[previous] * project(state), B[c]>.
    """

    def __init__(self, weights: Weights, config: DrafterConfig) -> None:
        if config.draft_vocab_size:
            raise ConfigError("a candidate selector over a reduced vocabulary is not supported")
        shape = (config.vocab_size, config.selector_rank)
        self._top_k = config.selector_top_k
        self._previous = weights.get("candidate_selector.predecessor_codebook", shape)
        self._next = weights.get("candidate_selector.successor_codebook", shape)
        self._projection = Linear(
            weights.get(
                "candidate_selector.hidden_projection.weight",
                (config.selector_rank, config.hidden_size),
            )
        )

    def walk(
        self, states: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [num_seqs, num_slots] for states [num_seqs, num_slots, hidden] and their logits, after `anchors`."""
        unary, candidates = logits.topk(self._top_k, -1)
        projected = self._projection(states.flatten(0, 1)).view(*states.shape[:2], -1)
        previous, path = anchors, []
        for slot in range(states.shape[1]):
            wanted = (self._previous[previous] * projected[:, slot]).unsqueeze(-1)
            bonus = (self._next[candidates[:, slot]] @ wanted).squeeze(-1)
            best = (unary[:, slot] + bonus.float()).argmax(-1, keepdim=True)
            previous = candidates[:, slot].gather(-1, best)[:, 0]
            path.append(previous)
        return torch.stack(path, 1)
