"""Prompt lookup at one user on editing prompts: tokens per step and per second, with and without, side by side.

    python bench/editing.py --checkpoint DIR --repeats 5 --json FILE

Each prompt goes through the chat template and asks for a function of the standard library with one name changed;
the answer is as long as the
function, or stops at --output-len. All engines live in one process and take turns within each repeat, so a busy
machine slows all of them. Times are those of decoding: the prompt is left out. Knows only the engine's public methods.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import inspect
import shlex
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

import machine
from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.errors import NetraError
from offline import Run, run_burst
from report import Metrics, Result, Row, medians
from workload import Prompt

_EDITS: tuple[tuple[Callable[..., object], str, str], ...] = (
    (shlex.quote, "s", "text"),
    (textwrap.indent, "prefix", "margin"),
)

_MODES = {
    "off": {"speculation": "none"},
    "8 drafts": {"speculation": "ngram", "num_draft_tokens": "8", "adaptive_drafts": "false"},
    "16 drafts": {"speculation": "ngram", "num_draft_tokens": "16", "adaptive_drafts": "false"},
    "controller": {"speculation": "ngram"},
}


def prompts(engine: Engine, longest: int) -> list[tuple[Prompt, int]]:
    """Each edit as a prompt, with the length of its answer in tokens."""
    made = []
    for function, old, new in _EDITS:
        source = inspect.getsource(function)
        ask = f"Repeat this function with `{old}` renamed to `{new}`, and nothing else.\n\n{source}"
        text = engine.tokenizer.apply_chat_template([{"role": "user", "content": ask}])
        token_ids = tuple(engine.tokenizer.encode_plain(text))
        length = min(longest, len(engine.tokenizer.encode_plain(source)))
        made.append((Prompt(text, token_ids, function.__qualname__), length))
    return made


def decoding(runs: list[Run]) -> Metrics:
    """Over all answers of a repeat: from the first token on, so the prompt's step does not count."""
    answers = [run.answers[0] for run in runs]
    seconds = sum(answer.last_time - answer.first_time for answer in answers)
    num_tokens = sum(len(answer.token_ids) - 1 for answer in answers)
    num_steps = sum(run.num_steps for run in runs) - len(runs)
    finals = [answer.final for answer in answers if answer.final is not None]
    num_drafts = sum(final.num_draft_tokens for final in finals)
    num_accepted = sum(final.num_accepted_tokens for final in finals)
    return {
        "output_tokens_per_second": num_tokens / seconds,
        "tokens_per_step": num_tokens / num_steps,
        "step_ms": 1e3 * seconds / num_steps,
        "acceptance": num_accepted / num_drafts if num_drafts else None,
    }


def measure(engines: dict[str, Engine], repeats: int, longest: int) -> dict[str, list[Metrics]]:
    """Metrics by mode and repeat, after one repeat that is not counted. Raises RuntimeError if tokens differ."""
    results: dict[str, list[Metrics]] = {mode: [] for mode in engines}
    expected: dict[int, list[int]] = {}
    for repeat in tqdm(range(-1, repeats), unit="repeat", disable=None):
        for mode, engine in engines.items():
            runs = []
            for index, (prompt, length) in enumerate(prompts(engine, longest)):
                run = run_burst(engine, [prompt], length, f"{mode}-{repeat}-{index}")
                if run.answers[0].token_ids != expected.setdefault(index, run.answers[0].token_ids):
                    raise RuntimeError(f"{mode}: other tokens than {next(iter(engines))}")
                runs.append(run)
            if repeat >= 0:
                results[mode].append(decoding(runs))
    return results


def table(rows: list[Row]) -> str:
    """One line per mode, with its speed over that of the first."""
    base = rows[0].metrics["output_tokens_per_second"]
    lines = [
        f"{'mode':<12} {'tok/s':>7} {'speed':>6} {'tok/step':>9} {'step ms':>8} {'accepted':>9}"
    ]
    for row in rows:
        values = row.metrics
        speed, accepted = values["output_tokens_per_second"], values["acceptance"]
        assert speed is not None
        assert base is not None
        lines.append(
            f"{row.name:<12} {speed:>7.1f} {speed / base:>5.2f}x {values['tokens_per_step']:>9.2f} "
            f"{values['step_ms']:>8.1f} {f'{accepted:.0%}' if accepted is not None else '':>9}"
        )
    return "\n".join(lines)


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output-len", type=int, default=128, help="at most")
    parser.add_argument("--num-threads", type=int, default=0, help="0: all cores")
    parser.add_argument("--modes", default=",".join(_MODES), help="the first is the base")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    fixed = {
        "checkpoint": str(arguments.checkpoint.expanduser().resolve()),
        "num_threads": str(arguments.num_threads), "enable_prefix_caching": "false",
        "kv_cache_memory": "256MiB", "max_num_seqs": "1", "max_model_len": "4096",
    }  # fmt: skip
    try:
        engines = {
            mode: Engine.build(EngineConfig.from_parameters(fixed | _MODES[mode]), Path.cwd())
            for mode in arguments.modes.split(",")
        }
        results = measure(engines, arguments.repeats, arguments.output_len)
    except (NetraError, RuntimeError) as error:
        print(f"editing: {error}", file=sys.stderr)
        return 1
    import torch

    name = arguments.checkpoint.name
    rows = [Row(mode, "editing, 1 user", medians(found), found) for mode, found in results.items()]
    print(table(rows))
    if arguments.json:
        facts = asdict(machine.describe(torch.__version__))
        conditions = {"machine": facts, "checkpoint": name, "repeats": arguments.repeats}
        Result("editing", rows, conditions).save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
