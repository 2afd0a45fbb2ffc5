"""Gated DeltaNet layer: projections, causal convolution and the gated delta rule over a slot's state.

Knows the storage of cache/state_pool.py: what a step leaves behind as records, and what the next one absorbs.

    step            reads                                     leaves
    short sequence  state, records of the tokens accepted     state with those absorbed; records and columns
                    last time, window at their end            of this step's tokens, none of them absorbed
    chunk           the same                                  state with all tokens; window at the chunk's end
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from netra_backend.cache.state_pool import LayerState
from netra_backend.config import ModelConfig
from netra_backend.forward_context import ChunkRows, Falling, ForwardContext, ShortRows
from netra_backend.models.weights import Weights
from netra_backend.ops import Linear, RmsNorm, by_token, chunked, recurrent, recurrent_step

_NORM_EPS = 1e-6  # of the l2 norm of q and k, as in transformers' l2norm


class GatedDeltaNet:
    """Mixer of a linear_attention layer; called with normed rows [num_tokens, hidden]."""

    def __init__(self, weights: Weights, config: ModelConfig, prefix: str) -> None:
        hidden = config.hidden_size
        self._config = config
        self._value_size = config.linear_num_value_heads * config.linear_value_head_dim
        heads = config.linear_num_value_heads
        sizes = {"qkv": config.conv_channels, "z": self._value_size, "b": heads, "a": heads}
        self._sizes = tuple(sizes.values())
        self._in = Linear(
            torch.cat(
                [
                    weights.get(f"{prefix}.in_proj_{name}.weight", (size, hidden))
                    for name, size in sizes.items()
                ]
            )
        )
        kernel = weights.get(
            f"{prefix}.conv1d.weight", (config.conv_channels, 1, config.conv_kernel)
        )
        self._kernel = kernel[:, 0].t().contiguous()
        self._decay = -weights.get(f"{prefix}.A_log", (heads,), torch.float32).exp()
        self._dt_bias = weights.get(f"{prefix}.dt_bias", (heads,), torch.float32)
        self._norm = RmsNorm(
            weights.get(f"{prefix}.norm.weight", (config.linear_value_head_dim,)),
            config.rms_norm_eps,
        )
        self._out = Linear(weights.get(f"{prefix}.out_proj.weight", (hidden, self._value_size)))

    def __call__(
        self,
        x: torch.Tensor,
        context: ForwardContext,
        state: LayerState,
        residual: torch.Tensor,
    ) -> torch.Tensor:
        mixed, z, b, a = self._in(x).split(self._sizes, -1)
        beta = b.float().sigmoid()
        g = self._decay * F.softplus(a.float() + self._dt_bias)
        gates = torch.stack((g, beta), 1)
        config = self._config
        shape = (-1, config.linear_num_value_heads, config.linear_value_head_dim)
        out = torch.empty(z.shape, dtype=torch.float32, device=z.device).view(shape)
        if context.short is not None:
            n = context.short.num_rows
            out[:n] = self._short(mixed[:n], gates[:n], context.short, state)
        for chunk in context.chunks:
            rows = slice(chunk.start, chunk.stop)
            out[rows] = self._chunk(mixed[rows], gates[rows], chunk, state)
        normed = self._norm(out).to(x.dtype)
        return self._out((normed * F.silu(z.view(shape))).flatten(1), residual)

    def _short(
        self, mixed: torch.Tensor, gates: torch.Tensor, short: ShortRows, state: LayerState
    ) -> torch.Tensor:
        width = short.width
        slots: torch.Tensor | slice = slice(*short.slot_range) if short.slot_range else short.slots
        shape = (short.num_seqs, width)
        if short.flat is not None:
            rows = short.rows.flatten()
            mixed, gates = mixed[rows], gates[rows]
        gates = gates.view(*shape, 2, -1)
        taps = self._config.conv_kernel - 1
        columns = state.columns[slots]
        window_rows = short.num_replay[:, None] + torch.arange(taps, device=mixed.device)
        window = columns.gather(1, window_rows[..., None].expand(-1, -1, columns.shape[-1]))
        inputs = torch.cat((window, mixed.reshape(*shape, -1)), 1)
        q, k, v = self._convolve(inputs)

        committed = state.states[slots].float()
        self._absorb(committed, slots, short.replay, state, short.checkpoints)
        for index, count, checkpoint_id in short.checkpoints:
            state.saved_columns[checkpoint_id] = columns[index, count : count + taps]
        state.states[slots] = committed.to(state.states.dtype)
        state.columns[slots, : taps + width] = inputs
        state.keys[slots, :width] = k
        state.values[slots, :width] = v
        state.gates[slots, :width] = gates
        order = short.falling.order
        if order is None:
            committed = committed.clone()
        else:
            committed, q, k, v, gates = (x[order] for x in (committed, q, k, v, gates))
        out = recurrent(
            committed,
            self._spread(q),
            self._spread(k),
            v,
            gates[:, :, 0],
            gates[:, :, 1],
            short.falling.live,
        )
        if order is not None:
            out = torch.empty_like(out).index_copy_(0, order, out)
        out = out.flatten(0, 1)
        return out if short.flat is None else out[short.flat]

    def _chunk(
        self, mixed: torch.Tensor, gates: torch.Tensor, chunk: ChunkRows, state: LayerState
    ) -> torch.Tensor:
        taps = self._config.conv_kernel - 1
        slot = slice(chunk.slot, chunk.slot + 1)
        window = state.columns[slot, chunk.num_replay : chunk.num_replay + taps]
        inputs = torch.cat((window, mixed[None]), 1)
        q, k, v = (x[0] for x in self._convolve(inputs))
        committed = state.states[slot].float()
        self._absorb(committed, slot, Falling([1] * chunk.num_replay), state, [])
        q, k = self._spread(q), self._spread(k)
        out, done = [], 0
        for stop, checkpoint_id in [*chunk.checkpoints, (len(mixed), -1)]:
            rows = slice(done, stop)
            if stop > done:
                out.append(
                    chunked(committed[0], q[rows], k[rows], v[rows], gates[rows, 0], gates[rows, 1])
                )
            if checkpoint_id >= 0:
                state.saved_states[checkpoint_id] = committed[0]
                state.saved_columns[checkpoint_id] = inputs[0, stop : stop + taps]
            done = stop
        state.states[slot] = committed.to(state.states.dtype)
        state.columns[slot, :taps] = inputs[:, -taps:]
        return torch.cat(out)

    def _absorb(
        self,
        committed: torch.Tensor,
        slots: torch.Tensor | slice,
        replay: Falling,
        state: LayerState,
        checkpoints: list[tuple[int, int, int]],
    ) -> None:
        """Absorb each slot's first records, as many as `replay` counts, into `committed`, in place, and copy the
        states that `checkpoints` (index, records absorbed, checkpoint id) names on the way."""
        num_records = len(replay.live)
        if num_records == 0:
            return
        keys = self._spread(state.keys[slots, :num_records].float())
        values = state.values[slots, :num_records].float()
        gates = state.gates[slots, :num_records]
        states, order = committed, replay.order
        if order is not None:
            states, keys, values, gates = (x[order] for x in (states, keys, values, gates))
            places = {index: place for place, index in enumerate(order.tolist())}
            checkpoints = [(places[index], count, id_) for index, count, id_ in checkpoints]
        decays, betas = gates[:, :, 0, :, None].exp(), gates[:, :, 1, :, None]
        tokens = by_token(replay.live, states, keys, values, decays, betas)
        for num_absorbed, token in enumerate(tokens, 1):
            recurrent_step(*token)
            for place, count, checkpoint_id in checkpoints:
                if count == num_absorbed:
                    state.saved_states[checkpoint_id] = states[place]
        if order is not None:
            committed.index_copy_(0, order, states)

    def _convolve(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v (float32 [batch, num_tokens, heads, dim], q and k normalised, q scaled) of the columns
        [batch, taps + num_tokens, channels]."""
        config = self._config
        num_tokens = inputs.shape[1] - config.conv_kernel + 1
        mixed = inputs[:, :num_tokens] * self._kernel[0]
        for tap in range(1, config.conv_kernel):
            mixed.addcmul_(inputs[:, tap : tap + num_tokens], self._kernel[tap])
        mixed = F.silu(mixed).float()
        key_size = config.linear_num_key_heads * config.linear_key_head_dim
        q, k, v = mixed.split((key_size, key_size, self._value_size), -1)
        q = _l2_normalize(q.unflatten(-1, (-1, config.linear_key_head_dim)))
        k = _l2_normalize(k.unflatten(-1, (-1, config.linear_key_head_dim)))
        v = v.unflatten(-1, (-1, config.linear_value_head_dim))
        return q * config.linear_key_head_dim**-0.5, k, v

    def _spread(self, x: torch.Tensor) -> torch.Tensor:
        """Give each value head its key head: value head h reads key head h // ratio."""
        ratio = self._config.linear_num_value_heads // self._config.linear_num_key_heads
        return x if ratio == 1 else x.repeat_interleave(ratio, -2)


def _l2_normalize(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
