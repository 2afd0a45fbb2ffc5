"""EAGLE-3 head (Li et al., 2025): one decoder layer over [embedding of token p+1; features at p], a small vocabulary.

The features of a computed token are fc of three hidden states that were tapped in the target; a later draft takes
the head's own hidden state in their place. Rows, slots and positions are those of chain.py. Formulas and names
as in vLLM's llama_eagle3.py.
"""

from __future__ import annotations

from pathlib import Path

import torch

from netra_backend.cache.kv_cache import LayerCache
from netra_backend.forward_context import ForwardContext
from netra_backend.models.layers import GatedMlp
from netra_backend.models.registry import Model
from netra_backend.models.weights import Weights
from netra_backend.ops import Linear, RmsNorm, apply_rope, paged_attention
from netra_backend.spec.drafter_config import DrafterConfig
from netra_backend.spec.drafter_layers import DrafterRotary, TokenHead, plain_norm, projections


class Eagle3Head:
    """The head's layer, norms and vocabulary. `max_len` positions can be drafted at."""

    def __init__(
        self, weights: Weights, config: DrafterConfig, model: Model, rope: DrafterRotary
    ) -> None:
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self._config = config
        self._rope = rope
        self._tokens = TokenHead(weights, config, model)
        num_taps = len(config.tap_places)
        self._input_norm: RmsNorm | None = None
        if config.norm_before_fc:
            self._input_norm = plain_norm(weights, "input_norm", num_taps * hidden, eps)
        self._tap_norms = [
            plain_norm(weights, f"fc_norm.{tap}", hidden, eps)
            for tap in range(num_taps if config.fc_norm else 0)
        ]
        self._fc = Linear(weights.get("fc.weight", (hidden, num_taps * hidden)))
        prefix = "midlayer" if "midlayer.hidden_norm.weight" in weights else "layers.0"
        self._embedding_norm, self._hidden_norm, self._mlp_norm = (
            plain_norm(weights, f"{prefix}.{name}", hidden, eps)
            for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        )
        self._qkv = Linear(
            torch.cat(projections(weights, f"{prefix}.self_attn", config, 2 * hidden))
        )
        width = config.num_attention_heads * config.head_dim
        self._out = Linear(weights.get(f"{prefix}.self_attn.o_proj.weight", (hidden, width)))
        self._mlp = GatedMlp(weights, f"{prefix}.mlp", hidden, config.intermediate_size)
        self._norm = plain_norm(weights, "norm", hidden, eps)

    def features(self, tapped: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden] from the target's tapped states [num_rows, num_taps * hidden]."""
        if self._input_norm is not None:
            tapped = self._input_norm(tapped)
        if self._tap_norms:
            parts = tapped.chunk(len(self._tap_norms), -1)
            normed = [norm(part) for norm, part in zip(self._tap_norms, parts, strict=True)]
            tapped = torch.cat(normed, -1)
        return self._fc(tapped)

    def __call__(
        self, features: torch.Tensor, context: ForwardContext, cache: LayerCache
    ) -> torch.Tensor:
        """States [num_rows, hidden], the features of the draft after; context.token_ids are those after the
        rows' positions.
        """
        config = self._config
        num_q, num_kv = config.num_attention_heads, config.num_kv_heads
        embedded = self._embedding_norm(self._tokens.embed(context.token_ids))
        normed = self._hidden_norm(features)
        residual = normed if config.norm_before_residual else features
        qkv = self._qkv(torch.cat((embedded, normed), -1))
        qkv = qkv.view(-1, num_q + 2 * num_kv, config.head_dim)
        apply_rope(qkv[:, : num_q + num_kv], self._rope(context.positions))
        attended = paged_attention(qkv[:, :num_q], qkv[:, num_q:], context, cache)
        x = self._out(attended.flatten(1), residual)
        x = self._mlp(self._mlp_norm(x), x)
        return self._norm(x) if config.norm_output else x

    def next_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """The most likely tokens [num_rows] of the target's vocabulary that the head knows."""
        normed = states if self._config.norm_output else self._norm(states)
        return self._tokens.target_ids(self._tokens.logits(normed).argmax(-1))


def load_eagle3(
    directory: Path,
    config: DrafterConfig,
    model: Model,
    max_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Eagle3Head:
    """Load a head. Raises ConfigError that names missing, misshapen and surplus tensors."""
    weights = Weights(directory, dtype, device, fp8_block=0)
    rope = DrafterRotary(config.rope, config.head_dim, max_len, device)
    head = Eagle3Head(weights, config, model, rope)
    weights.finish(())
    return head
