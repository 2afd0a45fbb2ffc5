"""Small random checkpoints in Hugging Face layout for tests: real files, real loading code, random weights.

States are made to remember: the default initialisation of Gated DeltaNet forgets within a token, which hides
every fault of state handling. A_log and dt_bias are therefore set as Mamba sets them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

VOCAB_SIZE = 512
BLOCK = 128
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
_SHARPNESS = 6.0
"""Factor on the random output head: flat logits would make equality of argmax a matter of rounding."""


def make_random_qwen(directory: Path, seed: int = 0, **changes: object) -> Path:
    """A qwen3_5_moe of 2.2M parameters in the stacked layout: 3 Gated DeltaNet layers and 1 attention layer.

    `changes` to its config must leave an attention layer at the end.
    """
    torch.manual_seed(seed)
    sizes: dict[str, object] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 4096, "tie_word_embeddings": False,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_interleaved": True, "mrope_section": [3, 3, 2],
        },
        "bos_token_id": None, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 0,
    } | changes  # fmt: skip
    config = Qwen3_5MoeTextConfig(**sizes, num_hidden_layers=len(sizes["layer_types"]))  # type: ignore[arg-type]
    model = Qwen3_5MoeForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _set_parameter(name, parameter)
    model.save_pretrained(directory)
    _stack_experts(directory / "model.safetensors")
    _write_tokenizer(directory)
    return directory


def make_random_mtp(directory: Path, seed: int = 0, **changes: object) -> Path:
    """make_random_qwen with an MTP layer (`mtp.*`), stacked like the others."""
    make_random_qwen(directory, seed, **changes)
    torch.manual_seed(seed + 1)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    raw = json.loads((directory / "config.json").read_text())
    last = f"model.layers.{len(raw['layer_types']) - 1}."
    layer = {
        name.replace(last, "mtp.layers.0."): torch.empty_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    hidden = tensors["model.norm.weight"].shape[0]
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        layer[f"mtp.{name}.weight"] = torch.zeros(hidden)
    layer["mtp.fc.weight"] = torch.empty(hidden, 2 * hidden)
    for name, tensor in layer.items():
        if "norm" in name:
            tensor.zero_()
        _set_parameter(name, tensor)
    save_file(tensors | layer, path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return directory


def make_random_llama(directory: Path, seed: int = 0) -> Path:
    """A llama of 4 layers with grouped queries and tied embeddings."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=96, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=EOS_TOKEN_ID, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _set_parameter(name, parameter)
    model.save_pretrained(directory)
    _write_tokenizer(directory)
    return directory


def make_fp8(source: Path, directory: Path, scale_dtype: torch.dtype = torch.bfloat16) -> Path:
    """`source` in the per-expert FP8 layout, names and modules as in the published FP8 checkpoints."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for part_name, part in _split_experts(name, tensor):
            part_name = part_name.replace("model.", "model.language_model.", 1)
            if _is_fp8(part_name):
                weight, scale = quantize_fp8(part)
                tensors[part_name] = weight
                tensors[f"{part_name}_scale_inv"] = scale.to(scale_dtype)
            else:
                tensors[part_name] = part
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    _write_tokenizer(directory)
    return directory


def quantize_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 e4m3 weight and one bf16-exact scale per 128x128 block (ragged at the edges)."""
    rows, columns = weight.shape
    padded = torch.zeros(math.ceil(rows / BLOCK) * BLOCK, math.ceil(columns / BLOCK) * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scale = (blocks.abs().amax((1, 3)).clamp_min(1e-12) / 448).bfloat16().float()
    codes = (blocks / scale[:, None, :, None]).clamp(-448, 448).view(padded.shape)
    return codes[:rows, :columns].contiguous().to(torch.float8_e4m3fn), scale


def _set_parameter(name: str, parameter: torch.Tensor) -> None:
    if name.endswith("A_log"):
        parameter.copy_(torch.linspace(1, 8, parameter.numel()).log())
    elif name.endswith("dt_bias"):
        dt = torch.exp(torch.linspace(math.log(1e-3), math.log(1e-1), parameter.numel()))
        parameter.copy_(dt + torch.log(-torch.expm1(-dt)))
    elif "norm" in name:
        parameter.add_(0.1 * torch.randn_like(parameter))
    elif name.endswith("conv1d.weight"):
        parameter.copy_(0.4 * torch.randn_like(parameter))
    else:
        fan_in = parameter.shape[-1]
        gain = _SHARPNESS if "lm_head" in name else 1.0
        parameter.copy_(gain * torch.randn_like(parameter) / math.sqrt(fan_in))


def _stack_experts(path: Path) -> None:
    """Turn transformers' per-expert tensors into the stacked layout of published 16-bit checkpoints."""
    tensors = load_file(path)
    prefixes = sorted({n.split(".experts.")[0] for n in tensors if ".experts." in n})
    for prefix in prefixes:
        stacks: dict[str, list[torch.Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for expert in range(
            sum(f"{prefix}.experts.{i}.up_proj.weight" in tensors for i in range(64))
        ):
            name = f"{prefix}.experts.{expert}"
            gate, up, down = (
                tensors.pop(f"{name}.{p}_proj.weight") for p in ("gate", "up", "down")
            )
            stacks["gate_up_proj"].append(torch.cat((gate, up)))
            stacks["down_proj"].append(down)
        for part, stack in stacks.items():
            tensors[f"{prefix}.experts.{part}"] = torch.stack(stack)
    save_file(tensors, path)


def _split_experts(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    prefix, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj":
        gate, up = tensor.chunk(2, 1)
        pairs = (("gate_proj", gate), ("up_proj", up))
    elif leaf == "down_proj" and tensor.dim() == 3:
        pairs = (("down_proj", tensor),)
    else:
        return [(name, tensor)]
    return [
        (f"{prefix}.{expert}.{part}.weight", stacked[expert].contiguous())
        for part, stacked in pairs
        for expert in range(tensor.shape[0])
    ]


def _is_fp8(name: str) -> bool:
    quantized = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
    return name.endswith(quantized) and "in_proj_a" not in name and "in_proj_b" not in name


def _write_tokenizer(directory: Path) -> None:
    """Byte-level: specials, the 256 bytes, and pairs of letters, so that ids below VOCAB_SIZE all decode."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinshrdlu"
    pairs = [(a, b) for a in letters for b in letters]
    tokens = [*SPECIAL_TOKENS, *alphabet, *(a + b for a, b in pairs)]
    fillers = [f"<|unused{i}|>" for i in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: index for index, token in enumerate([*tokens, *fillers])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *fillers])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})
    )
    (directory / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [EOS_TOKEN_ID, 0]})
    )
