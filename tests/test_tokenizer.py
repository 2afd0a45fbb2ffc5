"""Tokenizer and Detokenizer on small tokenizers of both families, trained here."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from netra_backend.errors import ConfigError, EngineError, RequestError
from netra_backend.tokenizer import Detokenizer, SamplingDefaults, Tokenizer

LINES = [
    "The quick brown fox jumps over the lazy dog. The end of the story, the very end.",
    "Zażółć gęślą jaźń; naïve café; ½ cup of   sugar\n\n\tdef f(x): return x + 1",
    "你好。世界。你好。 こんにちは世界 안녕하세요 👩‍👩‍👧 🇫🇷 😀😀 🤦🏽‍♂️",
]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SHIPPED = Path(__file__).parents[1] / "checkpoints" / "netra-tiny"


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.add_tokens(["<think>", "two words", "日本"])
    return tokenizer


def sentence_piece(decoder: decoders.Decoder) -> tokenizers.Tokenizer:
    """Llama-2-like: spaces as U+2581, one prepended to a text, unknown characters as byte tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    tokenizer.train_from_iterator(LINES[:2], trainer)
    # Byte tokens were special to the trainer only: in a real vocabulary they are ordinary entries.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair=None, special_tokens=[("<s>", 1)]
    )
    return tokenizer


def llama() -> tokenizers.Tokenizer:
    return sentence_piece(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    )


def metaspace() -> tokenizers.Tokenizer:
    return sentence_piece(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


FAMILIES: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte_level": byte_level,
    "llama": llama,
    "metaspace": metaspace,
}


def save(directory: Path, tokenizer: tokenizers.Tokenizer, **files: object) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(params=[*FAMILIES, "shipped"])
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[Tokenizer, tokenizers.Tokenizer, str]:
    """The tokenizer under test, the library's own, and the family's name."""
    name = request.param
    if name == "shipped":
        if not (SHIPPED / "tokenizer.json").is_file():
            pytest.skip("no shipped checkpoint")
        tmp_path = SHIPPED
    else:
        save(tmp_path, FAMILIES[name]())
    return (
        Tokenizer(tmp_path),
        tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        name,
    )


@pytest.fixture
def plain(tmp_path: Path) -> Tokenizer:
    return Tokenizer(save(tmp_path, byte_level()))


def random_ids(rng: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Valid text, broken bytes, specials and unknown ids in any mixture."""
    ids: list[int] = []
    for _ in range(rng.randint(1, 6)):
        line = tokenizer.encode(rng.choice(LINES))
        first = rng.randrange(len(line))
        ids += rng.choice(
            [
                line[first : first + rng.randint(1, 12)],
                [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randint(1, 4))],
            ]
        )
    return ids


def pushed(detokenizer: Detokenizer, ids: list[int], rng: random.Random) -> list[str]:
    """The texts of pushes of random sizes; finish() is the last."""
    texts, start = [], 0
    while start < len(ids):
        size = rng.choice((0, 1, 1, 2, 5))
        texts.append(detokenizer.push(ids[start : start + size]))
        start += size
    return [*texts, detokenizer.finish()]


# Detokenizer -------------------------------------------------------------------------------------


def test_any_split_gives_the_same_text(pair: tuple[Tokenizer, tokenizers.Tokenizer, str]) -> None:
    tokenizer, _, family = pair
    rng = random.Random(family)
    for round_number in range(300):
        ids = random_ids(rng, tokenizer)
        skip = round_number % 2 == 0
        at_once = Detokenizer(tokenizer, skip_special_tokens=skip)
        whole = at_once.push(ids) + at_once.finish()
        split = pushed(Detokenizer(tokenizer, skip_special_tokens=skip), ids, rng)
        assert "".join(split) == whole
        decoded = tokenizer.decode(ids, skip_special_tokens=skip)
        if family in ("byte_level", "shipped"):
            assert whole == decoded
        # A whole text loses the space that encoding prepended; a continuation has none to lose.
        assert whole.replace(" ", "") == decoded.replace(" ", "")


def test_output_continues_the_prompt(pair: tuple[Tokenizer, tokenizers.Tokenizer, str]) -> None:
    """Prompt and output decoded together: spaces between them are neither lost nor doubled."""
    tokenizer, _, _ = pair
    for line in LINES:
        ids = tokenizer.encode(line)
        for cut in range(2, len(ids)):
            prompt = tokenizer.decode(ids[:cut])
            if not prompt or prompt.endswith("\ufffd"):
                continue
            detokenizer = Detokenizer(tokenizer)
            output = "".join([*map(detokenizer.push, ([i] for i in ids[cut:]))])
            assert prompt + output + detokenizer.finish() == tokenizer.decode(ids) == line


def test_incomplete_characters_are_held_back_and_nothing_else(plain: Tokenizer) -> None:
    detokenizer = Detokenizer(plain)
    single_bytes = {plain.token_bytes(i): i for i in range(plain.vocab_size)}
    first, second = (single_bytes[bytes([byte])] for byte in "ß".encode())
    assert detokenizer.push(plain.encode_plain("aé")) == "aé"
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([second]) == "ß"
    assert detokenizer.push([first]) == ""
    assert detokenizer.push([single_bytes[b"a"]]) == "\ufffda"
    assert detokenizer.push([first]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    with pytest.raises(EngineError):
        detokenizer.push([first])


def cut_at_stop(text: str, stops: tuple[str, ...], include_stop: bool) -> tuple[str, bool]:
    """The obvious way: the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include_stop else end - max(map(len, found))], True
    return text, False


def longest_prefix_at_end(text: str, stops: tuple[str, ...]) -> int:
    lengths = (
        n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n]) and n <= len(text)
    )
    return max(lengths, default=0)


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_in_any_split(plain: Tokenizer, include_stop: bool) -> None:
    rng = random.Random(5)
    letters = {char: plain.encode_plain(char)[0] for char in "ab c"}
    num_stopped = 0
    for _ in range(1500):
        text = "".join(rng.choice("aab c") for _ in range(rng.randint(1, 16)))
        stops = tuple(
            "".join(rng.choice("aab c") for _ in range(rng.randint(1, 5)))
            for _ in range(rng.randint(0, 3))
        )
        detokenizer = Detokenizer(plain, stops, include_stop=include_stop)
        expected, stopped = cut_at_stop(text, stops, include_stop)
        released = ""
        for end, char in enumerate(text, 1):
            released += detokenizer.push([letters[char]])
            if not detokenizer.stopped:
                # Everything is out but what may still turn into a stop string.
                assert released == text[: end - longest_prefix_at_end(text[:end], stops)]
        assert (released + detokenizer.finish(), detokenizer.stopped) == (expected, stopped)
        again = Detokenizer(plain, stops, include_stop=include_stop)
        ids = [letters[char] for char in text]
        assert "".join(pushed(again, ids, rng)) == expected
        num_stopped += stopped
    assert 300 < num_stopped < 1400


def test_after_a_stop_string_nothing_comes(plain: Tokenizer) -> None:
    detokenizer = Detokenizer(plain, ("END",))
    assert detokenizer.push(plain.encode_plain("so EN")) == "so "
    assert detokenizer.push(plain.encode_plain("D. More")) == ""
    assert detokenizer.stopped
    assert detokenizer.push(plain.encode_plain("more")) == detokenizer.finish() == ""


def test_a_stop_string_may_end_in_the_replacement_of_broken_bytes(plain: Tokenizer) -> None:
    broken = next(i for i in range(plain.vocab_size) if plain.token_bytes(i) == b"\xe4")
    detokenizer = Detokenizer(plain, ("x\ufffd",))
    assert detokenizer.push([*plain.encode_plain("ax"), broken]) == "a"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped


def test_a_long_stop_string_costs_no_more_than_its_text(plain: Tokenizer) -> None:
    """Quadratic matching would compare ten thousand million characters here."""
    stop = "a" * 100_000 + "b"
    detokenizer = Detokenizer(plain, (stop,))
    ids = plain.encode_plain("a" * 100_000)
    texts = [detokenizer.push([i]) for i in ids]
    assert "".join(texts) == ""
    assert detokenizer.finish() == stop[:-1]


def test_special_tokens_are_hidden_or_shown(plain: Tokenizer) -> None:
    ids = plain.encode_plain("a<|im_end|>b<think>")
    assert Detokenizer(plain).push(ids) == "ab<think>"
    assert Detokenizer(plain, skip_special_tokens=False).push(ids) == "a<|im_end|>b<think>"
    assert Detokenizer(plain, ("<|im_end|>",), skip_special_tokens=False).push(ids) == "a"


# Tokenizer ---------------------------------------------------------------------------------------


def test_decode_is_the_librarys(pair: tuple[Tokenizer, tokenizers.Tokenizer, str]) -> None:
    tokenizer, library, family = pair
    rng = random.Random(1)
    for round_number in range(400):
        ids = random_ids(rng, tokenizer)
        skip = round_number % 2 == 0
        expected = library.decode(ids, skip_special_tokens=skip)
        # ByteFallback replaces every byte of a run with one broken character; here only the broken.
        if family == "byte_level" or "\ufffd" not in expected:
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_encode_is_the_librarys(pair: tuple[Tokenizer, tokenizers.Tokenizer, str]) -> None:
    tokenizer, library, family = pair
    for line in ["", "<|im_end|> and <s>", *LINES]:
        assert tokenizer.encode(line) == library.encode(line).ids
        assert tokenizer.encode_plain(line) == library.encode(line, add_special_tokens=False).ids
    assert tokenizer.vocab_size == library.get_vocab_size()
    if family in ("llama", "metaspace"):
        assert tokenizer.encode("a")[0] == 1 != tokenizer.encode_plain("a")[0]


def test_token_text_keeps_spaces(pair: tuple[Tokenizer, tokenizers.Tokenizer, str]) -> None:
    tokenizer, _, family = pair
    texts = [tokenizer.token_text(i) for i in tokenizer.encode_plain("The end of the story")]
    assert (
        "".join(texts)
        == ("" if family in ("byte_level", "shipped") else " ") + "The end of the story"
    )
    assert tokenizer.token_text(-1) == tokenizer.token_text(10**9) == ""


def test_text_that_is_not_unicode_is_the_clients_fault(plain: Tokenizer) -> None:
    for encode in (plain.encode, plain.encode_plain):
        with pytest.raises(RequestError, match="Unicode"):
            encode("a\ud800b")


def test_truncation_and_padding_of_the_file_do_not_apply(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert (
        Tokenizer(save(tmp_path, tokenizer)).encode(LINES[0]) == byte_level().encode(LINES[0]).ids
    )


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"generation_config": {"eos_token_id": [2, 0]}, "config": {"eos_token_id": 1}}, {0, 2}),
        ({"generation_config": {"eos_token_id": 0}}, {0}),
        ({"generation_config": {}, "config": {"eos_token_id": 1}}, {1}),
        ({"config": {"text_config": {"eos_token_id": 2}}}, {2}),
        ({"config": {"eos_token_id": None}, "tokenizer_config": {"eos_token": "<|im_end|>"}}, {2}),
        ({"tokenizer_config": {"eos_token": {"content": "<|endoftext|>"}}}, {0}),
        ({"tokenizer_config": {"eos_token": None}}, set()),
    ],
)
def test_eos(tmp_path: Path, files: dict[str, object], expected: set[int]) -> None:
    assert Tokenizer(save(tmp_path, byte_level(), **files)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, SamplingDefaults()),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True},
            SamplingDefaults(0.6, 20, 0.95, None),
        ),
        (
            {"temperature": 0.6, "top_k": 20, "do_sample": False, "repetition_penalty": 1.1},
            SamplingDefaults(repetition_penalty=1.1),
        ),
        ({"temperature": 1, "top_p": None}, SamplingDefaults(temperature=1.0)),
    ],
)
def test_sampling_defaults(
    tmp_path: Path, generation: dict[str, object], expected: SamplingDefaults
) -> None:
    directory = save(tmp_path, byte_level(), generation_config=generation)
    assert Tokenizer(directory).default_sampling == expected


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)
    save(tmp_path, byte_level())
    for content in ("{", "[]"):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ConfigError, match="generation_config"):
            Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.Sequence([decoders.ByteFallback(), decoders.CTC()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip("_", 1, 0)]),
    ],
)
def test_decoders_that_depend_on_neighbours_are_refused(
    tmp_path: Path, decoder: decoders.Decoder | None
) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match="decoder"):
        Tokenizer(save(tmp_path, tokenizer))


def test_metaspace_without_bytes(tmp_path: Path) -> None:
    library = sentence_piece(decoders.Metaspace())
    tokenizer = Tokenizer(save(tmp_path, library))
    ids = library.encode(LINES[0]).ids
    assert tokenizer.decode(ids) == library.decode(ids) == LINES[0]
    assert Detokenizer(tokenizer).push(ids) == " " + LINES[0]
    never = Tokenizer(save(tmp_path, sentence_piece(decoders.Metaspace(prepend_scheme="never"))))
    assert never.decode(ids) == " " + LINES[0]
