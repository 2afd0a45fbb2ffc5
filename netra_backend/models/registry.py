"""Which class serves a `model_type`, and how a model is loaded. One dict; adding a model is adding a line."""

from __future__ import annotations

from pathlib import Path

import torch

from netra_backend.config import ModelConfig
from netra_backend.models.llama import Llama
from netra_backend.models.qwen3_5_moe import Qwen35Moe
from netra_backend.models.weights import Weights

Model = Llama | Qwen35Moe

_MODELS: dict[str, type[Llama] | type[Qwen35Moe]] = {"llama": Llama, "qwen3_5_moe": Qwen35Moe}


def load_model(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Model:
    """Load a checkpoint. Raises ConfigError that names missing, misshapen and surplus tensors."""
    weights = Weights(directory, dtype, device, config.fp8_block)
    model_class = _MODELS[config.model_type]
    model = model_class(weights, config, config.max_position_embeddings, device)
    weights.finish(model_class.ignored_weights)
    return model
