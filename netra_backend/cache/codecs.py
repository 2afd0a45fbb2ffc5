"""Codecs: how 64 tokens of keys and values become the bytes of a sealed page, and attention over such pages.

Knows page layouts (memory_plan.py) and arithmetic; not who owns a page, nor tails and causality. A page
depends on its own 64 tokens only, bit for bit, however tokens were cut into steps. Scales never touch codes
where few queries read a page: they multiply queries, scores and probabilities (kv-cache.md 4.3). Where many
do (prompt chunks), a bounded group of pages is expanded once for torch's flash kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from netra_backend.config import EngineConfig, ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.memory_plan import FORMATS, PLAIN, CodeFormat, PageLayout, page_layout
from netra_backend.sequence import PAGE_SIZE

LIMIT = 6e4
"""Keys and values are clamped to this, and NaN to 0, before they are coded: float16 scales stay finite."""

_MIN_SCALE = 1e-6
_SCRATCH_ELEMENTS = 3 * 2**16
"""Codes become float32 in a buffer of 1 MiB: from 4 MiB on the conversion is 2-6 times slower, and 64 KiB
drown in calls (int8, head size 64: 4.2-4.9 Gelement/s at 0.4-1.6 MB, 2.1 at 3 MB, 0.8 at 25 MB, one thread)."""

_TEMPORARY_ELEMENTS = 2**20
"""Float32 elements, 4 MiB, that one call may hold for the scores or the expanded pages of an item."""

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

    def group_pages(self, num_rows: int) -> int:
        """Pages that one item of `attend` should have at most."""
        return max(1, _TEMPORARY_ELEMENTS // math.prod(self.page_shape))

    def attend(self, q: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See QuantizedCodec.attend; pages [num_items, count, 2, num_kv_heads, PAGE_SIZE, head_dim]."""
        keys, values = pages.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).unbind(0)
        out, lse = _flash(q, keys, values)
        return out, lse


@dataclass(frozen=True, slots=True)
class _Part:
    """Keys or values of pages [num_items, count, page_bytes]: their format, and views [num_items, count,
    num_kv_heads, ...] of code bytes [PAGE_SIZE, bytes of a token], scales and minima (float16; empty where
    the format has none).
    """

    form: CodeFormat
    codes: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor


class QuantizedCodec:
    """Pages uint8 [..., page_bytes] in a PageLayout. Not for two threads at once: it owns scratch buffers.

    Codes are read as planes: one of all channels, or with 4 bits one of the low and one of the high nibbles.
    Queries and outputs are permuted to that order instead of the codes, which costs nothing.
    """

    def __init__(self, layout: PageLayout, device: torch.device) -> None:
        self.layout = layout
        self.page_shape = (layout.page_bytes,)
        self.dtype = torch.uint8
        dim = layout.head_dim
        page = layout.num_kv_heads * PAGE_SIZE * dim
        self._group = max(1, _SCRATCH_ELEMENTS // page)
        self._scratch = torch.empty(self._group * page, dtype=torch.float32, device=device)
        self._raw = torch.empty(2 * self._group * page, dtype=torch.uint8, device=device)
        order = _nibble_order(dim).to(device)
        self._key_order = order if layout.key.code_bits == 4 else torch.arange(dim, device=device)
        self._rotation = hadamard(torch.eye(dim, device=device))
        self._key_factor = dim**-0.5 * _unit(layout.key)
        restoring = self._rotation if layout.value.is_rotated else torch.eye(dim, device=device)
        if layout.value.code_bits == 4:
            restoring = restoring[order]
        self._restoring = restoring * _unit(layout.value)

    def seal(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Pages uint8 [..., page_bytes] of keys and values [..., num_kv_heads, PAGE_SIZE, head_dim]."""
        size = self.layout.page_bytes
        pages = torch.empty(*keys.shape[:-3], size, dtype=torch.uint8, device=keys.device)
        for part, rows in zip(self.parts(pages.view(-1, 1, size)), (keys, values), strict=True):
            _encode(rows.reshape(-1, 1, *rows.shape[-3:]), part)
        return pages

    def queries(self, q: torch.Tensor) -> torch.Tensor:
        """Queries as `attend` wants them: float32, scaled, in the basis and order of the key codes."""
        q = q.float() * self._key_factor
        if self.layout.key.is_rotated:
            return q @ self._rotation
        return q[..., self._key_order]

    def restore(self, out: torch.Tensor) -> torch.Tensor:
        """Outputs of `attend`, merged or not, in the model's basis."""
        return out @ self._restoring

    def group_pages(self, num_rows: int) -> int:
        """Pages that one item of `attend` should have at most: bounds its scores, or its expanded pages."""
        width = num_rows if num_rows < _MANY_ROWS else 2 * self.layout.head_dim
        return max(1, _TEMPORARY_ELEMENTS // (self.layout.num_kv_heads * PAGE_SIZE * width))

    def attend(self, q: torch.Tensor, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [num_items, num_kv_heads, num_rows, head_dim] (from `queries`) to all tokens of its
        item's pages [num_items, count, page_bytes]; either num_items or count is 1.

        Returns out of q's shape, to be passed to `restore`, and the log-sum-exp of the scores
        [num_items, num_kv_heads, num_rows], both float32.
        """
        keys, values = self.parts(pages)
        if q.shape[2] >= _MANY_ROWS:
            out, lse = _flash(q, self._expand(keys), self._expand(values), scale=1.0)
            return out, lse
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
        keys, values = self.parts(pages)
        return self._expand(keys), self._expand(values)

    def parts(self, pages: torch.Tensor) -> tuple[_Part, _Part]:
        """Views of keys and values of pages [num_items, count, page_bytes]."""
        layout = self.layout
        blocks = pages.unflatten(-1, (layout.num_kv_heads, layout.head_bytes))
        starts = (0, *layout.ends[:-1])
        k_codes, v_codes, *halves = (
            blocks[..., start:end] for start, end in zip(starts, layout.ends, strict=True)
        )
        k_codes, v_codes = (codes.unflatten(-1, (PAGE_SIZE, -1)) for codes in (k_codes, v_codes))
        ks, km, vs, vm = (half.view(torch.float16) for half in halves)
        return _Part(layout.key, k_codes, ks, km), _Part(layout.value, v_codes, vs, vm)

    def _scores(self, q: torch.Tensor, keys: _Part) -> torch.Tensor:
        """Products of queries and keys, [num_items, num_kv_heads, num_rows, count * PAGE_SIZE]."""
        num_items, heads, num_rows, _ = q.shape
        if keys.form.scale_per == "channel":
            return self._scores_by_page(q, keys)
        parts = []
        if num_items == 1:
            codes, rows = keys.codes[0].transpose(0, 1), q[0]
            for start in range(0, codes.shape[1], self._group):
                planes = self._planes(codes[:, start : start + self._group], keys.form)
                parts.append(_products(rows, [plane.flatten(1, 2) for plane in planes]))
            scores = torch.cat(parts, -1).unsqueeze(0)
        else:
            for start in range(0, num_items, self._group):
                items = slice(start, start + self._group)
                planes = self._planes(keys.codes[items, 0], keys.form)
                parts.append(_products(q[items].flatten(0, 1), [p.flatten(0, 1) for p in planes]))
            scores = torch.cat(parts).view(num_items, heads, num_rows, PAGE_SIZE)
        if keys.form.scale_per == "token":
            scores.mul_(keys.scales.transpose(1, 2).flatten(2).unsqueeze(2))
        return scores

    def _scores_by_page(self, q: torch.Tensor, keys: _Part) -> torch.Tensor:
        """The same where scales belong to channels of a page: they and the minima go onto the queries."""
        num_items, heads, num_rows, _ = q.shape
        count = keys.codes.shape[1]
        codes, scales, minima = (x.flatten(0, 1) for x in (keys.codes, keys.scales, keys.minima))
        parts = []
        for start in range(0, len(codes), self._group):
            pages = slice(start, start + self._group)
            rows = q if num_items == 1 else q[pages]
            scaled = (rows * scales[pages][..., self._key_order].unsqueeze(2)).flatten(0, 1)
            low = minima[pages][..., self._key_order].float().unsqueeze(-1)
            planes = self._planes(codes[pages], keys.form)
            products = _products(scaled, [plane.flatten(0, 1) for plane in planes])
            parts.append(products.add_((rows @ low).flatten(0, 1)))
        scores = torch.cat(parts).view(num_items, count, heads, num_rows, PAGE_SIZE)
        return scores.permute(0, 2, 3, 1, 4).flatten(3)

    def _weigh(self, weights: torch.Tensor, values: _Part) -> torch.Tensor:
        """Sums of values by weights [num_items, num_kv_heads, num_rows, count * PAGE_SIZE], which are
        overwritten.
        """
        form = values.form
        scales, minima = (x.transpose(1, 2).flatten(2) for x in (values.scales, values.minima))
        shift = weights @ minima.float().unsqueeze(-1) if form.has_minimum else None
        if form.scale_per == "token":
            weights.mul_(scales.unsqueeze(2))
        if len(weights) == 1:
            codes, rows = (
                values.codes[0].transpose(0, 1),
                weights[0].split(self._group * PAGE_SIZE, -1),
            )
            out = weights.new_zeros(*weights.shape[1:3], self.layout.head_dim)
            for index, part in enumerate(rows):
                start = index * self._group
                planes = self._planes(codes[:, start : start + self._group], form)
                for columns, plane in zip(out.chunk(len(planes), -1), planes, strict=True):
                    columns.baddbmm_(part, plane.flatten(1, 2))
            out = out.unsqueeze(0)
        else:
            parts = []
            for start in range(0, len(weights), self._group):
                items = slice(start, start + self._group)
                planes = self._planes(values.codes[items, 0], form)
                parts.append(torch.cat([weights[items] @ plane for plane in planes], -1))
            out = torch.cat(parts)
        return out if shift is None else out.add_(shift)

    def _planes(self, codes: torch.Tensor, form: CodeFormat) -> list[torch.Tensor]:
        """Code bytes [.., .., PAGE_SIZE, bytes] as float32 planes in the scratch buffer, which the next call
        overwrites: [codes of all channels], or [low nibbles, high nibbles].
        """
        size = codes.numel()
        out = self._scratch[:size].view(codes.shape)
        if form.code_bits == 4:
            high = self._scratch[size : 2 * size].view(codes.shape)
            nibbles = self._raw[:size].view(codes.shape)
            out.copy_(torch.bitwise_and(codes, 15, out=nibbles))
            high.copy_(torch.bitwise_right_shift(codes, 4, out=nibbles))
            return [out, high]
        if form.scale_per:
            return [out.copy_(codes.view(torch.int8))]
        return [out.copy_(self._halves(codes))]

    def _halves(self, codes: torch.Tensor) -> torch.Tensor:
        """E4M3 codes as float16 values / 256: the fields fit when moved by 7 bits, subnormals included.

        torch's own conversion takes ten times as long.
        """
        bits = self._raw[: 2 * codes.numel()].view(torch.int16).view(codes.shape)
        bits.copy_(codes.view(torch.int8)).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return bits.view(torch.float16)

    def _expand(self, part: _Part) -> torch.Tensor:
        num_items, count, heads = part.codes.shape[:3]
        out = self._scratch.new_empty(num_items, heads, count, PAGE_SIZE, self.layout.head_dim)
        for item in range(num_items):
            codes = part.codes[item].transpose(0, 1)
            for start in range(0, count, self._group):
                pages = slice(start, start + self._group)
                planes = self._planes(codes[:, pages], part.form)
                for columns, plane in zip(
                    out[item, :, pages].chunk(len(planes), -1), planes, strict=True
                ):
                    columns.copy_(plane)
        for factors, apply in ((part.scales, out.mul_), (part.minima, out.add_)):
            factor = factors.transpose(1, 2)
            if part.form.scale_per == "channel":
                apply(factor[..., None, self._key_order])
            elif factor.shape[-1]:
                apply(factor.unsqueeze(-1))
        return out.flatten(2, 3)


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


def _unit(form: CodeFormat) -> float:
    """What codes are multiplied by, besides their scales; see QuantizedCodec._halves."""
    return 1.0 if form.scale_per else 256.0


def _products(rows: torch.Tensor, planes: list[torch.Tensor]) -> torch.Tensor:
    """rows [batch, num_rows, head_dim] times the transposed planes [batch, num_tokens, their channels]."""
    first, *others = zip(rows.chunk(len(planes), -1), planes, strict=True)
    out = torch.bmm(first[0], first[1].transpose(1, 2))
    for columns, plane in others:
        out.baddbmm_(columns, plane.transpose(1, 2))
    return out


def _encode(rows: torch.Tensor, into: _Part) -> None:
    """Code rows [num_items, 1, num_kv_heads, PAGE_SIZE, head_dim] into the views of their pages."""
    form = into.form
    x = rows.float().nan_to_num(0.0, LIMIT, -LIMIT).clamp_(-LIMIT, LIMIT)
    if form.is_rotated:
        x = hadamard(x).clamp_(-LIMIT, LIMIT)
    if not form.scale_per:
        into.codes.copy_(x.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
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
        into.codes.copy_(_divide(x, scale).clamp_(-127, 127).to(torch.int8).view(torch.uint8))
    into.scales.copy_(scale.squeeze(axis))


def _divide(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale rounded half up, by the reciprocal as the kernel does."""
    return torch.floor(x * (1.0 / scale.float()) + 0.5)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Bytes [..., head_dim / 2] of 4-bit codes [..., head_dim]; see PageLayout."""
    planes = codes.unflatten(-1, (4, 2, -1))
    return (planes[..., 0, :] | (planes[..., 1, :] << 4)).transpose(-1, -2).flatten(-2)
