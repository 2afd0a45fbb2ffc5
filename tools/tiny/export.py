"""Training state -> Hugging Face directories: bfloat16 (to check) and block FP8 (to ship).

The FP8 layout is the target's: one tensor per expert and projection, float8_e4m3 with a bfloat16
scale per 128x128 block under `weight_scale_inv`, MTP under `mtp.`.  Invariant: what `load_export`
reads back is what transformers computes with.
"""

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.tiny.layers import Config
from tools.tiny.model import TinyModel

BLOCK = 128
FP8_MAX = 448.0
FP8_NAMES = tuple(
    f"{name}.weight"
    for name in (
        "q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj",
        "shared_expert.gate_proj", "shared_expert.up_proj", "shared_expert.down_proj",
    )
)  # fmt: skip
SCALE = "_scale_inv"
IM_END, END_OF_TEXT = 2, 0
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
State = dict[str, Tensor]


def load_state(path: Path) -> tuple[Config, State]:
    state = torch.load(path, weights_only=False, map_location="cpu")
    return Config(**state["config"] | {"matmul_dtype": "float32"}), state["model"]


def hf_config(config: Config) -> dict[str, object]:
    third = config.rotary_dim // 2 // 3
    sections = [config.rotary_dim // 2 - 2 * third, third, third]
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "initializer_range": 0.02,
        "rms_norm_eps": config.eps,
        "use_cache": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": config.attention_interval,
        "layer_types": config.layer_types,
        "linear_conv_kernel_dim": config.conv_kernel,
        "linear_key_head_dim": config.linear_head_dim,
        "linear_value_head_dim": config.linear_head_dim,
        "linear_num_key_heads": config.linear_key_heads,
        "linear_num_value_heads": config.linear_value_heads,
        "mamba_ssm_dtype": "float32",
        "moe_intermediate_size": config.expert_size,
        "shared_expert_intermediate_size": config.shared_size,
        "num_experts_per_tok": config.experts_per_token,
        "num_experts": config.experts,
        "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": config.rope_theta,
            "partial_rotary_factor": config.rotary_share,
            "mrope_interleaved": True,
            "mrope_section": sections,
        },
        "partial_rotary_factor": config.rotary_share,
        "bos_token_id": None,
        "eos_token_id": IM_END,
        "pad_token_id": END_OF_TEXT,
        "dtype": "bfloat16",
    }


def config_of(directory: Path) -> Config:
    data = json.loads((directory / "config.json").read_text())
    return Config(
        vocab=data["vocab_size"],
        hidden=data["hidden_size"],
        layers=data["num_hidden_layers"],
        attention_interval=data["full_attention_interval"],
        heads=data["num_attention_heads"],
        kv_heads=data["num_key_value_heads"],
        head_dim=data["head_dim"],
        rotary_share=data["rope_parameters"]["partial_rotary_factor"],
        rope_theta=data["rope_parameters"]["rope_theta"],
        max_positions=data["max_position_embeddings"],
        linear_key_heads=data["linear_num_key_heads"],
        linear_value_heads=data["linear_num_value_heads"],
        linear_head_dim=data["linear_key_head_dim"],
        conv_kernel=data["linear_conv_kernel_dim"],
        experts=data["num_experts"],
        experts_per_token=data["num_experts_per_tok"],
        expert_size=data["moe_intermediate_size"],
        shared_size=data["shared_expert_intermediate_size"],
        eps=data["rms_norm_eps"],
    )


def rounded(name: str, weight: Tensor) -> Tensor:
    """bfloat16, except A_log, whose exponential is the state's decay."""
    return (weight.float() if name.endswith("A_log") else weight.bfloat16()).contiguous()


def bf16_tensors(state: State) -> State:
    return {name: rounded(name, weight) for name, weight in state.items()}


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(float8_e4m3 `[out, in]`, bfloat16 scales per block); weight = fp8 * scale."""
    out, inputs = weight.shape
    rows, columns = -(-out // BLOCK), -(-inputs // BLOCK)
    padded = torch.zeros(rows * BLOCK, columns * BLOCK)
    padded[:out, :inputs] = weight.float()
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = (blocks.abs().amax((1, 3)) / FP8_MAX).clamp_min(1e-12).bfloat16()
    scaled = (blocks / scale.float()[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    scaled = scaled.reshape(padded.shape)[:out, :inputs]
    return scaled.to(torch.float8_e4m3fn).contiguous(), scale


def dequantise(weight: Tensor, scale: Tensor) -> Tensor:
    full = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return weight.float() * full[: weight.shape[0], : weight.shape[1]]


def per_expert(state: State) -> State:
    """Splits the stacked experts into one tensor per expert and projection."""
    split: State = {}
    for name, weight in state.items():
        base, _, last = name.rpartition(".")
        if last == "gate_up_proj" and weight.dim() == 3:
            for e, both in enumerate(weight):
                gate, up = both.chunk(2)
                split[f"{base}.{e}.gate_proj.weight"] = gate
                split[f"{base}.{e}.up_proj.weight"] = up
        elif last == "down_proj" and weight.dim() == 3:
            split.update({f"{base}.{e}.down_proj.weight": w for e, w in enumerate(weight)})
        else:
            split[name] = weight
    return split


def stacked(state: State, experts: int) -> State:
    """The inverse of `per_expert`."""
    merged = {k: v for k, v in state.items() if ".experts." not in k}
    bases = {k.split(".experts.")[0] + ".experts" for k in state if ".experts." in k}
    for base in bases:

        def pick(kind: str, base: str = base) -> list[Tensor]:
            return [state[f"{base}.{e}.{kind}.weight"] for e in range(experts)]

        pairs = zip(pick("gate_proj"), pick("up_proj"), strict=True)
        merged[f"{base}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        merged[f"{base}.down_proj"] = torch.stack(pick("down_proj"))
    return merged


def fp8_tensors(state: State) -> tuple[State, list[str]]:
    """(tensors to save, names of the linear modules left in bfloat16)."""
    tensors: State = {}
    kept = []
    for name, weight in per_expert(state).items():
        if ".experts." in name or name.endswith(FP8_NAMES):
            tensors[name], tensors[name + SCALE] = quantise(weight)
            continue
        tensors[name] = rounded(name, weight)
        if weight.dim() == 2:
            kept.append(name.removesuffix(".weight"))
    return tensors, kept


def write_directory(
    directory: Path, tensors: State, config: dict[str, object], tokenizer: Path | None
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT,
                  "do_sample": False}  # fmt: skip
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    if tokenizer is None:
        return
    shutil.copy(tokenizer, directory / "tokenizer.json")
    shutil.copy(TEMPLATE, directory / "chat_template.jinja")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def write_bf16(directory: Path, config: Config, state: State, tokenizer: Path | None) -> None:
    write_directory(directory, bf16_tensors(state), hf_config(config), tokenizer)


def write_fp8(directory: Path, config: Config, state: State, tokenizer: Path | None) -> None:
    tensors, kept = fp8_tensors(state)
    settings = hf_config(config) | {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": kept,
        }
    }
    write_directory(directory, tensors, settings, tokenizer)


def load_export(directory: Path) -> TinyModel:
    """Reads a bfloat16 or FP8 directory into a float32 model."""
    config = config_of(directory)
    raw = load_file(directory / "model.safetensors")
    state = {
        name: dequantise(weight, raw[name + SCALE]) if name + SCALE in raw else weight.float()
        for name, weight in raw.items()
        if not name.endswith(SCALE)
    }
    if not any(name.endswith(".experts.gate_up_proj") for name in state):
        state = stacked(state, config.experts)
    model = TinyModel(config)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def compare_with_transformers(directory: Path, ids: Tensor) -> tuple[float, dict[str, list[str]]]:
    """(largest logit difference, missing and unexpected tensors): transformers against model.py."""
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    difference = (theirs.eval()(ids).logits - load_export(directory)(ids)).abs().max().item()
    lists = {k: sorted(info[k]) for k in ("missing_keys", "unexpected_keys")}
    return difference, lists


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--state", type=Path, default=Path(".cache/tiny/state.pt"))
    parser.add_argument("--tokenizer", type=Path, default=Path(".cache/tiny/data/tokenizer.json"))
    parser.add_argument("--bf16", type=Path, default=Path(".cache/tiny/export-bf16"))
    parser.add_argument("--fp8", type=Path, default=Path(".cache/tiny/export-fp8"))
    parser.add_argument("--check", action="store_true", help="compare both with transformers")
    args = parser.parse_args()
    config, state = load_state(args.state)
    write_bf16(args.bf16, config, state, args.tokenizer)
    write_fp8(args.fp8, config, state, args.tokenizer)
    for directory in (args.bf16, args.fp8):
        size = (directory / "model.safetensors").stat().st_size
        print(f"{directory}: {size / 1e6:.2f} MB")
        if args.check:
            ids = torch.randint(
                16, config.vocab, (2, 200), generator=torch.Generator().manual_seed(1)
            )
            difference, lists = compare_with_transformers(directory, ids)
            print(f"  largest logit difference to transformers {difference:.2e}, {lists}")
    print(json.dumps(asdict(config)))


if __name__ == "__main__":
    main()
