"""Compiles in all cores what h200_check.py will launch, before it does: one by one, compiling takes longer than running.

Worker processes have no device: they launch on tensors without memory under the fake driver of netra_kernels.aot, which
leaves the machine code in triton's cache on disk, under the same keys as a real launch asks for.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import torch

from h200_report import Row
from h200_steps import CODEC, loads
from launches import TARGET, shape_runner
from netra_backend.gpu.runner import KernelRunner
from netra_kernels.aot import capture
from netra_kernels.aot_cases import CASES
from step_load import batch_of


@cache
def _shapes() -> KernelRunner:
    steps = loads(dry=False)
    drafts = max(load.rows for load in steps if not load.is_chunk) - 1
    return shape_runner(TARGET, max(load.users for load in steps), drafts, CODEC)


def compile_job(job: tuple[str, int]) -> str:
    """Compile the kernels of one case of the machine-code tests, or of one step; returns what went wrong."""
    torch.set_num_threads(1)
    kind, index = job
    try:
        with capture():
            if kind == "case":
                CASES[index].launch()
            else:
                runner = _shapes()
                batch = batch_of(loads(dry=False)[index], runner.model_config.vocab_size)
                runner._forward(batch, batch.scheduled)
    except Exception as error:
        return f"{job}: {type(error).__name__}: {error}"
    return ""


def compile_ahead(num_workers: int) -> Row:
    """All kernels of the numerics and steps sections; raises RuntimeError that names the first failure."""
    started = time.perf_counter()
    jobs = [("step", i) for i in range(len(loads(dry=False)))]
    jobs += [("case", i) for i in range(len(CASES))]
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as capture() does: it is in the keys
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        failures = [found for found in pool.map(compile_job, jobs) if found]
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(jobs)}: {failures[0]}")
    return Row(
        f"compiled ahead, {len(jobs)} jobs in {num_workers} processes",
        wall_ms=1e3 * (time.perf_counter() - started),
    )
