"""Codecs: how 64 tokens of keys and values become the bytes of a sealed page, and attention over such pages.

Knows page layouts (memory_plan.py) and arithmetic; not who owns a page, nor tails and causality. A page
depends on its own 64 tokens only, bit for bit, however tokens were cut into steps. Scales never touch codes
where few queries read a page: they multiply queries, scores and probabilities (kv-cache.md 4.3). Where many
do (prompt chunks), a bounded group of pages is expanded once for torch's flash kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.memory_plan import FORMATS, PLAIN, CodeFormat, PageLayout, page_layout
from netra_backend.sequence import PAGE_SIZE

LIMIT = 6e4
"""Keys and values are clamped to this, and NaN to 0, before they are coded: float16 scales stay finite."""

_MIN_SCALE = 1e-6
_SCRATCH_ELEMENTS = 2**18
"""Codes become float32 in a buffer of 1 MiB: from 4 MiB on the conversion is 2-6 times slower, and 64 KiB
drown in calls (int8, head size 64: 4.2-4.9 Gelement/s at 0.4-1.6 MB, 2.1 at 3 MB, 0.8 at 25 MB, one thread)."""

_MANY_ROWS = 64
"""Query rows of a KV head from which expanding a group of pages beats folding scales (1,536 rows, head size
64: 14 against 10 GFLOP/s; 2,048 rows, 256: equal)."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def choose_codec(config: EngineConfig, model: ModelConfig, device: torch.device) -> str:
    """The codec that `kv_cache_dtype` stands for here: auto is plain on a CPU and int8 on a GPU.

    Raises ConfigError where a codec would do damage or cannot be laid out.
    """
    name = config.kv_cache_dtype
    if name == "auto":
        name = "int8" if device.type == "cuda" else PLAIN
    if name == "fp8_e4m3" and not (model.has_qk_norm or config.allow_fp8_without_qk_norm):
        raise ConfigError(
            f"kv_cache_dtype='fp8_e4m3': {model.model_type} does not normalise its keys, and unscaled FP8 "
            "keys of such models are known to destroy answers; use int8 (as small, and 40 times closer), or "
            "set allow_fp8_without_qk_norm"
        )
    if name != PLAIN:
        page_layout(name, model.num_kv_heads, model.head_dim)
    return name


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [..., size] rotated by the orthonormal Hadamard matrix (Sylvester's order), float32; its own inverse.

    Butterflies, not a matrix product: the result does not depend on how many vectors are rotated at once.
    """
    size = x.shape[-1]
    x = x.float()
    for _ in range(size.bit_length() - 1):
        even, odd = x[..., 0::2], x[..., 1::2]
        x = torch.cat((even + odd, even - odd), -1)
    return x * size**-0.5


class PlainCodec:
    """Pages [..., 2, num_kv_heads, PAGE_SIZE, head_dim] of the compute type."""

    joins_pages = False

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.page_shape = (2, num_kv_heads, PAGE_SIZE, head_dim)
        self.dtype = dtype

    def seal(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Pages of keys and values [..., num_kv_heads, PAGE_SIZE, head_dim]."""
        return torch.stack((keys, values), -4)

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries as `attend` wants them."""
        return q

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """Outputs of `attend`, merged or not, in the model's basis."""
        return out

    def attend(self, q: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See QuantizedCodec.attend; pages [num_items, count, 2, num_kv_heads, PAGE_SIZE, head_dim]."""
        keys, values = (pages[:, :, part].transpose(1, 2).flatten(2, 3) for part in (0, 1))
        out, lse = _flash(q, keys, values)
        return out, lse


@dataclass(frozen=True, slots=True)
class _Part:
    """Views into pages [num_items, count, page_bytes], each [num_items, count, num_kv_heads, ...]: code bytes
    [PAGE_SIZE, bytes of a token], scales and minima float16 (empty where the format has none).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor


class QuantizedCodec:
    """Pages uint8 [..., page_bytes] in a PageLayout. Not for two threads at once: it owns a scratch buffer.

    Four-bit codes are read in the order of their bytes (first all low nibbles, then all high ones); queries
    and outputs are permuted instead, which costs nothing.
    """

    joins_pages = True

    def __init__(self, layout: PageLayout, device: torch.device) -> None:
        self.layout = layout
        self.page_shape = (layout.page_bytes,)
        self.dtype = torch.uint8
        self._softmax_scale = layout.head_dim**-0.5
        head = layout.num_kv_heads * PAGE_SIZE * layout.head_dim
        self._group = max(1, _SCRATCH_ELEMENTS // head)
        self._scratch = torch.empty(self._group * head, dtype=torch.float32, device=device)
        self._nibbles = torch.empty(self._group * head // 2, dtype=torch.uint8, device=device)
        order = _nibble_order(layout.head_dim).to(device)
        self._key_order = order if layout.key.code_bits == 4 else None
        rotation = hadamard(torch.eye(layout.head_dim, device=device))
        self._rotation = rotation
        self._restoring = (
            rotation if layout.value.is_rotated else torch.eye(layout.head_dim, device=device)
        )
        if layout.value.code_bits == 4:
            self._restoring = self._restoring[order]

    def seal(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Pages uint8 [..., page_bytes] of keys and values [..., num_kv_heads, PAGE_SIZE, head_dim]."""
        layout = self.layout
        lead = keys.shape[:-3]
        pages = torch.empty(*lead, layout.page_bytes, dtype=torch.uint8, device=keys.device)
        flat = pages.view(-1, 1, layout.page_bytes)
        for part, rows, form in zip(
            self._parts(flat), (keys, values), (layout.key, layout.value), strict=True
        ):
            _encode(rows.reshape(-1, 1, *rows.shape[-3:]), form, part)
        return pages

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries as `attend` wants them: float32, scaled, in the basis and order of the key codes."""
        q = q.float() * self._softmax_scale
        if self.layout.key.is_rotated:
            return q @ self._rotation
        return q if self._key_order is None else q[..., self._key_order]

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """Outputs of `attend`, merged or not, in the model's basis."""
        return out @ self._restoring

    def attend(self, q: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [num_items, num_kv_heads, num_rows, head_dim] (from `queries`) to all tokens of its
        item's pages [num_items, count, page_bytes].

        Returns out of q's shape, to be passed to `restore`, and the log-sum-exp of the scores
        [num_items, num_kv_heads, num_rows], both float32. Temporary memory grows with pages.shape[1], not
        with the context; a caller passes a bounded group.
        """
        keys, values = self._parts(pages)
        if q.shape[2] >= _MANY_ROWS:
            return self._attend_expanded(q, keys, values)
        scores = self._scores(q, keys)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        out = self._weigh(weights, values).div_(total)
        return out, total.log_().add_(top).squeeze(-1)

    def expand(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [num_items, num_kv_heads, count * PAGE_SIZE, head_dim] float32 that pages stand for,
        in the bases of `queries` and `restore`.
        """
        keys, values = self._parts(pages)
        return self._expand(keys, self.layout.key), self._expand(values, self.layout.value)

    def _parts(self, pages: torch.Tensor) -> tuple[_Part, _Part]:
        layout = self.layout
        blocks = pages.unflatten(-1, (layout.num_kv_heads, layout.head_bytes))
        starts = (0, *layout.ends[:-1])
        k_codes, v_codes, *halves = (
            blocks[..., start:end] for start, end in zip(starts, layout.ends, strict=True)
        )
        ks, km, vs, vm = (half.view(torch.float16) for half in halves)
        k_codes, v_codes = (codes.unflatten(-1, (PAGE_SIZE, -1)) for codes in (k_codes, v_codes))
        return _Part(k_codes, ks, km), _Part(v_codes, vs, vm)

    def _groups(self, num_items: int, count: int) -> list[tuple[slice, slice]]:
        """Slices of items and of their pages that fill the scratch buffer: several items with one page each,
        or several pages of one item.
        """
        size = self._group
        if count == 1:
            return [
                (slice(i, min(i + size, num_items)), slice(0, 1)) for i in range(0, num_items, size)
            ]
        return [
            (slice(i, i + 1), slice(c, min(c + size, count)))
            for i in range(num_items)
            for c in range(0, count, size)
        ]

    def _scores(self, q: torch.Tensor, keys: _Part) -> torch.Tensor:
        """[num_items, num_kv_heads, num_rows, count * PAGE_SIZE]."""
        form = self.layout.key
        num_items, count, heads = keys.codes.shape[:3]
        scores = q.new_empty(num_items, heads, q.shape[2], count, PAGE_SIZE)
        for items, part in self._groups(num_items, count):
            codes = self._to_float(keys.codes[items, part], form)
            rows = q[items]
            if form.scale_per == "channel":
                scale, low = (
                    x[items, part].float()[..., self._key_order].transpose(1, 2)
                    for x in (keys.scales, keys.minima)
                )
                scaled = rows.unsqueeze(2) * scale.unsqueeze(3)
                products = scaled @ codes.transpose(-1, -2) + (
                    rows @ low.transpose(-1, -2)
                ).transpose(-1, -2).unsqueeze(-1)
                scores[items, :, :, part] = products.transpose(2, 3)
            else:
                scores[items, :, :, part] = (
                    rows @ codes.flatten(2, 3).transpose(-1, -2)
                ).unflatten(-1, (-1, PAGE_SIZE))
        if form.scale_per == "token":
            scores.mul_(keys.scales.transpose(1, 2).unsqueeze(2))
        return scores.flatten(3)

    def _weigh(self, weights: torch.Tensor, values: _Part) -> torch.Tensor:
        """Sum of values by weights [num_items, num_kv_heads, num_rows, count * PAGE_SIZE]; the latter are
        overwritten.
        """
        form = self.layout.value
        num_items, count = values.codes.shape[:2]
        shift = None
        if form.has_minimum:
            minima = values.minima.transpose(1, 2).flatten(2).float()
            shift = weights @ minima.unsqueeze(-1)
        if form.scale_per == "token":
            weights.mul_(values.scales.transpose(1, 2).flatten(2).unsqueeze(2))
        out = weights.new_zeros(*weights.shape[:3], self.layout.head_dim)
        for items, part in self._groups(num_items, count):
            codes = self._to_float(values.codes[items, part], form).flatten(2, 3)
            tokens = slice(part.start * PAGE_SIZE, part.stop * PAGE_SIZE)
            out[items] += weights[items, :, :, tokens] @ codes
        return out if shift is None else out.add_(shift)

    def _to_float(self, codes: torch.Tensor, form: CodeFormat) -> torch.Tensor:
        """Codes [num_items, count, num_kv_heads, PAGE_SIZE, bytes] as float32 [num_items, num_kv_heads, count,
        PAGE_SIZE, head_dim] in the scratch buffer; the next call overwrites them.
        """
        codes = codes.transpose(1, 2)
        shape = (*codes.shape[:-1], self.layout.head_dim)
        out = self._scratch[: codes.shape[:-1].numel() * self.layout.head_dim].view(shape)
        if form.code_bits == 4:
            low, high = out.chunk(2, -1)
            nibbles = self._nibbles[: codes.numel()].view(codes.shape)
            low.copy_(torch.bitwise_and(codes, 15, out=nibbles))
            high.copy_(torch.bitwise_right_shift(codes, 4, out=nibbles))
            return out
        return out.copy_(codes.view(torch.int8 if form.scale_per else torch.float8_e4m3fn))

    def _expand(self, part: _Part, form: CodeFormat) -> torch.Tensor:
        num_items, count, heads = part.codes.shape[:3]
        dim = self.layout.head_dim
        out = self._scratch.new_empty(num_items, heads, count, PAGE_SIZE, dim)
        for items, pages in self._groups(num_items, count):
            out[items, :, pages] = self._to_float(part.codes[items, pages], form)
        for factors, operation in ((part.scales, out.mul_), (part.minima, out.add_)):
            if factors.shape[-1]:
                factor = factors.transpose(1, 2).float()
                if form.scale_per == "channel":
                    operation(factor[..., None, self._key_order])
                else:
                    operation(factor[..., None])
        return out.flatten(2, 3)

    def _attend_expanded(
        self, q: torch.Tensor, keys: _Part, values: _Part
    ) -> tuple[torch.Tensor, torch.Tensor]:
        expanded = (self._expand(keys, self.layout.key), self._expand(values, self.layout.value))
        out, lse = _flash(q, *expanded, scale=1.0)
        return out, lse


Codec = PlainCodec | QuantizedCodec


def make_codec(
    name: str, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Codec:
    """The codec of that name for a layer's shapes; `dtype` is what plain pages hold."""
    if FORMATS[name] is None:
        return PlainCodec(num_kv_heads, head_dim, dtype)
    return QuantizedCodec(page_layout(name, num_kv_heads, head_dim), device)


def _nibble_order(head_dim: int) -> torch.Tensor:
    """Channel of each position when a token's code bytes are read low nibbles first, then high ones.

    Byte i of word w holds channels w + 2 i * head_dim / 8 (low) and w + (2 i + 1) * head_dim / 8 (high).
    """
    words = head_dim // 8
    low = torch.arange(words)[:, None] + 2 * words * torch.arange(4)
    return torch.cat((low.flatten(), low.flatten() + words))


def _encode(rows: torch.Tensor, form: CodeFormat, into: _Part) -> None:
    """Code rows [num_items, 1, num_kv_heads, PAGE_SIZE, head_dim] into the views of their pages."""
    x = rows.float().nan_to_num(0.0, LIMIT, -LIMIT).clamp_(-LIMIT, LIMIT)
    if form.is_rotated:
        x = hadamard(x).clamp_(-LIMIT, LIMIT)
    if not form.scale_per:
        into.codes.copy_(x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
        return
    axis = -1 if form.scale_per == "token" else -2
    if form.has_minimum:
        low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
        scale, minimum = ((high - low) / 15.0).clamp_min_(_MIN_SCALE).half(), low.half()
        codes = _divide(x - minimum.float(), scale).clamp_(0, 15).to(torch.uint8)
        into.minima.copy_(minimum.squeeze(axis))
        into.codes.copy_(_pack(codes))
    else:
        scale = (x.abs().amax(axis, keepdim=True) / 127.0).clamp_min_(_MIN_SCALE).half()
        codes = _divide(x, scale).clamp_(-127, 127).to(torch.int8)
        into.codes.copy_(codes.view(torch.uint8))
    into.scales.copy_(scale.squeeze(axis))


def _divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale rounded half up, by the reciprocal as the kernel does."""
    return torch.floor(x * (1.0 / scale.float()) + 0.5)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., head_dim / 2] of 4-bit codes [..., head_dim]; see PageLayout."""
    planes = codes.unflatten(-1, (4, 2, -1))
    return (planes[..., 0, :] | (planes[..., 1, :] << 4)).transpose(-1, -2).flatten(-2)
