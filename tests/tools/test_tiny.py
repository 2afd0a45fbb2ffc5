"""The tiny checkpoint's tools: delta rule, expert dispatch, export, chat template, shipped files.

Everything runs on a small random model; the shipped checkpoint is tested where it is present.
"""

import json
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tools.tiny import tasks
from tools.tiny.data import stretched_positions
from tools.tiny.evaluate import quantiser
from tools.tiny.export import (
    SCALE,
    TEMPLATE,
    compare_with_transformers,
    dequantise,
    load_export,
    quantise,
    write_bf16,
    write_fp8,
)
from tools.tiny.generate import ngram_draft
from tools.tiny.guidance import copy_targets, guidance_loss
from tools.tiny.layers import Config
from tools.tiny.material import Entry, Material, find_functions
from tools.tiny.model import GatedDeltaNet, TinyModel, chunked_delta_rule
from tools.tiny.moe import ROW_BLOCK, GroupedMlp, dispatch

SHIPPED = Path(__file__).parents[2] / "checkpoints" / "netra-tiny"
SMALL = Config(vocab=256, hidden=128, layers=4, heads=2, kv_heads=1, experts=4)


def small_model() -> TinyModel:
    torch.manual_seed(0)
    model = TinyModel(SMALL).eval()
    with torch.no_grad():  # larger weights than a fresh model's, so that every term counts
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and "conv1d" not in name:
                parameter.mul_(3)
    return model


def recurrence(query, key, value, decay, beta):
    """The delta rule token by token in float64."""
    query, key, value, decay, beta = (x.double() for x in (query, key, value, decay, beta))
    state = query.new_zeros(*query.shape[:2], query.shape[-1], value.shape[-1])
    outputs = []
    for t in range(query.shape[2]):
        state = state * decay[:, :, t, None, None].exp()
        known = torch.einsum("bhkv,bhk->bhv", state, key[:, :, t])
        delta = beta[:, :, t, None] * (value[:, :, t] - known)
        state = state + key[:, :, t, :, None] * delta[:, :, None]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, :, t]))
    return torch.stack(outputs, 2)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("chunk", [32, 64])
def test_delta_rule_agrees_with_the_recurrence_on_correlated_keys(correlation, chunk):
    torch.manual_seed(1)
    shape = (1, 2, 256, 32)
    common = torch.randn(1, 2, 1, 32)
    key = correlation**0.5 * common + (1 - correlation) ** 0.5 * torch.randn(shape)
    key = F.normalize(key, dim=-1)
    query, value = F.normalize(torch.randn(shape), dim=-1), torch.randn(shape)
    decay, beta = -0.05 * torch.rand(shape[:3]), torch.rand(shape[:3])
    ours = chunked_delta_rule(query, key, value, decay, beta, chunk)
    exact = recurrence(query, key, value, decay, beta)
    assert (ours - exact).abs().max() / exact.abs().max() < 2e-6


def test_new_models_remember():
    model = small_model()
    module = next(m for m in model.modules() if isinstance(m, GatedDeltaNet))
    kept = module.log_decay(torch.zeros(1, 1, SMALL.hidden)).exp()
    assert kept.min() > 0.4
    assert kept.max() < 1.0


def test_expert_dispatch_agrees_with_one_token_at_a_time():
    moe = small_model().model.layers[0].mlp
    x = torch.randn(1, 50, SMALL.hidden)
    ours = moe(x)[0]
    probabilities = F.linear(x[0], moe.gate.weight).softmax(-1)
    for token, share, out in zip(x[0], probabilities, ours, strict=True):
        weights, chosen = share.topk(SMALL.experts_per_token)
        expected = torch.sigmoid(moe.shared_expert_gate(token)) * moe.shared_expert(token)
        for weight, e in zip(weights / weights.sum(), chosen, strict=True):
            gate, up = (moe.experts.gate_up_proj[e] @ token).chunk(2)
            expected = expected + weight * (moe.experts.down_proj[e] @ (F.silu(gate) * up))
        torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)


def test_dispatch_groups_rows_by_expert():
    chosen = torch.tensor([2, 0, 2, 3, 0, 2])
    load, places, sizes = dispatch(chosen, 4)
    assert sizes == [ROW_BLOCK, 0, ROW_BLOCK, ROW_BLOCK]
    assert load.tolist() == pytest.approx([2 / 6, 0, 3 / 6, 1 / 6])
    assert sorted(places[chosen == 0].tolist()) == [0, 1]
    assert sorted(places[chosen == 2].tolist()) == [ROW_BLOCK, ROW_BLOCK + 1, ROW_BLOCK + 2]


def test_grouped_mlp_has_the_right_gradients():
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.double, requires_grad=True)
    gate_up = torch.randn(3, 6, 4, dtype=torch.double, requires_grad=True)
    down = torch.randn(3, 4, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: GroupedMlp.apply(*a, [2, 0, 3]), (x, gate_up, down))


def test_transformers_loads_the_bf16_export_and_agrees(tmp_path):
    pytest.importorskip("transformers")
    write_bf16(tmp_path, SMALL, small_model().state_dict(), None)
    ids = torch.randint(0, SMALL.vocab, (2, 70), generator=torch.Generator().manual_seed(0))
    difference, lists = compare_with_transformers(tmp_path, ids)
    assert lists == {"missing_keys": [], "unexpected_keys": []}
    assert difference < 1e-5


def test_fp8_export_has_the_public_layout(tmp_path):
    from safetensors import safe_open

    write_fp8(tmp_path, SMALL, small_model().state_dict(), None)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for prefix in ("model.layers.0", "mtp.layers.0"):
        for kind in ("gate_proj", "up_proj", "down_proj"):
            name = f"{prefix}.mlp.experts.3.{kind}.weight"
            assert tensors[name].dtype == torch.float8_e4m3fn
            assert tensors[name + SCALE].dtype == torch.bfloat16
    assert tensors["model.layers.0.linear_attn.in_proj_qkv.weight" + SCALE].shape == (4, 1)
    assert tensors["model.layers.0.linear_attn.in_proj_a.weight"].dtype == torch.bfloat16
    assert tensors["mtp.fc.weight"].dtype == torch.bfloat16
    settings = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert settings["weight_block_size"] == [128, 128]
    assert {"lm_head", "mtp.fc", "model.layers.3.mlp.gate"} <= set(
        settings["modules_to_not_convert"]
    )
    names = {name.removesuffix(SCALE) for name in tensors if name.endswith(SCALE)}
    two_dimensional = {n for n, t in tensors.items() if t.dim() == 2 and not n.endswith(SCALE)}
    kept = {f"{module}.weight" for module in settings["modules_to_not_convert"]}
    assert names | kept == two_dimensional


def test_fp8_export_reads_back_within_the_rounding(tmp_path):
    model = small_model()
    write_fp8(tmp_path, SMALL, model.state_dict(), None)
    again = load_export(tmp_path)
    for (name, weight), (_, read) in zip(
        sorted(model.state_dict().items()), sorted(again.state_dict().items()), strict=True
    ):
        assert (weight - read).abs().max() <= 0.04 * weight.abs().max(), name


def test_quantised_blocks_have_their_own_scales():
    weight = torch.randn(200, 130)
    weight[:128, :128] *= 100
    low, scale = quantise(weight)
    assert scale.shape == (2, 2)
    assert scale[0, 0] > 20 * scale[1, 1]
    torch.testing.assert_close(dequantise(low, scale), weight, rtol=0.07, atol=0.01)


@pytest.fixture(scope="module")
def render():
    """The template as transformers runs it."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    compiled = utils._compile_jinja_template(TEMPLATE.read_text())
    return lambda messages, **more: compiled.render(messages=messages, **more)


def test_template_renders_a_conversation(render):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"text": "lo"}]},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\nHi.<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    assert render(messages, add_generation_prompt=True) == expected + "\n</think>\n\n"
    assert render(messages, add_generation_prompt=True, enable_thinking=True) == expected


def test_template_keeps_thoughts_given_either_way(render):
    user = {"role": "user", "content": "x"}
    apart = {"role": "assistant", "reasoning_content": "hm", "content": "y"}
    inline = {"role": "assistant", "content": "<think>\nhm\n</think>\n\ny"}
    assert render([user, apart]) == render([user, inline])
    assert "<think>\nhm\n</think>\n\ny<|im_end|>" in render([user, apart])


def test_template_agrees_with_the_training_tasks(render):
    schema = tasks.tool_schema("get_time", "Local time of a city.", ["city"])
    history = tasks.tools_system([schema], "Be brief.")
    history += tasks.turn("user", "What time is it in Oslo?")
    history += tasks.answer_turn(tasks.tool_call_text("get_time", {"city": "Oslo"}))
    history += tasks.turn("user", "<tool_response>\nnoon\n</tool_response>")
    item = tasks.render("tool", history, "In Oslo it is noon.")
    call = {"type": "function", "function": {"name": "get_time", "arguments": {"city": "Oslo"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "noon"},
    ]
    assert render(messages, tools=[schema], add_generation_prompt=True) == item.prompt


def test_template_refuses_what_it_cannot_render(render):
    with pytest.raises(Exception, match="only text parts"):
        render([{"role": "user", "content": [{"type": "image", "image": "x"}]}])
    with pytest.raises(Exception, match="unknown role"):
        render([{"role": "narrator", "content": "x"}])


def material() -> Material:
    code = "def area(width, height):\n    total = width * height\n    return total\n"
    code += "\ndef double(items):\n    doubled = [2 * item for item in items]\n    return doubled\n"
    entry = Entry("function", "area", "area(width, height)", "Return the area.")
    functions = list(find_functions(code))
    words = ["river", "stone", "light", "paper"]
    text = "the quick river runs over the stone under the light"
    return Material(functions, [entry], [text], code.split("\n"), [("foo", "a word")], words)


def test_items_are_a_function_of_the_seed():
    first, second = (tasks.make_items(material(), 60, seed=3) for _ in range(2))
    assert first == second
    assert first != tasks.make_items(material(), 60, seed=4)
    assert all(i.answer.endswith("<|im_end|>\n<|endoftext|>") for i in first)
    assert all(i.prompt.count("<|im_start|>assistant") >= 1 for i in first)


def test_a_renamed_function_no_longer_holds_the_old_name():
    item = tasks.rename(material(), random.Random(0))
    old, new = item.prompt.split("`")[1], item.prompt.split("`")[3]
    answer = item.answer.split("```python")[1]
    assert f" {old} " not in answer
    assert new in answer


def test_guidance_points_at_what_followed_the_longest_match():
    ids = torch.tensor([[5, 6, 7, 9, 6, 8, 5, 6, 7]])
    targets, counted = copy_targets(ids)
    # "5 6" at 6, 7 repeats 0, 1, which 7 followed (place 2); "6" alone, at 4, is too short a match
    assert targets[0, 7].nonzero().flatten().tolist() == [2]
    assert counted[0].nonzero().flatten().tolist() == [7]


def test_guidance_falls_as_attention_finds_the_place():
    torch.manual_seed(0)
    model = small_model().train()
    half = torch.randint(0, SMALL.vocab, (2, 24))
    ids = torch.cat([half, half], 1)
    table = model.table(ids)
    attention = model.model.layers[3].self_attn
    optimizer = torch.optim.Adam([attention.q_proj.weight, attention.k_proj.weight], lr=1e-2)
    found = []
    for _ in range(30):
        model.model(ids, table)
        loss, attended = guidance_loss(model, ids, table, rows=2)
        found.append(attended)
        loss.backward()
        optimizer.step()
        model.zero_grad()
    assert found[-1] > 2 * found[0]


def test_stretched_positions_rise_and_stay_in_range():
    import numpy as np

    for seed in range(20):
        positions = stretched_positions(256, 32768, np.random.default_rng(seed))
        assert (np.diff(positions) > 0).all()
        assert positions[-1] < 32768


def test_ngram_draft_continues_the_latest_repeat():
    assert ngram_draft([1, 2, 3, 9, 1, 2, 4, 1, 2], 2) == [4, 1]
    assert ngram_draft([1, 2, 3], 2) == []


def test_cache_quantiser_gets_coarser_with_fewer_bits():
    x = torch.randn(1, 2, 10, 64)
    errors = [(quantiser(bits)(x) - x).abs().mean().item() for bits in (8, 4, 2)]
    assert errors[0] < errors[1] < errors[2]


@pytest.mark.skipif(not SHIPPED.exists(), reason="no checkpoint in the tree")
def test_shipped_checkpoint_is_as_promised():
    size = sum(f.stat().st_size for f in SHIPPED.iterdir())
    assert (SHIPPED / "model.safetensors").stat().st_size <= 16e6
    assert size <= 17e6
    config = json.loads((SHIPPED / "config.json").read_text())
    assert config["layer_types"].count("linear_attention") == 6
    assert config["layer_types"].count("full_attention") == 2
    promised = {"hidden_size": 256, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64,
                "vocab_size": 4096, "mtp_num_hidden_layers": 1}  # fmt: skip
    assert {key: config[key] for key in promised} == promised
    assert config["max_position_embeddings"] >= 32768
    generation = json.loads((SHIPPED / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert (SHIPPED / "README.md").exists()


@pytest.mark.skipif(not SHIPPED.exists(), reason="no checkpoint in the tree")
def test_shipped_checkpoint_predicts_its_own_format():
    tokenizers = pytest.importorskip("tokenizers")
    model = load_export(SHIPPED)
    tokenizer = tokenizers.Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    text = tasks.turn("user", "Hello") + tasks.answer_turn("Hello! How can I help you?")
    ids = torch.tensor([tokenizer.encode(text).ids])
    with torch.no_grad():
        loss = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:])
    assert loss < 4.0  # 8.3 for a model that knows nothing
