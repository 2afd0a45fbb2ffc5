"""The server's Python model: the only file that knows the server.

Turns the server's requests into engine requests and RequestOutputs into its responses; exports
metrics and logs through it. Decides nothing about batching, sampling or when a response goes out.
Invariant: `execute` never raises and never waits; whatever goes wrong reaches the client as an
error whose text begins with a machine-readable code, because over HTTP every error has the same
status.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from netra_backend.config import EngineConfig
from netra_backend.engine import Engine
from netra_backend.errors import ConfigError, EngineError, RequestError
from netra_backend.metrics_export import MetricsExporter
from netra_backend.openmp import SPIN_COUNT
from netra_backend.request import Request, RequestOutput
from netra_backend.request_parser import (
    INPUTS,
    Array,
    ClientRequest,
    RequestParser,
    ResponseOptions,
)
from netra_backend.responder import Responder
from netra_backend.responses import OUTPUTS, response_arrays

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_SECONDS = 5e-5
"""A send() takes the GIL back afterwards: beside one busy Python thread 551 sends/s at the default
interval, 1,835/s at this one (tritonserver 2.51)."""

_DRAIN_SECONDS = 10.0

_RESERVED_PARAMETERS = frozenset(
    {"EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "REPORT_CUSTOM_METRICS"}
)
"""Keys of config.pbtxt `parameters` that belong to the server's Python backend."""


class TritonPythonModel:
    """What the server loads; its methods are called from the server's thread."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Add what config.pbtxt leaves out: tensors, decoupled responses, no batch dimension."""
        present = auto_complete_model_config.as_dict()
        inputs = {entry["name"] for entry in present["input"]}
        outputs = {entry["name"] for entry in present["output"]}
        for name, data_type, length in INPUTS:
            if name not in inputs:
                tensor = {"name": name, "data_type": data_type, "dims": [length], "optional": True}
                auto_complete_model_config.add_input(tensor)
        for name, data_type, length in OUTPUTS:
            if name not in outputs:
                tensor = {"name": name, "data_type": data_type, "dims": [length]}
                auto_complete_model_config.add_output(tensor)
        auto_complete_model_config.set_model_transaction_policy({"decoupled": True})
        auto_complete_model_config.set_max_batch_size(0)
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Load everything. Raises TritonModelException with a readable reason if the deployment is
        wrong."""
        log_handler = _ServerLogHandler()
        logging.getLogger("netra_backend").addHandler(log_handler)
        logging.getLogger("netra_backend").setLevel(logging.INFO)
        try:
            self._start(args)
        except ConfigError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def _start(self, args: dict[str, str]) -> None:
        model_config = json.loads(args["model_config"])
        if not pb_utils.using_decoupled_model_transaction_policy(model_config):
            raise ConfigError("config.pbtxt must say model_transaction_policy { decoupled: true }")
        _prepare_process(args)
        config = EngineConfig.from_parameters(_parameters(model_config))
        logger.info("loading %s", config.checkpoint)
        self._engine = Engine.build(config, Path(args["model_repository"]))
        self._parser = RequestParser(self._engine.tokenizer, config)
        self._config = config
        self._ids = itertools.count()
        labels = {"model": args["model_name"], "version": args["model_version"]}
        self._exporter = MetricsExporter(self._engine.metrics, pb_utils.MetricFamily, labels)
        self._responder = Responder(
            config,
            self._engine.outputs,
            abort=self._engine.abort,
            is_healthy=lambda: self._engine.healthy,
            tick=self._export_metrics,
        )
        self._export_metrics()
        self._engine.start()
        self._responder.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the engine and return at once; the responder answers them."""
        for request in requests:
            self._accept(request)

    def _accept(self, request: Any) -> None:
        sink = ServerSink(request.get_response_sender(), self._engine.tokenizer.token_text)
        request_id = f"{request.request_id()}#{next(self._ids)}"
        try:
            client = self._parser.parse(_tensors(request), request.parameters())
            sink.options = client.options
            self._responder.register(request_id, sink, stream=client.options.stream)
            self._engine.add(self._engine_request(request_id, client, request.timeout()))
        except Exception as error:
            # The root of the server's thread: raising here would leave the request without an answer.
            self._responder.refuse(request_id, sink, error)

    def _engine_request(self, request_id: str, client: ClientRequest, timeout_us: int) -> Request:
        now = time.monotonic()
        limits = [
            self._config.request_timeout_seconds,
            client.timeout_seconds or 0.0,
            timeout_us / 1e6,
        ]
        seconds = min((limit for limit in limits if limit > 0), default=None)
        return Request(
            request_id=request_id,
            prompt_token_ids=client.prompt_token_ids,
            params=client.params,
            bad_word_ids=client.bad_word_ids,
            arrival_time=now,
            deadline=None if seconds is None else now + seconds,
            priority=client.priority,
            cache_salt=client.cache_salt,
        )

    def is_ready(self) -> bool:
        """Asked by servers from 26.03 on: false once the engine has failed."""
        return self._engine.healthy

    def finalize(self) -> None:
        """Let what is live finish, fail the rest, join both threads."""
        self._engine.shutdown(_DRAIN_SECONDS)
        self._responder.close(_DRAIN_SECONDS)
        self._export_metrics()

    def _export_metrics(self) -> None:
        try:
            self._exporter.export()
        except pb_utils.TritonModelException as error:
            logger.warning("metrics were not exported: %s", error)


class ServerSink:
    """One request's response sender of the server."""

    def __init__(self, sender: Any, token_text: Any) -> None:
        self._sender = sender
        self._token_text = token_text
        self.options = ResponseOptions()

    def send(self, output: RequestOutput, *, final: bool) -> None:
        """One data response; the last one carries the final flag itself."""
        arrays = response_arrays(output, self.options, self._token_text)
        tensors = [pb_utils.Tensor(name, array) for name, array in arrays]
        self._deliver(pb_utils.InferenceResponse(output_tensors=tensors), final=final)

    def fail(self, error: Exception) -> None:
        """The final response of a request that failed."""
        response = pb_utils.InferenceResponse(output_tensors=[], error=_server_error(error))
        self._deliver(response, final=True)

    def is_cancelled(self) -> bool:
        """A round trip to the server."""
        try:
            return bool(self._sender.is_cancelled())
        except pb_utils.TritonModelException:
            return False

    def _deliver(self, response: Any, *, final: bool) -> None:
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        try:
            self._sender.send(response, flags=flags)
        except (pb_utils.TritonModelException, RuntimeError) as error:
            raise EngineError(f"the server refused a response: {error}") from error


class _ServerLogHandler(logging.Handler):
    """Writes this package's log records into the server's log."""

    def emit(self, record: logging.LogRecord) -> None:
        text = f"{record.name}: {self.format(record)}"
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        elif record.levelno >= logging.INFO:
            pb_utils.Logger.log_info(text)
        else:
            pb_utils.Logger.log_verbose(text)


def _prepare_process(args: dict[str, str]) -> None:
    """Settings that must be in place before torch is imported."""
    sys.setswitchinterval(_SWITCH_INTERVAL_SECONDS)
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    if args["model_instance_kind"] == "GPU":
        os.environ["CUDA_VISIBLE_DEVICES"] = args["model_instance_device_id"]


def _parameters(model_config: dict[str, Any]) -> dict[str, str]:
    entries = model_config.get("parameters", {}).items()
    own = ((key, entry) for key, entry in entries if key not in _RESERVED_PARAMETERS)
    return {key: entry.get("string_value", "") for key, entry in own}


def _tensors(request: Any) -> dict[str, Array]:
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def _server_error(error: Exception) -> Any:
    if isinstance(error, RequestError):
        return pb_utils.TritonError(str(error), _error_code(error.code))
    logger.error("a request failed", exc_info=error)
    if isinstance(error, EngineError):
        return pb_utils.TritonError(f"[unhealthy] {error}", pb_utils.TritonError.UNAVAILABLE)
    return pb_utils.TritonError(f"[internal] {error!r}", pb_utils.TritonError.INTERNAL)


def _error_code(code: str) -> int:
    codes: dict[str, int] = {
        "queue_full": pb_utils.TritonError.UNAVAILABLE,
        "shutting_down": pb_utils.TritonError.UNAVAILABLE,
        "cancelled": pb_utils.TritonError.CANCELLED,
        "timeout": pb_utils.TritonError.CANCELLED,
    }
    invalid: int = pb_utils.TritonError.INVALID_ARG
    return codes.get(code, invalid)
