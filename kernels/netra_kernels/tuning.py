"""Block shapes, warps and stages per (kernel, shape bucket, architecture); nothing is tuned at serving time.

`source` says where a row comes from: "aot" = the widest shape that compiles for sm_90 without spills and with
the wanted MMA on both triton versions (docs/kernels.md), not timed; "h200" = fastest of the candidates
measured by bench/h200_check.py. Knows numbers only; the launchers know what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class Config:
    """rows: rows of the activations (or query rows) per program; columns: weight rows (or value channels)
    per program; depth: reduction per step; swapped: weights (or keys) are the left operand of the MMA."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int
    swapped: bool
    source: str


TABLE: dict[tuple[str, str, str], Config] = {
    ("attention", "rows16", "sm_90"): Config(16, 64, 0, 4, 2, True, "aot"),
    ("attention", "rows32", "sm_90"): Config(32, 64, 0, 8, 2, True, "aot"),
    ("attention", "rows64", "sm_90"): Config(64, 64, 0, 8, 2, False, "aot"),
    ("attention", "rows64 of int8 pages", "sm_90"): Config(64, 64, 0, 8, 2, True, "aot"),
    ("fp8_gemm", "rows16", "sm_90"): Config(16, 64, 128, 4, 4, True, "aot"),
    ("fp8_gemm", "rows32", "sm_90"): Config(32, 64, 128, 4, 4, True, "aot"),
    ("fp8_gemm", "rows64", "sm_90"): Config(64, 128, 128, 4, 4, False, "aot"),
    ("moe_gate_up", "rows16", "sm_90"): Config(16, 64, 128, 4, 3, True, "aot"),
    ("moe_gate_up", "rows64", "sm_90"): Config(64, 64, 128, 8, 3, False, "aot"),
    ("moe_down", "rows16", "sm_90"): Config(16, 128, 64, 4, 3, True, "aot"),
    ("moe_down", "rows64", "sm_90"): Config(64, 128, 64, 8, 3, False, "aot"),
}


def lookup(kernel: str, bucket: str, arch: str = "sm_90") -> Config:
    """The shipped configuration; KeyError names the missing row."""
    return TABLE[kernel, bucket, arch]


@dataclass(frozen=True, slots=True)
class Tiling:
    """How query rows are cut: `rows` per program (padded), `block_q` tokens of a group, `tiles` per sequence."""

    config: Config
    rows: int
    block_q: int
    tiles: int


MAX_ROWS = (64, 64, 32, 32)
"""Rows per program, by value kind, that fit into registers with heads of 256 (docs/kernels.md)."""


def tiling(max_query_len: int, group: int, value_kind: int = 0) -> Tiling:
    """Cut max_query_len tokens of `group` query heads that share a key/value head, for pages of a codec."""
    wanted = max(16, triton.next_power_of_2(max_query_len * group))
    rows = max(min(wanted, MAX_ROWS[value_kind]), triton.next_power_of_2(group))
    bucket = f"rows{rows} of int8 pages" if rows == 64 and value_kind == 1 else f"rows{rows}"
    block_q = rows // group
    return Tiling(lookup("attention", bucket), rows, block_q, triton.cdiv(max_query_len, block_q))
