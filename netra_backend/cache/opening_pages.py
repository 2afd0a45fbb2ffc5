"""OpeningPages: first pages of sequences where those have a codec of their own, and attention to them.

Knows ids below 0, as the block manager gives them, and no tables. There is one page a sequence, so what counts on a CPU
is the number of operations: 8-bit codes with a scale per token are read by a third of those of codecs.py.
"""

from __future__ import annotations

import torch

from netra_backend.cache.codecs import Codec, QuantizedCodec
from netra_backend.memory_plan import FORMATS


class OpeningPages:
    """One layer's pages [num_opening_pages, *codec.page_shape]."""

    def __init__(self, codec: Codec, pages: torch.Tensor) -> None:
        self.codec = codec
        self.pages = pages
        self._views = _token_bytes(codec, pages)

    def attend(
        self, rows: torch.Tensor, page_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of rows [count, num_kv_heads, num_rows, head_dim] to one page each, in the model's basis, and the
        log-sum-exp of its scores [count, num_kv_heads, num_rows]; both float32, or plain pages' type.
        """
        queries = self.codec.queries(rows)
        if not self._views:
            out, lse = self.codec.attend(queries, self.pages[page_ids].unsqueeze(1))
            return self.codec.restore(out), lse
        keys, key_scales, values, value_scales = (view[page_ids] for view in self._views)
        scores = torch.matmul(queries, keys.float().transpose(-1, -2)).mul_(key_scales)
        lse = scores.logsumexp(-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().mul_(value_scales)
        return self.codec.restore(torch.matmul(weights, values.float())), lse


def _token_bytes(codec: Codec, pages: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of `pages` if they are int8: key codes [count, num_kv_heads, PAGE_SIZE, head_dim], their scales
    [count, num_kv_heads, 1, PAGE_SIZE], and the same of values; else nothing.
    """
    if not isinstance(codec, QuantizedCodec):
        return ()
    if (codec.layout.key, codec.layout.value) != FORMATS["int8"]:
        return ()
    keys, values = codec.parts(pages.unsqueeze(1))
    return tuple(
        view
        for part in (keys, values)
        for view in (part.codes[:, 0].view(torch.int8), part.scales[:, 0].unsqueeze(2))
    )
