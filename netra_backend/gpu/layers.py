"""Layers of the kernel path: attention, Gated DeltaNet and mixture of experts over pages, tails and rings.

Each launch is one operation of the table. The order of launches is the storage rule:

    short sequences   norms, rotary embedding, write into the tail and seal of full tails in one; attention
    chunks            norms and rotary embedding; attention; seal from tail and chunk; what is left into the tail

Knows no architecture's order of layers (models.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from netra_backend.cache.kv_cache import LayerCache
from netra_backend.errors import ConfigError
from netra_backend.gpu.projection import (
    Activations,
    Projection,
    Setting,
    WeightSource,
    load_experts,
)
from netra_backend.gpu.ring_states import RingState
from netra_backend.gpu.step_inputs import Group, StepInputs
from netra_kernels.attention_merge import AttentionOutput
from netra_kernels.gated_delta_rule import DeltaInputs
from netra_kernels.kv_codec import PageLayout
from netra_kernels.rms_norm import GROUP
from netra_kernels.seal import Sealing


@dataclass(frozen=True, slots=True)
class KernelCache:
    """One attention layer's pages and tails, and the format of the pages."""

    pages: torch.Tensor
    tails: torch.Tensor
    layout: PageLayout

    @classmethod
    def of(cls, cache: LayerCache, layout: PageLayout) -> KernelCache:
        """The kernels' view of a layer of KVCache: the bytes are the same, tails are used as rings."""
        return cls(cache.pages, cache.tails, layout)


class Attention:
    """Attention of `prefix`.{q,k,v,o}_proj. With q_norm and k_norm in the checkpoint q and k are normalised; with
    `gated`, q_proj holds each head's query and then its gate.
    """

    def __init__(
        self,
        weights: WeightSource,
        setting: Setting,
        prefix: str,
        cos_sin: torch.Tensor,
        gated: bool,
    ) -> None:
        config = setting.config
        self._setting = setting
        self._cos_sin = cos_sin
        self._gated = gated
        heads, kv_heads, dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        self._q_size, self._kv_size = heads * dim * (1 + gated), kv_heads * dim
        sizes = {"q": self._q_size, "k": self._kv_size, "v": self._kv_size}
        names = {f"{prefix}.{name}_proj.weight": size for name, size in sizes.items()}
        self._in = Projection(weights, setting, names, config.hidden_size)
        self._out = Projection(
            weights, setting, {f"{prefix}.o_proj.weight": config.hidden_size}, heads * dim
        )
        self._norms: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
        if config.has_qk_norm:
            q, k = (weights.get(f"{prefix}.{n}_norm.weight", (dim,), torch.float32) for n in "qk")
            self._norms = (q, k)

    @property
    def fp8(self) -> bool:
        """Whether it wants FP8 rows."""
        return self._in.fp8

    def __call__(self, x: Activations, step: StepInputs, cache: KernelCache) -> torch.Tensor:
        """[num_rows, hidden]; keys and values of the step go into the tails and pages."""
        qkv = self._in(x)
        outputs = [self._attend(qkv[rows], group, cache) for group, rows in step.rows()]
        return self._out(outputs[0] if len(outputs) == 1 else _joined(outputs))

    def _attend(self, qkv: torch.Tensor, group: Group, cache: KernelCache) -> AttentionOutput:
        config, ops = self._setting.config, self._setting.ops
        dim = config.head_dim
        q, k, v = (
            part.unflatten(-1, (-1, dim * (1 + self._gated) if i == 0 else dim))
            for i, part in enumerate(qkv.split((self._q_size, self._kv_size, self._kv_size), -1))
        )
        q, gate = (q[..., :dim], q[..., dim:]) if self._gated else (q, None)
        shared, tail = group.attention, cache.tails
        sealed = (
            group.seal_pages,
            shared.slots,
            group.sealed_before,
            group.tail_before,
            cache.layout,
        )
        seals_first = not group.is_chunks and group.shape.max_seals
        sealing = Sealing(cache.pages, *sealed) if seals_first else None
        q_norm, k_norm = self._norms
        turned = ops.rope(
            q, k, v, group.positions, self._cos_sin, q_norm, k_norm, config.rms_norm_eps, True, cache.layout.rotates_keys,
            None if group.is_chunks else tail, None if group.is_chunks else group.tail_mapping, sealing=sealing,
        )  # fmt: skip
        out = ops.paged_attention(
            turned.q, turned.k, v, cache.pages, tail, shared, cache.layout, dim**-0.5, turned.q_rotated,
            gate, self._out.fp8,
        )  # fmt: skip
        if group.is_chunks:
            if group.shape.max_seals:
                ops.seal(cache.pages, tail, *sealed, turned.k, v, shared.cu_seqlens_q)
            ops.store_tail(turned.k, v, tail, group.tail_mapping)
        return out


def _joined(outputs: list[AttentionOutput]) -> AttentionOutput:
    codes = [out.fp8.view(torch.uint8) for out in outputs if out.fp8 is not None]
    scales = [out.scales for out in outputs if out.scales is not None]
    return AttentionOutput(
        torch.cat([out.hidden for out in outputs]),
        torch.cat(codes).view(torch.float8_e4m3fn) if codes else None,
        torch.cat(scales) if scales else None,
    )


class GatedDeltaNet:
    """Mixer of a linear_attention layer. Raises ConfigError for FP8 with value heads of other than 128 channels."""

    def __init__(self, weights: WeightSource, setting: Setting, prefix: str) -> None:
        config, hidden = setting.config, setting.config.hidden_size
        self._setting = setting
        heads, dim = config.linear_num_value_heads, config.linear_value_head_dim
        channels, values = config.conv_channels, heads * dim
        wide = {f"{prefix}.in_proj_qkv.weight": channels, f"{prefix}.in_proj_z.weight": values}
        self._in = Projection(weights, setting, wide, hidden)
        narrow = {f"{prefix}.in_proj_{name}.weight": heads for name in "ba"}
        self._gates = Projection(weights, setting, narrow, hidden)
        kernel = weights.get(f"{prefix}.conv1d.weight", (channels, 1, config.conv_kernel))
        self._kernel = kernel[:, 0].contiguous()
        self._a_log = weights.get(f"{prefix}.A_log", (heads,), torch.float32)
        self._dt_bias = weights.get(f"{prefix}.dt_bias", (heads,), torch.float32)
        self._norm = weights.get(f"{prefix}.norm.weight", (dim,))
        self._out = Projection(weights, setting, {f"{prefix}.out_proj.weight": hidden}, values)
        if self._out.fp8 and dim != GROUP:
            raise ConfigError(
                f"FP8 {prefix}.out_proj: linear_value_head_dim {dim}, the kernels want {GROUP}"
            )

    @property
    def fp8(self) -> bool:
        """Whether it wants FP8 rows."""
        return self._in.fp8

    def __call__(self, x: Activations, step: StepInputs, state: RingState) -> torch.Tensor:
        """[num_rows, hidden]; a short sequence leaves records, a chunk the state after its tokens."""
        config, ops = self._setting.config, self._setting.ops
        heads = config.linear_num_value_heads
        projected, ba = self._in(x), self._gates(x)
        mixed, z = projected[:, : config.conv_channels], projected[:, config.conv_channels :]
        b, a = ba[:, :heads], ba[:, heads:]
        outputs = []
        for group, rows in step.rows():
            if group.is_chunks:
                self._save_columns(mixed[rows], step, state)
            convolved = ops.causal_conv1d(mixed[rows], self._kernel, state.columns, group.delta)
            gates = (a[rows], b[rows], self._a_log, self._dt_bias, state.states)
            if group.is_chunks:
                saved = None if group.checkpoint_ids is None else state.saved_states
                out = ops.gated_delta_chunk(
                    convolved, *gates, group.delta, group.checkpoint_ids, saved
                )
            else:
                out = ops.gated_delta_rule(convolved, *gates, state.records, group.delta)
            outputs.append(out)
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        gate = z.unflatten(-1, (heads, -1))
        return self._out(
            ops.gated_rms_norm(out, gate, self._norm, config.rms_norm_eps, self._out.fp8)
        )

    def absorb(self, inputs: DeltaInputs, state: RingState) -> None:
        """Move `num_replay` records of each slot into its state; inputs without new tokens."""
        none = state.states.new_empty((0, self._setting.config.conv_channels), dtype=self._setting.dtype)  # fmt: skip
        gates = none[:, : self._setting.config.linear_num_value_heads]
        self._setting.ops.gated_delta_rule(
            none, gates, gates, self._a_log, self._dt_bias, state.states, state.records, inputs
        )

    def _save_columns(self, mixed: torch.Tensor, step: StepInputs, state: RingState) -> None:
        taps = state.saved_columns.shape[1]
        for copy in step.column_copies:
            first = max(0, copy.stop - taps)
            past = state.columns_before(copy.slot, copy.start)
            recent = mixed[copy.row + first : copy.row + copy.stop]
            state.saved_columns[copy.checkpoint_id] = torch.cat((past, recent))[-taps:]


class SparseMlp:
    """Router, routed experts and the shared expert."""

    def __init__(self, weights: WeightSource, setting: Setting, prefix: str) -> None:
        self._setting = setting
        config = setting.config
        gates = {
            f"{prefix}.gate.weight": config.num_experts,
            f"{prefix}.shared_expert_gate.weight": 1,
        }
        self._router = Projection(weights, setting, gates, config.hidden_size)
        self._experts = load_experts(weights, setting, prefix)
        self._counts = torch.zeros(config.num_experts + 1, dtype=torch.int32, device=setting.device)

    @property
    def fp8(self) -> bool:
        """Whether it wants FP8 rows."""
        return self._experts.gate_up_scales is not None

    def __call__(
        self, x: Activations, live_rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the chosen experts [num_rows, slots, hidden] and their weights: the next norm adds them up."""
        config, ops = self._setting.config, self._setting.ops
        logits, count = self._router(x), config.num_experts
        top_k, gate = config.num_experts_per_tok, logits[:, count]
        routing = ops.route(logits[:, :count], top_k, gate, live_rows, self._counts)
        rows = x.hidden if x.fp8 is None else x.fp8
        outputs = ops.expert_outputs(rows, x.scales, routing, self._experts, self._setting.dtype)
        return outputs, routing.weights


class DenseMlp:
    """down(silu(gate x) * up x)."""

    def __init__(self, weights: WeightSource, setting: Setting, prefix: str) -> None:
        config = setting.config
        names = {
            f"{prefix}.{name}_proj.weight": config.intermediate_size for name in ("gate", "up")
        }
        self._gate_up = Projection(weights, setting, names, config.hidden_size)
        down = weights.get(
            f"{prefix}.down_proj.weight", (config.hidden_size, config.intermediate_size)
        )
        self._down = down

    @property
    def fp8(self) -> bool:
        """Whether it wants FP8 rows."""
        return self._gate_up.fp8

    def __call__(self, x: Activations, live_rows: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        """[num_rows, hidden], and no weights."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return F.linear(F.silu(gate).mul_(up), self._down), None
