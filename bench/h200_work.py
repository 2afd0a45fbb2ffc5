"""The kernels' workloads of h200_check.py: random operands of the model's shapes, and what each must cost at least.

Knows shapes, bytes and operations; not how anything is timed or judged. Needs torch and triton only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from netra_kernels import kv_codec
from netra_kernels.causal_conv1d import causal_conv1d, causal_conv1d_ref
from netra_kernels.fp8_gemm import fp8_gemm, fp8_gemm_ref
from netra_kernels.fused_moe import ExpertWeights, fused_moe, fused_moe_ref
from netra_kernels.gated_delta_chunk import gated_delta_chunk, gated_delta_chunk_ref
from netra_kernels.gated_delta_rule import (
    DeltaInputs,
    DeltaRecords,
    gated_delta_rule,
    gated_delta_rule_ref,
)
from netra_kernels.paged_attention import AttentionInputs, paged_attention, paged_attention_ref
from netra_kernels.rms_norm import (
    quantize_fp8_ref,
    quantize_rows,
    quantize_rows_ref,
    rms_norm,
    rms_norm_ref,
)
from netra_kernels.rope import RopeOutput, rope, rope_ref, rotary_table
from netra_kernels.router import Routing, route, route_ref
from netra_kernels.sampling import SamplingRows, sample, sample_ref
from netra_kernels.seal import Sealing, seal, seal_ref
from netra_kernels.tuning import tiling

Output = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of the model and of the workload; TARGET is Qwen3.6-35B-A3B."""

    hidden: int = 2048
    q_heads: int = 16
    kv_heads: int = 2
    head_dim: int = 256
    rotary: int = 64
    key_heads: int = 16
    value_heads: int = 32
    delta_dim: int = 128
    experts: int = 256
    top_k: int = 8
    inter: int = 512
    attention_layers: int = 10
    delta_layers: int = 30
    users: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    query_lens: tuple[int, ...] = (1, 4, 8)
    context: int = 40960
    chunk: int = 4096

    @property
    def channels(self) -> int:
        """Convolution channels: q, k and v of a recurrent layer."""
        return (2 * self.key_heads + self.value_heads) * self.delta_dim


TINY = Shapes(256, 4, 2, 64, 16, 1, 2, 32, 4, 2, 128, 1, 1, (1, 2), (1, 2), 128, 70)


@dataclass(slots=True)
class Work:
    """One thing to run. num_bytes and operations are the least that any implementation moves and does."""

    name: str
    run: Callable[[], Output]
    num_bytes: float = 0.0
    operations: float = 0.0
    fp8: bool = False
    reference: Callable[[], Output] | None = None
    limit: float = 0.01


class Builder:
    """Makes random operands of the model's shapes on one device."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.s = shapes
        self.device = device

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).bfloat16()

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def fp8(self, rows: int, depth: int) -> Output:
        return quantize_fp8_ref(torch.randn(rows, depth, device=self.device))

    def weight(self, *shape: int) -> Output:
        codes = (
            (64 * torch.randn(shape, device=self.device)).clamp(-448, 448).to(torch.float8_e4m3fn)
        )
        blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        return codes, 1e-3 * (torch.rand(blocks, device=self.device) + 0.5)

    def delta_inputs(self, lens: list[int], start: int, replay: int) -> DeltaInputs:
        count = len(lens)
        ends = torch.tensor([0, *lens]).cumsum(0).tolist()
        return DeltaInputs(
            self.ints(list(range(count))), self.ints([start] * count), self.ints([replay] * count),
            self.ints(ends), max(lens),
        )  # fmt: skip

    def attention(self, codec: str, users: int, query: int, context: int, tail: int) -> Work:
        s, layout = self.s, kv_codec.page_layout(codec, self.s.kv_heads, self.s.head_dim)
        pages_each = context // 64
        count = users * pages_each
        # bytes that are small positive float16 scales as well as codes
        if codec == "plain":
            pool = self.normal(count, 2, s.kv_heads, 64, s.head_dim)
        else:
            pool = torch.randint(
                32, 48, (count, layout.page_bytes), dtype=torch.uint8, device=self.device
            )
        table = torch.randperm(count, device=self.device).int().view(users, pages_each)
        programs = users * s.kv_heads * tiling(query, 1).tiles
        splits = 0 if not pages_each else max(1, min(64, pages_each, 264 // programs))
        inputs = AttentionInputs(
            table, self.ints(list(range(users))), self.ints([64 * pages_each] * users), self.ints([tail] * users),
            self.ints([i * query for i in range(users + 1)]), query, splits,
        )  # fmt: skip
        rows = users * query
        q, gate = self.normal(rows, s.q_heads, s.head_dim), self.normal(rows, s.q_heads, s.head_dim)
        k, v = self.normal(rows, s.kv_heads, s.head_dim), self.normal(rows, s.kv_heads, s.head_dim)
        tails = self.normal(users, 2, s.kv_heads, 128, s.head_dim)
        rotated = kv_codec.hadamard_ref(q).bfloat16() if layout.rotates_keys else None
        arguments = (q, k, v, pool, tails, inputs, layout, s.head_dim**-0.5, rotated, gate)
        page_bytes = pool[0].numel() * pool.element_size() if count else 0
        visible = context + tail + (query + 1) / 2
        return Work(
            f"attention {codec} users={users} query={query} context={context}",
            lambda: (paged_attention(*arguments).hidden,),
            count * page_bytes + users * 2 * tail * s.kv_heads * s.head_dim * 2,
            4 * rows * s.q_heads * s.head_dim * visible,
            reference=lambda: (paged_attention_ref(*arguments).hidden,),
        )

    def delta_rule(self, users: int, query: int, replay: int, checked: bool = False) -> Work:
        s, record_rows = self.s, 2 * max(query, replay)
        state = torch.randn(users, s.value_heads, s.delta_dim, s.delta_dim, device=self.device)
        records = DeltaRecords(
            self.normal(users, record_rows, s.key_heads, s.delta_dim),
            self.normal(users, record_rows, s.value_heads, s.delta_dim),
            -torch.rand(users, record_rows, s.value_heads, device=self.device),
            torch.rand(users, record_rows, s.value_heads, device=self.device),
        )
        inputs = self.delta_inputs([query] * users, 1000, replay)
        rows = users * query
        weights = (
            torch.rand(s.value_heads, device=self.device).log(),
            torch.rand(s.value_heads, device=self.device),
        )
        operands = (
            self.normal(rows, s.channels),
            self.normal(rows, s.value_heads),
            self.normal(rows, s.value_heads),
        )

        def call(function: Callable[..., torch.Tensor], fresh: bool) -> Output:
            pool = state.clone() if fresh else state
            return function(*operands, *weights, pool, records, inputs), pool

        return Work(
            f"delta rule users={users} query={query} replay={replay}",
            lambda: call(gated_delta_rule, fresh=checked),
            state.numel() * 8.0,
            reference=lambda: call(gated_delta_rule_ref, fresh=True),
        )

    def delta_chunk(self, tokens: int, correlation: float) -> Work:
        s = self.s
        mixed = self.normal(tokens, s.channels)
        width = s.key_heads * s.delta_dim
        shared = self.normal(width)
        mixed[:, width : 2 * width] *= (1 - correlation) ** 0.5
        mixed[:, width : 2 * width] += correlation**0.5 * shared
        weights = (
            torch.rand(s.value_heads, device=self.device).log(),
            torch.rand(s.value_heads, device=self.device),
        )
        operands = (
            mixed,
            self.normal(tokens, s.value_heads) - 4,
            self.normal(tokens, s.value_heads) + 2,
        )
        inputs = self.delta_inputs([tokens], 30, 0)
        state = torch.randn(1, s.value_heads, s.delta_dim, s.delta_dim, device=self.device)

        def call(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> Output:
            pool = state.to(dtype, copy=True)  # it becomes the state after the chunk
            return function(*operands, *weights, pool, inputs), pool

        moved = 2 * tokens * (s.channels + s.value_heads * s.delta_dim)
        return Work(
            f"delta rule chunk of {tokens}, key correlation {correlation}",
            lambda: call(gated_delta_chunk, torch.float32),
            moved,
            tokens
            * s.value_heads
            * 2
            * (3 * 64 * s.delta_dim + 3 * s.delta_dim**2 + 128 * s.delta_dim),
            reference=lambda: call(gated_delta_chunk_ref, torch.float64),
        )

    def conv(self, users: int, query: int) -> Work:
        x, weight = self.normal(users * query, self.s.channels), self.normal(self.s.channels, 4)
        columns, inputs = (
            self.normal(users, 12, self.s.channels),
            self.delta_inputs([query] * users, 1000, 0),
        )
        return Work(
            f"convolution users={users} query={query}",
            lambda: (causal_conv1d(x, weight, columns.clone(), inputs),),
            2 * x.numel() * 2 + 6 * users * self.s.channels,
            reference=lambda: (causal_conv1d_ref(x, weight, columns.clone(), inputs),),
        )

    def moe(self, tokens: int) -> Work:
        s = self.s
        gate_up, gate_up_scales = self.weight(s.experts + 1, 2 * s.inter, s.hidden)
        down, down_scales = self.weight(s.experts + 1, s.hidden, s.inter)
        layer = ExpertWeights(gate_up, down, gate_up_scales, down_scales)
        x, scales = self.fp8(tokens, s.hidden)
        logits = torch.randn(tokens, s.experts, device=self.device)
        gate = torch.randn(tokens, device=self.device)
        counts = torch.zeros(s.experts + 1, dtype=torch.int32, device=self.device)
        chosen = route_ref(logits, s.top_k, gate)
        used = int((chosen.counts > 0).sum())
        return Work(
            f"route + MoE tokens={tokens} ({used} experts)",
            lambda: (fused_moe(x, scales, route(logits, s.top_k, gate, counts=counts), layer),),
            used * 3.0 * s.inter * s.hidden,
            6.0 * chosen.experts.numel() * s.inter * s.hidden,
            fp8=True,
            reference=lambda: (fused_moe_ref(x, scales, chosen, layer),),
            limit=0.05,
        )

    def gemm(self, rows: int, columns: int, depth: int) -> Work:
        x, weight = self.fp8(rows, depth), self.weight(columns, depth)
        counters = torch.zeros(4096, dtype=torch.int32, device=self.device)
        return Work(
            f"fp8 GEMM {rows} x {columns} x {depth}",
            lambda: (fp8_gemm(*x, *weight, torch.bfloat16, counters),),
            columns * depth + rows * (depth + 2 * columns),
            2.0 * rows * columns * depth,
            fp8=True,
            reference=lambda: (fp8_gemm_ref(*x, *weight),),
        )

    def norm(self, rows: int) -> Work:
        x, residual, weight = (
            self.normal(rows, self.s.hidden),
            self.normal(rows, self.s.hidden),
            self.normal(self.s.hidden),
        )
        arguments = (x, weight, 1e-6, residual, True, True)
        return Work(
            f"RMSNorm + residual + fp8 rows={rows}",
            lambda: (rms_norm(*arguments).hidden, rms_norm(*arguments).residual),
            9.0 * x.numel(),
            reference=lambda: (rms_norm_ref(*arguments).hidden, rms_norm_ref(*arguments).residual),
        )

    def rope(self, rows: int) -> Work:
        s = self.s
        q, kv = (
            self.normal(rows, s.q_heads, 2 * s.head_dim),
            self.normal(rows, 2 * s.kv_heads, s.head_dim),
        )
        table = rotary_table(1024, s.rotary, 1e7, self.device)
        positions = torch.randint(0, 1024, (rows,), dtype=torch.int32, device=self.device)
        weights = (self.normal(s.head_dim), self.normal(s.head_dim))
        views = (q[..., : s.head_dim], kv[:, : s.kv_heads], kv[:, s.kv_heads :])

        def call(function: Callable[..., object]) -> Output:
            out = function(*views, positions, table, *weights, 1e-6, True, True)
            return out.q, out.k, out.q_rotated  # type: ignore[attr-defined]

        moved = 2.0 * rows * s.head_dim * (3 * s.q_heads + 2 * s.kv_heads)
        return Work(
            f"rope + norms + rotation rows={rows}",
            lambda: call(rope),
            moved,
            reference=lambda: call(rope_ref),
        )

    def router(self, rows: int) -> Work:
        logits, gate = (
            torch.randn(rows, self.s.experts, device=self.device),
            torch.randn(rows, device=self.device),
        )

        counts = torch.zeros(self.s.experts + 1, dtype=torch.int32, device=self.device)

        def call(function: Callable[..., Routing]) -> Output:
            counts.zero_()
            found = function(logits, self.s.top_k, gate, counts=counts)
            return found.experts.float(), found.weights, found.counts.float()

        return Work(
            f"route rows={rows}",
            lambda: call(route),
            logits.nbytes,
            reference=lambda: call(route_ref),
        )

    def sampling(self, rows: int) -> Work:
        vocab = 300 if self.s is TINY else 248320
        logits = 3 * torch.randn(rows, vocab, device=self.device)
        floats = [torch.full((rows,), x, device=self.device) for x in (1.0, 0.95, 0.0)]
        seeds = torch.arange(rows, device=self.device)
        top_k = self.ints([0 if r % 2 else 20 for r in range(rows)])
        params = SamplingRows(floats[0], top_k, floats[1], floats[2], seeds, seeds + 9)
        return Work(
            f"sample rows={rows} vocabulary={vocab}",
            lambda: (sample(logits, params).float(),),
            logits.nbytes,
            reference=lambda: (sample_ref(logits, params).float(),),
        )

    def seal(self, codec: str) -> Work:
        s, layout = self.s, kv_codec.page_layout(codec, self.s.kv_heads, self.s.head_dim)
        tail = self.normal(4, 2, s.kv_heads, 128, s.head_dim)
        arguments = (self.ints([[2], [0], [-1], [1]]), self.ints([0, 1, 2, 3]), self.ints([0, 64, 128, 192]),
                     self.ints([64, 70, 90, 127]), layout)  # fmt: skip

        def call(function: Callable[..., None]) -> Output:
            pages = torch.zeros(3, layout.page_bytes, dtype=torch.uint8, device=self.device)
            function(pages, tail, *arguments)
            return tuple(x for page in pages for x in kv_codec.decode_page_ref(page, layout))

        return Work(
            f"seal {codec}",
            lambda: call(seal),
            reference=lambda: call(seal_ref),
            limit=0.02,
        )

    def rope_seal(self, codec: str) -> Work:
        """Four short sequences, three of which fill a page in the launch that writes their new rows."""
        s, layout = self.s, kv_codec.page_layout(codec, self.s.kv_heads, self.s.head_dim)
        tail, q = self.normal(4, 2, s.kv_heads, 128, s.head_dim), self.normal(4, s.q_heads, s.head_dim)  # fmt: skip
        kv = self.normal(4, 2 * s.kv_heads, s.head_dim)
        places = self.ints([0, 64, 128, 192]), self.ints([64, 70, 90, 127])
        positions, slots = places[0] + places[1], self.ints([0, 1, 2, 3])
        table = rotary_table(1024, s.rotary, 1e7, self.device)
        arguments = (q, kv[:, : s.kv_heads], kv[:, s.kv_heads :], positions, table, None, None, 1e-6, True,
                     layout.rotates_keys)  # fmt: skip
        pages = torch.zeros(
            3, *layout.page_shape, dtype=tail.dtype if codec == "plain" else torch.uint8, device=self.device
        )  # fmt: skip

        def call(function: Callable[..., RopeOutput]) -> Output:
            ring, filled = tail.clone(), pages.clone()
            jobs = self.ints([2, 0, -1, 1]).view(4, 1)
            sealing = Sealing(filled, jobs, slots, *places, layout)
            out = function(*arguments, ring, slots * 128 + positions % 128, False, sealing)
            decoded = [x for page in filled for x in kv_codec.decode_page_ref(page, layout)]
            return out.q, out.k, ring, *decoded

        return Work(
            f"rope + tail + seal {codec}",
            lambda: call(rope),
            reference=lambda: call(rope_ref),
            limit=0.02,
        )

    def quantize(self, rows: int) -> Work:
        x = self.normal(rows, self.s.hidden)

        def call(function: Callable[..., Output]) -> Output:
            codes, scales = function(x)
            return codes.float(), scales

        return Work(
            f"fp8 of rows={rows}",
            lambda: call(quantize_rows),
            3.0 * x.numel(),
            reference=lambda: call(quantize_rows_ref),
        )
