"""The shipped configurations: each launcher called with meta tensors of the target model's shapes.

Target: hidden 2048, 16 query and 2 key/value heads of 256, Gated DeltaNet with 16 key and 32 value heads
of 128, 256 experts of 512 (8 per token), FP8 weights in 128 x 128 blocks. Knows no compiler: aot.py
compiles the cases, tests/kernels/test_machine_code.py holds them to `opcodes` and `max_narrow_loads`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from netra_kernels.causal_conv1d import causal_conv1d
from netra_kernels.fp8_gemm import fp8_gemm
from netra_kernels.fused_moe import ExpertWeights, fused_moe
from netra_kernels.gated_delta_chunk import gated_delta_chunk
from netra_kernels.gated_delta_rule import DeltaInputs, DeltaRecords, gated_delta_rule
from netra_kernels.kv_codec import CODECS, page_layout
from netra_kernels.kv_tail import store_tail
from netra_kernels.paged_attention import AttentionInputs, paged_attention
from netra_kernels.rms_norm import gated_rms_norm, quantize_rows, rms_norm
from netra_kernels.rope import rope
from netra_kernels.router import Routing, route
from netra_kernels.sampling import Penalties, SamplingRows, penalize, sample
from netra_kernels.seal import Sealing, seal

BF16, FP8, F32, I32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32


@dataclass(frozen=True, slots=True)
class Case:
    """A configuration; `opcodes`: kernel name -> opcode that its machine code must contain.

    slow: compiled by the full table only, being like another case that the quick gate compiles.
    """

    name: str
    launch: Callable[[], object]
    opcodes: dict[str, str] = field(default_factory=dict)
    max_narrow_loads: int | None = None
    slow: bool = False


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory: shape and dtype for the launcher, an aligned address for the compiler."""
    return torch.empty(shape, dtype=dtype, device="meta")


def _norm_cases() -> list[Case]:
    return [
        Case(
            "RMSNorm + residual + fp8, 2048",
            lambda: rms_norm(meta(7, 2048), meta(2048), 1e-6, meta(7, 2048), True, True),
            max_narrow_loads=0,
        ),
        Case(
            "weighted sum of 9 experts + residual + RMSNorm + fp8, 2048",
            lambda: rms_norm(
                meta(7, 9, 2048), meta(2048), 1e-6, meta(7, 2048), True, True, meta(7, 9, dtype=F32)
            ),
            max_narrow_loads=0,
        ),
        Case("fp8 of rows, 2048", lambda: quantize_rows(meta(7, 2048)), max_narrow_loads=0),
        Case(
            "gated RMSNorm + fp8, 32 x 128",
            lambda: gated_rms_norm(meta(7, 32, 128), meta(7, 32, 128), meta(128), 1e-6, True),
            max_narrow_loads=1,
        ),
    ]


def _rope(rotate: bool, with_tail: bool, codec: str = "") -> object:
    q_and_gate, kv = meta(7, 16, 512), meta(7, 4, 256)
    sealing = None
    if codec:
        integers = (meta(9, dtype=I32) for _ in range(3))
        sealing = Sealing(
            pages_of(codec, 99), meta(9, 1, dtype=I32), *integers, page_layout(codec, 2, 256)
        )
    return rope(
        q_and_gate[..., :256], kv[:, :2], kv[:, 2:], meta(7, dtype=I32), meta(262144, 64, dtype=F32),
        meta(256), meta(256), 1e-6, True, rotate,
        meta(9, 2, 2, 128, 256) if with_tail else None, meta(7, dtype=I32) if with_tail else None, False, sealing,
    )  # fmt: skip


def _rope_cases() -> list[Case]:
    sealing = [
        Case(
            f"rope + norms + tail + seal {codec}, 16/2 x 256",
            lambda codec=codec: _rope(page_layout(codec, 2, 256).rotates_keys, True, codec),  # type: ignore[misc]
            max_narrow_loads=0,
            slow=codec not in ("plain", "int8", "int4"),
        )
        for codec in CODECS
    ]
    return [
        Case(
            "rope + norms + rotation + tail, 16/2 x 256",
            lambda: _rope(True, True),
            max_narrow_loads=0,
        ),
        Case(
            "rope + norms of a chunk, 16/2 x 256", lambda: _rope(False, False), max_narrow_loads=0
        ),
        *sealing,
    ]


def _router_cases() -> list[Case]:
    return [
        Case(
            "route top-8 of 256 + shared",
            lambda: route(meta(7, 256, dtype=F32), 8, meta(7, dtype=F32)),
        ),
        Case(
            "route top-8 of 256 + shared, with padding",
            lambda: route(meta(7, 256, dtype=F32), 8, meta(7, dtype=F32), meta(1, dtype=I32)),
        ),
    ]


def pages_of(codec: str, num_pages: int, heads: int = 2, dim: int = 256) -> torch.Tensor:
    """The page pool of one layer, in the shape its codec wants."""
    if codec == "plain":
        return meta(num_pages, 2, heads, 64, dim)
    return meta(num_pages, page_layout(codec, heads, dim).page_bytes, dtype=torch.uint8)


def _seal(codec: str, chunk: bool) -> object:
    kv = meta(1000, 4, 256)
    new = (kv[:, :2], kv[:, 2:], meta(3, dtype=I32)) if chunk else (None, None, None)
    return seal(
        pages_of(codec, 99), meta(9, 2, 2, 128, 256), meta(2, 8 if chunk else 1, dtype=I32),
        *(meta(2, dtype=I32) for _ in range(3)), page_layout(codec, 2, 256), *new,
    )  # fmt: skip


def _seal_cases() -> list[Case]:
    kv = meta(1000, 4, 256)
    tail = Case(
        "store tail of a chunk",
        lambda: store_tail(kv[:, :2], kv[:, 2:], meta(9, 2, 2, 128, 256), meta(1000, dtype=I32)),
        max_narrow_loads=0,
    )
    seals = [
        Case(
            f"seal {codec}, {name}",
            lambda codec=codec, chunk=chunk: _seal(codec, chunk),  # type: ignore[misc]
            max_narrow_loads=0,
            slow=not (chunk and codec in ("plain", "int8", "int4")),
        )
        for codec in CODECS
        for name, chunk in (("tail", False), ("chunk", True))
    ]
    return [tail, *seals]


def _attention(
    codec: str, query_len: int, heads: int = 16, kv_heads: int = 2, dim: int = 256
) -> object:
    kv = meta(999, 2 * kv_heads, dim)
    inputs = AttentionInputs(
        meta(9, 640, dtype=I32),
        *(meta(9, dtype=I32) for _ in range(3)),
        meta(10, dtype=I32),
        query_len,
        8,
    )
    q_and_gate = meta(999, heads, 2 * dim)
    return paged_attention(
        meta(999, heads, dim), kv[:, :kv_heads], kv[:, kv_heads:], pages_of(codec, 99, kv_heads, dim),
        meta(9, 2, kv_heads, 128, dim), inputs, page_layout(codec, kv_heads, dim), dim**-0.5,
        meta(999, heads, dim), q_and_gate[..., dim:], True,
    )  # fmt: skip


_QUICK = {
    ("plain", 1),
    ("plain", 512),
    ("int8", 1),
    ("int8", 4),
    ("int8", 8),
    ("int4", 1),
    ("int4", 512),
}


def _attention_cases() -> list[Case]:
    wanted = {"_history_kernel": "HGMMA", "_local_kernel": "HGMMA"}
    return [
        Case(
            f"attention {codec}, {query_len} query tokens x 8 heads of 256",
            lambda codec=codec, query_len=query_len: _attention(codec, query_len),  # type: ignore[misc]
            wanted,
            slow=(codec, query_len) not in _QUICK,
        )
        for codec in CODECS
        for query_len in (1, 4, 8, 512)
    ]


def _delta_arguments() -> tuple[torch.Tensor, ...]:
    ba = meta(999, 64)
    return meta(999, 8192), ba[:, 32:], ba[:, :32], meta(32, dtype=F32), meta(32, dtype=F32)


def _delta_inputs(query_len: int) -> DeltaInputs:
    return DeltaInputs(*(meta(9, dtype=I32) for _ in range(3)), meta(10, dtype=I32), query_len)


def _delta_rule(state: torch.dtype) -> object:
    records = DeltaRecords(
        meta(9, 16, 16, 128),
        meta(9, 16, 32, 128),
        meta(9, 16, 32, dtype=F32),
        meta(9, 16, 32, dtype=F32),
    )
    pool = meta(9, 32, 128, 128, dtype=state)
    return gated_delta_rule(*_delta_arguments(), pool, records, _delta_inputs(8))


def _delta_chunk(state: torch.dtype) -> object:
    pool, copies = meta(9, 32, 128, 128, dtype=state), meta(9, 32, 128, 128)
    return gated_delta_chunk(
        *_delta_arguments(), pool, _delta_inputs(512), meta(9, 9, dtype=I32), copies
    )


def _delta_cases() -> list[Case]:
    cases = []
    for state in (F32, BF16):
        name = f"16/32 heads of 128, state {str(state).removeprefix('torch.')}"
        cases += [
            Case(
                f"delta rule, {name}",
                lambda state=state: _delta_rule(state),  # type: ignore[misc]
                slow=state == BF16,
            ),
            Case(
                f"delta rule chunk, {name}",
                lambda state=state: _delta_chunk(state),  # type: ignore[misc]
                {"_prepare_kernel": "HGMMA", "_scan_kernel": "HGMMA"},
                slow=state == BF16,
            ),
        ]
    return cases


def _conv(query_len: int) -> object:
    return causal_conv1d(
        meta(999, 12288)[:, :8192], meta(8192, 4), meta(9, 12, 8192), _delta_inputs(query_len)
    )


def _conv_cases() -> list[Case]:
    return [
        Case(f"convolution, {query_len} tokens x 8192", lambda n=query_len: _conv(n))  # type: ignore[misc]
        for query_len in (1, 4, 512)
    ]


def _gemm(rows: int, columns: int, depth: int) -> object:
    x, scales = meta(rows, depth, dtype=FP8), meta(rows, depth // 128, dtype=F32)
    weight, blocks = meta(columns, depth, dtype=FP8), meta(columns // 128, depth // 128, dtype=F32)
    if (
        columns == 248320
    ):  # an output head: float32 logits, wide enough without cuts along the depth
        return fp8_gemm(x, scales, weight, blocks, F32)
    return fp8_gemm(x, scales, weight, blocks, BF16, meta(4096, dtype=I32))


def _gemm_cases() -> list[Case]:
    shapes = (
        (4, 12288, 2048),
        (4, 2048, 4096),
        (24, 2048, 4096),
        (1000, 12288, 2048),
        (4, 248320, 2048),
        (128, 248320, 2048),
    )
    return [
        Case(
            f"fp8 GEMM {rows} x {columns} x {depth}",
            lambda shape=(rows, columns, depth): _gemm(*shape),  # type: ignore[misc]
            {"_fp8_gemm_kernel": "QGMMA"},
            max_narrow_loads=0,
        )
        for rows, columns, depth in shapes
    ]


def _moe(num_tokens: int) -> object:
    layer = ExpertWeights(
        meta(257, 1024, 2048, dtype=FP8), meta(257, 2048, 512, dtype=FP8),
        meta(257, 8, 16, dtype=F32), meta(257, 16, 4, dtype=F32),
    )  # fmt: skip
    x, scales = meta(num_tokens, 2048, dtype=FP8), meta(num_tokens, 16, dtype=F32)
    routing = Routing(
        meta(num_tokens, 9, dtype=I32), meta(num_tokens, 9, dtype=F32), meta(257, num_tokens, dtype=I32),
        meta(257, dtype=I32),
    )  # fmt: skip
    return fused_moe(x, scales, routing, layer)


def _moe_cases() -> list[Case]:
    wanted = {"_gate_up_kernel": "QGMMA", "_down_kernel": "QGMMA"}
    return [
        Case(f"MoE 256 + 1 experts of 512, {name}", lambda n=n: _moe(n), wanted)  # type: ignore[misc]
        for name, n in (("few rows", 7), ("many rows", 1000))
    ]


def _sample() -> object:
    floats = (meta(9, dtype=F32), meta(9, dtype=I32), meta(9, dtype=F32), meta(9, dtype=F32))
    rows = SamplingRows(*floats, meta(9, dtype=torch.int64), meta(9, dtype=torch.int64))
    return sample(meta(9, 248320, dtype=F32), rows)


def _penalize() -> object:
    penalties = Penalties(
        meta(3, 248320, dtype=torch.int16), meta(9, dtype=I32), meta(9, 8, dtype=I32),
        *(meta(9, dtype=F32) for _ in range(3)), meta(9, 7760, dtype=I32),
    )  # fmt: skip
    return penalize(meta(9, 248320, dtype=F32), penalties)


def _sampling_cases() -> list[Case]:
    return [
        Case("sample, vocabulary 248320", _sample, max_narrow_loads=0),
        Case("penalize, vocabulary 248320", _penalize),
    ]


CASES: list[Case] = [
    *_norm_cases(),
    *_rope_cases(),
    *_router_cases(),
    *_seal_cases(),
    *_attention_cases(),
    *_delta_cases(),
    *_conv_cases(),
    *_gemm_cases(),
    *_moe_cases(),
    *_sampling_cases(),
]
