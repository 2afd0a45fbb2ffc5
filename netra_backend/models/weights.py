"""Weights: the tensors of a safetensors checkpoint under canonical names, dequantised and checked.

Knows no architecture: a model asks for each tensor with the shape it expects, then `finish` names every
tensor that was missing and every one that nobody asked for. Tensors are read from the memory-mapped file
one at a time, so a checkpoint is never in memory twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import safe_open

from netra_backend.errors import ConfigError

_MAX_NAMES = 20


def canonical_name(name: str) -> str:
    """Drop the prefix that multimodal checkpoints put before the text model's names."""
    return name.replace("model.language_model.", "model.", 1)


def dequantize_fp8(weight: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """float32 [out, in] from FP8 [out, in] and scales [ceil(out/block), ceil(in/block)] (to be multiplied)."""
    rows, columns = weight.shape
    expanded = (
        scale.float().repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
    )
    return weight.float().mul_(expanded)


class Weights:
    """All tensors of a checkpoint directory; `get` hands them out in `dtype` on `device`.

    Raises ConfigError when the directory holds no safetensors, or a file is damaged.
    """

    def __init__(
        self, directory: Path, dtype: torch.dtype, device: torch.device, fp8_block: int
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._fp8_block = fp8_block
        self._files = {path: _open(path) for path in _shards(directory)}
        self._locations = {
            canonical_name(name): (path, name)
            for path, file in self._files.items()
            for name in file.keys()  # noqa: SIM118 (a safe_open is no dict)
        }
        self._used: set[str] = set()
        self._problems: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._locations

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor `name` of `shape`, FP8 blocks multiplied by their scales.

        A missing tensor or a wrong shape is noted for `finish`, and zeros are returned meanwhile.
        """
        wanted = dtype or self._dtype
        tensor = self._read(name)
        if tensor is None or tuple(tensor.shape) != shape:
            found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            self._problems.append(f"{name} {found}, expected {shape}")
            return torch.zeros(shape, dtype=wanted, device=self._device)
        if tensor.dtype == torch.float8_e4m3fn:
            scale = self._read(f"{name}_scale_inv")
            if scale is None or not self._fp8_block:
                self._problems.append(
                    f"{name} is FP8 but has no {name}_scale_inv or no weight_block_size"
                )
                return torch.zeros(shape, dtype=wanted, device=self._device)
            tensor = dequantize_fp8(tensor, scale, self._fp8_block)
        return tensor.to(device=self._device, dtype=wanted)

    def is_fp8(self, name: str) -> bool:
        """Whether `name` is stored as FP8 blocks."""
        if name not in self._locations:
            return False
        path, stored_name = self._locations[name]
        return bool(self._files[path].get_slice(stored_name).get_dtype() == "F8_E4M3")

    def get_fp8(self, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of `shape` and float32 scales per block, as stored; problems are noted as `get` notes them."""
        block = self._fp8_block or 1
        blocks = (-(-shape[0] // block), -(-shape[1] // block))
        scales = self.get(f"{name}_scale_inv", blocks, torch.float32)
        codes = self._read(name)
        if codes is None or tuple(codes.shape) != shape or codes.dtype != torch.float8_e4m3fn:
            self._problems.append(f"{name} is no FP8 tensor of shape {shape}")
            codes = torch.zeros(shape, dtype=torch.float8_e4m3fn)
        return codes.to(self._device), scales

    def finish(self, ignored_prefixes: Iterable[str]) -> None:
        """Raise ConfigError naming all missing, misshapen and surplus tensors, if there are any."""
        ignored = tuple(ignored_prefixes)
        surplus = sorted(
            n for n in self._locations if n not in self._used and not n.startswith(ignored)
        )
        problems = self._problems + [f"{name} is not part of this architecture" for name in surplus]
        if problems:
            more = len(problems) - _MAX_NAMES
            tail = f"; and {more} more" if more > 0 else ""
            raise ConfigError("checkpoint tensors: " + "; ".join(problems[:_MAX_NAMES]) + tail)

    def _read(self, name: str) -> torch.Tensor | None:
        if name not in self._locations:
            return None
        self._used.add(name)
        path, stored_name = self._locations[name]
        tensor: torch.Tensor = self._files[path].get_tensor(stored_name)
        return tensor


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return [directory / name for name in names]
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"no safetensors file in {directory}")
    return paths


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except Exception as error:  # safetensors has its own exception types for damaged files
        raise ConfigError(f"cannot read {path}: {error}") from error
