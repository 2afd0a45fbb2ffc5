"""Stream one answer over gRPC, token by token.

    python client_examples/stream.py --prompt "The standard library is" --max-tokens 64

Shows the smallest client: one stream, one request, text deltas until the final response. The last line
is what the request cost, from outputs that are sent only because the flags ask for them.
"""

import argparse
import queue
import sys
import time

import numpy as np
import tritonclient.grpc as grpcclient


def text_input(name: str, text: str) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode()], dtype=np.object_))
    return tensor


def flag_input(name: str, value: bool = True) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (%(default)s)")
    parser.add_argument("--model", default="netra")
    parser.add_argument("--prompt", default="The standard library is")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    received: queue.SimpleQueue = queue.SimpleQueue()
    client = grpcclient.InferenceServerClient(options.url)
    client.start_stream(lambda result, error: received.put((result, error)))
    flags = (
        "stream",
        "return_finish_reason",
        "return_num_input_tokens",
        "return_num_output_tokens",
    )
    started = time.monotonic()
    client.async_stream_infer(
        options.model,
        [text_input("text_input", options.prompt), *map(flag_input, flags)],
        parameters={"max_tokens": options.max_tokens},
        enable_empty_final_response=True,
    )
    print(options.prompt, end="", flush=True)
    first_seconds, num_tokens, final = None, 0, False
    while not final:
        result, error = received.get()
        if error is not None:
            print(f"\nerror: {error.message()}", file=sys.stderr)
            return 1
        first_seconds = first_seconds or time.monotonic() - started
        num_tokens += int(result.as_numpy("num_output_tokens")[0])
        final = result.get_response().parameters["triton_final_response"].bool_param
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    client.stop_stream()

    reason = result.as_numpy("finish_reason")[0].decode()
    num_prompt = int(result.as_numpy("num_input_tokens")[0])
    seconds = time.monotonic() - started
    print(
        f"\n\n[{num_prompt} prompt + {num_tokens} answer tokens, finish reason {reason}, "
        f"first text after {first_seconds:.2f} s, {num_tokens / seconds:.1f} tokens/s]"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
