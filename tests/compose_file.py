"""`examples/images/compose.scale.yaml` as its services' own commands, with addresses replaced."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parent.parent / "examples" / "images" / "compose.scale.yaml"
_VARIABLE = re.compile(r"\$\{(\w+)(?::(\?|-)([^}]*))?\}")
_COMMAND = re.compile(r"(?:coordinator-1|\\\n#\s+) (hypergpu [^>\n]*)")


def compose_services(
    variables: Mapping[str, str], places: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The services, with variables filled in as compose does, and texts of the file replaced.

    Raises:
        KeyError: A variable that compose would ask for is missing.
    """
    text = FILE.read_text("utf-8")
    for before, after in (places or {}).items():
        assert before in text, f"{before} is not in {FILE.name}"
        text = text.replace(before, after)
    services: dict[str, Any] = _fill(yaml.safe_load(text)["services"], variables)
    return services


def _fill(found: Any, variables: Mapping[str, str]) -> Any:
    """Each text of a tree with its variables filled in, after the tree was parsed."""

    def value_of(variable: re.Match[str]) -> str:
        name, mark, default = variable.groups()
        return variables.get(name, default) if mark == "-" else variables[name]

    if isinstance(found, str):
        return _VARIABLE.sub(value_of, found)
    if isinstance(found, list):
        return [_fill(each, variables) for each in found]
    if isinstance(found, dict):
        return {key: _fill(each, variables) for key, each in found.items()}
    return found


def told_commands() -> list[list[str]]:
    """Commands of `hypergpu` that the comment at the head tells people to run in a container."""
    head = FILE.read_text("utf-8").partition("\nname:")[0]
    return [shlex.split(command_text) for command_text in _COMMAND.findall(head)]
