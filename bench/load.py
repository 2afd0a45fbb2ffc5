"""Measures a running server as its clients see it: many users, streamed answers, a steady window.

    python bench/load.py --grpc HOST:PORT --users 16 --input-len 128 --output-len 64 --json FILE
    python bench/load.py --http HOST:PORT ...

Closed loop: each user sends its next request when the last one ended. Users start at random times
and first send a request of random length, so that they spread over all phases; what is measured
begins when every user has done that, and ends after `--requests` answers per user. `--burst` sends
one request per user at once instead, as offline.py does, and measures until the last token.
Tokens are those that the server counts. The client's own CPU and delays are measured and printed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm  # type: ignore[import-untyped]

import machine
from netra_backend.tokenizer import Tokenizer
from report import Metrics, Result, Row, medians, percentile, rows_table
from transport import GrpcTransport, HttpTransport, Transport, TransportError
from window import Span, measure, summary
from workload import Lengths, Prompt, PromptMaker, poisson_arrivals, standard_library

_MAX_FAILURES_IN_A_ROW = 5
_LAG_SECONDS = 0.02
_REPOSITORY = Path(__file__).parents[1] / "model_repository"


@dataclass(frozen=True, slots=True)
class Plan:
    """What the users do. `requests` answers per user are measured."""

    users: int
    requests: int
    output_lens: Lengths
    stagger_seconds: float
    max_seconds: float
    seed: int


class ClosedLoop:
    """The users, their requests and the window of one run."""

    def __init__(self, transport: Transport, prompts: list[Prompt], plan: Plan) -> None:
        self.spans: list[Span] = []
        self.window = (0.0, 0.0)
        self._transport = transport
        self._prompts = prompts
        self._plan = plan
        self._rng = random.Random(plan.seed)
        self._next = 0
        self._open: list[Span] = []
        self._num_warm = 0
        self._num_gone = 0
        self._num_measured = 0
        self._finished = asyncio.Event()

    async def run(self, bar: tqdm) -> list[Span]:
        """Run until enough answers are measured; returns all spans, unfinished ones too."""
        plan = self._plan
        spacing = plan.users / plan.stagger_seconds
        delays = poisson_arrivals(spacing, plan.users, self._rng)
        tasks = [asyncio.create_task(self._user(delay, bar)) for delay in delays]
        try:
            await asyncio.wait_for(self._finished.wait(), plan.max_seconds)
        except asyncio.TimeoutError:
            print(f"ended by --max-seconds {plan.max_seconds:.0f}", file=sys.stderr)
        finally:
            self.window = (self.window[0], time.perf_counter())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self.spans + self._open

    async def burst(self, output_len: int, bar: tqdm) -> list[Span]:
        """One request per user at once; the window ends with the last token."""
        begin = time.perf_counter()
        requests = (self._request(output_len) for _ in range(self._plan.users))
        spans = await asyncio.gather(*requests)
        self.window = (begin, max(span.last for span in spans))
        bar.update(len(spans))
        return list(spans)

    async def _user(self, delay: float, bar: tqdm) -> None:
        await asyncio.sleep(delay)
        failures = 0
        warm = False
        while failures < _MAX_FAILURES_IN_A_ROW:
            length = self._plan.output_lens.draw(self._rng)
            span = await self._request(length if warm else self._rng.randint(1, length))
            self.spans.append(span)
            if span.error:
                failures += 1
                await asyncio.sleep(0.2)
                continue
            failures = 0
            if warm:
                self._count(span, bar)
            else:
                warm = True
                self._start_window()
        self._num_gone += 1
        if self._num_gone == self._plan.users:
            self._finished.set()

    def _start_window(self) -> None:
        self._num_warm += 1
        if self._num_warm == self._plan.users:
            self.window = (time.perf_counter(), 0.0)

    def _count(self, span: Span, bar: tqdm) -> None:
        if not self.window[0]:
            return
        self._num_measured += 1
        bar.update(1)
        if self._num_measured >= self._plan.users * self._plan.requests:
            self._finished.set()

    async def _request(self, output_len: int) -> Span:
        prompt = self._prompts[self._next % len(self._prompts)]
        self._next += 1
        span = Span(time.perf_counter(), len(prompt.token_ids), output_len)
        self._open.append(span)
        try:
            async for chunk in self._transport.stream(prompt.text, output_len):
                now = time.perf_counter()
                if chunk.num_output_tokens:
                    span.chunks.append((now, chunk.num_output_tokens))
                span.num_input_tokens = chunk.num_input_tokens
                if chunk.finish_reason not in ("", "None"):
                    span.end = now
        except TransportError as error:
            span.error = str(error)
        span.end = span.end or time.perf_counter()
        self._open.remove(span)
        return span


async def watch_lag(lags: list[float]) -> None:
    """Note how late the event loop wakes: the client's own share of every latency."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_LAG_SECONDS)
        lags.append(time.perf_counter() - before - _LAG_SECONDS)


async def run(arguments: argparse.Namespace, transport: Transport) -> tuple[list[Metrics], str]:
    """Make the prompts and run; returns the metrics of each repeat and the source of the text."""
    checkpoint = arguments.checkpoint or find_checkpoint(
        await transport.checkpoint(), arguments.model
    )
    corpus = standard_library()
    maker = PromptMaker(Tokenizer(checkpoint), corpus, arguments.seed, arguments.shared_prefix_len)
    rng = random.Random(arguments.seed)
    repeats = arguments.repeats if arguments.burst else 1
    count = arguments.users * (repeats + 1 if arguments.burst else arguments.requests + 3)
    input_lens = Lengths.parse(arguments.input_len)
    bar = tqdm(range(count), desc="prompts", unit="prompt", disable=None)
    prompts = [maker.make(input_lens.draw(rng)) for _ in bar]
    plan = Plan(
        arguments.users,
        arguments.requests,
        Lengths.parse(arguments.output_len),
        arguments.stagger,
        arguments.max_seconds,
        arguments.seed,
    )
    loop = ClosedLoop(transport, prompts, plan)
    total = arguments.users * (repeats if arguments.burst else arguments.requests)
    results: list[Metrics] = []
    with tqdm(total=total, unit="answer", desc="measuring", disable=None) as bar:
        if arguments.burst:
            await loop.burst(min(8, plan.output_lens.high), tqdm(disable=True))
        for _ in range(repeats):
            results.append(await one_window(loop, plan, arguments.burst, bar))
    return results, corpus.description


async def one_window(loop: ClosedLoop, plan: Plan, burst: bool, bar: tqdm) -> Metrics:
    """Run and measure once, the client's own cost included."""
    lags: list[float] = []
    watcher = asyncio.create_task(watch_lag(lags))
    meter = machine.CpuMeter()
    spans = await (loop.burst(plan.output_lens.high, bar) if burst else loop.run(bar))
    cpu = meter.stop()
    watcher.cancel()
    if not loop.window[0]:
        errors = Counter(span.error for span in spans if span.error).most_common(1)
        raise TransportError(errors[0][0] if errors else "no user finished its first request")
    for error, count in Counter(span.error for span in spans if span.error).most_common(5):
        print(f"{count} failed: {error}", file=sys.stderr)
    lag = percentile(lags, 0.99)
    return measure(spans, loop.window) | {
        "client_cores": cpu.own_cores,
        "other_cores": None,
        "rest_of_machine_cores": cpu.other_cores,
        "client_lag_ms_p99": None if lag is None else lag * 1000,
    }


def find_checkpoint(knob: str, model: str) -> Path:
    """The served checkpoint on this machine, for its tokenizer. Raises TransportError."""
    path = (_REPOSITORY / model / knob).resolve()
    if not (path / "tokenizer.json").is_file():
        raise TransportError(
            f"the served checkpoint {knob!r} is not on this machine: name its tokenizer with "
            f"--checkpoint DIR"
        )
    return path


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--grpc", metavar="HOST:PORT")
    server.add_argument("--http", metavar="HOST:PORT")
    parser.add_argument("--model", default="netra")
    parser.add_argument("--checkpoint", type=Path, help="for its tokenizer (default: the served)")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument(
        "--input-len", default="128", help="N, LOW-HIGH, lognormal:MEDIAN:SIGMA:MAX"
    )
    parser.add_argument("--output-len", default="64", help="likewise")
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--requests", type=int, default=4, help="measured answers per user")
    parser.add_argument("--stagger", type=float, default=1.0, help="seconds over which users start")
    parser.add_argument("--max-seconds", type=float, default=600.0, help="end the run after that")
    parser.add_argument("--burst", action="store_true", help="one request per user, all at once")
    parser.add_argument("--repeats", type=int, default=3, help="of a burst")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shared-prefix-len", type=int, default=0, help="tokens all prompts share")
    parser.add_argument("--name", default="netra", help="name of the row")
    return parser.parse_args()


async def run_and_close(arguments: argparse.Namespace) -> tuple[list[Metrics], str]:
    """Open the connection, run, close it."""
    kind = GrpcTransport if arguments.grpc else HttpTransport
    transport: Transport = kind(arguments.grpc or arguments.http, arguments.model)
    try:
        return await run(arguments, transport)
    finally:
        await transport.close()


def main() -> int:
    """Command line; exit status 1 if any request failed."""
    arguments = parse_arguments()
    try:
        repeats, source = asyncio.run(run_and_close(arguments))
    except (TransportError, ValueError) as error:
        print(f"load: {error}", file=sys.stderr)
        return 1
    protocol = "grpc" if arguments.grpc else "http"
    workload = f"{arguments.users} x {arguments.input_len}+{arguments.output_len} {protocol}"
    workload += " burst" if arguments.burst else ""
    merged = medians(repeats)
    conditions = {
        "machine": asdict(machine.describe()),
        "arguments": machine.without_paths(vars(arguments)),
        "text": source,
    }
    result = Result("load", [Row(arguments.name, workload, merged, repeats)], conditions)
    print(rows_table(result.rows), summary(merged), sep="\n")
    if arguments.json:
        result.save(arguments.json)
    return 1 if merged["num_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
