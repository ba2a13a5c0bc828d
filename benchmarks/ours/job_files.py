"""Job files as tables that a benchmark changes before it writes them."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Tree = dict[str, Any]


def job_tree(path: Path) -> Tree:
    """A job file's tables."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def text_of(tree: Mapping[str, Any]) -> str:
    """A job file's tree as TOML: texts, numbers, and tables of them."""
    return "\n".join(_lines(tree)) + "\n"


def _lines(tree: Mapping[str, Any]) -> Iterator[str]:
    tables = {name: each for name, each in tree.items() if isinstance(each, dict)}
    yield from (f"{name} = {json.dumps(each)}" for name, each in tree.items() if name not in tables)
    for name, table in tables.items():
        yield f"[{name}]"
        yield from (f"{key} = {json.dumps(each)}" for key, each in table.items())
