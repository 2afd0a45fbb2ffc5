"""Text <-> token ids: Tokenizer for whole texts, Detokenizer for a stream with stop strings.

Knows the tokenizer files of a Hugging Face checkpoint; no torch, no engine, no server. Decoding
works in bytes: an id stands for the same bytes wherever it occurs, so any split of the ids gives
the same text and a token costs O(1). Tokenizers for which that does not hold are refused.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers

from netra_backend.chat_template import ChatTemplate
from netra_backend.errors import ConfigError, EngineError, RequestError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values that generation_config.json recommends; None where it has none, or does not sample."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None


class Tokenizer:
    """Tokenizer of one checkpoint directory; any thread may use it.

    Raises ConfigError if tokenizer.json is missing, a file is not valid, or the decoder is unknown.
    """

    def __init__(self, directory: Path) -> None:
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        model = _read_json(directory / "config.json")
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces = _Pieces.from_decoder(self._tokenizer.decoder)
        self._piece_cache: dict[int, bytes] = {}
        self.vocab_size = 1 + max(self._tokenizer.get_vocab_size(False) - 1, *added, 0)
        special_tokens = _special_tokens(config)
        self.eos_token_ids = self._eos_token_ids(generation, model, special_tokens)
        self.default_sampling = _sampling_defaults(generation)
        self._chat_template = ChatTemplate.load(directory, config, special_tokens)

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the checkpoint adds.

        Raises RequestError for text that is not valid Unicode.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_plain(self, text: str) -> list[int]:
        """Token ids with nothing added: for rendered chat templates, bad words, continuations."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise RequestError("invalid_request", "the text is not valid Unicode") from error
        ids: list[int] = encoding.ids
        return ids

    def apply_chat_template(
        self,
        messages: list[dict[str, object]],
        tools: list[object] | None = None,
        template_kwargs: dict[str, object] | None = None,
    ) -> str:
        """The prompt text of a conversation; it holds its special tokens, so use `encode_plain`.

        `add_generation_prompt` is true unless `template_kwargs` says otherwise. Raises RequestError
        if the checkpoint has no template or the template refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                "invalid_request", "this model has no chat template: send plain text"
            )
        return self._chat_template.render(messages, tools, template_kwargs or {})

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence; U+FFFD for invalid UTF-8, nothing for unknown ids."""
        kept = [i for i in token_ids if not (skip_special_tokens and i in self._special_ids)]
        data = b"".join(map(self.token_bytes, kept))
        known = (i for i in kept if self.token_bytes(i))
        first = "".join(self._tokenizer.id_to_token(i) or "" for i in islice(known, 1))
        return self._pieces.without_dummy_prefix(data, first).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; U+FFFD where it is only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text; nothing for an id outside the vocabulary."""
        piece = self._piece_cache.get(token_id)
        if piece is None:
            known = 0 <= token_id < self.vocab_size
            token = self._tokenizer.id_to_token(token_id) if known else None
            piece = self._pieces.to_bytes(token) if token else b""
            self._piece_cache[token_id] = piece
        return piece

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` hides the token."""
        return token_id in self._special_ids

    def _eos_token_ids(
        self,
        generation: Mapping[str, object],
        model: Mapping[str, object],
        special_tokens: Mapping[str, str],
    ) -> frozenset[int]:
        text_model = model.get("text_config")
        nested = text_model.get("eos_token_id") if isinstance(text_model, dict) else None
        for value in (generation.get("eos_token_id"), model.get("eos_token_id"), nested):
            if isinstance(value, int):
                return frozenset((value,))
            if isinstance(value, list) and value:
                return frozenset(int(i) for i in value)
        token_id = self._tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        return frozenset() if token_id is None else frozenset((token_id,))


class Detokenizer:
    """Text of one request's output, token by token; ids may come in any grouping.

    The ids continue a prompt, so a leading space of the first word stays (`Tokenizer.decode` drops
    it where the tokenizer prepends one to whole texts). When a stop string is complete, `stopped`
    is set and the text ends before it, or after it with `include_stop`; of several, the one
    completed first counts, and the longest of those.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._include_stop = include_stop
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = [_StopMatcher(text) for text in stop if text]
        self._held = ""
        self._finished = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; return the text that is certain now, "" once stopped.

        Raises EngineError after finish.
        """
        if self._finished:
            raise EngineError("Detokenizer.push after finish")
        if self.stopped:
            return ""
        if self._skip_special_tokens:
            token_ids = (i for i in token_ids if not self._tokenizer.is_special(i))
        data = b"".join(map(self._tokenizer.token_bytes, token_ids))
        return self._release(self._utf8.decode(data))

    def finish(self) -> str:
        """The text still held back: a partial character (as U+FFFD), the start of a stop string."""
        if self._finished or self.stopped:
            self._finished = True
            return ""
        self._finished = True
        released = self._release(self._utf8.decode(b"", final=True))
        rest, self._held = self._held, ""
        return released + rest

    def _release(self, text: str) -> str:
        if not self._held and not any(matcher.text[0] in text for matcher in self._stops):
            return text
        held = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            length = max([matcher.advance(char) for matcher in self._stops])
            if length:
                self.stopped, self._held = True, ""
                return held[: end if self._include_stop else end - length]
        num_held = max(matcher.num_matched for matcher in self._stops)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]


class _StopMatcher:
    """Knuth-Morris-Pratt: how much of `text` the characters seen so far end with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._fallback[length - 1]
            length += text[i] == text[length]
            self._fallback[i] = length

    def advance(self, char: str) -> int:
        """Take one character; return the length of the stop string if it is complete, else 0."""
        while self.num_matched and self.text[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += self.text[self.num_matched] == char
        return self.num_matched if self.num_matched == len(self.text) else 0


@dataclass(frozen=True, slots=True)
class _Pieces:
    """How vocabulary entries become bytes, read from `decoder` of tokenizer.json.

    Two families: ByteLevel (each character is a byte), and Metaspace or Replace + ByteFallback
    (SentencePiece: U+2581 is a space, `<0x0A>` a byte). `num_strip` spaces at the start of a whole
    text, or those of its first token (`strip_first_token`), are the prefix that encoding added.
    """

    byte_of_char: Mapping[str, int] | None = None
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    num_strip: int = 0
    strip_first_token: bool = False

    @classmethod
    def from_decoder(cls, decoder: tokenizers.decoders.Decoder | None) -> _Pieces:
        """Raises ConfigError for a decoder of another family."""
        state: dict[str, Any] = json.loads(
            decoder.__getstate__() if decoder else '{"type": "none"}'
        )
        steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(byte_of_char=_byte_of_char())
        spaces = [step for step in steps if step["type"] == "Metaspace"]
        replaces = [step for step in steps if step["type"] == "Replace"]
        strips = [step for step in steps if step["type"] == "Strip"]
        known = {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}.issuperset(kinds)
        simple = all("String" in step["pattern"] for step in replaces) and all(
            step["content"] == " " and step["stop"] == 0 for step in strips
        )
        if not known or not simple or len(strips) > 1 or len(spaces) > 1:
            raise ConfigError(f"tokenizer.json: decoder {' + '.join(kinds)} is not supported")
        return cls(
            replacements=(
                *((step["replacement"], " ") for step in spaces),
                *((step["pattern"]["String"], step["content"]) for step in replaces),
            ),
            byte_fallback="ByteFallback" in kinds,
            num_strip=strips[0]["start"] if strips else 0,
            strip_first_token=any(step["prepend_scheme"] != "never" for step in spaces),
        )

    def to_bytes(self, token: str) -> bytes:
        if self.byte_of_char is not None:
            # An added token may hold characters outside the table (a space): then it is plain text.
            found = [self.byte_of_char.get(char) for char in token]
            return token.encode() if None in found else bytes(b for b in found if b is not None)
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()

    def without_dummy_prefix(self, data: bytes, first_token: str) -> bytes:
        """`data`, which starts with `first_token`, without what encoding prepends to a text."""
        if self.strip_first_token:
            bare = self.to_bytes(first_token.replace(self.replacements[0][0], ""))
            return bare + data[len(self.to_bytes(first_token)) :]
        for _ in range(self.num_strip):
            data = data.removeprefix(b" ")
        return data


def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 is itself, the other bytes are U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigError(f"no tokenizer.json in {path.parent}")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise ConfigError(f"{path}: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _read_json(path: Path) -> dict[str, object]:
    """The object in a file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return value


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """`bos_token` and the like, which are strings or objects with their `content`."""
    found: dict[str, str] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _sampling_defaults(generation: Mapping[str, object]) -> SamplingDefaults:
    def number(key: str) -> float | None:
        value = generation.get(key)
        valid = isinstance(value, int | float) and not isinstance(value, bool)
        return float(value) if valid and isinstance(value, int | float) else None

    penalty = number("repetition_penalty")
    if generation.get("do_sample") is False:
        return SamplingDefaults(repetition_penalty=penalty)
    top_k = number("top_k")
    return SamplingDefaults(
        temperature=number("temperature"),
        top_k=None if top_k is None else int(top_k),
        top_p=number("top_p"),
        repetition_penalty=penalty,
    )
