"""Formats of sealed key/value pages.

pages: uint8 [num_pages, page_bytes]; codec "plain": model dtype [num_pages, 2, num_kv_heads, 64, head_dim].
A page is one block per kv head, a block is [K codes | V codes | K scales | K zeros | V scales | V zeros]:
  int8  K, V int8 per token, scale = max/127 per token, both rotated (x H)
  k8v4  K as int8; V 4 bit: value = scale * code + zero per token, rotated
  int4  K 4 bit: scale and zero per channel of the page, not rotated; V as k8v4
  fp8_e4m3  K, V e4m3 with one scale per layer
Scales and zeros are float16. A 4-bit token is head_dim / 8 int32 words; nibble j of word w is channel
w + j * head_dim / 8. A page depends on its own 64 tokens only. Does not know who fills or owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from netra_kernels.hadamard import hadamard_ref

PAGE = 64
CODECS = ("plain", "int8", "k8v4", "int4", "fp8_e4m3")
_KEY_KIND = {"plain": 0, "int8": 1, "k8v4": 1, "int4": 2, "fp8_e4m3": 3}
_VALUE_KIND = {"plain": 0, "int8": 1, "k8v4": 2, "int4": 2, "fp8_e4m3": 3}
_CODE_BITS = {0: 0, 1: 8, 2: 4, 3: 8}

LIMIT = 6e4
"""Keys and values are clamped to this (and NaN to 0) before a quantised seal: float16 scales stay finite."""

MIN_SCALE = 1e-6
"""Scale of a constant group; representable in float16."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Byte offsets inside one kv head's block of a page; sizes of the block and of the page."""

    codec: str
    num_kv_heads: int
    head_dim: int
    key_kind: int
    value_kind: int
    v_codes: int
    k_scales: int
    k_zeros: int
    v_scales: int
    v_zeros: int
    head_bytes: int

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.num_kv_heads * self.head_bytes

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of one page of one layer."""
        if self.codec == "plain":
            return (2, self.num_kv_heads, PAGE, self.head_dim)
        return (self.page_bytes,)

    @property
    def rotates_keys(self) -> bool:
        """Whether scores are taken with q H instead of q."""
        return self.key_kind == 1

    @property
    def rotates_values(self) -> bool:
        """Whether the attention output comes out as o H."""
        return self.value_kind in (1, 2)


def page_layout(codec: str, num_kv_heads: int, head_dim: int) -> PageLayout:
    """Layout of a quantised codec; for "plain" only the kinds matter. Raises KeyError for an unknown codec."""
    key, value = _KEY_KIND[codec], _VALUE_KIND[codec]
    v_codes = PAGE * head_dim * _CODE_BITS[key] // 8
    k_scales = v_codes + PAGE * head_dim * _CODE_BITS[value] // 8
    k_zeros = k_scales + 2 * {0: 0, 1: PAGE, 2: head_dim, 3: 0}[key]
    v_scales = k_zeros + (2 * head_dim if key == 2 else 0)
    v_zeros = v_scales + (2 * PAGE if value in (1, 2) else 0)
    end = v_zeros + (2 * PAGE if value == 2 else 0)
    return PageLayout(
        codec,
        num_kv_heads,
        head_dim,
        key,
        value,
        v_codes,
        k_scales,
        k_zeros,
        v_scales,
        v_zeros,
        end,
    )


def _symmetric_ref(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (x.abs().amax(-1) / 127.0).clamp(min=MIN_SCALE).half()
    codes = torch.floor(x * (1.0 / scale.float())[..., None] + 0.5).clamp(-127, 127).to(torch.int8)
    return codes, scale


def _asymmetric_ref(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = x.amin(axis, keepdim=True), x.amax(axis, keepdim=True)
    scale, zero = ((high - low) / 15.0).clamp(min=MIN_SCALE).half(), low.half()
    codes = (
        torch.floor((x - zero.float()) * (1.0 / scale.float()) + 0.5).clamp(0, 15).to(torch.int64)
    )
    return codes, scale.squeeze(axis), zero.squeeze(axis)


def _pack_ref(codes: torch.Tensor) -> torch.Tensor:
    planes = codes.unflatten(-1, (8, -1))
    words = (planes << (4 * torch.arange(8, device=codes.device))[:, None]).sum(-2)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _unpack_ref(words: torch.Tensor) -> torch.Tensor:
    shifts = (4 * torch.arange(8, device=words.device))[:, None]
    return ((words.long()[..., None, :] >> shifts) & 15).flatten(-2).float()


def encode_page_ref(
    k: torch.Tensor, v: torch.Tensor, layout: PageLayout, k_scale: float = 1.0, v_scale: float = 1.0
) -> torch.Tensor:
    """uint8 [page_bytes] of k, v [num_kv_heads, 64, head_dim]."""
    k, v = (x.float().nan_to_num(0.0, LIMIT, -LIMIT).clamp(-LIMIT, LIMIT) for x in (k, v))
    parts: list[torch.Tensor] = []
    scales: list[torch.Tensor] = []
    if layout.key_kind == 3:
        parts = [
            (x * (1.0 / s)).clamp(-448, 448).to(torch.float8_e4m3fn)
            for x, s in ((k, k_scale), (v, v_scale))
        ]
    elif layout.key_kind == 1:
        codes, scale = _symmetric_ref(hadamard_ref(k))
        parts, scales = [codes], [scale]
    else:
        codes, scale, zero = _asymmetric_ref(k, -2)
        parts, scales = [_pack_ref(codes)], [scale, zero]
    if layout.value_kind == 1:
        codes, scale = _symmetric_ref(hadamard_ref(v))
        parts, scales = [*parts, codes], [*scales, scale]
    elif layout.value_kind == 2:
        codes, scale, zero = _asymmetric_ref(hadamard_ref(v), -1)
        parts, scales = [*parts, _pack_ref(codes)], [*scales, scale, zero]
    return torch.cat(
        [p.contiguous().flatten(1).view(torch.uint8) for p in parts + scales], 1
    ).flatten()


def decode_page_ref(
    page: torch.Tensor, layout: PageLayout, k_scale: float = 1.0, v_scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [num_kv_heads, 64, head_dim] float32 that a page stands for, rotations undone."""
    if layout.codec == "plain":
        return page[0].float(), page[1].float()
    block = page.view(layout.num_kv_heads, layout.head_bytes)
    dim = layout.head_dim

    def part(start: int, end: int, dtype: torch.dtype, width: int) -> torch.Tensor:
        return block[:, start:end].contiguous().view(dtype).unflatten(-1, (-1, width))

    def values(
        kind: int, start: int, end: int, scales: int, zeros: int, axis: int, scale: float
    ) -> torch.Tensor:
        count = PAGE if axis == -1 else dim
        if kind == 3:
            return part(start, end, torch.float8_e4m3fn, dim).float() * scale
        step = part(scales, scales + 2 * count, torch.float16, count).float()[:, 0].unsqueeze(axis)
        if kind == 1:
            return hadamard_ref(part(start, end, torch.int8, dim).float() * step)
        zero = part(zeros, zeros + 2 * count, torch.float16, count).float()[:, 0].unsqueeze(axis)
        x = _unpack_ref(part(start, end, torch.int32, dim // 8)) * step + zero
        return hadamard_ref(x) if axis == -1 else x

    axis = -2 if layout.key_kind == 2 else -1
    k = values(layout.key_kind, 0, layout.v_codes, layout.k_scales, layout.k_zeros, axis, k_scale)
    args = (layout.value_kind, layout.v_codes, layout.k_scales, layout.v_scales, layout.v_zeros)
    return k, values(*args, -1, v_scale)
