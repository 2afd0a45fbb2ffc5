"""bench/launches.py: what the real runner would launch in a decode step, counted on a device without memory."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoints import make_fp8, make_random_mtp, make_random_qwen
from netra_backend.config import EngineConfig
from netra_backend.gpu.graphs import Replay, make_buckets, seq_counts
from netra_backend.gpu.runner import KernelRunner


@pytest.fixture(scope="module")
def launches() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "launches.py"
    spec = importlib.util.spec_from_file_location("launches", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["launches"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launches")
    plain = make_random_qwen(folder / "plain", linear_key_head_dim=128, linear_value_head_dim=128)
    return make_fp8(plain, folder / "fp8") / "config.json"


@pytest.mark.parametrize(("users", "seals"), [(4, False), (4, True), (400, False)])
def test_layers_take_as_few_launches_as_promised(
    launches: ModuleType, config_file: Path, users: int, seals: bool
) -> None:
    """Few rows or many, and in steps that fill pages."""
    runner = launches.shape_runner(config_file, users, 2)
    config = runner.model_config
    batch = launches.batch_of(launches.Load(users, 3, 640), config.vocab_size)
    if seals:
        batch.scheduled[0].seal_block_ids = [1]
    by_layer = launches.layers(config, launches.record(runner, batch))
    assert [kind for kind, _ in by_layer] == list(config.layer_types)
    assert [len(own) for _, own in by_layer] == [12] * len(by_layer)
    names = [launch.name for launch in by_layer[0][1]]
    assert names.count("_gated_delta_rule_kernel") == 1
    assert names.index("_gate_up_kernel") == names.index("_down_kernel") - 1
    rope = next(launch for launch in by_layer[-1][1] if launch.name == "_rope_kernel")
    assert rope.constants["SEAL"] == seals


def test_costs_follow_the_load(launches: ModuleType, config_file: Path) -> None:
    """Twice the users: twice the state, twice the history; experts and weights less than twice."""
    totals = []
    for users in (4, 8):
        load = launches.Load(users, 1, 640)
        config, found = launches.trace(config_file, load)
        totals.append({x.name: launches.cost(x, config, load)[0] for x in found})
    for name in ("_gated_delta_rule_kernel", "_history_kernel"):
        assert totals[1][name] == 2 * totals[0][name] > 0
    for name in ("_gate_up_kernel", "_fp8_gemm_kernel"):
        assert totals[0][name] <= totals[1][name] < 2 * totals[0][name]


def test_the_history_of_a_long_chunk_is_not_split(launches: ModuleType, config_file: Path) -> None:
    """Its tiles fill the device, and every split would write and read all of its rows in float32."""
    splits = {}
    for rows in (64, 4096):
        config, found = launches.trace(config_file, launches.Load(1, rows, 2048, is_chunk=True))
        splits[rows] = next(x.grid[2] for x in found if x.name == "_history_kernel")
        assert (
            launches.floor_seconds(
                found, config, launches.Load(1, rows, 2048, True), launches.Rates()
            )
            > 0
        )
    assert splits == {64: 32, 4096: 2}


class _DeviceOnly(TorchDispatchMode):
    """Raises AssertionError for an operation that the host takes part in: no CUDA graph could be recorded over it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, out) if isinstance(x, torch.Tensor)]
        assert all(x.device.type == "meta" for x in tensors), f"{func} on the host"
        return out


class _MetaRecorder:
    """Runs what would be recorded, twice as on a device, and notes how many launches each run had."""

    def __init__(self, listed: list[object]) -> None:
        self.num_launches: list[int] = []
        self._listed = listed

    def record(self, work: Callable[[], torch.Tensor]) -> Replay:
        for _ in range(2):
            before = len(self._listed)
            with _DeviceOnly():
                output = work()
            self.num_launches.append(len(self._listed) - before)
        return lambda: output


def test_what_is_recorded_stays_on_the_device(
    launches: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model, the draft layer behind it and its chain, by the launchers of the kernels, in every bucket."""
    folder = tmp_path_factory.mktemp("recorded")
    sizes = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    checkpoint = make_fp8(make_random_mtp(folder / "plain", **sizes), folder / "fp8")
    config = EngineConfig(
        checkpoint=str(checkpoint), kv_cache_dtype="int8", kv_cache_memory="1GiB", max_num_seqs=3,
        speculation="mtp", num_draft_tokens=2, max_num_batched_tokens=64,
    )  # fmt: skip
    with launches.recorder() as listed:
        recorder = _MetaRecorder(listed)
        device = torch.device("meta")
        KernelRunner(config, checkpoint, frozenset(), device, recorder=recorder)
    runs = recorder.num_launches
    assert len(runs) == 2 * (2 * len(make_buckets(3, 2, 64)) + len(seq_counts(3)))
    assert runs[::2] == runs[1::2], "a first run launches what the recording does"
    assert min(runs) > 12


ROOFLINE = {
    (1, 1): 0.9364218046511628,
    (1, 4): 1.5957373023255812,
    (32, 4): 12.043008908808616,
    (128, 1): 24.36255763439001,
}
"""Milliseconds of the target's decode steps at 40,960 tokens by the roofline the design was made with: FP8 pages (1,040
bytes a token and layer), 4.3 TB/s, 790 TFLOP/s bf16 and 1,500 FP8."""


def test_the_floor_from_shapes_is_the_designs_and_launches_stay_near_it(
    launches: ModuleType,
) -> None:
    """Equal to the design's figures; the launches' own floor is above it by the activations, 3 % at most."""
    runner = launches.shape_runner(launches.TARGET, 128, 3)
    config, rates = runner.model_config, launches.Rates(4.3e12, 790e12, 1500 / 790)
    for (users, rows), expected in ROOFLINE.items():
        load = launches.Load(users, rows, 40960)
        assert 1e3 * sum(launches.closed_form(config, load, 1040, rates).values()) == pytest.approx(
            expected
        )
        found = launches.record(runner, launches.batch_of(load, config.vocab_size))
        floor = launches.floor_seconds(found, config, load, rates)
        assert 1 < floor / sum(launches.closed_form(config, load, 1032, rates).values()) < 1.03


def test_the_table_of_the_documentation_is_rewritten_between_its_marks(
    launches: ModuleType,
) -> None:
    import launch_table

    text = f"before\n{launch_table.BEGIN}\nold\n{launch_table.END}\nafter"
    assert launch_table.replaced(text, "new") == text.replace("old", "new")
    with pytest.raises(ValueError, match="substring"):
        launch_table.replaced("no marks", "new")
