"""A loss that shows attention where to look when text repeats, so that copying forms early.

By next-token loss alone in-context copying appears late, and suddenly.  Here one key/value head of
each attention layer is told the place to attend to: the token that followed the longest earlier
match of the current suffix.  The other heads are free.  Used early in training, at weight 0 later.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.tiny.model import Attention, TinyModel, rotate

LONGEST_MATCH = 4


@torch.no_grad()
def copy_targets(ids: Tensor) -> tuple[Tensor, Tensor]:
    """(targets `[rows, t, j]`, counted `[rows, t]`): which places j place t should look at.

    Tokens j-1, j-2.. match t, t-1.. for the longest run found, at least two tokens, and token j is
    what really comes after t; places without such a j do not count.
    """
    rows, size = ids.shape
    run = torch.ones(rows, size, size, dtype=torch.bool, device=ids.device).tril()
    length = torch.zeros(rows, size, size, dtype=torch.int8, device=ids.device)
    for back in range(LONGEST_MATCH):
        here = F.pad(ids, (back, 0), value=-1)[:, :size]
        earlier = F.pad(ids, (back + 1, 0), value=-2)[:, :size]
        run = run & (here.unsqueeze(2) == earlier.unsqueeze(1))
        length += run
    best = length.amax(-1, keepdim=True)
    following = F.pad(ids, (0, 1), value=-3)[:, 1:]
    continues = ids.unsqueeze(1) == following.unsqueeze(2)
    targets = (length == best) & (best >= 2) & continues
    return targets, targets.any(-1)


def head_logits(attention: Attention, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Causal logits `[rows, heads, t, j]` of the query heads that share key head 0."""
    config = attention.config
    rows, size, _ = x.shape
    heads, dim = config.heads // config.kv_heads, config.head_dim
    weight = attention.q_proj.weight.view(config.heads, 2, dim, -1)[:heads, 0].flatten(0, 1)
    query = F.linear(x, weight).view(rows, size, heads, dim)
    key = F.linear(x, attention.k_proj.weight[:dim]).view(rows, size, 1, dim)
    query = rotate(attention.q_norm(query).transpose(1, 2), table)
    key = rotate(attention.k_norm(key).transpose(1, 2), table)
    future = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    return (query @ key.transpose(-1, -2) * dim**-0.5).masked_fill(future, -1e9)


def guidance_loss(
    model: TinyModel, ids: Tensor, table: tuple[Tensor, Tensor], rows: int
) -> tuple[Tensor, float]:
    """(mean -log of the attention on the right places, that attention's mean) over `rows` rows.

    Reads what the attention layers kept from the forward pass just made in training mode.
    """
    targets, counted = copy_targets(ids[:rows])
    table = tuple(t[:rows] for t in table)
    losses, masses = [], []
    for layer in model.model.layers:
        if layer.normed is None:
            continue
        shares = head_logits(layer.self_attn, layer.normed[:rows], table).log_softmax(-1)
        chosen = shares.masked_fill(~targets.unsqueeze(1), -1e9).logsumexp(-1)
        chosen = chosen.transpose(1, 2)[counted]
        losses.append(-chosen.mean())
        masses.append(chosen.detach().exp().mean().item())
    return torch.stack(losses).mean(), sum(masses) / len(masses)
