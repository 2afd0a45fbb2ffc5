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
    log decay g, then beta. saved_states and saved_columns [num_checkpoints, ..] are copies at page
    boundaries: a state, and the conv_kernel - 1 inputs before the next token.
    """

    states: torch.Tensor
    columns: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    gates: torch.Tensor
    saved_states: torch.Tensor
    saved_columns: torch.Tensor


class StatePool:
    """The slots of every linear-attention layer; empty for a model without such layers.

    `slot_pools` are all that a slot holds, as tensors [num_layers, num_slots, ...].
    """

    def __init__(
        self,
        model: ModelConfig,
        plan: MemoryPlan,
        layout: SlotLayout,
        dtype: torch.dtype,
        state_dtype: torch.dtype,
        checkpoint_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def pool(
            *shape: int, dtype: torch.dtype = dtype, count: int = plan.num_slots
        ) -> torch.Tensor:
            return torch.zeros(model.num_linear_layers, count, *shape, dtype=dtype, device=device)

        heads, key_dim = model.linear_num_value_heads, model.linear_key_head_dim
        value_dim, records = model.linear_value_head_dim, layout.num_records
        self._states = pool(heads, key_dim, value_dim, dtype=state_dtype)
        self._columns = pool(layout.conv_columns, model.conv_channels)
        keys = pool(records, model.linear_num_key_heads, key_dim)
        values = pool(records, heads, value_dim)
        gates = pool(records, 2, heads, dtype=torch.float32)
        pools = (self._states, self._columns, keys, values, gates)
        assert sum(p.nbytes for p in pools) == plan.num_slots * plan.state_bytes
        self._saved_states = pool(
            heads, key_dim, value_dim, dtype=checkpoint_dtype, count=plan.num_checkpoints
        )
        self._saved_columns = pool(
            max(0, model.conv_kernel - 1), model.conv_channels, count=plan.num_checkpoints
        )
        self.slot_pools = list(pools)
        saved = (self._saved_states, self._saved_columns)
        assert sum(p.nbytes for p in saved) == plan.num_checkpoints * plan.checkpoint_bytes
        self.layers = [
            LayerState(*(p[layer] for p in (*pools, *saved)))
            for layer in range(model.num_linear_layers)
        ]

    def reset(self, slots: list[int]) -> None:
        """Start the slots from nothing: zero state, zero convolution history."""
        self._states[:, slots] = 0
        self._columns[:, slots] = 0

    def restore(self, checkpoint_ids: list[int], slots: list[int]) -> None:
        """Start the slots from checkpoints: the state and the inputs before the next token."""
        self._states[:, slots] = self._saved_states[:, checkpoint_ids].to(self._states.dtype)
        taps = self._saved_columns.shape[2]
        self._columns[:, slots, :taps] = self._saved_columns[:, checkpoint_ids]
