"""A trainable DFlash drafter: blocks of masks at random anchors of the target's own answers.

Block i begins with the token at anchor a; its rows see the target's states before a and, in a full layer, one
another. Row j predicts token a + j; later rows weigh less, for they count only if all before them are right.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.drafters.layers import Attention, Mlp, Norm
from tools.drafters.target import Target

BLOCK = 8
WINDOW = 128
ANCHORS = 24
THETA = 10_000.0
HEADS, KV_HEADS, DIM, INNER = 4, 2, 64, 768
LAYER_TYPES = ("sliding_attention", "full_attention")
DECAY = 4.0
"""Rows after which a row weighs 1/e of the first."""


class Layer(nn.Module):
    """A Qwen3 layer; its keys and values come from context features and block rows alike."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.self_attn = Attention(hidden, hidden, HEADS, KV_HEADS, DIM, THETA, True)
        self.mlp = Mlp(hidden, INNER)


class Dflash(nn.Module):
    """Names are those of the published layout."""

    def __init__(self, target: Target, places: tuple[int, ...], mask_token_id: int) -> None:
        super().__init__()
        hidden = target.config.hidden_size
        self.target, self.places, self.mask_token_id = target, places, mask_token_id
        self.fc = nn.Linear(len(places) * hidden, hidden, bias=False)
        self.hidden_norm, self.norm = Norm(hidden), Norm(hidden)
        self.layers = nn.ModuleList(Layer(hidden) for _ in LAYER_TYPES)
        with torch.no_grad():  # begins with the last tapped layer, and as the target ends
            self.fc.weight.normal_(std=0.01)[:, -hidden:].fill_diagonal_(1.0)
            self.norm.weight.copy_(target.norm)

    def forward(self, tokens: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """Logits `[rows, number of anchors, BLOCK - 1, vocab]` of the tokens after `anchors`, places of tokens."""
        rows = len(tokens)
        positions = (anchors[..., None] + torch.arange(BLOCK)).flatten(1)
        inputs = torch.full_like(positions, self.mask_token_id)
        inputs[:, ::BLOCK] = tokens.gather(1, anchors)
        x = self.target.embedding[inputs]
        context = self.hidden_norm(self.fc(states))
        for layer, kind in zip(self.layers, LAYER_TYPES, strict=True):
            visible = _visible(positions, anchors, states.shape[1], kind == "sliding_attention")
            x = _run(layer, x, context, positions, visible)
        x = self.norm(x).view(rows, -1, BLOCK, x.shape[-1])[:, :, 1:]
        return F.linear(x, self.target.head)

    def loss(self, tokens: Tensor, states: Tensor, prompt_len: int) -> tuple[Tensor, Tensor]:
        """Weighted loss over the block rows, and the share of right guesses per row."""
        rows, length = tokens.shape
        anchors = torch.randint(prompt_len - 1, length - BLOCK + 1, (rows, ANCHORS))
        logits = self(tokens, states, anchors)
        places = anchors[..., None] + torch.arange(1, BLOCK)
        wanted = tokens.gather(1, places.flatten(1)).view(places.shape)
        losses = F.cross_entropy(logits.flatten(0, 2), wanted.flatten(), reduction="none")
        weights = torch.exp(-torch.arange(BLOCK - 1) / DECAY)
        mean = losses.view(wanted.shape).mean((0, 1))
        right = (logits.argmax(-1) == wanted).float().mean((0, 1))
        return (mean * weights).sum() / weights.sum(), right.detach()

    def config(self) -> dict[str, object]:
        """config.json of the published layout."""
        return {
            "architectures": ["DFlashDraftModel"], "num_hidden_layers": len(LAYER_TYPES),
            "hidden_size": self.target.config.hidden_size, "intermediate_size": INNER,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
            "rms_norm_eps": 1e-6, "rope_theta": THETA, "hidden_act": "silu",
            "vocab_size": self.target.config.vocab_size, "block_size": BLOCK,
            "layer_types": list(LAYER_TYPES), "sliding_window": WINDOW,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": [place - 1 for place in self.places],
            },
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the checkpoint holds."""
        return self.state_dict()


def _visible(positions: Tensor, anchors: Tensor, num_context: int, slides: bool) -> Tensor:
    """[rows, 1, block rows, context + block rows]: what each block row sees."""
    before = torch.arange(num_context) < anchors.repeat_interleave(BLOCK, 1)[..., None]
    block = torch.arange(anchors.shape[1]).repeat_interleave(BLOCK)
    same = (block[:, None] == block).expand(len(positions), -1, -1)
    visible = torch.cat((before, same), 2)
    if slides:
        places = torch.cat((torch.arange(num_context).expand(len(positions), -1), positions), 1)
        distance = positions[..., None] - places[:, None]
        visible = visible & (distance >= 0) & (distance < WINDOW)
    return visible[:, None]


def _run(layer: Layer, x: Tensor, context: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
    attention = layer.self_attn
    normed = layer.input_layernorm(x)
    places = torch.arange(context.shape[1]).expand(len(x), -1)
    both = torch.cat((context, normed), 1)
    keys, values = attention.keys_values(both, torch.cat((places, positions), 1))
    x = x + attention(attention.queries(normed, positions), keys, values, visible)
    return x + layer.mlp(layer.post_attention_layernorm(x))
