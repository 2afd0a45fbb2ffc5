"""Qwen3.5/3.6 MoE, text part (transformers' `qwen3_5_moe`): Gated DeltaNet and gated attention, MoE in each
layer. Norms are zero-centred (1 + w) except the one inside Gated DeltaNet. Vision weights are skipped; MTP
weights (`mtp.*`) belong to the proposer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from netra_backend.cache.kv_cache import KVCache, LayerCache
from netra_backend.cache.state_pool import LayerState, StatePool
from netra_backend.config import ModelConfig
from netra_backend.forward_context import ForwardContext
from netra_backend.models.gated_delta_net import GatedDeltaNet
from netra_backend.models.layers import Embedding, RotaryEmbedding, pair_rotary
from netra_backend.models.taps import Taps
from netra_backend.models.weights import Weights
from netra_backend.ops import (
    Linear,
    RmsNorm,
    apply_rope,
    fused_moe,
    paged_attention,
    silu_and_mul,
)


def zero_centred_norm(weights: Weights, config: ModelConfig, name: str) -> RmsNorm:
    """RMSNorm over the hidden size whose factor is 1 + w, float32 as transformers computes it."""
    weight = weights.get(name, (config.hidden_size,), torch.float32)
    return RmsNorm(weight + 1.0, config.rms_norm_eps)


class GatedAttention:
    """Attention whose output is gated by sigmoid(gate x); q and k are normalised per head, rotary is partial."""

    def __init__(self, weights: Weights, config: ModelConfig, prefix: str) -> None:
        hidden, dim = config.hidden_size, config.head_dim
        self._config = config
        # q_proj holds, per head, the query and then its gate.
        sizes = {
            "q": config.num_attention_heads * 2 * dim,
            "k": config.num_kv_heads * dim,
            "v": config.num_kv_heads * dim,
        }
        self._sizes = tuple(sizes.values())
        q, k, v = (weights.get(f"{prefix}.{n}_proj.weight", (s, hidden)) for n, s in sizes.items())
        q = pair_rotary(q.view(-1, 2 * dim, hidden), config.rotary_dim).flatten(0, 1)
        k = pair_rotary(k.view(-1, dim, hidden), config.rotary_dim).flatten(0, 1)
        self._qkv = Linear(torch.cat((q, k, v)))
        factors = (weights.get(f"{prefix}.{n}_norm.weight", (dim,), torch.float32) for n in "qk")
        self._q_norm, self._k_norm = (
            RmsNorm(pair_rotary(w[None] + 1.0, config.rotary_dim)[0], config.rms_norm_eps)
            for w in factors
        )
        self._out = Linear(
            weights.get(f"{prefix}.o_proj.weight", (hidden, config.num_attention_heads * dim))
        )

    def __call__(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        context: ForwardContext,
        cache: LayerCache,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        config = self._config
        dim = config.head_dim
        qg, k, v = self._qkv(x).split(self._sizes, -1)
        q, gate = qg.view(-1, config.num_attention_heads, 2 * dim).chunk(2, -1)
        q = self._q_norm(q)
        k = self._k_norm(k.view(-1, config.num_kv_heads, dim))
        apply_rope(q, rotation)
        apply_rope(k, rotation)
        kv = torch.cat((k, v.view(-1, config.num_kv_heads, dim)), 1)
        attended = paged_attention(q, kv, context, cache)
        return self._out((attended * gate.sigmoid()).flatten(1), residual)


class SparseMlp:
    """Router, routed experts and the shared expert."""

    def __init__(self, weights: Weights, config: ModelConfig, prefix: str) -> None:
        hidden, inner = config.hidden_size, config.shared_expert_intermediate_size
        self._top_k = config.num_experts_per_tok
        self._gate_up, self._down = _stacked_experts(weights, config, f"{prefix}.experts")
        parts = {
            "gate": config.num_experts,
            "shared_expert_gate": 1,
            "shared_expert.gate_proj": inner,
            "shared_expert.up_proj": inner,
        }
        self._sizes = (config.num_experts, 1, 2 * inner)
        self._in = Linear(
            torch.cat([weights.get(f"{prefix}.{n}.weight", (s, hidden)) for n, s in parts.items()])
        )
        self._shared_down = Linear(
            weights.get(f"{prefix}.shared_expert.down_proj.weight", (hidden, inner))
        )

    def __call__(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        logits, shared_gate, shared = self._in(x).split(self._sizes, -1)
        probabilities = F.softmax(logits, -1, dtype=torch.float32)
        chosen, expert_ids = probabilities.topk(self._top_k, -1)
        chosen = (chosen / chosen.sum(-1, keepdim=True)).to(x.dtype)
        routed = fused_moe(x, self._gate_up, self._down, chosen, expert_ids)
        shared = self._shared_down(silu_and_mul(shared))
        return routed.addcmul_(shared_gate.sigmoid(), shared).add_(residual)


def _stacked_experts(
    weights: Weights, config: ModelConfig, prefix: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [num_experts, 2 * inner, hidden] and down [num_experts, hidden, inner], from either layout."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    if f"{prefix}.gate_up_proj" in weights:
        gate_up = weights.get(f"{prefix}.gate_up_proj", (count, 2 * inner, hidden))
        return gate_up, weights.get(f"{prefix}.down_proj", (count, hidden, inner))
    down = weights.get(f"{prefix}.0.down_proj.weight", (hidden, inner))
    all_down = down.new_empty(count, hidden, inner)
    all_gate_up = down.new_empty(count, 2 * inner, hidden)
    for expert in range(count):
        name = f"{prefix}.{expert}"
        all_gate_up[expert, :inner] = weights.get(f"{name}.gate_proj.weight", (inner, hidden))
        all_gate_up[expert, inner:] = weights.get(f"{name}.up_proj.weight", (inner, hidden))
        all_down[expert] = weights.get(f"{name}.down_proj.weight", (hidden, inner))
    return all_gate_up, all_down


class DecoderLayer:
    """One residual block of either kind; `layer_type` as in ModelConfig.layer_types."""

    def __init__(self, weights: Weights, config: ModelConfig, prefix: str, layer_type: str) -> None:
        self._mixer_norm = zero_centred_norm(weights, config, f"{prefix}.input_layernorm.weight")
        self._mlp_norm = zero_centred_norm(
            weights, config, f"{prefix}.post_attention_layernorm.weight"
        )
        self.attention: GatedAttention | None = None
        self.delta_net: GatedDeltaNet | None = None
        if layer_type == "full_attention":
            self.attention = GatedAttention(weights, config, f"{prefix}.self_attn")
        else:
            self.delta_net = GatedDeltaNet(weights, config, f"{prefix}.linear_attn")
        self._mlp = SparseMlp(weights, config, f"{prefix}.mlp")

    def __call__(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor,
        context: ForwardContext,
        storage: LayerCache | LayerState,
    ) -> torch.Tensor:
        normed = self._mixer_norm(x)
        if isinstance(storage, LayerCache):
            assert self.attention is not None
            x = self.attention(normed, rotation, context, storage, x)
        else:
            assert self.delta_net is not None
            x = self.delta_net(normed, context, storage, x)
        return self._mlp(self._mlp_norm(x), x)


class Qwen35Moe:
    """The model; see models/registry.py for the interface that it implements."""

    ignored_weights = ("model.visual.", "visual.", "mtp.")

    def __init__(
        self, weights: Weights, config: ModelConfig, max_len: int, device: torch.device
    ) -> None:
        self._config = config
        self.embedding = Embedding(weights, config)
        self._layers = [
            DecoderLayer(weights, config, f"model.layers.{index}", layer_type)
            for index, layer_type in enumerate(config.layer_types)
        ]
        self._norm = zero_centred_norm(weights, config, "model.norm.weight")
        self.rope = RotaryEmbedding(config, max_len, device)

    def forward(
        self, context: ForwardContext, cache: KVCache, states: StatePool, taps: Taps | None = None
    ) -> torch.Tensor:
        """Hidden states after the final norm, [num_tokens, hidden]; `taps` hear the layers before it."""
        x = self.embedding.embed(context.token_ids)
        rotation = self.rope(context.positions)
        caches, pools = iter(cache.layers), iter(states.layers)
        for index, layer in enumerate(self._layers):
            if taps is not None:
                taps.take(index, x)
            storage = next(caches) if layer.attention is not None else next(pools)
            x = layer(x, rotation, context, storage)
        if taps is not None:
            taps.take(len(self._layers), x)
        return self._norm(x)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden]."""
        return self.embedding.embed(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size]."""
        return self.embedding.logits(hidden)
