"""Whole steps of h200_check.py: the real runner over random weights of the target's shapes, next to each step's floor.

KernelRunner is built as for serving but for its weights, which are made on the device. Each row times the forward pass
with the output head (alone, on fixed inputs) and a whole step with Python and sampling. The floor is that of the
launches (step_floor.py), which a runner on the meta device lists. Drafts are not proposed. Knows no kernel.
"""

from __future__ import annotations

import gc
import json
import math
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from h200_report import Row, attempt, milliseconds
from launches import TARGET, is_fp8, record, shape_runner
from netra_backend.batch import Batch
from netra_backend.config import EngineConfig
from netra_backend.gpu.ring_states import RingStates
from netra_backend.gpu.runner import KernelRunner
from step_floor import Rates, floor_seconds
from step_load import Load, batch_of

CODEC = "int8"
"""What kv_cache_dtype=auto is on a GPU."""

_CODE_DEVIATION = 64.0
"""Standard deviation of FP8 codes: far from both ends of e4m3."""

_PRESSING = ((1, 1), (32, 4), (128, 4), (1, 4), (32, 1), (128, 1), (256, 1), (256, 4))
"""(users, rows) to begin with, should the time not reach for all."""


def loads(dry: bool) -> list[Load]:
    """The steps to time, the most telling first: decoding with 0, 3 and 7 drafts, and prompt chunks."""
    if dry:
        return [Load(2, 2, 128), Load(1, 70, 64, is_chunk=True)]
    context = 40960
    users, rows = (1, 8, 32, 64, 128, 256), (1, 4, 8)
    rest = [pair for pair in ((u, r) for r in rows for u in users) if pair not in _PRESSING]
    decoding = [Load(u, r, context) for u, r in (*_PRESSING, *rest)]
    chunks = [Load(1, 4096, behind, is_chunk=True) for behind in (32768, 0, 131072)]
    return decoding[:3] + chunks + decoding[3:]


class RandomWeights:
    """A WeightSource of random tensors on a device; FP8 where the published checkpoint has FP8.

    Products keep the size of their input, norms are near one and states remember (A_log and dt_bias as Mamba sets
    them), so that activations stay finite in any depth. FP8 tensors are views of one pool of codes: copied by the
    loader, as those of a file are.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._random = torch.Generator(device).manual_seed(0)
        self._pool = torch.empty(0, dtype=torch.float8_e4m3fn, device=device)
        self._at = 0

    def __contains__(self, name: str) -> bool:
        return name == "lm_head.weight"

    def is_fp8(self, name: str) -> bool:
        """As published."""
        return is_fp8(name)

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """By what the name says it is."""
        size = shape[-1]
        if name.endswith("A_log"):
            values = torch.linspace(1, 8, size, device=self._device).log()
        elif name.endswith("dt_bias"):
            step = torch.linspace(math.log(1e-3), math.log(1e-1), size, device=self._device).exp()
            values = step + torch.log(-torch.expm1(-step))
        elif name.endswith("norm.weight"):
            ones = name.endswith("linear_attn.norm.weight")  # the others are added to one
            values = 0.1 * self._normal(shape) + float(ones)
        else:
            values = self._normal(shape) / (1.0 if "embed" in name else math.sqrt(size))
        return values.to(dtype or self._dtype)

    def get_fp8(self, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, and scales that make them as large as `get`'s values."""
        count = shape[0] * shape[1]
        if self._pool.numel() < 2 * count:
            values = _CODE_DEVIATION * self._normal((2 * count,))
            self._pool = values.clamp(-448, 448).to(torch.float8_e4m3fn)
        self._at = (self._at + 1_000_003 * 16) % (self._pool.numel() - count)
        blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
        spread = 0.75 + 0.5 * torch.rand(blocks, device=self._device, generator=self._random)
        codes = self._pool[self._at : self._at + count].view(shape)
        return codes, spread / (_CODE_DEVIATION * math.sqrt(shape[1]))

    def _normal(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, device=self._device, generator=self._random)


def tiny_config(config: dict[str, object]) -> dict[str, object]:
    """The target's config.json with a layer of each kind and sizes that the interpreter follows."""
    text = dict(config["text_config"])  # type: ignore[call-overload]
    rope = dict(text["rope_parameters"]) | {"mrope_section": [6, 5, 5]}
    text |= {
        "vocab_size": 512, "hidden_size": 128, "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128,
        "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 1024, "rope_parameters": rope,
    }  # fmt: skip
    return config | {"text_config": text}


class Forward:
    """The forward pass and the output head of a step, on inputs that are on the device already."""

    def __init__(self, runner: KernelRunner, batch: Batch) -> None:
        self._runner = runner
        self._step = runner._prepare(batch, batch.scheduled, None)
        self.logits = torch.empty(0)

    def __call__(self) -> None:
        runner, step = self._runner, self._step
        hidden = runner._model.forward(step, runner._caches, runner._states.layers)
        self.logits = runner._model.logits(hidden[step.logit_rows])


class Steps:
    """The runner and its floors. Raises what building them raises."""

    def __init__(self, device: torch.device, rates: Rates, dry: bool, graphs: bool) -> None:
        self._device, self._rates = device, rates
        steps = loads(dry)
        users = max(load.users for load in steps)
        drafts = max(load.rows for load in steps if not load.is_chunk) - 1
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            config = json.loads(TARGET.read_text())
            path.write_text(json.dumps(tiny_config(config) if dry else config))
            self._shapes = shape_runner(path, users, drafts, CODEC)
            knobs = EngineConfig(
                checkpoint=folder, dtype="bfloat16", kv_cache_dtype=CODEC, kv_cache_memory="8MiB" if dry else "0.8",
                max_num_seqs=users, num_draft_tokens=drafts, speculation="ngram", num_prefix_checkpoints=1,
                enable_cuda_graphs=graphs,
            )  # fmt: skip
            weights = RandomWeights(torch.bfloat16, device)
            self._runner = KernelRunner(knobs, Path(folder), frozenset(), device, weights=weights)
        self._runner.proposer = None
        self._fill(self._runner)

    @staticmethod
    def _fill(runner: KernelRunner) -> None:
        """Pages, tails, states and records as if sequences had run: random, not zero."""
        for cache in runner._caches:
            # bytes that are small positive float16 scales as well as codes
            cache.pages.random_(32, 48)
            cache.tails.normal_()
        states: RingStates = runner._states
        for layer in states.layers:
            layer.states.normal_()
            layer.columns.normal_()
            layer.records.k.normal_()
            layer.records.v.normal_()
            layer.records.g.uniform_(-0.1, 0.0)
            layer.records.beta.uniform_()

    def measure(self, load: Load) -> Row:
        """Times and floor of one step; RuntimeError if its logits are not finite."""
        runner, config = self._runner, self._runner.model_config
        pages = runner.plan.num_pages
        batch = batch_of(load, config.vocab_size, pages)
        floor = floor_seconds(record(self._shapes, batch), config, load, self._rates)
        with torch.inference_mode():
            forward = Forward(runner, batch)
            ms, in_graph = milliseconds(forward, self._device)
            if not bool(forward.logits.isfinite().all()):
                raise RuntimeError("logits are not finite")
            del forward
        shared = " (shared pages)" if load.users * load.context // 64 > pages else ""
        return Row(
            f"{load}{shared}", ms=ms, floor_ms=1e3 * floor, in_graph=in_graph, wall_ms=self._wall(batch),
            rows_per_s=load.num_rows / (ms * 1e-3),
        )  # fmt: skip

    def _wall(self, batch: Batch) -> float:
        """Median milliseconds of a step from batch to tokens."""
        seconds = []
        for _ in range(1 if self._device.type == "cpu" else 5):
            start = time.perf_counter()
            self._runner.launch(batch).wait()
            seconds.append(time.perf_counter() - start)
        self._runner._sampler.free([item.seq.seq_id for item in batch.scheduled])
        return 1e3 * sorted(seconds)[len(seconds) // 2]


def step_rows(device: torch.device, rates: Rates, dry: bool, graphs: bool) -> Iterator[Row]:
    """One row per load; one row that failed if there is no runner. graphs: whether whole steps replay the runner's own."""
    made: list[Steps] = []

    def build() -> Row:
        start = time.perf_counter()
        made.append(Steps(device, rates, dry, graphs))
        return Row("runner with random weights", wall_ms=1e3 * (time.perf_counter() - start))

    try:
        yield attempt("runner with random weights", build)
        for load in loads(dry) if made else []:
            yield attempt(str(load), partial(made[0].measure, load))
    finally:
        made.clear()  # tens of gigabytes, which the next section wants
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
