"""Chat over several turns; the server applies the model's chat template to `messages`.

    python client_examples/chat.py
    python client_examples/chat.py --message "Say hello." --message "Once more, louder."

The client keeps the conversation and sends all of it each time. Without --message it is interactive.
"""

import argparse
import json
import queue
import sys
from collections.abc import Iterator

import numpy as np
import tritonclient.grpc as grpcclient


def answer(url: str, model: str, messages: list[dict], sampling: dict) -> Iterator[str]:
    """Text deltas of the assistant's next turn. Raises InferenceServerException on an error."""
    received: queue.SimpleQueue = queue.SimpleQueue()
    inputs = []
    for name, text in (("messages", messages), ("sampling_parameters", sampling)):
        tensor = grpcclient.InferInput(name, [1], "BYTES")
        tensor.set_data_from_numpy(np.array([json.dumps(text).encode()], dtype=np.object_))
        inputs.append(tensor)
    stream = grpcclient.InferInput("stream", [1], "BOOL")
    stream.set_data_from_numpy(np.array([True]))
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: received.put((result, error)))
        client.async_stream_infer(model, [*inputs, stream], enable_empty_final_response=True)
        final = False
        while not final:
            result, error = received.get()
            if error is not None:
                raise error
            final = result.get_response().parameters["triton_final_response"].bool_param
            yield result.as_numpy("text_output")[0].decode()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (%(default)s)")
    parser.add_argument("--model", default="netra")
    parser.add_argument("--system", help="what the assistant is told before the conversation")
    parser.add_argument("--message", action="append", help="say this and end; may be repeated")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, help="0 is greedy; default: the model's")
    options = parser.parse_args()

    messages = [{"role": "system", "content": options.system}] if options.system else []
    sampling = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    turns = iter(options.message) if options.message else iter(lambda: input("you> ").strip(), "")
    try:
        for text in turns:
            if options.message:
                print(f"you> {text}")
            messages.append({"role": "user", "content": text})
            reply = ""
            print("assistant> ", end="", flush=True)
            for delta in answer(options.url, options.model, messages, sampling):
                reply += delta
                print(delta, end="", flush=True)
            print()
            messages.append({"role": "assistant", "content": reply})
    except grpcclient.InferenceServerException as error:
        print(f"\nerror: {error.message()}", file=sys.stderr)
        return 1
    except (EOFError, KeyboardInterrupt):
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
