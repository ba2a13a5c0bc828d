"""Chat templates: the text of transformers, and an end to those that want more."""

from collections.abc import Iterator
from typing import Any

import pytest

from gpu_node.shell.worker.chat_template.messages import TEMPLATE_BYTES_MOST
from gpu_node.shell.worker.chat_template.renderer import TemplateError, TemplateRenderer
from gpu_node.shell.worker.chat_template.tokenizer_chats import chat_tokens
from tests.tiny_bases import trained_tokenizer

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be <short> & «exact»"},
    {"role": "user", "content": "hello 数 😀"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "and?"},
]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "description": "a < b", "parameters": {}}}
]
TEMPLATE = """{%- set state = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- set state.count = state.count + 1 %}
{{ bos_token }}[{{ message.role | upper }}] {{ message['content'] | trim }}
    {%- if message.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}
{% endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if documents is none and add_generation_prompt %}{{ '<|assistant|>' ~ state.count }}{% endif %}
"""


@pytest.fixture(scope="module")
def renderer() -> Iterator[TemplateRenderer]:
    renderer = TemplateRenderer(time_most_s=20)
    yield renderer
    renderer.close()


def test_a_chat_is_the_text_of_transformers(renderer: TemplateRenderer) -> None:
    tokenizer = trained_tokenizer()
    tokenizer.bos_token = "<|user|>"
    tokenizer.chat_template = TEMPLATE
    for tools in ([], TOOLS):
        theirs = tokenizer.apply_chat_template(
            CHAT, tools=tools or None, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        assert chat_tokens(renderer, tokenizer, CHAT, tools) == theirs


def test_of_several_templates_the_usual_one_is_taken_or_that_of_tools(
    renderer: TemplateRenderer,
) -> None:
    tokenizer = trained_tokenizer()
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    assert chat_tokens(renderer, tokenizer, CHAT) == tokenizer("plain")["input_ids"]
    assert chat_tokens(renderer, tokenizer, CHAT, TOOLS) == tokenizer("with tools")["input_ids"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "the model has no chat template"),
        ("x" * (TEMPLATE_BYTES_MOST + 1), "more than 65,536 bytes"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__ }}", "SecurityError"),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "SecurityError|TemplateSyntaxError"),
        ("{{ 'x' * 900000000 }}", "too much memory"),
        (
            "{% for i in range(99999) %}{{ 'x' * 100 }}{% endfor %}",
            "more than 4,194,304 characters",
        ),
        ("{% include '/etc/passwd' %}", "TypeError|TemplateNotFound|loader"),
    ],
)
def test_a_template_that_wants_more_is_refused(
    renderer: TemplateRenderer, template: str | None, reason: str
) -> None:
    with pytest.raises(TemplateError, match=reason):
        renderer.chat_text(template, CHAT)
    assert renderer.chat_text("{{ messages | length }}", CHAT) == "4"


def test_a_template_that_takes_too_long_is_ended_and_the_next_one_rendered() -> None:
    renderer = TemplateRenderer(time_most_s=3)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="takes more than 3 s: its process was ended"):
        renderer.chat_text(endless, CHAT)
    renderer.close()
    patient = TemplateRenderer(time_most_s=60)
    with pytest.raises(TemplateError, match="its process was ended"):
        patient.chat_text(endless, CHAT)  # The kernel ends it after five seconds of computing.
    assert patient.chat_text("{{ messages | length }}", CHAT) == "4"
    patient.close()
