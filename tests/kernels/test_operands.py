"""The launchers' checks: what passes, and that what does not is named."""

from __future__ import annotations

import pytest
import torch

from netra_kernels.kv_codec import page_layout
from netra_kernels.operands import (
    check_aligned,
    check_dense,
    check_pages,
    check_rows,
    check_tail,
)

X = torch.zeros(4, 6, 32)


def test_good_operands_pass():
    check_dense(X, None, X[1])
    check_rows(X, None, X[:, ::2], X[..., 3:])
    check_aligned(X, None, X[1])
    check_tail(torch.zeros(3, 2, 4, 72, 32), 4, 32)
    check_pages(torch.zeros(5, 2, 4, 64, 32), page_layout("plain", 4, 32))
    layout = page_layout("int8", 4, 32)
    check_pages(torch.zeros(5, layout.page_bytes, dtype=torch.uint8), layout)


@pytest.mark.parametrize(
    ("check", "operand", "message"),
    [
        (check_dense, X[:, ::2], r"\(4, 3, 32\) with strides .* is not contiguous"),
        (check_rows, X.transpose(1, 2), "no contiguous rows"),
        (check_aligned, X.flatten()[1:], "does not start at 16 bytes"),
        (lambda x: check_tail(x, 4, 64), torch.zeros(3, 2, 4, 72, 32), r"\(3, 2, 4, 72, 32\) are not"),
        (lambda x: check_pages(x, page_layout("int8", 4, 32)), torch.zeros(5, 7), "are not int8"),
    ],
)  # fmt: skip
def test_bad_operands_are_named(check, operand, message):
    with pytest.raises(AssertionError, match=message):
        check(operand)
