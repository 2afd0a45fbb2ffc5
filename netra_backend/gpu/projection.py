"""Matrix products of the kernel path: FP8 blocks stay as the checkpoint stores them, everything else is dense.

Knows names and shapes of weights, not what they are for. Several matrices over the same input become one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from netra_backend.config import ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.gpu.device_ops import DeviceOps
from netra_kernels.fused_moe import ExpertWeights
from netra_kernels.rms_norm import FP8_MAX, GROUP

_COUNTERS = 2**15
"""Programs of the widest product with rows enough to be cut along the depth, with room to spare."""

_SLAB = 128 * GROUP
"""Rows that are quantised at once: a large head in float32 would take gigabytes."""

_MIN_BLOCK = 1e-12
"""Largest value of a block of zeros, so that nothing divides by zero."""


class WeightSource(Protocol):
    """What models/weights.py offers, or random tensors of the same shapes."""

    def __contains__(self, name: str) -> bool: ...

    def is_fp8(self, name: str) -> bool:
        """Whether the tensor is stored as FP8 blocks."""
        ...

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Dense, FP8 blocks multiplied by their scales."""
        ...

    def get_fp8(self, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and float32 scales."""
        ...


class Activations(Protocol):
    """Rows in the model's dtype [num_rows, ..] and, where the next product wants them, in FP8 with scales."""

    @property
    def hidden(self) -> torch.Tensor: ...

    @property
    def fp8(self) -> torch.Tensor | None: ...

    @property
    def scales(self) -> torch.Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What every layer of a model is built with. counters: arrival counts of products cut along their depth.

    fp8_head: whether the output head becomes FP8 blocks at load.
    """

    config: ModelConfig
    ops: DeviceOps
    dtype: torch.dtype
    device: torch.device
    counters: torch.Tensor
    fp8_head: bool = False

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        ops: DeviceOps,
        dtype: torch.dtype,
        device: torch.device,
        fp8_head: bool = False,
    ) -> Setting:
        """With counters of its own."""
        counters = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)
        return cls(config, ops, dtype, device, counters, fp8_head)


class Projection:
    """y = x W^T for the matrices `parts` (name -> rows) over one input of `depth` columns, one below the other.

    `fp8` says whether it wants FP8 rows: when its matrices are FP8. Raises ConfigError if only some are, or if
    blocks of 128 rows would straddle two of them.
    """

    def __init__(
        self, weights: WeightSource, setting: Setting, parts: dict[str, int], depth: int
    ) -> None:
        self._setting = setting
        kinds = {weights.is_fp8(name) for name in parts}
        if len(kinds) > 1:
            raise ConfigError(f"{', '.join(parts)}: some are FP8 and some are not")
        self.fp8 = kinds == {True}
        self._scales: torch.Tensor | None = None
        if not self.fp8:
            tensors = [weights.get(name, (rows, depth)) for name, rows in parts.items()]
            self._weight = torch.cat(tensors)
            return
        if any(rows % GROUP for rows in list(parts.values())[:-1]):
            raise ConfigError(
                f"FP8 {', '.join(parts)}: rows {list(parts.values())} are no {GROUP}s"
            )
        pairs = [weights.get_fp8(name, (rows, depth)) for name, rows in parts.items()]
        self._weight = _join([codes for codes, _ in pairs])
        self._scales = torch.cat([scales for _, scales in pairs])

    def __call__(self, x: Activations) -> torch.Tensor:
        """[num_rows, rows of all parts] in the model's dtype."""
        if self._scales is None:
            return F.linear(x.hidden.flatten(1), self._weight)
        assert x.fp8 is not None
        assert x.scales is not None
        setting = self._setting
        return setting.ops.fp8_gemm(
            x.fp8.flatten(1), x.scales, self._weight, self._scales, setting.dtype, setting.counters
        )


def _join(codes: list[torch.Tensor]) -> torch.Tensor:
    """FP8 tensors one below the other (torch.cat does not take FP8 everywhere)."""
    return torch.cat([part.view(torch.uint8) for part in codes]).view(torch.float8_e4m3fn)


class OutputHead:
    """Logits of rows that passed the final norm, from `weight` [vocab_size, hidden] as it is, or with `fp8_head` from FP8
    blocks of it and rows rounded to FP8. Raises ConfigError for FP8 with a hidden size that is no multiple of 128.
    """

    def __init__(self, weight: torch.Tensor, setting: Setting) -> None:
        self._ops = setting.ops
        self._weight = weight
        self._scales: torch.Tensor | None = None
        if setting.fp8_head:
            if weight.shape[1] % GROUP:
                raise ConfigError(
                    f"lm_head_dtype='fp8': hidden size {weight.shape[1]} is no multiple of {GROUP}"
                )
            self._weight, self._scales = quantize_blocks(weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size]."""
        if self._scales is None:
            return F.linear(hidden, self._weight).float()
        rows = self._ops.quantize_rows(hidden)
        return self._ops.fp8_gemm(*rows, self._weight, self._scales, torch.float32)


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 codes of weight [rows, depth], depth a multiple of 128, and float32 scales per 128 x 128 block."""
    codes = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = []
    for first in range(0, len(weight), _SLAB):
        part = weight[first : first + _SLAB].float()
        padded = F.pad(part, (0, 0, 0, -len(part) % GROUP))
        largest = padded.abs().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP)).amax((1, 3))
        scale = largest.clamp(min=_MIN_BLOCK) / FP8_MAX
        grown = scale.repeat_interleave(GROUP, 0)[: len(part)].repeat_interleave(GROUP, 1)
        codes[first : first + _SLAB] = (part / grown).clamp(-FP8_MAX, FP8_MAX).to(codes.dtype)
        scales.append(scale)
    return codes, torch.cat(scales)


def load_experts(weights: WeightSource, setting: Setting, prefix: str) -> ExpertWeights:
    """All experts of a layer and the shared one as the last of them; FP8 as stored, else dense.

    Raises ConfigError where the shared expert is not as wide as the others.
    """
    config = setting.config
    count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    if config.shared_expert_intermediate_size != inner:
        raise ConfigError(
            f"shared_expert_intermediate_size {config.shared_expert_intermediate_size}: the kernels want "
            f"moe_intermediate_size, {inner}"
        )
    shared = f"{prefix}.shared_expert"
    fp8 = weights.is_fp8(f"{shared}.gate_proj.weight")
    kind = torch.float8_e4m3fn if fp8 else setting.dtype
    gate_up = torch.empty((count + 1, 2 * inner, hidden), dtype=kind, device=setting.device)
    down = torch.empty((count + 1, hidden, inner), dtype=kind, device=setting.device)
    names = [f"{prefix}.experts.{index}" for index in range(count)]
    if f"{prefix}.experts.gate_up_proj" in weights:
        gate_up[:count] = weights.get(f"{prefix}.experts.gate_up_proj", (count, 2 * inner, hidden))
        down[:count] = weights.get(f"{prefix}.experts.down_proj", (count, hidden, inner))
        names = []
    targets = [*enumerate(names), (count, shared)]
    if not fp8:
        for index, name in targets:
            for rows, part in ((slice(inner), "gate"), (slice(inner, None), "up")):
                gate_up[index, rows] = weights.get(f"{name}.{part}_proj.weight", (inner, hidden))
            down[index] = weights.get(f"{name}.down_proj.weight", (hidden, inner))
        return ExpertWeights(gate_up, down)
    if inner % GROUP:
        raise ConfigError(f"FP8 experts: moe_intermediate_size {inner} is no multiple of {GROUP}")
    wide, deep = inner // GROUP, -(-hidden // GROUP)
    scales = torch.empty((count + 1, 2 * wide, deep), device=setting.device)
    down_scales = torch.empty((count + 1, deep, wide), device=setting.device)
    for index, name in targets:
        for half, part in enumerate(("gate", "up")):
            codes, blocks = weights.get_fp8(f"{name}.{part}_proj.weight", (inner, hidden))
            gate_up[index, half * inner : (half + 1) * inner] = codes
            scales[index, half * wide : (half + 1) * wide] = blocks
        down[index], down_scales[index] = weights.get_fp8(
            f"{name}.down_proj.weight", (hidden, inner)
        )
    return ExpertWeights(gate_up, down, scales, down_scales)
