"""MTP: the checkpoint's own draft layer (`mtp.*`), chained to any number of drafts by chain.py.

One attention layer over (embedding of token p+1, the model's hidden state after the final norm at p), which
predicts token p+2; later drafts take its own normed output in place of that hidden state.
"""

from __future__ import annotations

from pathlib import Path

import torch

from netra_backend.cache.kv_cache import LayerCache
from netra_backend.config import ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.forward_context import ForwardContext
from netra_backend.models.qwen3_5_moe import DecoderLayer, Qwen35Moe, zero_centred_norm
from netra_backend.models.weights import Weights
from netra_backend.ops import Linear

_NOT_MTP = ("model.", "lm_head.", "visual.")


class MtpHead:
    """The layer and its norms; embedding and output head are the model's own."""

    def __init__(self, weights: Weights, config: ModelConfig, model: Qwen35Moe) -> None:
        hidden = config.hidden_size
        self._model = model
        self._embedding_norm, self._hidden_norm = (
            zero_centred_norm(weights, config, f"mtp.pre_fc_norm_{part}.weight")
            for part in ("embedding", "hidden")
        )
        self._fc = Linear(weights.get("mtp.fc.weight", (hidden, 2 * hidden)))
        self._layer = DecoderLayer(weights, config, "mtp.layers.0", "full_attention")
        self._norm = zero_centred_norm(weights, config, "mtp.norm.weight")

    def features(self, hidden: torch.Tensor) -> torch.Tensor:
        """What stands for computed tokens: the model's final hidden states as they are."""
        return hidden

    def __call__(
        self, hidden: torch.Tensor, context: ForwardContext, cache: LayerCache
    ) -> torch.Tensor:
        """Normed outputs [num_rows, hidden] for context.token_ids (those after the rows' positions)."""
        embedded = self._model.embedding.embed(context.token_ids)
        x = self._fc(torch.cat((self._embedding_norm(embedded), self._hidden_norm(hidden)), -1))
        x = self._layer(x, self._model.rope(context.positions), context, cache)
        return self._norm(x)

    def next_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """The most likely tokens [num_rows] after the layer's outputs."""
        return self._model.logits(states).argmax(-1)


def load_mtp_head(
    directory: Path, config: ModelConfig, model: Qwen35Moe, dtype: torch.dtype, device: torch.device
) -> MtpHead:
    """Load `mtp.*`. Raises ConfigError that names missing, misshapen and surplus tensors."""
    if config.num_mtp_layers != 1:
        raise ConfigError(
            f"speculation='mtp': the checkpoint has {config.num_mtp_layers} MTP layers"
        )
    weights = Weights(directory, dtype, device, config.fp8_block)
    head = MtpHead(weights, config, model)
    weights.finish(_NOT_MTP)
    return head


def has_mtp(directory: Path, config: ModelConfig, device: torch.device) -> bool:
    """Whether the checkpoint brings an MTP layer."""
    if config.num_mtp_layers == 0:
        return False
    return "mtp.fc.weight" in Weights(directory, torch.float32, device, config.fp8_block)
