"""Muon for the matrices, AdamW for the rest, under one learning-rate factor.

Knows parameter names, not the model.  Muon (https://kellerjordan.github.io/posts/muon) replaces a
matrix's momentum by its nearest orthogonal matrix, found by five Newton-Schulz steps.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

ADAM_NAMES = ("embed_tokens", "lm_head", "mlp.gate.", "in_proj_a", "in_proj_b",
              "shared_expert_gate", "conv1d")  # fmt: skip
MOMENTUM = 0.95
DECAY = 0.05  # weight decay, times the learning rate


def orthogonalise(matrices: Tensor) -> Tensor:
    """Newton-Schulz on a stack `[count, rows, columns]`, rows <= columns."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x


class Optimizer:
    """`step(factor)` applies one update at `factor` times the base rates, clears the gradients."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        adam_rate: float,
        muon_rate: float,
        dtype: torch.dtype,
    ) -> None:
        self.muon_rate, self.adam_rate, self.dtype = muon_rate, adam_rate, dtype
        self.matrices: list[nn.Parameter] = []
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, parameter in parameters:
            if parameter.dim() < 2 or "conv1d" in name:
                plain.append(parameter)
            elif any(part in name for part in ADAM_NAMES):
                decayed.append(parameter)
            else:
                self.matrices.append(parameter)
        groups = [
            {"params": decayed, "weight_decay": DECAY},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=adam_rate, betas=(0.9, 0.95), fused=True)
        self.momentum = [torch.zeros_like(p) for p in self.matrices]

    def state_dict(self) -> dict[str, object]:
        return {"adam": self.adam.state_dict(), "momentum": self.momentum}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.adam.load_state_dict(state["adam"])
        self.momentum = state["momentum"]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * factor
        self.adam.step()
        self.muon_step(self.muon_rate * factor)
        for parameter in self.matrices:
            parameter.grad = None
        self.adam.zero_grad(set_to_none=True)

    def muon_step(self, rate: float) -> None:
        shapes: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = defaultdict(list)
        for parameter, momentum in zip(self.matrices, self.momentum, strict=True):
            momentum.lerp_(parameter.grad, 1 - MOMENTUM)
            update = parameter.grad.lerp(momentum, MOMENTUM)
            for weight, direction in split_experts(parameter.data, update):
                shapes[tuple(weight.shape)].append((weight, direction))
        for (rows, columns), pairs in shapes.items():
            stack = torch.stack([direction for _, direction in pairs]).to(self.dtype)
            wide = stack if rows <= columns else stack.transpose(1, 2)
            result = orthogonalise(wide).float()
            result = result if rows <= columns else result.transpose(1, 2)
            size = rate * max(1.0, rows / columns) ** 0.5
            for (weight, _), direction in zip(pairs, result, strict=True):
                weight.mul_(1 - rate * DECAY).add_(direction, alpha=-size)


def split_experts(weight: Tensor, update: Tensor) -> list[tuple[Tensor, Tensor]]:
    """One matrix per expert; gate and up, stacked in one tensor, count as two."""
    if weight.dim() == 2:
        return [(weight, update)]
    count = weight.shape[0] * (2 if weight.shape[1] == weight.shape[2] else 1)
    shape = (count, -1, weight.shape[2])
    return list(zip(weight.view(shape), update.view(shape), strict=True))
