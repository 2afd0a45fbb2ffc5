"""Small random EAGLE-3 heads and DFlash drafters in Hugging Face layout, and what holds their drafts to a reference."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from netra_backend.batch import ScheduledSequence, SequenceOutput
from netra_backend.forward_context import ForwardContext
from netra_backend.spec.proposer import Proposer

HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 1, 32, 160
"""Other heads than the targets' of checkpoints.py: their caches must not be taken for one another."""

_SHARPNESS = 6.0

Json = dict[str, object]


def make_eagle3(directory: Path, target: Path, seed: int = 0, **options: object) -> Path:
    """A head with half of the target's vocabulary; `options` go into its config.json."""
    shapes = _target_shapes(target)
    hidden, vocab = shapes["hidden_size"], shapes["vocab_size"]
    config = _config(shapes) | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
        "draft_vocab_size": vocab // 2, "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    } | options  # fmt: skip
    torch.manual_seed(seed)
    chosen = torch.randperm(vocab)[: vocab // 2].sort().values
    taps = 3 * hidden
    tensors = {
        "fc.weight": _matrix(hidden, taps),
        "norm.weight": _factors(hidden),
        "lm_head.weight": _SHARPNESS * _matrix(vocab // 2, hidden),
        "d2t": chosen - torch.arange(vocab // 2),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True),
        "midlayer.hidden_norm.weight": _factors(hidden),
    } | _layer("midlayer", hidden, 2 * hidden)  # fmt: skip
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = _factors(taps)
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{tap}.weight": _factors(hidden) for tap in range(3)}
    return _save(directory, config, tensors)


def make_dflash(
    directory: Path, target: Path, block_size: int = 8, seed: int = 0, **options: object
) -> Path:
    """A drafter of two layers, the first with a window of 40 positions; DFlash2's parts if `options` name them."""
    shapes = _target_shapes(target)
    hidden, vocab = shapes["hidden_size"], shapes["vocab_size"]
    own = {"target_layer_ids": [0, 2, 3], "mask_token_id": vocab - 1} | options
    config = _config(shapes) | {
        "architectures": ["DFlash2DraftModel" if "selector_rank" in own else "DFlashDraftModel"],
        "num_hidden_layers": 2, "block_size": block_size, "dflash_config": own,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0,
            "original_max_position_embeddings": 64,
        },
    }  # fmt: skip
    torch.manual_seed(seed)
    tensors = {
        "fc.weight": _matrix(hidden, 3 * hidden),
        "hidden_norm.weight": _factors(hidden),
        "norm.weight": _factors(hidden),
    }
    for index in range(2):
        prefix = f"layers.{index}"
        tensors |= _layer(prefix, hidden, hidden)
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}.self_attn.{name}.weight"] = _factors(HEAD_DIM)
        if "conv_kernel_size" in own:
            tensors |= _convs(prefix, hidden, own["conv_kernel_size"], own["conv_group_size"])
    if "selector_rank" in own:
        rank = own["selector_rank"]
        tensors["candidate_selector.hidden_projection.weight"] = _matrix(rank, hidden)
        for name in ("predecessor_codebook", "successor_codebook"):
            tensors[f"candidate_selector.{name}"] = torch.randn(vocab, rank)
    return _save(directory, config, tensors)


def _target_shapes(target: Path) -> dict[str, int]:
    raw = json.loads((target / "config.json").read_text())
    return {name: raw[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers")}


def _config(shapes: dict[str, int]) -> Json:
    return {
        "hidden_size": shapes["hidden_size"], "vocab_size": shapes["vocab_size"],
        "intermediate_size": INNER, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "rope_theta": 5e4, "hidden_act": "silu",
    }  # fmt: skip


def _matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns) / math.sqrt(columns)


def _factors(size: int) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size)


def _layer(prefix: str, hidden: int, attention_input: int) -> dict[str, torch.Tensor]:
    counts = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    tensors = {
        f"{prefix}.self_attn.{name}_proj.weight": 2 * _matrix(count * HEAD_DIM, attention_input)
        for name, count in counts.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}.{name}.weight"] = _factors(hidden)
    return tensors | {
        f"{prefix}.self_attn.o_proj.weight": 2 * _matrix(hidden, HEADS * HEAD_DIM),
        f"{prefix}.mlp.gate_proj.weight": _matrix(INNER, hidden),
        f"{prefix}.mlp.up_proj.weight": _matrix(INNER, hidden),
        f"{prefix}.mlp.down_proj.weight": _matrix(hidden, INNER),
    }


def _convs(prefix: str, hidden: int, taps: int, group: int) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in ("attention_conv", "mlp_conv"):
        tensors[f"{prefix}.{name}.base_kernel"] = 0.7 * torch.randn(2, taps, hidden)
        projection = 0.5 * _matrix(2 * taps * hidden // group, hidden)
        tensors[f"{prefix}.{name}.kernel_projection.weight"] = projection
    return tensors


def _save(directory: Path, config: Json, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: x.contiguous() for name, x in tensors.items()}, directory / "model.safetensors"
    )
    return directory


class TappedTarget:
    """transformers' model in float32 and the residual stream after each of its layers."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._streams: list[torch.Tensor] = []
        self.model.model.embed_tokens.register_forward_hook(self._keep)
        for layer in self.model.model.layers:
            layer.register_forward_hook(self._keep)

    def _keep(self, _module: object, _inputs: object, output: object) -> None:
        stream = output[0] if isinstance(output, tuple) else output
        assert isinstance(stream, torch.Tensor)
        self._streams.append(stream)

    @torch.inference_mode()
    def streams(self, tokens: list[int]) -> list[torch.Tensor]:
        """[len(tokens), hidden] after 0, 1, 2, ... layers."""
        self._streams = []
        self.model.model(torch.tensor([tokens]), use_cache=False)
        return [stream[0] for stream in self._streams]

    def embed(self, tokens: list[int]) -> torch.Tensor:
        """Input embeddings."""
        return self.model.model.embed_tokens.weight[tokens]

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Of the target's own output head."""
        return self.model.lm_head(normed)


class Recorder:
    """Lets the real proposer draft, notes its drafts, and returns others: right up to a changing position."""

    def __init__(
        self, real: Proposer, answers: dict[tuple[int, ...], list[int]], num_drafts: int, vocab: int
    ) -> None:
        self._real = real
        self._answers = answers
        self._num_drafts = num_drafts
        self._vocab = vocab
        self.seen: list[tuple[list[int], list[int]]] = []

    def propose(
        self,
        items: list[ScheduledSequence],
        outputs: list[SequenceOutput],
        context: ForwardContext,
        hidden: torch.Tensor,
    ) -> list[list[int]]:
        real = self._real.propose(items, outputs, context, hidden)
        returned = []
        for item, output, drafts in zip(items, outputs, real, strict=True):
            seq = item.seq
            assert len(drafts) == (item.num_wanted_drafts if item.num_logits else 0)
            if drafts:
                self.seen.append((seq.token_ids + output.token_ids, drafts))
            answer = self._answers[tuple(seq.token_ids[: seq.num_prompt_tokens])]
            at = seq.num_output_tokens + len(output.token_ids)
            right = answer[at : at + item.num_wanted_drafts]
            keep = (seq.seq_id + len(self.seen)) % (self._num_drafts + 1)
            returned.append(right[:keep] + [(t + 1) % self._vocab for t in right[keep:]])
        return returned

    def free(self, seq_ids: Iterable[int]) -> None:
        self._real.free(seq_ids)
