"""The files of a checkout: tracked, or new and not ignored."""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = {Path("hypergpu/v1"), Path("benchmarks/results")}
"""Stubs of the wire, and the benchmarks' results."""


@cache
def files() -> tuple[Path, ...]:
    """Return every file, relative to the root, generated ones included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (Path(name) for name in listing.split("\0") if name)
    return tuple(sorted(path for path in set(paths) if (ROOT / path).is_file()))


def is_handwritten(path: Path) -> bool:
    return GENERATED.isdisjoint(path.parents)


def handwritten_files() -> list[Path]:
    """Return the files that people write."""
    return [path for path in files() if is_handwritten(path)]


def one_per_line(findings: list[str]) -> str:
    """Return findings one a line, which pytest does not cut."""
    return "\n" + "\n".join(findings)


@cache
def syntax(path: Path) -> ast.Module:
    """Parse a Python file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), str(path))


def modules() -> list[tuple[Path, ast.Module]]:
    """Return every hand-written Python file with its syntax tree."""
    return [(path, syntax(path)) for path in handwritten_files() if path.suffix == ".py"]
