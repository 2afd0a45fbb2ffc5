"""The architectures on the kernel path: which layers follow each other; qwen3_5_moe with its MTP head, and llama.

Between layers travel what the next norm adds up: the mixer's output, or the outputs of the chosen experts with
their weights, and the residual stream. Knows no batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from netra_backend.gpu.layers import Attention, DenseMlp, GatedDeltaNet, KernelCache, SparseMlp
from netra_backend.gpu.projection import OutputHead, Projection, Setting, WeightSource
from netra_backend.gpu.ring_states import RingState
from netra_backend.gpu.step_inputs import StepInputs
from netra_kernels.rms_norm import NormOutput
from netra_kernels.rope import rotary_table


class _Stream:
    """What has been computed of the rows so far: `x` (and expert weights) not yet added to `residual`."""

    def __init__(self, setting: Setting, x: torch.Tensor) -> None:
        self._setting = setting
        self._zero_centered = setting.config.model_type == "qwen3_5_moe"
        self.x = x
        self.weights: torch.Tensor | None = None
        self._residual: torch.Tensor | None = None

    def norm(self, weight: torch.Tensor, fp8: bool) -> NormOutput:
        """Add `x` to the residual and normalise the sum."""
        out = self._setting.ops.rms_norm(
            self.x, weight, self._setting.config.rms_norm_eps, self._residual, self._zero_centered, fp8, self.weights
        )  # fmt: skip
        self._residual, self.weights = out.residual, None
        return out


class _Layer:
    """One residual block."""

    def __init__(
        self,
        weights: WeightSource,
        setting: Setting,
        prefix: str,
        layer_type: str,
        cos_sin: torch.Tensor,
    ) -> None:
        size = (setting.config.hidden_size,)
        hybrid = setting.config.model_type == "qwen3_5_moe"
        self._input_norm, self._mlp_norm = (
            weights.get(f"{prefix}.{name}_layernorm.weight", size, torch.float32)
            for name in ("input", "post_attention")
        )
        self.mixer: Attention | GatedDeltaNet = (
            Attention(weights, setting, f"{prefix}.self_attn", cos_sin, gated=hybrid)
            if layer_type == "full_attention"
            else GatedDeltaNet(weights, setting, f"{prefix}.linear_attn")
        )
        self._mlp: SparseMlp | DenseMlp = (SparseMlp if hybrid else DenseMlp)(
            weights, setting, f"{prefix}.mlp"
        )

    def __call__(self, stream: _Stream, step: StepInputs, storage: KernelCache | RingState) -> None:
        normed = stream.norm(self._input_norm, self.mixer.fp8)
        if isinstance(self.mixer, Attention):
            assert isinstance(storage, KernelCache)
            stream.x = self.mixer(normed, step, storage)
        else:
            assert isinstance(storage, RingState)
            stream.x = self.mixer(normed, step, storage)
        normed = stream.norm(self._mlp_norm, self._mlp.fp8)
        stream.x, stream.weights = self._mlp(normed, step.live_rows)


class KernelModel:
    """A model of one of the architectures; `layers` in order."""

    ignored_weights = ("model.visual.", "visual.", "mtp.", "model.layers.0.self_attn.rotary_emb.")

    def __init__(self, weights: WeightSource, setting: Setting) -> None:
        config = setting.config
        self.setting = setting
        shape = (config.vocab_size, config.hidden_size)
        self._table = weights.get("model.embed_tokens.weight", shape)
        tied = config.tie_word_embeddings and "lm_head.weight" not in weights
        self._head = OutputHead(
            self._table if tied else weights.get("lm_head.weight", shape), setting
        )
        self.cos_sin = rotary_table(
            config.max_position_embeddings, config.rotary_dim, config.rope_theta, setting.device
        )
        self.layers = [
            _Layer(weights, setting, f"model.layers.{index}", layer_type, self.cos_sin)
            for index, layer_type in enumerate(config.layer_types)
        ]
        self._norm = weights.get("model.norm.weight", (config.hidden_size,), torch.float32)

    def forward(
        self, step: StepInputs, caches: list[KernelCache], states: list[RingState]
    ) -> torch.Tensor:
        """Hidden states after the final norm, [num_rows, hidden]."""
        stream = _Stream(self.setting, self.embed(step.token_ids()))
        attention, recurrent = iter(caches), iter(states)
        for layer in self.layers:
            own = next(attention) if isinstance(layer.mixer, Attention) else next(recurrent)
            layer(stream, step, own)
        return stream.norm(self._norm, fp8=False).hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden]."""
        return F.embedding(token_ids, self._table)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [num_rows, vocab_size] of rows that passed the final norm."""
        return self._head(hidden)

    def recurrent_layers(self) -> list[GatedDeltaNet]:
        """Mixers that keep a state, in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, GatedDeltaNet)]


class KernelMtpHead:
    """The checkpoint's draft layer (see spec/mtp.py); embedding and output head are the model's own."""

    def __init__(self, weights: WeightSource, model: KernelModel) -> None:
        setting = model.setting
        size = setting.config.hidden_size
        self._model = model
        self._embedding_norm, self._hidden_norm, self._norm = (
            weights.get(f"mtp.{name}.weight", (size,), torch.float32)
            for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        )
        self._fc = Projection(weights, setting, {"mtp.fc.weight": size}, 2 * size)
        self._layer = _Layer(weights, setting, "mtp.layers.0", "full_attention", model.cos_sin)

    def __call__(
        self, hidden: torch.Tensor, token_ids: torch.Tensor, step: StepInputs, cache: KernelCache
    ) -> torch.Tensor:
        """Normed outputs [num_rows, hidden] for the tokens after each row's position."""
        setting = self._model.setting
        eps = setting.config.rms_norm_eps
        norm = setting.ops.rms_norm
        embedded = norm(self._model.embed(token_ids), self._embedding_norm, eps, None, True).hidden
        before = norm(hidden, self._hidden_norm, eps, None, True).hidden
        joined = torch.cat((embedded, before), -1)
        stream = _Stream(setting, self._fc(NormOutput(joined, joined)))
        self._layer(stream, step, cache)
        return stream.norm(self._norm, fp8=False).hidden
