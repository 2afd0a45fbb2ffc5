"""The table of operations over pages, rings and FP8 rows: Triton-language kernels, or their torch references.

Every field has a Protocol, which both sides satisfy (mypy holds them to it, a test compares the signatures): a
table is chosen once, when a model is constructed, and nothing branches afterwards. Shapes and formulas are in the
files of netra_kernels that the operations come from. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from netra_backend.gpu.kernel_draw import Sample
from netra_kernels import (
    causal_conv1d,
    fp8_gemm,
    fused_moe,
    gated_delta_chunk,
    gated_delta_rule,
    kv_tail,
    paged_attention,
    rms_norm,
    rope,
    router,
    sampling,
    seal,
)
from netra_kernels.attention_merge import AttentionOutput
from netra_kernels.fused_moe import ExpertWeights
from netra_kernels.gated_delta_rule import DeltaInputs, DeltaRecords
from netra_kernels.kv_codec import PageLayout
from netra_kernels.paged_attention import AttentionInputs
from netra_kernels.rms_norm import NormOutput
from netra_kernels.rope import RopeOutput
from netra_kernels.router import Routing
from netra_kernels.seal import Sealing

Tensor = torch.Tensor


class RmsNorm(Protocol):
    """Residual, weighted sum of expert outputs, norm, FP8."""

    def __call__(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, zero_centered: bool = False,
        fp8: bool = False, slot_weights: Tensor | None = None,
    ) -> NormOutput: ...  # fmt: skip


class GatedRmsNorm(Protocol):
    """Norm of each head, times silu(gate), FP8."""

    def __call__(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, fp8: bool = False
    ) -> NormOutput: ...


class QuantizeRows(Protocol):
    """FP8 rows and their scales."""

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


class Rope(Protocol):
    """Norms and rotary embedding of q and k, rotation of q, write into the tail, seal of full tails."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, cos_sin: Tensor, q_weight: Tensor | None = None,
        k_weight: Tensor | None = None, eps: float = 1e-6, zero_centered: bool = False, rotate: bool = False,
        tail: Tensor | None = None, slot_mapping: Tensor | None = None, interleaved: bool = False,
        sealing: Sealing | None = None,
    ) -> RopeOutput: ...  # fmt: skip


class Seal(Protocol):
    """Fill pages from the tail and a chunk's rows."""

    def __call__(
        self, pages: Tensor, tail: Tensor, seal_pages: Tensor, slots: Tensor, num_sealed: Tensor, num_tail: Tensor,
        layout: PageLayout, k: Tensor | None = None, v: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
        k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> None: ...  # fmt: skip


class StoreTail(Protocol):
    """Copy a chunk's last rows into the tail."""

    def __call__(self, k: Tensor, v: Tensor, tail: Tensor, slot_mapping: Tensor) -> None: ...


class PagedAttention(Protocol):
    """Attention over pages, tail and the new rows; gate and FP8."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, tail: Tensor, inputs: AttentionInputs,
        layout: PageLayout, scale: float, q_rotated: Tensor | None = None, gate: Tensor | None = None,
        fp8: bool = False, k_scale: float = 1.0, v_scale: float = 1.0,
    ) -> AttentionOutput: ...  # fmt: skip


class CausalConv1d(Protocol):
    """Convolution and SiLU; the past is a ring of columns."""

    def __call__(
        self, x: Tensor, weight: Tensor, columns: Tensor, inputs: DeltaInputs
    ) -> Tensor: ...


class GatedDeltaRule(Protocol):
    """Absorb accepted records, then compute new tokens without committing them."""

    def __call__(
        self, mixed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
        records: DeltaRecords, inputs: DeltaInputs,
    ) -> Tensor: ...  # fmt: skip


class GatedDeltaChunk(Protocol):
    """Prompt chunks: commit all tokens, copy states at page boundaries."""

    def __call__(
        self, mixed: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor,
        inputs: DeltaInputs, checkpoint_ids: Tensor | None = None, checkpoints: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


class Route(Protocol):
    """Experts and weights of every token, the shared expert last; and the rows of every expert, without those of padding."""

    def __call__(
        self, logits: Tensor, top_k: int, shared_logits: Tensor | None = None, num_live: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Routing: ...  # fmt: skip


class ExpertOutputs(Protocol):
    """What each chosen expert makes of its token."""

    def __call__(
        self, x: Tensor, x_scales: Tensor | None, routing: Routing, layer: ExpertWeights,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Tensor: ...  # fmt: skip


class Fp8Gemm(Protocol):
    """x W^T of FP8 rows and FP8 blocks."""

    def __call__(
        self, x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor,
        dtype: torch.dtype = torch.bfloat16, counters: Tensor | None = None,
    ) -> Tensor: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """One implementation of every operation."""

    rms_norm: RmsNorm
    gated_rms_norm: GatedRmsNorm
    quantize_rows: QuantizeRows
    rope: Rope
    seal: Seal
    store_tail: StoreTail
    paged_attention: PagedAttention
    causal_conv1d: CausalConv1d
    gated_delta_rule: GatedDeltaRule
    gated_delta_chunk: GatedDeltaChunk
    route: Route
    expert_outputs: ExpertOutputs
    fp8_gemm: Fp8Gemm
    sample: Sample


KERNELS = DeviceOps(
    rms_norm=rms_norm.rms_norm,
    gated_rms_norm=rms_norm.gated_rms_norm,
    quantize_rows=rms_norm.quantize_rows,
    rope=rope.rope,
    seal=seal.seal,
    store_tail=kv_tail.store_tail,
    paged_attention=paged_attention.paged_attention,
    causal_conv1d=causal_conv1d.causal_conv1d,
    gated_delta_rule=gated_delta_rule.gated_delta_rule,
    gated_delta_chunk=gated_delta_chunk.gated_delta_chunk,
    route=router.route,
    expert_outputs=fused_moe.expert_outputs,
    fp8_gemm=fp8_gemm.fp8_gemm,
    sample=sampling.sample,
)
"""Triton-language kernels: a GPU, or any tensors under TRITON_INTERPRET=1."""

REFERENCES = DeviceOps(
    rms_norm=rms_norm.rms_norm_ref,
    gated_rms_norm=rms_norm.gated_rms_norm_ref,
    quantize_rows=rms_norm.quantize_rows_ref,
    rope=rope.rope_ref,
    seal=seal.seal_ref,
    store_tail=kv_tail.store_tail_ref,
    paged_attention=paged_attention.paged_attention_ref,
    causal_conv1d=causal_conv1d.causal_conv1d_ref,
    gated_delta_rule=gated_delta_rule.gated_delta_rule_ref,
    gated_delta_chunk=gated_delta_chunk.gated_delta_chunk_ref,
    route=router.route_ref,
    expert_outputs=fused_moe.expert_outputs_ref,
    fp8_gemm=fp8_gemm.fp8_gemm_ref,
    sample=sampling.sample_ref,
)
"""The same in torch, for tests of everything around the kernels."""
