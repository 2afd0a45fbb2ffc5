"""A trainable EAGLE-3 head: unrolled on its own outputs ("training-time test"), as drafting will use it.

Step s at row p reads (token p + 1 + s, the state that step s - 1 gave at p) at position p + s and predicts token
p + 2 + s. It attends to the rows up to p of step 0, which are the target's, and to its own steps before.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.drafters.layers import Attention, Mlp, Norm
from tools.drafters.target import Target

STEPS = 4
THETA = 10_000.0
HEADS, KV_HEADS, DIM, INNER = 4, 2, 64, 768


class MidLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = Norm(hidden), Norm(hidden)
        self.post_attention_layernorm = Norm(hidden)
        self.self_attn = Attention(hidden, 2 * hidden, HEADS, KV_HEADS, DIM, THETA, False)
        self.mlp = Mlp(hidden, INNER)


class Eagle3(nn.Module):
    """Names are those of the published layout; `d2t` and `t2d` are saved beside the parameters."""

    def __init__(self, target: Target, places: tuple[int, ...], vocabulary: Tensor) -> None:
        super().__init__()
        hidden = target.config.hidden_size
        self.target, self.places, self.vocabulary = target, places, vocabulary
        self.fc = nn.Linear(len(places) * hidden, hidden, bias=False)
        self.midlayer = MidLayer(hidden)
        self.norm = Norm(hidden)
        self.lm_head = nn.Linear(hidden, len(vocabulary), bias=False)
        with torch.no_grad():  # begins as the target's own head over its last tapped layer
            self.fc.weight.zero_()[:, -hidden:].fill_diagonal_(1.0)
            self.norm.weight.copy_(target.norm)
            self.lm_head.weight.copy_(target.head[vocabulary])

    def forward(self, tokens: Tensor, states: Tensor) -> list[Tensor]:
        """Logits `[rows, count, draft vocab]` of each step, for the `count` rows that all steps have a target for."""
        count = tokens.shape[1] - 1 - STEPS
        features = self.fc(states)[:, :count]
        positions = torch.arange(count).expand(len(tokens), -1)
        earlier: list[tuple[Tensor, Tensor]] = []
        logits = []
        for step in range(STEPS):
            ids = tokens[:, 1 + step :][:, :count]
            features = self._layer(ids, features, positions + step, earlier)
            logits.append(self.lm_head(self.norm(features)))
        return logits

    def loss(self, tokens: Tensor, states: Tensor, prompt_len: int) -> tuple[Tensor, Tensor]:
        """Mean loss over the steps, and the share of right guesses per step, of answers' tokens."""
        known = torch.full((len(self.target.embedding),), -1)
        known[self.vocabulary] = torch.arange(len(self.vocabulary))
        losses, right = [], []
        for step, logits in enumerate(self(tokens, states)):
            wanted = known[tokens[:, 2 + step :][:, prompt_len - 1 : logits.shape[1]]]
            logits = logits[:, prompt_len - 1 :]
            losses.append(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=-1))
            right.append((logits.argmax(-1) == wanted).float().mean())
        return torch.stack(losses).mean(), torch.stack(right).detach()

    def _layer(
        self, ids: Tensor, features: Tensor, positions: Tensor, earlier: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        layer, attention = self.midlayer, self.midlayer.self_attn
        embedded = layer.input_layernorm(self.target.embedding[ids])
        x = torch.cat((embedded, layer.hidden_norm(features)), -1)
        q = attention.queries(x, positions)
        earlier.append(attention.keys_values(x, positions))
        count = ids.shape[1]
        visible = torch.cat(
            [torch.ones(count, count, dtype=torch.bool).tril()]
            + [torch.eye(count, dtype=torch.bool)] * (len(earlier) - 1),
            1,
        )
        keys, values = (torch.cat(parts, 1) for parts in zip(*earlier, strict=True))
        x = features + attention(q, keys, values, visible[None, None])
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def config(self) -> dict[str, object]:
        """config.json of the published layout."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1,
            "hidden_size": self.target.config.hidden_size, "intermediate_size": INNER,
            "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM,
            "rms_norm_eps": 1e-6, "rope_theta": THETA, "hidden_act": "silu",
            "vocab_size": self.target.config.vocab_size, "draft_vocab_size": len(self.vocabulary),
            "eagle_aux_hidden_state_layer_ids": list(self.places),
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """Everything that the checkpoint holds."""
        marked = torch.zeros(self.target.config.vocab_size, dtype=torch.bool)
        marked[self.vocabulary] = True
        d2t = self.vocabulary - torch.arange(len(self.vocabulary))
        return self.state_dict() | {"d2t": d2t, "t2d": marked}
