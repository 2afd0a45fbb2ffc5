"""Mixture of experts for training: router, grouped expert products, shared expert.

Experts compute on contiguous rows; the dispatch that groups them pads each expert's rows, so that
the products come in few shapes.  It knows nothing of attention or of the rest of the model.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny.layers import DTYPES, Config, Linear

ROW_BLOCK = 128  # rows of an expert are padded to a multiple of this


class Router(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))


class Experts(nn.Module):
    """Stacked expert weights; the gate's rows come first in gate_up_proj."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        count, size, hidden = config.experts, config.expert_size, config.hidden
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))


class SharedExpert(nn.Module):
    def __init__(self, hidden: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, size, dtype)
        self.up_proj = Linear(hidden, size, dtype)
        self.down_proj = Linear(size, hidden, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def swiglu(hidden: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(hidden: Tensor, grad: Tensor) -> Tensor:
    gate, up = hidden.chunk(2, -1)
    opened = torch.sigmoid(gate)
    silu = gate * opened
    slope = opened + silu * (1 - opened)
    return torch.cat([grad * up * slope, grad * silu], -1)


def spans(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of the experts that got rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


class GroupedMlp(torch.autograd.Function):
    """SwiGLU of each expert over its rows of x `[rows, hidden]`, which lie in order of expert."""

    @staticmethod
    def forward(ctx, x: Tensor, gate_up: Tensor, down: Tensor, counts: list[int]) -> Tensor:
        size = down.shape[2]
        hidden = x.new_empty(x.shape[0], 2 * size)
        for e, rows in spans(counts):
            torch.mm(x[rows], gate_up[e].t(), out=hidden[rows])
        active = swiglu(hidden)
        out = torch.empty_like(x)
        for e, rows in spans(counts):
            torch.mm(active[rows], down[e].t(), out=out[rows])
        ctx.save_for_backward(x, gate_up, down, hidden, active)
        ctx.counts = counts
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, gate_up, down, hidden, active = ctx.saved_tensors
        grad_active, grad_x = torch.empty_like(active), torch.empty_like(x)
        grad_down, grad_gate_up = torch.zeros_like(down), torch.zeros_like(gate_up)
        for e, rows in spans(ctx.counts):
            torch.mm(grad[rows], down[e], out=grad_active[rows])
            torch.mm(grad[rows].t(), active[rows], out=grad_down[e])
        grad_hidden = swiglu_backward(hidden, grad_active)
        for e, rows in spans(ctx.counts):
            torch.mm(grad_hidden[rows], gate_up[e], out=grad_x[rows])
            torch.mm(grad_hidden[rows].t(), x[rows], out=grad_gate_up[e])
        return grad_x, grad_gate_up, grad_down, None


class MoE(nn.Module):
    """Softmax router, top-k renormalised, plus a sigmoid-gated shared expert.

    After a forward pass `load` holds each expert's share of the assignments and `balance` the
    Switch loss term (1 when balanced).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.dtype = DTYPES[config.matmul_dtype]
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_expert = SharedExpert(config.hidden, config.shared_size, self.dtype)
        self.shared_expert_gate = Linear(config.hidden, 1)
        self.load = torch.zeros(config.experts)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out, weights = self.route(flat)
        gate, shared = self.shared_expert_gate(flat), self.shared_expert(flat)
        return combine(out, weights, gate, shared).view_as(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's expert outputs `[tokens, top, hidden]` and their weights `[tokens, top]`."""
        top, experts = self.config.experts_per_token, self.config.experts
        probabilities = F.linear(x, self.gate.weight).softmax(-1)
        weights, chosen = probabilities.topk(top, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        self.load, places, sizes = dispatch(chosen.flatten(), experts)
        self.balance = experts * (self.load * probabilities.mean(0)).sum()
        total = chosen.numel() + experts * ROW_BLOCK
        gate_up = self.experts.gate_up_proj.to(self.dtype)
        down = self.experts.down_proj.to(self.dtype)
        copies = x.to(self.dtype).repeat_interleave(top, 0)
        rows = copies.new_zeros(total, x.shape[-1]).index_copy(0, places, copies)
        out = GroupedMlp.apply(rows, gate_up, down, sizes)
        return out.index_select(0, places).view(-1, top, x.shape[-1]), weights


def combine(out: Tensor, weights: Tensor, gate: Tensor, shared: Tensor) -> Tensor:
    """Weighted sum of each token's experts plus its gated shared expert, float32."""
    return (out * weights.unsqueeze(-1)).sum(1) + gate.sigmoid() * shared


def dispatch(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """Where each assignment goes in a buffer grouped by expert.

    Returns the share of each expert, the row of each assignment, and the rows per expert.  These
    are multiples of ROW_BLOCK: bfloat16 products on a CPU build a kernel per new shape, 4 ms each
    against 0.4 ms for the product itself (measured, AMX), so the shapes must be few.
    """
    counts = torch.bincount(chosen, minlength=experts)
    padded = (counts + ROW_BLOCK - 1) // ROW_BLOCK * ROW_BLOCK
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    order = chosen.argsort(stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device) + shift[chosen[order]]
    return counts / counts.sum(), places, padded.tolist()
