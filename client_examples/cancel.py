"""Cancel a request in the middle of its answer, and see the server free what it held.

    python client_examples/cancel.py

Starts an answer that would be very long, reads some of it, cancels the stream, and watches the gauge of
running requests on the metrics port go back. A `timeout` (microseconds) would end it from the server's side.
"""

import argparse
import queue
import sys
import time
import urllib.request

import numpy as np
import tritonclient.grpc as grpcclient


def num_running(metrics_url: str, model: str) -> int:
    """The server's gauge of requests that are being computed; brought up to date once a second."""
    with urllib.request.urlopen(metrics_url, timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("vllm:num_requests_running{") and f'"{model}"' in line:
                return int(float(line.split()[-1]))
    raise SystemExit(f"no metrics of model {model} at {metrics_url}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (%(default)s)")
    parser.add_argument("--metrics", default="http://localhost:8002/metrics")
    parser.add_argument("--model", default="netra")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--responses", type=int, default=10, help="how many to read before")
    options = parser.parse_args()

    received: queue.SimpleQueue = queue.SimpleQueue()
    client = grpcclient.InferenceServerClient(options.url)
    client.start_stream(lambda result, error: received.put((result, error)))
    prompt = grpcclient.InferInput("text_input", [1], "BYTES")
    prompt.set_data_from_numpy(np.array([options.prompt.encode()], dtype=np.object_))
    stream = grpcclient.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    parameters = {"max_tokens": 2000, "ignore_eos": True}
    client.async_stream_infer(options.model, [prompt, stream], parameters=parameters)

    for _ in range(options.responses):
        result, error = received.get()
        if error is not None:
            print(f"error: {error.message()}", file=sys.stderr)
            return 1
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    client.stop_stream(cancel_requests=True)
    cancelled = time.monotonic()
    print(f"\n[cancelled after {options.responses} responses]")
    while num_running(options.metrics, options.model) > 0:
        if time.monotonic() - cancelled > 30:
            print("others are still running on this server")
            return 1
        time.sleep(0.1)
    print(f"[no request running {time.monotonic() - cancelled:.1f} s later]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
