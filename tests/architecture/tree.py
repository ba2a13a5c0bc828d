"""The files of a checkout, tracked or new and not ignored: their lines of code and their imports.

Everything is read from the source; no module is imported.
"""

import ast
import gc
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[2]
GENERATED = {Path("hypergpu/v1"), Path("benchmarks/results"), Path("dashboard_api/dist")}
"""Stubs of the wire, the benchmarks' results and the built page."""


@cache
def files() -> tuple[Path, ...]:
    """Return every file, relative to the root, generated ones included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    paths = (Path(name) for name in output.split("\0") if name)
    return tuple(sorted(path for path in set(paths) if (ROOT / path).is_file()))


def is_handwritten(path: Path) -> bool:
    return GENERATED.isdisjoint(path.parents)


def handwritten_files() -> list[Path]:
    """Return the files that people write."""
    return [path for path in files() if is_handwritten(path)]


def one_per_line(findings: list[str]) -> str:
    """Return findings one a line, which pytest does not cut."""
    return "\n" + "\n".join(findings)


Nodes = tuple[ast.AST, ...]
"""All nodes of a file's syntax tree, outer ones first."""


def nodes_of(source: str) -> Nodes:
    """Parse Python source. As `ast.walk` goes, in half its time: of all files it walks two million
    nodes.
    """
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:  # It grows meanwhile.
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return tuple(nodes)


@cache
def modules() -> tuple[tuple[Path, Nodes], ...]:
    """Parse every hand-written Python file, named relative to the root."""
    # A million nodes stay: to look through them for garbage takes longer than to make them.
    gc.disable()
    paths = [path for path in handwritten_files() if path.suffix == ".py"]
    parsed_files = tuple(
        (path, nodes_of((ROOT / path).read_text(encoding="utf-8"))) for path in paths
    )
    gc.freeze()
    gc.enable()
    return parsed_files


_LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


def code_lines(source: str) -> int:
    """Count a Python file's lines that hold a token of code."""
    prose = {
        line
        for node in nodes_of(source)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - prose)


def package_lines() -> dict[str, int]:
    """Count the code lines of each top-level folder."""
    counts: Counter[str] = Counter()
    for path in handwritten_files():
        if path.suffix == ".py":
            counts[path.parts[0]] += code_lines((ROOT / path).read_text(encoding="utf-8"))
    return dict(sorted(counts.items()))


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


@cache
def import_graph(root: Path) -> Graph:
    """Return which hand-written product files import which, tests aside."""
    python_files = (path for name in PACKAGES for path in sorted((root / name).rglob("*.py")))
    paths = [path for path in python_files if "node_modules" not in path.parts]
    paths_by_module = {
        _module_name(path.relative_to(root)): str(path.relative_to(root)) for path in paths
    }
    parsed_files = {ROOT / path: nodes for path, nodes in modules()} if root == ROOT else {}
    graph: Graph = {}
    for path in paths:
        if "v1" not in path.parts:
            name = str(path.relative_to(root))
            nodes = parsed_files.get(path) or nodes_of(path.read_text(encoding="utf-8"))
            graph[name] = {
                paths_by_module[each] for each in _imported_modules(nodes, paths_by_module)
            } - {name}
    return graph


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_modules(nodes: Nodes, known: dict[str, str]) -> Iterator[str]:
    for node in nodes:
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
        imported_modules = {target for targets in graph.values() for target in targets}
        loose = {
            name for name, targets in graph.items() if not targets or name not in imported_modules
        }
        if not loose:
            return sorted(graph)
        graph = {
            name: (targets - loose) & graph.keys()
            for name, targets in graph.items()
            if name not in loose
        }
