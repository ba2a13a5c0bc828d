import ast
from pathlib import Path

from tests.architecture.repository import ROOT, modules, written

SOURCE = {".css", ".html", ".proto", ".py", ".sh", ".sol", ".svelte", ".ts"}
FUNCTION_LINES = 60
README_LINES = 150


def lines(path: Path) -> int:
    return len((ROOT / path).read_text(encoding="utf-8").splitlines())


def line_limit(path: Path) -> int:
    return 700 if path.parts[0] == "tests" else 500


def test_no_source_file_is_longer_than_its_limit() -> None:
    sources = [path for path in written() if path.suffix in SOURCE]
    assert {str(p): lines(p) for p in sources if lines(p) > line_limit(p)} == {}


def test_no_function_is_longer_than_sixty_lines() -> None:
    long = {
        f"{path}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES
    }
    assert long == {}


def test_the_readme_fits_its_limit() -> None:
    assert lines(Path("README.md")) <= README_LINES
