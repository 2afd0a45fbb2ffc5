"""A client's sampling options, as JSON values or strings, to SamplingParams.

Knows names, types and defaults; neither the server nor the model. Values that arrive as strings
("max_tokens": "128", as load generators send them) are coerced; a boolean is never taken for a
number. An unknown name is an error that lists the known ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from netra_backend.errors import RequestError
from netra_backend.request import SamplingParams

IGNORED_PARAMETERS = frozenset(
    {"id", "priority", "timeout", "sequence_id", "sequence_start", "sequence_end"}
)
"""Reserved words of the server's protocol: through HTTP generate they arrive as plain request
parameters."""

_STRUCTURED = "structured output is not supported yet"
_NOT_SUPPORTED = {
    "structured_outputs": _STRUCTURED,
    "response_format": _STRUCTURED,
    "guided_json": _STRUCTURED,
    "guided_regex": _STRUCTURED,
    "guided_choice": _STRUCTURED,
    "guided_grammar": _STRUCTURED,
    "guided_decoding": _STRUCTURED,
    "guided_decoding_guide": _STRUCTURED,
    "guided_decoding_guide_type": _STRUCTURED,
    "lora_name": "LoRA adapters are not supported",
    "prompt_logprobs": "log-probabilities of the prompt are not supported",
    "use_beam_search": "beam search is not supported",
}

_INT64 = (-(2**63), 2**63 - 1)
_UINT64_MAX = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What `sampling_parameters` (or the request parameters) said.

    `priority`: lower is served first. `timeout_seconds`: the client's own limit for the whole
    request. `cache_salt`: only requests with the same one share prefixes.
    """

    params: SamplingParams
    priority: int = 0
    timeout_seconds: float | None = None
    cache_salt: str = ""


def known_options() -> tuple[str, ...]:
    """Every name a client may use."""
    return (*SamplingParams.names(), "priority", "timeout_seconds", "cache_salt")


def parse_json(name: str, text: str) -> Any:
    """`text` as JSON. Raises RequestError that names the input."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError("invalid_request", f"{name} is not valid JSON: {error}") from error


def parse_options(options: Mapping[str, object], defaults: Mapping[str, object]) -> SamplingOptions:
    """Check and coerce `options`; `defaults` (already typed) fill what is absent or null.

    Raises RequestError: `unknown_parameter` for a name that is not known, `invalid_request` for a
    value.
    """
    values: dict[str, Any] = dict(defaults)
    for name, value in options.items():
        if name in _NOT_SUPPORTED:
            if value not in (None, False, "", [], {}):
                raise RequestError("invalid_request", f"{name}: {_NOT_SUPPORTED[name]}")
        elif name not in _COERCIONS:
            raise RequestError(
                "unknown_parameter",
                f"unknown sampling parameter {name!r}; known: {', '.join(known_options())}",
            )
        elif value is not None:
            values[name] = _COERCIONS[name](name, value)
    priority = values.pop("priority", 0)
    timeout_seconds = values.pop("timeout_seconds", None)
    cache_salt = values.pop("cache_salt", "")
    return SamplingOptions(SamplingParams(**values), priority, timeout_seconds, cache_salt)


def _invalid(name: str, value: object, expected: str) -> RequestError:
    text = repr(value)
    shown = text if len(text) <= 80 else text[:80] + "..."
    return RequestError("invalid_request", f"{name}={shown} must be {expected}")


def coerce_int(name: str, value: object) -> int:
    """A 64-bit integer from a JSON number or a string that holds one."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = int(value)
        if isinstance(value, float) and number != value:
            raise ValueError
    except (ValueError, OverflowError) as error:
        raise _invalid(name, value, "an integer") from error
    if not _INT64[0] <= number <= _INT64[1]:
        raise _invalid(name, value, "a 64-bit integer")
    return number


def _coerce_seed(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and _INT64[1] < value <= _UINT64_MAX:
        return value
    return coerce_int(name, value)


def coerce_float(name: str, value: object) -> float:
    """A finite or infinite number (never NaN) from a JSON number or a string that holds one."""
    try:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise _invalid(name, value, "a number") from error
    if number != number:
        raise _invalid(name, value, "a number")
    return number


def _coerce_string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise _invalid(name, value, "a string")
    return value


def coerce_bool(name: str, value: object) -> bool:
    """A JSON boolean, or true, false, 1, 0 in a string."""
    known = {"true": True, "false": False, "1": True, "0": False}
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in known:
        return known[value.strip().lower()]
    raise _invalid(name, value, "true or false")


def _coerce_timeout(name: str, value: object) -> float:
    seconds = coerce_float(name, value)
    if not 0 < seconds < float("inf"):
        raise _invalid(name, value, "a positive number of seconds")
    return seconds


def _coerce_strings(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
        return tuple(value)
    raise _invalid(name, value, "a string or a list of strings")


def _coerce_token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(name, value)
    items = value if isinstance(value, list | tuple) else [value]
    token_ids = tuple(coerce_int(name, item) for item in items)
    if any(token_id < 0 for token_id in token_ids):
        raise _invalid(name, value, "token ids, none negative")
    return token_ids


def _coerce_logit_bias(name: str, value: object) -> dict[int, float]:
    if isinstance(value, str):
        value = parse_json(name, value)
    if not isinstance(value, dict):
        raise _invalid(name, value, "an object from token id to bias")
    return {coerce_int(name, key): coerce_float(name, bias) for key, bias in value.items()}


_COERCIONS: dict[str, Callable[[str, object], object]] = {
    "max_tokens": coerce_int,
    "min_tokens": coerce_int,
    "temperature": coerce_float,
    "top_k": coerce_int,
    "top_p": coerce_float,
    "min_p": coerce_float,
    "repetition_penalty": coerce_float,
    "presence_penalty": coerce_float,
    "frequency_penalty": coerce_float,
    "logit_bias": _coerce_logit_bias,
    "bad_words": _coerce_strings,
    "stop": _coerce_strings,
    "stop_token_ids": _coerce_token_ids,
    "include_stop_str_in_output": coerce_bool,
    "ignore_eos": coerce_bool,
    "skip_special_tokens": coerce_bool,
    "seed": _coerce_seed,
    "logprobs": coerce_int,
    "n": coerce_int,
    "priority": coerce_int,
    "timeout_seconds": _coerce_timeout,
    "cache_salt": _coerce_string,
}
