"""StatePool: the recurrent memory of Gated DeltaNet layers, one slot per running sequence.

A slot holds, for each layer, the committed state, the records of the newest tokens that the state does not
hold yet (k, v, beta, g), and the inputs of the causal convolution that precede and accompany them. Rejecting
drafts therefore moves a counter, and memory does not grow by a state per draft. Knows no arithmetic
(torch_ops/gated_delta_rule.py); the state is float32 by default because rounding it every token compounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from netra_backend.config import ModelConfig
from netra_backend.memory_plan import MemoryPlan, SlotLayout


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's slots.

    states [num_slots, num_value_heads, key_dim, value_dim]; columns [num_slots, conv_columns, channels],
    the convolution's inputs: conv_kernel - 1 before the first record, then one per record; keys
    [num_slots, num_records, num_key_heads, key_dim] and values [num_slots, num_records, num_value_heads,
    value_dim] after convolution and normalisation; gates [num_slots, num_records, 2, num_value_heads] float32:
    log decay g, then beta.
    """

    states: torch.Tensor
    columns: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gates: torch.Tensor


class StatePool:
    """The slots of every linear-attention layer; empty for a model without such layers."""

    def __init__(
        self,
        model: ModelConfig,
        plan: MemoryPlan,
        layout: SlotLayout,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def pool(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(
                model.num_linear_layers, plan.num_slots, *shape, dtype=dtype, device=device
            )

        heads, key_dim = model.linear_num_value_heads, model.linear_key_head_dim
        value_dim, records = model.linear_value_head_dim, layout.num_records
        self._states = pool(heads, key_dim, value_dim, dtype=state_dtype)
        self._columns = pool(layout.conv_columns, model.conv_channels)
        keys = pool(records, model.linear_num_key_heads, key_dim)
        values = pool(records, heads, value_dim)
        gates = pool(records, 2, heads, dtype=torch.float32)
        pools = (self._states, self._columns, keys, values, gates)
        assert sum(p.nbytes for p in pools) == plan.num_slots * plan.state_bytes
        self.layers = [
            LayerState(*(p[layer] for p in pools)) for layer in range(model.num_linear_layers)
        ]

    def reset(self, slots: list[int]) -> None:
        """Start the slots from nothing: zero state, zero convolution history."""
        self._states[:, slots] = 0
        self._columns[:, slots] = 0
