"""The orthonormal Hadamard rotation x -> x H of vectors whose size is a power of two; H is its own inverse.

It spreads outliers over all channels before a vector is quantised (kv_codec.py). Both forms take the same
butterflies in the same order in float32, so a kernel and its reference agree bit by bit. Knows no cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def hadamard_ref(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] rotated, float32. Raises ValueError if size is no power of two.

    Constant geometry: each stage adds and subtracts neighbours and moves the lowest index bit to the top,
    so that after log2(size) stages every bit is transformed and back in its place (Sylvester's order).
    """
    size = x.shape[-1]
    if size & (size - 1):
        raise ValueError(f"no Hadamard rotation of {size} channels: not a power of two")
    x = x.float()
    for _ in range(size.bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = torch.cat([even + odd, even - odd], dim=-1)
    return x * size**-0.5


@triton.jit
def hadamard(b_x, ROWS: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, NORM: tl.constexpr):
    """Rows of b_x [ROWS, SIZE] float32 rotated; STAGES = log2(SIZE), NORM = SIZE ** -0.5."""
    for _ in tl.static_range(STAGES):
        b_even, b_odd = tl.split(tl.reshape(b_x, [ROWS, SIZE // 2, 2]))
        b_pair = tl.join(b_even + b_odd, b_even - b_odd)
        b_x = tl.reshape(tl.permute(b_pair, (0, 2, 1)), [ROWS, SIZE])
    return b_x * NORM
