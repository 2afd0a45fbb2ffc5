"""Measures how much sooner the second turn of a conversation starts when its history is in the prefix cache.

    python bench/second_turn.py --checkpoint DIR [--history-len 4000] [--json FILE]

Turn 1 is a prompt and an answer of `history-len` tokens together; turn 2 is that and a question. Warm: turn 2
follows turn 1. Cold: the same tokens under a `cache_salt` of their own, on the same engine. Both wait from `add`
to the first token, alone and greedy; each repeat has a conversation of its own.
"""

from __future__ import annotations

import os

# Read when OpenMP starts, which importing torch does.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

import machine
from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.errors import NetraError
from netra_backend.request import Request, SamplingParams
from report import Metrics, Result, Row, medians, rows_table
from workload import PromptMaker, standard_library


def answer(
    engine: Engine, name: str, token_ids: tuple[int, ...], output_len: int, salt: str
) -> tuple[float, tuple[int, ...], int]:
    """Run one request alone: seconds to its first token, its tokens, and how many were cached.

    Raises RuntimeError if it fails.
    """
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    start = time.perf_counter()
    engine.add(Request(name, token_ids, params, time.monotonic(), cache_salt=salt))
    first, tokens, num_cached = 0.0, (), 0
    is_live = True
    while is_live:
        is_live = engine.step()
        while not engine.outputs.empty():
            output = engine.outputs.get()
            if output.error is not None:
                raise RuntimeError(f"{name} failed: {output.error}")
            first = first or time.perf_counter() - start
            tokens += output.token_ids
            num_cached = output.num_cached_tokens
    return first, tokens, num_cached


def measure(engine: Engine, arguments: argparse.Namespace) -> tuple[list[Metrics], str]:
    """The repeats' metrics, after one that only warms up, and the text's source."""
    corpus = standard_library()
    maker = PromptMaker(engine.tokenizer, corpus, arguments.seed)
    repeats: list[Metrics] = []
    for number in range(-1, arguments.repeats):
        prompt = maker.make(arguments.history_len - arguments.output_len).token_ids
        question = maker.make(arguments.question_len).token_ids
        _, tokens, _ = answer(engine, f"first{number}", prompt, arguments.output_len, "")
        turn = prompt + tokens + question
        warm, warm_tokens, num_cached = answer(engine, f"warm{number}", turn, 8, "")
        cold, cold_tokens, none = answer(engine, f"cold{number}", turn, 8, str(number))
        assert none == 0
        if number >= 0:
            repeats.append(
                {
                    "cold_ttft_ms": 1e3 * cold,
                    "warm_ttft_ms": 1e3 * warm,
                    "times_sooner": cold / warm,
                    "num_cached_tokens": num_cached,
                    "same_tokens": float(warm_tokens == cold_tokens),
                }
            )
    return repeats, corpus.description


def build(arguments: argparse.Namespace) -> Engine:
    """The engine with the knobs of the command line. Raises NetraError."""
    parameters = {
        "checkpoint": str(arguments.checkpoint.expanduser().resolve()),
        "num_threads": str(arguments.num_threads),
        "max_num_seqs": "4",
        "kv_cache_memory": "2GiB",
    }
    parameters |= dict(setting.split("=", 1) for setting in arguments.set)
    return Engine.build(EngineConfig.from_parameters(parameters), Path.cwd())


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--history-len", type=int, default=4000, help="tokens of the first turn")
    parser.add_argument("--output-len", type=int, default=64, help="of them, its answer")
    parser.add_argument("--question-len", type=int, default=32, help="new tokens of turn 2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--name", default="netra", help="name of the row")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a knob")
    parser.add_argument("--json", type=Path, help="write the results there")
    arguments = parser.parse_args()
    if any("=" not in setting for setting in arguments.set):
        parser.error("--set takes KEY=VALUE")
    return arguments


def main() -> int:
    """Command line; returns the exit status."""
    arguments = parse_arguments()
    meter = machine.CpuMeter()
    try:
        engine = build(arguments)
        repeats, source = measure(engine, arguments)
        engine.shutdown(drain_seconds=0.0)
    except (NetraError, RuntimeError) as error:
        print(f"second_turn: {error}", file=sys.stderr)
        return 1
    import torch

    workload = f"{arguments.history_len}+{arguments.question_len}"
    result = Result(
        "second_turn",
        [Row(arguments.name, workload, medians(repeats), repeats)],
        {
            "machine": asdict(machine.describe(torch.__version__)),
            "config": asdict(engine.config) | {"checkpoint": arguments.checkpoint.name},
            "text": source,
            "seed": arguments.seed,
            "other_cores": meter.stop().other_cores,
        },
    )
    print(rows_table(result.rows))
    if arguments.json:
        result.save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
