"""Input tensors and request parameters of one inference request, to a ClientRequest.

Knows the dialect (names, shapes, what excludes what, defaults) as numpy arrays and JSON text; not
the server's objects and not the engine. Everything that a client can get wrong raises RequestError
here, so a ClientRequest is ready for the engine except for limits that only the engine knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from netra_backend.config import EngineConfig
from netra_backend.errors import RequestError
from netra_backend.request import SamplingParams
from netra_backend.sampling_options import (
    IGNORED_PARAMETERS,
    SamplingOptions,
    coerce_bool,
    coerce_int,
    parse_json,
    parse_options,
)
from netra_backend.tokenizer import Tokenizer

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

INPUTS: tuple[tuple[str, str, int], ...] = (
    ("text_input", "TYPE_STRING", 1),
    ("messages", "TYPE_STRING", 1),
    ("input_ids", "TYPE_INT32", -1),
    ("tools", "TYPE_STRING", 1),
    ("chat_template_kwargs", "TYPE_STRING", 1),
    ("image", "TYPE_STRING", -1),
    ("stream", "TYPE_BOOL", 1),
    ("sampling_parameters", "TYPE_STRING", 1),
    ("stop", "TYPE_STRING", -1),
    ("stop_token_ids", "TYPE_INT32", -1),
    ("bad_words", "TYPE_STRING", -1),
    ("exclude_input_in_output", "TYPE_BOOL", 1),
    ("return_finish_reason", "TYPE_BOOL", 1),
    ("return_cumulative_logprob", "TYPE_BOOL", 1),
    ("return_logprobs", "TYPE_BOOL", 1),
    ("return_num_input_tokens", "TYPE_BOOL", 1),
    ("return_num_output_tokens", "TYPE_BOOL", 1),
    ("return_num_cached_tokens", "TYPE_BOOL", 1),
    ("return_perf_metrics", "TYPE_BOOL", 1),
)
"""Name, type and length (-1: any) of every input tensor; all are optional to the server."""

_LIST_INPUTS = ("stop", "stop_token_ids", "bad_words")
_FLAGS = tuple(name for name, data_type, _ in INPUTS if data_type == "TYPE_BOOL")


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the client wants to read; `echo` is what the single answer starts with."""

    stream: bool = False
    echo: str = ""
    finish_reason: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    num_cached_tokens: bool = False
    perf_metrics: bool = False


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One checked request: the prompt in token ids, how to sample, what to answer."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    bad_word_ids: tuple[tuple[int, ...], ...]
    options: ResponseOptions
    priority: int
    timeout_seconds: float | None
    cache_salt: str = ""


class RequestParser:
    """Turns tensors into ClientRequests with one deployment's tokenizer and defaults."""

    def __init__(self, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._tokenizer = tokenizer
        self._defaults = _sampling_defaults(tokenizer, config)

    def parse(self, tensors: Tensors, parameters: str) -> ClientRequest:
        """`parameters`: the server's request parameters as JSON. Flags may come through them too; the
        rest counts as sampling parameters if there is no `sampling_parameters` input.

        Raises RequestError (`invalid_request`, `unknown_parameter`).
        """
        if "image" in tensors:
            raise RequestError("invalid_request", "image: this backend serves text only")
        others = _json_object("parameters", parameters or "{}")
        flags = {name: coerce_bool(name, others.pop(name)) for name in _FLAGS if name in others}
        flags |= {name: bool(_item(tensors, name)) for name in _FLAGS if name in tensors}
        options = self._sampling(tensors, others, flags)
        prompt_token_ids, text = self._prompt(tensors)
        return ClientRequest(
            prompt_token_ids=prompt_token_ids,
            params=options.params,
            bad_word_ids=self._bad_word_ids(options.params.bad_words),
            options=self._response_options(flags, "text_input" in tensors, prompt_token_ids, text),
            priority=options.priority,
            timeout_seconds=options.timeout_seconds,
            cache_salt=options.cache_salt,
        )

    def _sampling(
        self, tensors: Tensors, parameters: dict[str, object], flags: Mapping[str, bool]
    ) -> SamplingOptions:
        if "sampling_parameters" in tensors:
            text = _string(tensors, "sampling_parameters")
            given = _json_object("sampling_parameters", text)
        else:
            given = {k: value for k, value in parameters.items() if k not in IGNORED_PARAMETERS}
        for name in _LIST_INPUTS:
            if name in tensors:
                given[name] = _strings_or_ints(tensors, name)
        if flags.get("return_cumulative_logprob") and given.get("logprobs") is None:
            given["logprobs"] = 0
        return parse_options(given, self._defaults)

    def _prompt(self, tensors: Tensors) -> tuple[tuple[int, ...], str | None]:
        given = [name for name in ("text_input", "messages", "input_ids") if name in tensors]
        if len(given) != 1:
            shown = " and ".join(given) if given else "none"
            raise RequestError(
                "invalid_request", f"give one of text_input, messages and input_ids, not {shown}"
            )
        if given == ["input_ids"]:
            return _token_ids(tensors["input_ids"]), None
        if given == ["text_input"]:
            text = _string(tensors, "text_input")
            return tuple(self._tokenizer.encode(text)), text
        text = self._render(tensors)
        return tuple(self._tokenizer.encode_plain(text)), text

    def _render(self, tensors: Tensors) -> str:
        messages = parse_json("messages", _string(tensors, "messages"))
        tools = parse_json("tools", _string(tensors, "tools")) if "tools" in tensors else None
        if tools is not None and not isinstance(tools, list):
            raise RequestError("invalid_request", "tools must be a JSON list")
        kwargs: dict[str, object] | None = None
        if "chat_template_kwargs" in tensors:
            kwargs = _json_object("chat_template_kwargs", _string(tensors, "chat_template_kwargs"))
        return self._tokenizer.apply_chat_template(messages, tools, kwargs)

    def _bad_word_ids(self, bad_words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Each word as it reads at the start of a text and after a space (as in vLLM)."""
        found: dict[tuple[int, ...], None] = {}
        for word in bad_words:
            bare = tuple(self._tokenizer.encode_plain(word.lstrip()))
            spaced = tuple(self._tokenizer.encode_plain(" " + word.lstrip()))
            if bare:
                found[bare] = None
            if spaced and spaced[:1] != bare[:1] and len(spaced) == len(bare):
                found[spaced] = None
        return tuple(found)

    def _response_options(
        self,
        flags: Mapping[str, bool],
        is_plain_text: bool,
        prompt_token_ids: tuple[int, ...],
        text: str | None,
    ) -> ResponseOptions:
        stream = flags.get("stream", False)
        # Only a plain text prompt is echoed unasked: nobody wants a rendered template back.
        exclude = flags.get("exclude_input_in_output", stream or not is_plain_text)
        if stream and not exclude:
            reason = "When streaming, `exclude_input_in_output` = False is not allowed."
            raise RequestError("invalid_request", reason)
        echo = "" if exclude else text
        return ResponseOptions(
            stream=stream,
            echo=self._tokenizer.decode(prompt_token_ids) if echo is None else echo,
            finish_reason=flags.get("return_finish_reason", False),
            cumulative_logprob=flags.get("return_cumulative_logprob", False),
            logprobs=flags.get("return_logprobs", False),
            num_input_tokens=flags.get("return_num_input_tokens", False),
            num_output_tokens=flags.get("return_num_output_tokens", False),
            num_cached_tokens=flags.get("return_num_cached_tokens", False),
            perf_metrics=flags.get("return_perf_metrics", False),
        )


def _sampling_defaults(tokenizer: Tokenizer, config: EngineConfig) -> dict[str, object]:
    """The deployment's values where set, else the checkpoint's, else those of SamplingParams."""
    checkpoint = tokenizer.default_sampling
    chosen: dict[str, object | None] = {
        "max_tokens": config.default_max_tokens,
        "temperature": checkpoint.temperature,
        "top_p": checkpoint.top_p,
        "top_k": checkpoint.top_k,
        "repetition_penalty": checkpoint.repetition_penalty,
    }
    if config.default_temperature >= 0:
        chosen["temperature"] = config.default_temperature
    if config.default_top_p > 0:
        chosen["top_p"] = config.default_top_p
    if config.default_top_k >= 0:
        chosen["top_k"] = config.default_top_k
    return {name: value for name, value in chosen.items() if value is not None}


def _item(tensors: Tensors, name: str) -> object:
    array = tensors[name]
    if array.size != 1:
        raise RequestError("invalid_request", f"{name} must hold one element, not {array.size}")
    item: object = array.reshape(-1)[0]
    return item


def _string(tensors: Tensors, name: str) -> str:
    return _decode(name, _item(tensors, name))


def _decode(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, bytes):
        raise RequestError("invalid_request", f"{name} must be a string tensor")
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError("invalid_request", f"{name} is not UTF-8: {error}") from error


def _token_ids(array: Array) -> tuple[int, ...]:
    if array.dtype.kind not in "iu":
        raise RequestError("invalid_request", f"input_ids must hold integers, not {array.dtype}")
    return tuple(array.reshape(-1).tolist())


def _strings_or_ints(tensors: Tensors, name: str) -> list[object]:
    items = tensors[name].reshape(-1)
    if name == "stop_token_ids":
        return [coerce_int(name, int(item)) for item in items]
    return [_decode(name, item) for item in items]


def _json_object(name: str, text: str) -> dict[str, object]:
    value = parse_json(name, text)
    if not isinstance(value, dict):
        raise RequestError(
            "invalid_request", f"{name} must be a JSON object, not {type(value).__name__}"
        )
    return value
