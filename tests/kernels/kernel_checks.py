"""Helpers of the kernel tests: error ratios, outputs filled with NaN, margins that must stay untouched."""

from __future__ import annotations

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Root mean square of the difference over that of the expected values; NaN anywhere gives NaN."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()).item()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    """Same shape and dtype as promised, and a relative error below `limit`."""
    assert actual.shape == expected.shape
    error = relative_error(actual, expected)
    assert error < limit, f"relative error {error:.3e}, limit {limit:.1e}"


class Guarded:
    """A tensor inside a larger buffer: `view` starts as garbage, the margins must stay as they were."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, margin: int = 256) -> None:
        size = torch.Size(shape).numel()
        self._bytes = torch.full(((size + 2 * margin) * dtype.itemsize,), 0x7F, dtype=torch.uint8)
        self._margin = margin * dtype.itemsize
        self.view = self._bytes[self._margin : -self._margin].view(dtype).view(shape)
        self.view.fill_(float("nan") if dtype.is_floating_point else -77)

    def assert_margins_untouched(self) -> None:
        """Raises AssertionError if a kernel wrote outside the view."""
        assert (self._bytes[: self._margin] == 0x7F).all(), "written before the start"
        assert (self._bytes[-self._margin :] == 0x7F).all(), "written past the end"


def poison_empty(monkeypatch: object) -> None:
    """Make torch.empty* hand out NaN, so that an element a kernel forgets to write shows."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        stock = getattr(owner, name)

        def filled(*args: object, _stock: object = stock, **kwargs: object) -> torch.Tensor:
            out = _stock(*args, **kwargs)  # type: ignore[operator]
            if out.dtype == torch.float8_e4m3fn:
                out.view(torch.uint8).fill_(0x7F)
            else:
                out.fill_(float("nan") if out.dtype.is_floating_point else 113)
            return out

        monkeypatch.setattr(owner, name, filled)  # type: ignore[attr-defined]
