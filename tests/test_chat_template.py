"""ChatTemplate: transformers' rendering of the same template, and clear answers to bad messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from netra_backend.chat_template import ChatTemplate
from netra_backend.errors import ConfigError, RequestError
from netra_backend.tokenizer import Tokenizer

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
RICH = """{{ bos_token }}
{%- if tools %}
    {% for tool in tools %}
        {{- tool | tojson }}
        {{ tool | tojson(indent=1) }}
    {% endfor %}
{%- endif %}
{% for message in messages %}
    {%- if loop.index > 3 %}{% break %}{% endif %}
    {%- if message.role == 'assistant' %}
        {%- generation -%}
        {{- message.content | default('') | trim }}
        {%- for call in message.tool_calls or [] %}
            {{- call.function.name }}
            {%- for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}
        {%- endfor %}
        {% endgeneration %}
    {%- elif message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}{{ part.text }}|{% endfor %}
    {%- endif %}
{% endfor %}
{%- set ns = namespace(last='') %}
{%- for message in messages %}{% set ns.last = message.role %}{% endfor %}
{{- ns.last }} {{ enable_thinking | default('unset') }} {{ add_generation_prompt }}
"""
TOKENS = {"bos_token": "<s>"}
TOOLS: list[object] = [{"type": "function", "function": {"name": "f<>&", "parameters": {"é": [1]}}}]
ARGUMENTS = {"x": 1, "y": "z"}
CHATS: dict[str, list[dict[str, object]]] = {
    "short": [{"role": "user", "content": "Hi <b>'there'</b>"}],
    "long": [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "Zażółć 你好"},
        {"role": "assistant", "content": " yes \n"},
        {"role": "user", "content": "again"},
    ],
    "calls": [
        {"role": "user", "content": "call it"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}],
        },
        {"role": "tool", "content": "42"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
}  # fmt: skip


def render(
    source: str,
    messages: list[dict[str, object]],
    tools: list[object] | None = None,
    **template_kwargs: object,
) -> str:
    return ChatTemplate(source, TOKENS).render(messages, tools, template_kwargs)


@pytest.mark.parametrize(
    ("source", "chat"),
    [(RICH, chat) for chat in CHATS] + [(CHATML, "short"), (CHATML, "long")],
)
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False, "add_generation_prompt": False}])
def test_renders_as_transformers_does(source: str, chat: str, kwargs: dict[str, object]) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    for tools in (None, TOOLS):
        expected = rendering.render_jinja_template(
            [[{k: v for k, v in message.items() if v is not None} for message in CHATS[chat]]],
            tools=tools,
            chat_template=source,
            **{"add_generation_prompt": True, **TOKENS, **kwargs},
        )
        assert render(source, CHATS[chat], tools, **kwargs) == expected[0][0]


def test_parts_become_a_string_for_templates_that_take_strings() -> None:
    assert render(CHATML, CHATS["parts"]).startswith("<|im_start|>user\na\nb<|im_end|>")
    assert "a|b|" in render(RICH, CHATS["parts"])
    printing = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert render(printing, CHATS["parts"]) == "a\nb"


def test_arguments_of_calls_may_be_json_text() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps(ARGUMENTS)}}
    messages = [CHATS["calls"][0], {"role": "assistant", "tool_calls": [call]}]
    assert "fx=1;y=z;" in render(RICH, messages)
    assert call["function"]["arguments"] == json.dumps(ARGUMENTS)  # type: ignore[index]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one"),
        ({"role": "user"}, "at least one"),
        (["hi"], "object with a role"),
        ([{"content": "hi"}], "object with a role"),
        ([{"role": 3, "content": "hi"}], "object with a role"),
        ([{"role": "user", "content": 3}], "string or a list"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": [3]}], "text"),
        ([{"role": "user"}], "chat template"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "chat template"),
    ],
)
def test_bad_messages_are_the_clients_fault(messages: object, reason: str) -> None:
    source = RICH if "tool_calls" in str(messages) else CHATML
    with pytest.raises(RequestError, match=reason) as caught:
        render(source, messages)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_request"


def test_what_the_template_raises_reaches_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}", CHATS["short"])
    for broken in ("{{ 1 / 0 }}", "{{ messages[7].role.x }}", "{{ 'a' + 1 }}"):
        with pytest.raises(RequestError, match="chat template"):
            render(broken, CHATS["short"])


def test_the_template_is_sandboxed() -> None:
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(RequestError, match="chat template"):
            render(attack, CHATS["short"])


def test_reserved_arguments_are_refused() -> None:
    with pytest.raises(RequestError, match="messages is reserved"):
        ChatTemplate(CHATML, TOKENS).render(CHATS["short"], None, {"messages": []})


def test_strftime_now() -> None:
    assert len(render("{{ strftime_now('%Y') }}", CHATS["short"])) == 4


def test_the_tokenizer_renders_with_its_special_tokens(tmp_path: Path) -> None:
    library = tokenizers.Tokenizer(models.BPE())
    library.decoder = decoders.ByteLevel()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer(tmp_path).apply_chat_template(CHATS["short"])
    config = {"chat_template": RICH, "bos_token": {"content": "<BOS>"}, "model_max_length": 7}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = Tokenizer(tmp_path).apply_chat_template(CHATS["short"], TOOLS, {"enable_thinking": True})
    assert text.startswith("<BOS>")
    assert "f<>&" in text
    assert text.rstrip().endswith("user True True")


def test_loading(tmp_path: Path) -> None:
    def load(config: dict[str, object]) -> str | None:
        template = ChatTemplate.load(tmp_path, config, TOKENS)
        return template.render(CHATS["short"], None, {}) if template else None

    assert load({}) is None
    assert load({"chat_template": "from config"}) == "from config"
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    assert load({"chat_template": named}) == "named"
    assert load({"chat_template": named[:1]}) is None
    (tmp_path / "chat_template.jinja").write_text("from file é", encoding="utf-8")
    assert load({"chat_template": "from config"}) == "from file é"
    (tmp_path / "chat_template.jinja").write_text("{% if %}", encoding="utf-8")
    with pytest.raises(ConfigError, match="chat template"):
        load({})
