"""Imports between a tree's modules and folders, read from the source without importing it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec

Graph = dict[str, set[str]]
"""Files that a file imports, as paths relative to the root."""

PACKAGES = (
    "benchmarks",
    "contracts",
    "coordinator",
    "dashboard_api",
    "gpu_node",
    "hypergpu",
    "netsim",
    "payments",
)


class FolderPair(msgspec.Struct, frozen=True, order=True):
    """Two folders that import each other, with one import each way."""

    one: str
    other: str
    forth: str
    back: str


def import_graph(root: Path) -> Graph:
    """Return which hand-written product files import which, tests aside."""
    paths = [path for name in PACKAGES for path in sorted((root / name).rglob("*.py"))]
    known = {_module_name(path.relative_to(root)): str(path.relative_to(root)) for path in paths}
    return {
        str(path.relative_to(root)): {
            known[name]
            for name in _imported_modules(path, known)
            if known[name] != str(path.relative_to(root))
        }
        for path in paths
        if "v1" not in path.parts
    }


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(path: Path, known: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


def both_way_pairs(root: Path) -> list[FolderPair]:
    """Return the folders that import each other.

    A ``__main__`` is a program above its whole package, so its imports are no folder's.
    """
    between: dict[tuple[str, str], str] = {}
    for source, targets in import_graph(root).items():
        for target in sorted(targets) if Path(source).name != "__main__.py" else ():
            folders = str(Path(source).parent), str(Path(target).parent)
            if folders[0] != folders[1]:
                between.setdefault(folders, f"{source} imports {target}")
    return sorted(
        FolderPair(one, other, forth, between[other, one])
        for (one, other), forth in between.items()
        if one < other and (other, one) in between
    )


def circular_modules(root: Path) -> list[str]:
    """Return the files that stay after all those without importers or imports are taken away.

    Empty exactly where there is no circle; files between two circles count too.
    """
    graph = {source: set(targets) for source, targets in import_graph(root).items()}
    while True:
        imported = {target for targets in graph.values() for target in targets}
        loose = {name for name, targets in graph.items() if not targets or name not in imported}
        if not loose:
            return sorted(graph)
        graph = {
            name: (targets - loose) & graph.keys()
            for name, targets in graph.items()
            if name not in loose
        }
