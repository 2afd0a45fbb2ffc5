"""RingStates: the recurrent memory of Gated DeltaNet layers as the kernels keep it, one slot per running sequence.

What StatePool is for torch, with rings by position instead of rows in order: the record of position p lies in row
p % num_records, its convolution input in column p % conv_columns. Nothing moves when drafts are rejected, and a new
sequence needs no reset: the kernels take a state of zero where a sequence has no past. Knows no arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from netra_backend.config import ModelConfig
from netra_backend.memory_plan import MemoryPlan, SlotLayout
from netra_kernels.gated_delta_rule import DeltaRecords


@dataclass(frozen=True, slots=True)
class RingState:
    """One layer's slots: states [num_slots, HV, K, V], columns [num_slots, conv_columns, channels] (inputs of the
    convolution), records of [num_slots, num_records, ..]; saved_* [num_checkpoints, ..] are copies at page boundaries.
    """

    states: torch.Tensor
    columns: torch.Tensor
    records: DeltaRecords
    saved_states: torch.Tensor
    saved_columns: torch.Tensor

    def columns_before(self, slot: int, position: int) -> torch.Tensor:
        """Inputs of the taps - 1 tokens before `position`, [taps - 1, channels]."""
        width, taps = self.columns.shape[1], self.saved_columns.shape[1]
        rows = [(position - taps + i) % width for i in range(taps)]
        return self.columns[slot, rows]


class RingStates:
    """The slots of every linear-attention layer; empty for a model without such layers."""

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
        layers, slots, saved = model.num_linear_layers, plan.num_slots, plan.num_checkpoints
        heads, key_dim = model.linear_num_value_heads, model.linear_key_head_dim
        value_dim, taps = model.linear_value_head_dim, max(0, model.conv_kernel - 1)
        records = layout.num_records

        def pool(count: int, *shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros(layers, count, *shape, dtype=kind, device=device)

        self._states = pool(slots, heads, key_dim, value_dim, kind=state_dtype)
        self._columns = pool(slots, layout.conv_columns, model.conv_channels)
        keys = pool(slots, records, model.linear_num_key_heads, key_dim)
        values = pool(slots, records, heads, value_dim)
        decays, betas = (pool(slots, records, heads, kind=torch.float32) for _ in range(2))
        pools = (self._states, self._columns, keys, values, decays, betas)
        assert sum(p.nbytes for p in pools) == plan.num_slots * plan.state_bytes
        self._saved_states = pool(saved, heads, key_dim, value_dim, kind=checkpoint_dtype)
        self._saved_columns = pool(saved, taps, model.conv_channels)
        self.layers = [
            RingState(
                self._states[i],
                self._columns[i],
                DeltaRecords(keys[i], values[i], decays[i], betas[i]),
                self._saved_states[i],
                self._saved_columns[i],
            )
            for i in range(layers)
        ]

    def restore(self, checkpoint_id: int, slot: int, position: int) -> None:
        """Start the slot from a checkpoint taken after `position` tokens."""
        width, taps = self._columns.shape[2], self._saved_columns.shape[2]
        rows = [(position - taps + i) % width for i in range(taps)]
        self._states[:, slot] = self._saved_states[:, checkpoint_id].to(self._states.dtype)
        self._columns[:, slot, rows] = self._saved_columns[:, checkpoint_id]
