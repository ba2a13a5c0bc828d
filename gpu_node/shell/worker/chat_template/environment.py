"""Jinja's sandbox with the names that chat templates of models expect, as transformers has them."""

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpu_node.shell.worker.chat_template.messages import TEXT_CHARACTERS_MOST


class TextTooLongError(Exception):
    """A template writes more than any prompt has."""


class GenerationMark(Extension):
    """``{% generation %}`` marks what a model wrote, for trainings; rendering passes over it."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja has it

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """The block's content."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class TemplateNamespace(jinja2.utils.Namespace):
    """A namespace without names by which Python's own parts are reached."""

    def __init__(self, *pairs: Any, **attributes: Any) -> None:
        for name in dict(*pairs, **attributes):
            _check_name(name)
        super().__init__(*pairs, **attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no {name!r}")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _json_text(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the filter's own signature
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the filter's own signature
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _local_time(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def chat_environment() -> ImmutableSandboxedEnvironment:
    """An environment in which nothing can be changed and no attribute of Python is reached."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationMark, loopcontrols]
    )
    environment.filters["tojson"] = _json_text
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _local_time
    environment.globals["namespace"] = TemplateNamespace
    return environment


def rendered_text(
    environment: ImmutableSandboxedEnvironment, template: str, variables: Mapping[str, Any]
) -> str:
    """The text that a template writes.

    Raises:
        TextTooLongError: It is longer than `TEXT_CHARACTERS_MOST`.
        Exception: Whatever the template raises.
    """
    pieces, length = [], 0
    for piece in environment.from_string(template).generate(**variables):
        length += len(piece)
        if length > TEXT_CHARACTERS_MOST:
            raise TextTooLongError(f"it writes more than {TEXT_CHARACTERS_MOST:,} characters")
        pieces.append(piece)
    return "".join(pieces)
