"""Mixture of experts in torch: what a CPU runs for fused_moe. Knows no router: weights and ids come in."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def fused_moe(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    expert_weights: torch.Tensor,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """sum_k weight_k * down_k(silu(gate_k x) * up_k x) over each token's chosen experts.

    x [num_tokens, hidden]; gate_up [num_experts, 2 * inner, hidden] (gate rows first); down
    [num_experts, hidden, inner]; expert_weights, expert_ids [num_tokens, top_k]. Each expert runs once, on
    all the rows that chose it.
    """
    top_k = expert_ids.shape[1]
    order = torch.argsort(expert_ids.flatten(), stable=True)
    rows = order // top_k
    gathered = x[rows]
    counts = torch.bincount(expert_ids.flatten(), minlength=gate_up.shape[0]).tolist()
    results = torch.empty_like(gathered)
    inner = down.shape[2]
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            continue
        stop = start + count
        hidden = F.linear(gathered[start:stop], gate_up[expert])
        activated = F.silu(hidden[:, :inner]).mul_(hidden[:, inner:])
        torch.mm(activated, down[expert].t(), out=results[start:stop])
        start = stop
    results.mul_(expert_weights.flatten()[order].unsqueeze(1))
    # Back to [num_tokens, top_k, hidden] and summed in the order of the router, whatever the batch was.
    return results[torch.argsort(order)].view(-1, top_k, x.shape[1]).sum(1)
