"""Trainable text model of the target's architecture: Gated DeltaNet, attention, MoE, one MTP layer.

Parameter names are those of the public checkpoint's text part plus `mtp.*`: a state dict is an
export.  It knows nothing of data, files or optimizers.  Matrix products run in
`Config.matmul_dtype`; norms, softmax, router, delta rule and rotary embedding always in float32.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.tiny.layers import DTYPES, Config, GatedNorm, Linear, Norm
from tools.tiny.moe import MoE


def chunked_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, chunk: int
) -> Tensor:
    """Gated delta rule, chunk-parallel: S <- e^g S; S += k (beta (v - S^T k))^T; o = S^T q.

    query, key, value `[batch, heads, tokens, dim]`; decay (log, <= 0), beta `[batch, heads,
    tokens]`; tokens a multiple of chunk.  The in-chunk system is solved by substitution: the
    product form of the inverse is exact on paper but explodes in float32 once keys are correlated.
    """
    batch, heads, tokens, dim = query.shape
    count = tokens // chunk

    def split(x: Tensor) -> Tensor:
        return x.reshape(batch, heads, count, chunk, -1)

    query, key, value, beta = split(query), split(key), split(value), split(beta)
    total = split(decay).squeeze(-1).cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=query.device).tril()
    pairwise = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, -1e9).exp()
    grown = total.exp().unsqueeze(-1)
    key_t = key.transpose(-1, -2)
    system = (key * beta) @ key_t * pairwise
    right = torch.cat([value * beta, key * beta * grown], -1)
    # unitriangular: the diagonal and what is above it are never read
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_values, state_weights = solved.split([value.shape[-1], dim], -1)
    attention = query @ key_t * pairwise
    decayed_query = query * grown
    key_to_end = (key * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    chunk_decay = total[..., -1].exp()[..., None, None]
    parts = new_values, state_weights, decayed_query, attention, key_to_end, chunk_decay
    return scan_chunks(*parts).reshape(batch, heads, tokens, -1)


@torch.compiler.disable
def scan_chunks(
    new_values: Tensor,
    state_weights: Tensor,
    decayed_query: Tensor,
    attention: Tensor,
    key_to_end: Tensor,
    chunk_decay: Tensor,
) -> Tensor:
    """Carries the state from chunk to chunk (dim 2 counts chunks); outputs stacked on that dim.

    Not compiled: a row of many chunks would unroll into a graph that takes minutes to build.
    """
    batch, heads, _, _, value_dim = new_values.shape
    parts = new_values, state_weights, decayed_query, attention, key_to_end, chunk_decay
    state = new_values.new_zeros(batch * heads, state_weights.shape[-1], value_dim)
    outputs = []
    for value, weights, query, scores, key, decay in zip(
        *(x.flatten(0, 1).unbind(1) for x in parts), strict=True
    ):
        delta = torch.baddbmm(value, weights, state, alpha=-1)
        outputs.append(torch.baddbmm(scores @ delta, query, state))
        state = torch.baddbmm(state * decay, key, delta)
    return torch.stack(outputs, 1).unflatten(0, (batch, heads))


def unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


class GatedDeltaNet(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        dtype = DTYPES[config.matmul_dtype]
        self.key_size = config.linear_key_heads * config.linear_head_dim
        self.value_size = config.linear_value_heads * config.linear_head_dim
        channels = 2 * self.key_size + self.value_size
        heads = config.linear_value_heads
        self.conv1d = nn.Conv1d(channels, channels, config.conv_kernel, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        self.A_log = nn.Parameter(torch.zeros(heads))
        self.norm = GatedNorm(config.linear_head_dim, config.eps)
        self.in_proj_qkv = Linear(config.hidden, channels, dtype)
        self.in_proj_z = Linear(config.hidden, self.value_size, dtype)
        self.in_proj_b = Linear(config.hidden, heads)
        self.in_proj_a = Linear(config.hidden, heads)
        self.out_proj = Linear(self.value_size, config.hidden, dtype)

    def log_decay(self, x: Tensor) -> Tensor:
        """Log of the state's decay per token and value head, `[batch, tokens, heads]`, <= 0."""
        return -self.A_log.exp() * F.softplus(self.in_proj_a(x) + self.dt_bias)

    def mix(self, x: Tensor) -> Tensor:
        """Depthwise causal convolution over q, k and v, then SiLU."""
        columns = self.in_proj_qkv(x).float()
        kernel, tokens = self.config.conv_kernel, x.shape[1]
        padded = F.pad(columns, (0, 0, kernel - 1, 0))
        weight = self.conv1d.weight.squeeze(1)
        mixed = padded[:, :tokens] * weight[:, 0]
        for tap in range(1, kernel):
            mixed = torch.addcmul(mixed, padded[:, tap : tap + tokens], weight[:, tap])
        return F.silu(mixed)

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        batch, tokens, _ = x.shape
        dim, repeat = config.linear_head_dim, config.linear_value_heads // config.linear_key_heads
        parts = self.mix(x).split([self.key_size, self.key_size, self.value_size], -1)
        query, key, value = (p.view(batch, tokens, -1, dim).transpose(1, 2) for p in parts)
        query = (unit(query) * dim**-0.5).repeat_interleave(repeat, 1)
        key = unit(key).repeat_interleave(repeat, 1)
        beta = self.in_proj_b(x).sigmoid().transpose(1, 2)
        decay = self.log_decay(x).transpose(1, 2)
        missing = -tokens % config.chunk
        if missing:
            query, key, value = (F.pad(p, (0, 0, 0, missing)) for p in (query, key, value))
            decay, beta = F.pad(decay, (0, missing)), F.pad(beta, (0, missing))
        out = chunked_delta_rule(query, key, value, decay, beta, config.chunk)[:, :, :tokens]
        gate = self.in_proj_z(x).view(batch, tokens, -1, dim)
        return self.out_proj(self.norm(out.transpose(1, 2), gate).flatten(2))


def rotary_table(config: Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[batch or 1, 1, tokens, rotary_dim]` of positions `[batch or 1, tokens]`."""
    half = torch.arange(0, config.rotary_dim, 2, device=positions.device)
    inverse = config.rope_theta ** (-half.float() / config.rotary_dim)
    angles = positions.float().unsqueeze(-1) * inverse
    angles = torch.cat([angles, angles], -1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = table
    turning, still = x.split([cosine.shape[-1], x.shape[-1] - cosine.shape[-1]], -1)
    first, second = turning.chunk(2, -1)
    turned = turning * cosine + torch.cat([-second, first], -1) * sine
    return torch.cat([turned, still], -1)


class Attention(nn.Module):
    """Grouped-query attention with normed q/k, partial rotary and a sigmoid output gate per head.

    `stored` is what a KV cache would give back of a key or value; evaluation sets a quantiser.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        dtype = DTYPES[config.matmul_dtype]
        width = config.heads * config.head_dim
        self.q_proj = Linear(config.hidden, 2 * width, dtype)
        self.k_proj = Linear(config.hidden, config.kv_heads * config.head_dim, dtype)
        self.v_proj = Linear(config.hidden, config.kv_heads * config.head_dim, dtype)
        self.o_proj = Linear(width, config.hidden, dtype)
        self.q_norm = Norm(config.head_dim, config.eps)
        self.k_norm = Norm(config.head_dim, config.eps)
        self.stored: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        config = self.config
        batch, tokens, _ = x.shape
        shape, repeat = (batch, tokens, -1, config.head_dim), config.heads // config.kv_heads
        query, gate = self.q_proj(x).view(*shape[:3], 2 * config.head_dim).chunk(2, -1)
        query = rotate(self.q_norm(query).transpose(1, 2), table)
        key = rotate(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), table)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        if self.stored is not None:
            key, value = self.stored(key), self.stored(value)
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        dtype = value.dtype
        out = F.scaled_dot_product_attention(query.to(dtype), key.to(dtype), value, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())


class Layer(nn.Module):
    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.normed: Tensor | None = None  # what attention last read, for warm_attention.py
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.mlp = MoE(config)
        self.input_layernorm = Norm(config.hidden, config.eps)
        self.post_attention_layernorm = Norm(config.hidden, config.eps)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.input_layernorm(x)
        self.normed = normed if self.training and self.kind == "full_attention" else None
        linear = self.kind == "linear_attention"
        x = x + (self.linear_attn(normed) if linear else self.self_attn(normed, table))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.layer_types)
        self.norm = Norm(config.hidden, config.eps)

    def forward(self, ids: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, table)
        return self.norm(x)


class Mtp(nn.Module):
    """Multi-token prediction: embedding of token t+1 and final hidden state of t give token t+2."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.fc = Linear(2 * config.hidden, config.hidden, DTYPES[config.matmul_dtype])
        self.pre_fc_norm_embedding = Norm(config.hidden, config.eps)
        self.pre_fc_norm_hidden = Norm(config.hidden, config.eps)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = Norm(config.hidden, config.eps)

    def forward(self, embedded: Tensor, hidden: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = self.fc(torch.cat(both, -1)).float()
        return self.norm(self.layers[0](x, table))


class TinyModel(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = Linear(config.hidden, config.vocab, DTYPES[config.matmul_dtype])
        self.mtp = Mtp(config)
        self.initialise()

    def table(self, ids: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
        return rotary_table(self.config, positions)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocab]` in float32."""
        return self.lm_head(self.model(ids, self.table(ids))).float()

    @torch.no_grad()
    def initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter.uniform_(-0.5, 0.5)
            elif parameter.dim() >= 2:
                small = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight",
                                       "experts.down_proj"))  # fmt: skip
                scale = 1 / math.sqrt(2 * self.config.layers) if small else 1.0
                parameter.normal_(0, 0.02 * scale)
        for module in self.modules():
            if isinstance(module, GatedDeltaNet):
                remember(module)

    def mixtures(self) -> list[MoE]:
        return [m for m in self.modules() if isinstance(m, MoE)]


@torch.no_grad()
def remember(module: GatedDeltaNet) -> None:
    """Mamba's initialisation: A in 1..8, time steps 1e-3..1e-1, so a state outlives a token."""
    heads = module.A_log.shape[0]
    module.A_log.copy_(torch.linspace(1, 8, heads).log())
    steps = torch.exp(torch.rand(heads) * math.log(100) + math.log(1e-3))
    module.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))


def parameter_counts(config: Config, model: TinyModel) -> tuple[int, int]:
    """(all parameters, those a token uses)."""
    total = sum(p.numel() for p in model.parameters())
    routed = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    return total, total - routed + routed * config.experts_per_token // config.experts
