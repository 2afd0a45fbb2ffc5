"""What launchers demand of their operands: layouts that the kernels' address arithmetic and wide loads rely on.

Every check raises AssertionError with the shape that is wrong; None stands for an operand that is not there.
Knows no kernel.
"""

from __future__ import annotations

import torch

from netra_kernels.kv_codec import PageLayout


def check_dense(*tensors: torch.Tensor | None) -> None:
    """Contiguous."""
    for x in tensors:
        assert x is None or x.is_contiguous(), f"{tuple(x.shape)} with strides {x.stride()} is not contiguous"  # fmt: skip


def check_rows(*tensors: torch.Tensor | None) -> None:
    """Views whose last dimension is contiguous."""
    for x in tensors:
        assert x is None or x.stride(-1) == 1, f"{tuple(x.shape)} with strides {x.stride()} has no contiguous rows"  # fmt: skip


def check_aligned(*tensors: torch.Tensor | None) -> None:
    """Contiguous, and read 16 bytes at a time."""
    check_dense(*tensors)
    for x in tensors:
        assert x is None or x.data_ptr() % 16 == 0, f"{tuple(x.shape)} does not start at 16 bytes"


def check_pages(pages: torch.Tensor, layout: PageLayout) -> None:
    """A pool of pages of the layout."""
    check_aligned(pages)
    assert pages.shape[1:] == layout.page_shape, f"pages {tuple(pages.shape)} are not {layout.codec}"  # fmt: skip


def check_tail(tail: torch.Tensor, num_kv_heads: int, head_dim: int) -> None:
    """Tails [num_slots, 2, num_kv_heads, tail_rows, head_dim]."""
    check_aligned(tail)
    expected = (2, num_kv_heads, tail.shape[3], head_dim)
    assert tail.shape[1:] == expected, f"tails {tuple(tail.shape)} are not {expected}"
