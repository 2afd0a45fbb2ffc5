"""Which runner serves a device: torch on a CPU, kernels on a GPU. The one place that decides, once."""

from __future__ import annotations

from pathlib import Path

import torch

from netra_backend.config import EngineConfig
from netra_backend.errors import ConfigError
from netra_backend.gpu.runner import KernelRunner
from netra_backend.model_runner import ModelRunner


def make_runner(
    config: EngineConfig, checkpoint: Path, eos_token_ids: frozenset[int]
) -> ModelRunner | KernelRunner:
    """The runner for `config.device`; auto is CUDA where there is one. Raises ConfigError if there is none, and for what
    only a GPU does.
    """
    has_cuda = torch.cuda.is_available()
    if config.device == "cpu" or (config.device == "auto" and not has_cuda):
        if config.lm_head_dtype == "fp8":
            raise ConfigError("lm_head_dtype='fp8': a CPU has no FP8 products; use auto")
        return ModelRunner(config, checkpoint, eos_token_ids)
    if not has_cuda:
        raise ConfigError("device='cuda': no CUDA device is visible; use device=cpu or auto")
    return KernelRunner(config, checkpoint, eos_token_ids, torch.device("cuda"))
