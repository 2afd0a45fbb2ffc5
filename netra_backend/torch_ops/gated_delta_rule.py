"""The gated delta rule in torch: what a CPU runs for Gated DeltaNet layers.

Per value head, with state S [key_dim, value_dim] (Yang et al., "Gated Delta Networks", arXiv 2412.06464):
    S <- exp(g) S;  d = beta (v - S^T k);  S <- S + k d^T;  o = S^T q
Two forms: token by token for a few tokens (the same operations whether a token is computed or replayed, so a
replayed state equals the computed one bit for bit), and chunks of 64 for prompts. Everything is float32.
Keys and queries arrive normalised and scaled; neither form knows about convolutions or slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CHUNK = 64


def by_token(
    live: list[int], state: torch.Tensor, *inputs: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """For each token views of what recurrent_step takes: `state` [batch, heads, key_dim, value_dim], then `inputs`
    [batch, num_tokens, heads, dim], all of the first live[t] of the batch and with batch and heads as one.
    """
    heads, states = state.shape[1], state.flatten(0, 1)
    parts = [x.transpose(0, 1).flatten(1, 2).unsqueeze(2).unbind() for x in inputs]
    for count, *tokens in zip(live, *parts, strict=True):
        n = count * heads
        # A view costs 2 us, a step of one sequence some 25.
        yield (states, *tokens) if n == len(states) else tuple(x[:n] for x in (states, *tokens))


def recurrent_step(
    state: torch.Tensor, k: torch.Tensor, v: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor
) -> None:
    """Absorb one token into `state` [batch * heads, key_dim, value_dim] in place.

    k [batch * heads, 1, key_dim], v [batch * heads, 1, value_dim], decay = exp(g) and beta [batch * heads, 1, 1].
    """
    state.mul_(decay)
    delta = torch.baddbmm(v, k, state, alpha=-1).mul_(beta)
    state.addcmul_(k.transpose(1, 2), delta)


def recurrent(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    live: list[int],
) -> torch.Tensor:
    """Run tokens one by one; `state` [batch, heads, key_dim, value_dim] is changed in place. Returns
    [batch, num_tokens, heads, value_dim].

    q, k [batch, num_tokens, heads, key_dim], v [batch, num_tokens, heads, value_dim], g, beta
    [batch, num_tokens, heads]. Of token t only the first live[t] of the batch are computed; the rest is undefined.
    """
    out = torch.empty_like(v)
    inputs = (k, v, g.exp().unsqueeze(-1), beta.unsqueeze(-1), q)
    for t, (states, *token, query) in enumerate(by_token(live, state, *inputs)):
        recurrent_step(states, *token)
        out[: live[t], t] = torch.bmm(query, states).view(live[t], *v.shape[2:])
    return out


def chunked(
    state: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """The same for one sequence and many tokens; `state` [heads, key_dim, value_dim] is changed in place.

    q, k [num_tokens, heads, key_dim], v [num_tokens, heads, value_dim], g, beta [num_tokens, heads].
    Within a chunk the deltas solve (I + A) d = beta (v - exp(G) S^T k) with A strictly lower triangular,
    A_ij = beta_i exp(G_i - G_j) k_i.k_j and G the running sum of g. The system is solved by substitution:
    the product form of the inverse is exact on paper and loses everything on correlated keys.
    """
    num_tokens, heads, value_dim = v.shape
    q, k, v = (_split(x) for x in (q, k, v))
    g, beta = _split(g.unsqueeze(-1)).cumsum(-2), _split(beta.unsqueeze(-1))
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril_()
    decay = torch.where(lower, g - g.transpose(-1, -2), -torch.inf).exp_()
    keys_t = k.transpose(-1, -2)
    weighted = k * beta
    system = ((weighted @ keys_t) * decay).tril_(-1)
    from_start = g.exp()
    solved = torch.linalg.solve_triangular(
        system, torch.cat((v * beta, weighted * from_start), -1), upper=False, unitriangular=True
    )
    new_values, old_keys = solved.split((value_dim, k.shape[-1]), -1)
    scores = (q @ keys_t) * decay
    q_start = q * from_start
    k_end_t = (k * (g[..., -1:, :] - g).exp()).transpose(-1, -2)
    chunk_decay = from_start[..., -1:, :]
    out = torch.empty_like(v)
    for i in range(v.shape[0]):
        deltas = new_values[i] - old_keys[i] @ state
        out[i] = q_start[i] @ state + scores[i] @ deltas
        state.mul_(chunk_decay[i]).add_(k_end_t[i] @ deltas)
    return out.transpose(1, 2).reshape(-1, heads, value_dim)[:num_tokens]


def _split(x: torch.Tensor) -> torch.Tensor:
    """[num_tokens, heads, dim] -> [num_chunks, heads, CHUNK, dim], padded with zeros (no effect on S)."""
    padding = -x.shape[0] % CHUNK
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding))
    return x.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2)
