"""adapter: the server's requests in, exactly one final answer each out, whatever goes wrong."""

import importlib
import json
import queue
import threading
from types import SimpleNamespace

import fake_server
import numpy as np
import pytest
from fake_server import InferenceRequest, Logger, TritonError, TritonModelException

from netra_backend.engine import Engine
from netra_backend.errors import ConfigError, EngineError, RequestError
from netra_backend.metrics import Metrics
from netra_backend.request import FinishReason, RequestOutput
from netra_backend.tokenizer import SamplingDefaults


class ScriptedEngine:
    """Records requests; answers when the test says so."""

    def __init__(self):
        self.tokenizer = SimpleNamespace(
            default_sampling=SamplingDefaults(),
            encode=lambda text: [ord(character) for character in text],
            encode_plain=lambda text: [ord(character) for character in text],
            token_text=chr,
        )
        self.metrics = Metrics(4096)
        self.outputs = queue.SimpleQueue()
        self.healthy = True
        self.refusal = None
        self.requests = []
        self.aborted = threading.Event()
        self.shut_down = False

    def start(self):
        pass

    def add(self, request):
        if self.refusal:
            raise self.refusal
        self.requests.append(request)

    def abort(self, request_id, error):
        self.put(finish_reason=FinishReason.ABORT, error=error, request_id=request_id)
        self.aborted.set()

    def shutdown(self, drain_seconds):
        self.shut_down = True

    def put(self, text="", request_id=None, **fields):
        name = request_id or self.requests[-1].request_id
        self.outputs.put(RequestOutput(name, text=text, **fields))


@pytest.fixture
def adapter(monkeypatch):
    fake_server.install(monkeypatch)
    module = importlib.import_module("netra_backend.adapter")
    monkeypatch.setattr(module, "_DRAIN_SECONDS", 0.5)
    return module


@pytest.fixture
def engine(monkeypatch):
    engine = ScriptedEngine()
    monkeypatch.setattr(Engine, "build", staticmethod(lambda config, directory: engine))
    return engine


def arguments(parameters=None, decoupled=True, kind="MODEL"):
    entries = {key: {"string_value": value} for key, value in (parameters or {}).items()}
    return {
        "model_config": json.dumps({"parameters": entries, "decoupled": decoupled}),
        "model_name": "netra",
        "model_version": "1",
        "model_repository": "/models/netra",
        "model_instance_kind": kind,
        "model_instance_device_id": "3",
    }


@pytest.fixture
def model(adapter, engine, monkeypatch):
    monkeypatch.setattr(adapter.sys, "setswitchinterval", lambda seconds: None)
    model = adapter.TritonPythonModel()
    model.initialize(arguments({"cancel_poll_ms": "10"}))
    yield model
    if not engine.shut_down:
        model.finalize()


def text(value):
    return np.array([value.encode()], dtype=np.object_)


def run(model, request):
    assert model.execute([request]) is None
    return request


def finish(model, request):
    """Ends the model, so that everything due has been sent."""
    model.finalize()
    return request.sender


def only_error(sender):
    assert sender.closed
    assert len(sender.responses) == 1
    return sender.responses[0].error


def test_what_config_pbtxt_leaves_out_is_added(adapter):
    own = {"name": "stop", "data_type": "TYPE_STRING", "dims": [4]}
    filled = adapter.TritonPythonModel.auto_complete_config(fake_server.ModelConfig([own])).config
    assert filled["decoupled"] is True
    assert filled["max_batch_size"] == 0
    names = [tensor["name"] for tensor in filled["input"]]
    assert len(names) == len(set(names))
    assert filled["input"][0] is own
    assert {"text_input", "messages", "stream", "sampling_parameters"} < set(names)
    assert all(tensor["optional"] for tensor in filled["input"][1:])
    assert "text_output" in [tensor["name"] for tensor in filled["output"]]


def test_a_request_reaches_the_engine_and_its_text_comes_back(model, engine):
    request = run(model, InferenceRequest('{"max_tokens": 7}', text_input=text("ab")))
    assert engine.requests[0].prompt_token_ids == (97, 98)
    assert engine.requests[0].params.max_tokens == 7
    engine.put("x")
    engine.put("y", finish_reason=FinishReason.STOP)
    sender = finish(model, request)
    assert sender.closed
    assert [response.outputs["text_output"][0] for response in sender.responses] == [b"abxy"]


def test_request_ids_are_unique_even_if_the_clients_are_not(model, engine):
    for _ in range(3):
        run(model, InferenceRequest(text_input=text("a")))
    assert len({request.request_id for request in engine.requests}) == 3
    assert all("client" in request.request_id for request in engine.requests)


def test_the_nearest_of_all_time_limits_is_the_deadline(adapter, engine):
    model = adapter.TritonPythonModel()
    model.initialize(arguments({"request_timeout_seconds": "30"}))
    cases = (("", 0, 30), ('{"timeout_seconds": 7}', 0, 7), ('{"timeout_seconds": 7}', 2e6, 2))
    for parameters, timeout_us, seconds in cases:
        run(model, InferenceRequest(parameters, timeout_us, text_input=text("a")))
        request = engine.requests[-1]
        assert request.deadline == pytest.approx(request.arrival_time + seconds, abs=1e-3)
    model.finalize()


def test_without_limits_there_is_no_deadline(model, engine):
    run(model, InferenceRequest(text_input=text("a")))
    assert engine.requests[-1].deadline is None


@pytest.mark.parametrize(
    ("error", "code", "start"),
    [
        (RequestError("queue_full", "no"), TritonError.UNAVAILABLE, "[queue_full] no"),
        (RequestError("shutting_down", "no"), TritonError.UNAVAILABLE, "[shutting_down]"),
        (RequestError("prompt_too_long", "no"), TritonError.INVALID_ARG, "[prompt_too_long]"),
        (EngineError("dead"), TritonError.UNAVAILABLE, "[unhealthy] dead"),
        (ZeroDivisionError("oops"), TritonError.INTERNAL, "[internal]"),
    ],
)
def test_what_the_engine_refuses_is_answered_with_its_code(model, engine, error, code, start):
    engine.refusal = error
    answer = only_error(finish(model, run(model, InferenceRequest(text_input=text("a")))))
    assert answer.code == code
    assert answer.message.startswith(start)


@pytest.mark.parametrize("code", ["cancelled", "timeout"])
def test_aborted_requests_answer_cancelled(model, engine, code):
    request = run(model, InferenceRequest(text_input=text("a")))
    engine.put(finish_reason=FinishReason.ABORT, error=RequestError(code, "gone"))
    assert only_error(finish(model, request)).code == TritonError.CANCELLED


def test_a_bad_request_is_answered_and_its_neighbours_are_served(model, engine):
    bad = InferenceRequest('{"nonsense": 1}', text_input=text("a"))
    broken = InferenceRequest("{", text_input=text("a"))
    good = InferenceRequest(text_input=text("a"))
    assert model.execute([bad, broken, good]) is None
    engine.put("x", finish_reason=FinishReason.STOP)
    model.finalize()
    assert only_error(bad.sender).message.startswith("[unknown_parameter]")
    assert only_error(broken.sender).message.startswith("[invalid_request]")
    assert good.sender.responses[0].error is None


def test_a_client_that_left_is_noticed(model, engine):
    request = run(model, InferenceRequest('{"stream": true}', text_input=text("a")))
    request.sender.cancelled = True
    assert engine.aborted.wait(30)
    assert only_error(finish(model, request)).code == TritonError.CANCELLED


def test_a_wrong_configuration_is_a_readable_load_error(adapter, engine):
    for bad in (arguments({"typo": "1"}), arguments(decoupled=False)):
        with pytest.raises(TritonModelException, match=r"typo|decoupled"):
            adapter.TritonPythonModel().initialize(bad)


def test_keys_of_the_server_are_no_knobs(adapter):
    config = {"parameters": {"EXECUTION_ENV_PATH": {"string_value": "x"}, "seed": {}}}
    assert adapter._parameters(config) == {"seed": ""}


def test_the_process_is_prepared_before_torch_is_loaded(adapter, monkeypatch):
    seen = {}
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setattr(adapter.sys, "setswitchinterval", lambda seconds: seen.update(gil=seconds))

    def build(config, directory):
        environment = adapter.os.environ
        seen.update(omp=environment["GOMP_SPINCOUNT"], gpu=environment["CUDA_VISIBLE_DEVICES"])
        raise ConfigError("far enough")

    monkeypatch.setattr(Engine, "build", staticmethod(build))
    with pytest.raises(TritonModelException, match="far enough"):
        adapter.TritonPythonModel().initialize(arguments(kind="GPU"))
    assert 0 < int(seen["omp"]) < 100_000
    assert seen["gpu"] == "3"
    assert seen["gil"] < 1e-3


def test_readiness_follows_the_engine(model, engine):
    assert model.is_ready()
    engine.healthy = False
    assert not model.is_ready()


def test_log_records_go_to_the_servers_log(model, adapter):
    Logger.lines.clear()
    adapter.logger.warning("value %d", 3)
    adapter.logger.info("fine")
    assert ("warn", "netra_backend.adapter: value 3") in Logger.lines
    assert ("info", "netra_backend.adapter: fine") in Logger.lines


def test_metrics_are_exported_at_the_end(model, engine):
    engine.metrics.generation_tokens.value = 9
    model.finalize()
    calls = model._exporter._families["vllm:generation_tokens_total"].calls
    assert sum(value for _, _, value in calls) == 9
