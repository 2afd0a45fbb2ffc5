"""Llama (transformers' `llama`): rotary attention with grouped queries, gated MLP, RMSNorm before each."""

from __future__ import annotations

import torch

from netra_backend.cache.kv_cache import KVCache, LayerCache
from netra_backend.cache.state_pool import StatePool
from netra_backend.config import ModelConfig
from netra_backend.forward_context import ForwardContext
from netra_backend.models.layers import Embedding, GatedMlp, RotaryEmbedding, pair_rotary
from netra_backend.models.taps import Taps
from netra_backend.models.weights import Weights
from netra_backend.ops import Linear, RmsNorm, apply_rope, paged_attention


class _Layer:
    def __init__(self, weights: Weights, config: ModelConfig, index: int) -> None:
        prefix = f"model.layers.{index}"
        hidden, dim = config.hidden_size, config.head_dim
        self._config = config
        self._attention_norm = RmsNorm(
            weights.get(f"{prefix}.input_layernorm.weight", (hidden,)), config.rms_norm_eps
        )
        heads = {
            "q": config.num_attention_heads,
            "k": config.num_kv_heads,
            "v": config.num_kv_heads,
        }
        q, k, v = (
            weights.get(f"{prefix}.self_attn.{name}_proj.weight", (count * dim, hidden))
            for name, count in heads.items()
        )
        q, k = (
            pair_rotary(x.view(-1, dim, hidden), config.rotary_dim).flatten(0, 1) for x in (q, k)
        )
        self._qkv = Linear(torch.cat((q, k, v)))
        self._out = Linear(
            weights.get(f"{prefix}.self_attn.o_proj.weight", (hidden, heads["q"] * dim))
        )
        self._mlp_norm = RmsNorm(
            weights.get(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            config.rms_norm_eps,
        )
        self._mlp = GatedMlp(weights, f"{prefix}.mlp", hidden, config.intermediate_size)

    def __call__(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        context: ForwardContext,
        cache: LayerCache,
    ) -> torch.Tensor:
        config = self._config
        num_q, num_kv = config.num_attention_heads, config.num_kv_heads
        qkv = self._qkv(self._attention_norm(x)).view(-1, num_q + 2 * num_kv, config.head_dim)
        apply_rope(qkv[:, : num_q + num_kv], rotation)
        q, kv = qkv.split((num_q, 2 * num_kv), 1)
        attended = paged_attention(q, kv, context, cache)
        x = self._out(attended.flatten(1), x)
        return self._mlp(self._mlp_norm(x), x)


class Llama:
    """The model; see models/registry.py for the interface that it implements."""

    ignored_weights = ("model.layers.0.self_attn.rotary_emb.",)

    def __init__(
        self, weights: Weights, config: ModelConfig, max_len: int, device: torch.device
    ) -> None:
        self._config = config
        self._embedding = Embedding(weights, config)
        self._layers = [_Layer(weights, config, i) for i in range(len(config.layer_types))]
        self._norm = RmsNorm(
            weights.get("model.norm.weight", (config.hidden_size,)), config.rms_norm_eps
        )
        self._rope = RotaryEmbedding(config, max_len, device)

    def forward(
        self, context: ForwardContext, cache: KVCache, states: StatePool, taps: Taps | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]; `taps` hear the layers before it."""
        x = self._embedding.embed(context.token_ids)
        rotation = self._rope(context.positions)
        for index, (layer, layer_cache) in enumerate(zip(self._layers, cache.layers, strict=True)):
            if taps is not None:
                taps.take(index, x)
            x = layer(x, rotation, context, layer_cache)
        if taps is not None:
            taps.take(len(self._layers), x)
        return self._norm(x)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden]."""
        return self._embedding.embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size]."""
        return self._embedding.logits(hidden)
