"""ChatTemplate: a conversation to prompt text, with the Jinja template that a checkpoint ships.

Knows no token ids. Renders as transformers does (sandboxed, same filters and globals), and turns
what clients send besides strings (text parts, arguments as JSON) into what templates expect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from netra_backend.errors import ConfigError, RequestError

_GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""`{% generation %}` marks what an assistant says, for training; here it is `{% if true %}`."""

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What rendering raises for messages of a shape that the template does not expect."""


class ChatTemplate:
    """A compiled template. Raises ConfigError if `source` is not valid Jinja."""

    @classmethod
    def load(
        cls, directory: Path, config: Mapping[str, object], special_tokens: Mapping[str, str]
    ) -> ChatTemplate | None:
        """From chat_template.jinja, else `chat_template` of tokenizer_config.json; None without."""
        path = directory / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, list):
            entries = [entry for entry in source if isinstance(entry, dict)]
            source = {entry.get("name"): entry.get("template") for entry in entries}.get("default")
        return cls(source, special_tokens) if isinstance(source, str) else None

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = special_tokens
        try:
            self._template = environment.from_string(_GENERATION_TAG.sub(_as_if_tag, source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"chat template: {error}") from error
        self._takes_parts = self._probe_parts()

    def render(
        self,
        messages: list[dict[str, object]],
        tools: list[object] | None,
        template_kwargs: dict[str, object],
    ) -> str:
        """The prompt text. Raises RequestError for messages that are malformed or refused."""
        if not isinstance(messages, list) or not messages:
            raise RequestError("invalid_request", "messages must be a list of at least one message")
        reserved = {"messages", "tools"}.intersection(template_kwargs)
        if reserved:
            raise RequestError(
                "invalid_request", f"chat template arguments: {min(reserved)} is reserved"
            )
        variables = {
            **self._special_tokens,
            "add_generation_prompt": True,
            **template_kwargs,
            "messages": [self._message(message) for message in messages],
            "tools": tools or None,
        }
        try:
            return self._template.render(variables)
        except _TEMPLATE_FAULTS as error:
            raise RequestError(
                "invalid_request", f"messages: the chat template says: {error}"
            ) from error

    def _probe_parts(self) -> bool:
        """Whether content may be a list of text parts: other templates fail, or print the list."""
        probe = [{"role": "user", "content": [{"type": "text", "text": "probe"}]}]
        try:
            text = self._template.render({**self._special_tokens, "messages": probe, "tools": None})
        except _TEMPLATE_FAULTS:
            return False
        return "probe" in text and "'probe'" not in text

    def _message(self, message: object) -> dict[str, object]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise RequestError("invalid_request", "every message must be an object with a role")
        found = {key: value for key, value in message.items() if value is not None}
        if "content" in found:
            found["content"] = self._content(found["content"])
        if isinstance(found.get("tool_calls"), list):
            found["tool_calls"] = [_with_parsed_arguments(call) for call in found["tool_calls"]]
        return found

    def _content(self, content: object) -> object:
        if isinstance(content, str):
            return content
        if not isinstance(content, list):
            raise RequestError(
                "invalid_request", "content must be a string or a list of text parts"
            )
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind != "text" or not isinstance(text, str):
                raise RequestError(
                    "invalid_request",
                    f"content part of type {kind!r}: this backend serves text only",
                )
            texts.append(text)
        return content if self._takes_parts else "\n".join(texts)


def _with_parsed_arguments(call: object) -> object:
    """OpenAI clients send a call's arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": parsed}}


def _as_if_tag(match: re.Match[str]) -> str:
    return f"{match[1]}{'endif' if match[2] else 'if true'}{match[3]}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """json.dumps, because Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
