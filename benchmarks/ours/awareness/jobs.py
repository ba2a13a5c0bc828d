"""Job files of the benchmarks with a few settings changed."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.ours.awareness.runs import KEPT

Tree = dict[str, Any]


def job_tree(path: Path) -> Tree:
    """A job file's tables."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def write_job(tree: Mapping[str, Any], name: str) -> Path:
    """The tables as a job file of that name."""
    path = KEPT / "jobs" / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_of(tree), encoding="utf-8")
    return path


def text_of(tree: Mapping[str, Any]) -> str:
    """A job file's tree as TOML: texts, numbers, and tables of them."""
    return "\n".join(_lines(tree)) + "\n"


def _lines(tree: Mapping[str, Any]) -> Iterator[str]:
    tables = {name: each for name, each in tree.items() if isinstance(each, dict)}
    yield from (f"{name} = {json.dumps(each)}" for name, each in tree.items() if name not in tables)
    for name, table in tables.items():
        yield f"[{name}]"
        yield from (f"{key} = {json.dumps(each)}" for key, each in table.items())
