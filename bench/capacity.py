"""Prints how many conversations of a length fit into a memory figure, per KV codec: the start-up solver's answer.

    python bench/capacity.py --model-config DIR/config.json --memory-bytes 101.8e9 --context-len 49152

Memory is what is left for pages, tails, states and checkpoints once weights and workspace are there. Loads no
weights and allocates nothing; tests hold the solver's bytes to allocated ones.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from netra_backend.config import ModelConfig
from netra_backend.errors import ConfigError
from netra_backend.memory_plan import (
    FORMATS,
    PLAIN,
    KVLayout,
    MemoryPlan,
    bits_per_value,
    draft_codec,
    opening_codec,
    plan_memory,
    tail_rows,
)
from netra_backend.sequence import PAGE_SIZE
from report import save, table

_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits with one codec; bytes are of one conversation unless the name says otherwise."""

    codec: str
    conversations: int
    bits_per_value: float
    bytes_per_token: int
    kv_bytes: int
    tail_bytes: int
    state_bytes: int
    conversation_bytes: int
    checkpoint_bytes_total: int
    total_bytes: int
    explanation: str


def solve(model: ModelConfig, codec: str, arguments: argparse.Namespace) -> MemoryPlan:
    """The plan with the most slots that can all hold `context_len` tokens. Raises ConfigError if none can."""
    num_draft_layers = model.num_mtp_layers if arguments.mtp else 0

    def plan(num_slots: int) -> MemoryPlan:
        return plan_memory(
            model,
            budget_bytes=int(arguments.memory_bytes),
            num_slots=num_slots,
            max_model_len=arguments.context_len,
            element_bytes=_ELEMENT_BYTES[arguments.dtype],
            state_element_bytes=_ELEMENT_BYTES[arguments.state_dtype],
            max_draft_tokens=arguments.num_draft_tokens,
            kv=KVLayout(
                codec,
                tail_rows(2 * arguments.num_draft_tokens),
                num_draft_layers,
                arguments.draft_codec or draft_codec(codec),
                opening_codec(codec) if arguments.openings else "",
            ),
            num_checkpoints=arguments.checkpoints,
            checkpoint_element_bytes=_ELEMENT_BYTES[arguments.checkpoint_dtype],
        )

    one = plan(1)
    each = one.slot_bytes + one.kv_bytes(arguments.context_len)
    free = one.budget_bytes - one.num_checkpoints * one.checkpoint_bytes
    solved = plan(max(1, free // each))
    assert solved.num_full_conversations == solved.num_slots
    return solved


def capacity(model: ModelConfig, codec: str, arguments: argparse.Namespace) -> Capacity:
    """One codec's row."""
    plan = solve(model, codec, arguments)
    kv_bytes = plan.kv_bytes(arguments.context_len)
    element_bytes = _ELEMENT_BYTES[arguments.dtype]
    return Capacity(
        codec={2: "bf16", 4: "float32"}[element_bytes] if codec == PLAIN else codec,
        conversations=plan.num_full_conversations,
        bits_per_value=bits_per_value(codec, model, element_bytes),
        bytes_per_token=plan.page_bytes // PAGE_SIZE,
        kv_bytes=kv_bytes,
        tail_bytes=plan.tail_bytes,
        state_bytes=plan.state_bytes,
        conversation_bytes=kv_bytes + plan.slot_bytes,
        checkpoint_bytes_total=plan.num_checkpoints * plan.checkpoint_bytes,
        total_bytes=plan.total_bytes,
        explanation=plan.describe(),
    )


def capacity_table(rows: list[Capacity]) -> str:
    """Markdown, megabytes of 10^6 bytes per conversation."""
    headers = [
        "codec",
        "bits/value",
        "B/token",
        "KV MB",
        "tail MB",
        "state MB",
        "conversations",
        "x",
    ]
    lines = (
        [
            row.codec,
            f"{row.bits_per_value:.2f}",
            f"{row.bytes_per_token:,}",
            f"{row.kv_bytes / 1e6:.1f}",
            f"{row.tail_bytes / 1e6:.2f}",
            f"{row.state_bytes / 1e6:.1f}",
            str(row.conversations),
            f"{row.conversations / rows[0].conversations:.2f}",
        ]
        for row in rows
    )
    return table(headers, lines)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model-config", type=Path, required=True, help="a config.json")
    parser.add_argument(
        "--memory-bytes", type=float, required=True, help="for the pools, like 101.8e9"
    )
    parser.add_argument("--context-len", type=int, required=True, help="tokens of a conversation")
    parser.add_argument("--codec", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--dtype", default="bfloat16", choices=list(_ELEMENT_BYTES))
    parser.add_argument("--state-dtype", default="float32", choices=list(_ELEMENT_BYTES))
    parser.add_argument(
        "--draft-codec", choices=list(FORMATS), help="default: the codec, at least 8 bits"
    )
    parser.add_argument(
        "--openings",
        action="store_true",
        help="first pages of a codec of their own where it has one, as on a CPU",
    )
    parser.add_argument(
        "--num-draft-tokens", type=int, default=0, help="drafts a step: tail rows and records"
    )
    parser.add_argument(
        "--no-mtp", dest="mtp", action="store_false", help="no K and V of MTP layers"
    )
    parser.add_argument(
        "--checkpoints", type=int, default=0, help="state checkpoints of prefix reuse"
    )
    parser.add_argument("--checkpoint-dtype", default="bfloat16", choices=list(_ELEMENT_BYTES))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    """Command line; returns the exit status."""
    arguments = _parse()
    try:
        model = ModelConfig.from_file(arguments.model_config)
        rows = [capacity(model, codec, arguments) for codec in arguments.codec]
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    for row in rows:
        print(f"{row.codec}: {row.explanation}")
    print("\n" + capacity_table(rows))
    if arguments.json:
        conditions = {key: str(value) for key, value in vars(arguments).items() if key != "json"}
        conditions["model_config"] = arguments.model_config.name
        save(arguments.json, "capacity", rows, conditions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
