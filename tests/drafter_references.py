"""The formulas of EAGLE-3, DFlash and DFlash2 over a whole context in plain torch: no cache, no step, no page.

Written from the papers and the published checkpoints' layout, sharing nothing with netra_backend: what the
proposers draft step by step must be what these draft from scratch.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from random_drafters import TappedTarget
from safetensors.torch import load_file


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def rotate(x: torch.Tensor, inverse: torch.Tensor, scale: float, first: int = 0) -> torch.Tensor:
    """Half rotation of x [rows, heads, dim] at positions first, first + 1, ..."""
    angles = torch.outer(torch.arange(first, first + len(x)).float(), inverse)
    cos, sin = (
        torch.cat((part, part), -1)[:, None] * scale for part in (angles.cos(), angles.sin())
    )
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """Softmax attention row by row; visible [rows, columns]. Returns [rows, heads * dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", scores, v).flatten(1)


def mlp(x: torch.Tensor, t: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
    gate, up, down = (t[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


class Reference:
    """A drafter's files and the target that it listens to."""

    def __init__(self, directory: Path, target: TappedTarget) -> None:
        self.target = target
        self.t = load_file(directory / "model.safetensors")
        self.config = json.loads((directory / "config.json").read_text())
        self.dim = self.config["head_dim"]

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ self.t[f"{name}_proj.weight"].t()).view(len(x), -1, self.dim)


class EagleReference(Reference):
    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Guesses at what follows `tokens`, of which all but the last are computed."""
        t, config = self.t, self.config
        streams = self.target.streams(tokens[:-1])
        tapped = [streams[i] for i in config["eagle_aux_hidden_state_layer_ids"]]
        if config.get("fc_norm"):
            tapped = [rms(x, t[f"fc_norm.{i}.weight"]) for i, x in enumerate(tapped)]
        joined = torch.cat(tapped, -1)
        if config.get("norm_before_fc"):
            joined = rms(joined, t["input_norm.weight"])
        features = joined @ t["fc.weight"].t()
        following = list(tokens[1:])
        inverse = config["rope_theta"] ** (-torch.arange(0, self.dim, 2) / self.dim)
        for _ in range(count):
            out = self._layer(self.target.embed(following), features, inverse)
            normed = rms(out[-1], t["norm.weight"])
            best = int((t["lm_head.weight"] @ normed).argmax())
            following.append(best + int(t["d2t"][best]))
            recycled = normed if config.get("norm_output") else out[-1]
            features = torch.cat((features, recycled[None]))
        return following[len(tokens) - 1 :]

    def _layer(
        self, embedded: torch.Tensor, features: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        t, p = self.t, "midlayer"
        normed = rms(features, t[f"{p}.hidden_norm.weight"])
        residual = normed if self.config.get("norm_before_residual") else features
        x = torch.cat((rms(embedded, t[f"{p}.input_layernorm.weight"]), normed), -1)
        q, k, v = (self.project(x, f"{p}.self_attn.{name}") for name in "qkv")
        visible = torch.ones(len(x), len(x), dtype=torch.bool).tril()
        out = attend(rotate(q, inverse, 1.0), rotate(k, inverse, 1.0), v, visible)
        x = residual + out @ t[f"{p}.self_attn.o_proj.weight"].t()
        return x + mlp(rms(x, t[f"{p}.post_attention_layernorm.weight"]), t, p)


class DflashReference(Reference):
    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Guesses at what follows `tokens`, of which all but the last are computed."""
        t, own = self.t, self.config["dflash_config"]
        streams = self.target.streams(tokens[:-1])
        joined = torch.cat([streams[layer + 1] for layer in own["target_layer_ids"]], -1)
        context = rms(joined @ t["fc.weight"].t(), t["hidden_norm.weight"])
        size = self.config["block_size"]
        block = self.target.embed([tokens[-1]] + [own["mask_token_id"]] * (size - 1))
        block = block * own.get("input_embedding_scale", 1.0)
        for index in range(self.config["num_hidden_layers"]):
            block = self._layer(block, context, index)
        states = rms(block, t["norm.weight"])[1:]
        logits = self.target.logits(states) * own.get("output_multiplier", 1.0)
        cap = own.get("final_logit_softcapping")
        logits = cap * torch.tanh(logits / cap) if cap else logits
        found = self._walk(states, logits, tokens[-1]) if "selector_rank" in own else logits.argmax(-1).tolist()  # fmt: skip
        return found[:count]

    def _layer(self, block: torch.Tensor, context: torch.Tensor, index: int) -> torch.Tensor:
        t, p = self.t, f"layers.{index}"
        x = rms(block, t[f"{p}.input_layernorm.weight"])
        x, kernel = self._conv(x, x, f"{p}.attention_conv", 0), x
        out = self._attention(x, context, index) @ t[f"{p}.self_attn.o_proj.weight"].t()
        block = block + self._conv(out, kernel, f"{p}.attention_conv", 1)
        x = rms(block, t[f"{p}.post_attention_layernorm.weight"])
        x, kernel = self._conv(x, x, f"{p}.mlp_conv", 0), x
        return block + self._conv(mlp(x, t, p), kernel, f"{p}.mlp_conv", 1)

    def _attention(self, x: torch.Tensor, context: torch.Tensor, index: int) -> torch.Tensor:
        t, p, start = self.t, f"layers.{index}.self_attn", len(context)
        both = torch.cat((context, x))
        q = rms(self.project(x, f"{p}.q"), t[f"{p}.q_norm.weight"])
        k = rms(self.project(both, f"{p}.k"), t[f"{p}.k_norm.weight"])
        inverse, scale = self._rope()
        q, k = rotate(q, inverse, scale, start), rotate(k, inverse, scale)
        places = torch.arange(len(both))
        rows = places[start:, None]
        visible = torch.ones(len(x), len(both), dtype=torch.bool)
        if self.config["layer_types"][index] == "sliding_attention":
            visible &= places > rows - self.config["sliding_window"]
            visible &= places <= rows
        return attend(q, k, self.project(both, f"{p}.v"), visible)

    def _rope(self) -> tuple[torch.Tensor, float]:
        """YaRN: dimensions that turn often keep their frequency, slow ones are stretched by the factor."""
        rope = self.config["rope_parameters"]
        theta, factor = rope["rope_theta"], rope["factor"]
        length = rope["original_max_position_embeddings"]
        low, high = (
            self.dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (32, 1)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), self.dim - 1)
        found = []
        for i in range(self.dim // 2):
            plain = theta ** (-2 * i / self.dim)
            ramp = min(max((i - low) / (high - low), 0.0), 1.0)
            found.append(plain * (1 - ramp) + plain / factor * ramp)
        return torch.tensor(found), 0.1 * math.log(factor) + 1

    def _conv(self, x: torch.Tensor, source: torch.Tensor, name: str, side: int) -> torch.Tensor:
        if f"{name}.base_kernel" not in self.t:
            return x
        base = self.t[f"{name}.base_kernel"][side]
        taps, hidden = base.shape
        group = self.config["dflash_config"]["conv_group_size"]
        delta = (source @ self.t[f"{name}.kernel_projection.weight"].t()).view(
            len(x), 2, taps, hidden // group
        )
        out = torch.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(taps, i + 1)):
                out[i] += (base[tap] + delta[i, side, tap].repeat_interleave(group)) * x[i - tap]
        return out

    def _walk(self, states: torch.Tensor, logits: torch.Tensor, anchor: int) -> list[int]:
        before, after = (
            self.t[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor")
        )
        project = self.t["candidate_selector.hidden_projection.weight"]
        path = [anchor]
        for state, row in zip(states, logits, strict=True):
            candidates = row.topk(self.config["dflash_config"]["selector_top_k"]).indices.tolist()
            wanted = before[path[-1]] * (project @ state)
            scores = {c: float(row[c] + wanted @ after[c]) for c in candidates}
            path.append(max(scores, key=scores.__getitem__))
        return path[1:]
