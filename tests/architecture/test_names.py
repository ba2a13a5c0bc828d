import ast
import re
from collections.abc import Iterator
from pathlib import Path

from benchmarks.house.tree import handwritten_files, modules, one_per_line

NAMELESS_PLACES = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
NAMELESS_VALUES = {"data", "flag", "info", "obj"}
NAMELESS_DEEDS = re.compile(r"_*(do|handle|process)_(?!id$)")


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    def words(path: Path) -> set[str]:
        return {Path(part).stem.lower() for part in path.parts}

    assert [str(path) for path in handwritten_files() if words(path) & NAMELESS_PLACES] == []


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield each parameter and variable; a class's fields belong to the schemas and specs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def field_lines(tree: ast.Module) -> set[int]:
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = (f for node in classes for f in node.body if isinstance(f, ast.Assign | ast.AnnAssign))
    return {field.lineno for field in fields}


def test_no_parameter_or_variable_has_a_name_that_says_nothing() -> None:
    found = [
        f"{path}:{line} {name}"
        for path, tree in modules()
        for line, name in bound_names(tree)
        if name in NAMELESS_VALUES and line not in field_lines(tree)
    ]
    assert not found, one_per_line(found)


def test_no_function_only_says_that_it_does_something() -> None:
    found = [
        f"{path}:{node.lineno} {node.name}"
        for path, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and NAMELESS_DEEDS.match(node.name)
    ]
    assert not found, one_per_line(found)


def test_the_glossary_explains_each_word_once() -> None:
    rows = Path(__file__).parents[2].joinpath("docs/glossary.md").read_text("utf-8").splitlines()
    words = [row.split("|")[1].strip() for row in rows if row.startswith("| **")]
    assert len(words) > 20
    assert sorted(words) == sorted(set(words))
