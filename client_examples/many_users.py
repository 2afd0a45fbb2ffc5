"""Many users at once, each on a gRPC stream of its own, with a live table.

    python client_examples/many_users.py --users 16 --max-tokens 64

One row per user while they run; at the end the totals: tokens a second of all together, the time to the
first text, and the longest time that anybody waited between two pieces of text.
"""

import argparse
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
import tritonclient.grpc as grpcclient

OPENINGS = ("Once upon a time", "def main(", "The server", "To be or not", "import os\n", "In the")


@dataclass
class User:
    """What one user has seen so far; written by its stream's thread, read by the table."""

    prompt: str
    text: str = ""
    num_tokens: int = 0
    started: float = 0.0
    first_seconds: float = 0.0
    last_time: float = 0.0
    largest_gap: float = 0.0
    error: str = ""

    def receive(self, result: grpcclient.InferResult | None, error: Exception | None) -> bool:
        """Take one response; True if it was the last."""
        now = time.monotonic()
        if result is None:
            self.error = str(error)
            return True
        if self.num_tokens:
            self.largest_gap = max(self.largest_gap, now - self.last_time)
        else:
            self.first_seconds = now - self.started
        self.last_time = now
        self.text += result.as_numpy("text_output")[0].decode()
        self.num_tokens += int(result.as_numpy("num_output_tokens")[0])
        return result.get_response().parameters["triton_final_response"].bool_param

    def row(self) -> str:
        tail = (self.error or self.text)[-48:]
        shown = "".join(char if char.isprintable() else " " for char in tail)
        return f"{self.num_tokens:6} {self.first_seconds:7.2f} {self.largest_gap:7.2f}  {shown}"


def run(user: User, url: str, model: str, max_tokens: int) -> None:
    done = threading.Event()
    inputs = [grpcclient.InferInput("text_input", [1], "BYTES")]
    inputs[0].set_data_from_numpy(np.array([user.prompt.encode()], dtype=np.object_))
    for name in ("stream", "return_num_output_tokens"):
        inputs.append(grpcclient.InferInput(name, [1], "BOOL"))
        inputs[-1].set_data_from_numpy(np.array([True]))
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: user.receive(result, error) and done.set())
        user.started = time.monotonic()
        parameters = {"max_tokens": max_tokens, "ignore_eos": True}
        client.async_stream_infer(
            model, inputs, parameters=parameters, enable_empty_final_response=True
        )
        done.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (%(default)s)")
    parser.add_argument("--model", default="netra")
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    users = [User(OPENINGS[index % len(OPENINGS)]) for index in range(options.users)]
    arguments = (options.url, options.model, options.max_tokens)
    threads = [threading.Thread(target=run, args=(user, *arguments)) for user in users]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    live = sys.stdout.isatty()
    print(f"{'tokens':>6} {'first s':>7} {'gap s':>7}  text")
    while live and any(thread.is_alive() for thread in threads):
        print("".join(f"\x1b[K{user.row()}\n" for user in users) + f"\x1b[{len(users)}A", end="")
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    seconds = time.monotonic() - started

    print("".join(f"{user.row()}\n" for user in users), end="")
    total = sum(user.num_tokens for user in users)
    first = sorted(user.first_seconds for user in users)
    print(
        f"\n{len(users)} users, {total} tokens in {seconds:.1f} s = {total / seconds:.1f} tokens/s; "
        f"first text: median {first[len(first) // 2]:.2f} s, worst {first[-1]:.2f} s; "
        f"largest gap {max(user.largest_gap for user in users):.2f} s"
    )
    return 1 if any(user.error for user in users) else 0


if __name__ == "__main__":
    sys.exit(main())
