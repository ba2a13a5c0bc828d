"""Chats as tokens by a tokenizer of transformers; its template is rendered in another process."""

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_node.shell.worker.chat_template.renderer import TemplateRenderer


def chat_tokens(
    renderer: TemplateRenderer,
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The tokens of a chat, up to where the answer begins.

    Raises:
        TemplateError: There is no template, or it gives no text.
    """
    template = _template_of(tokenizer, has_tools=bool(tools))
    marks = dict(tokenizer.special_tokens_map)
    text = renderer.chat_text(template, messages, tools, marks)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _template_of(tokenizer: Any, *, has_tools: bool) -> str | None:
    """The chat template of a tokenizer; None: it has none, or no usual one of several."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use" if has_tools else "", template.get("default"))
    return template if isinstance(template, str) else None
