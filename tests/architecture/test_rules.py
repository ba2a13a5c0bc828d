"""Rules of the code: sizes, names, imports, forbidden constructs.

``python -m tests.architecture --offenders PATH`` lists breaches.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.offenders import RULES
from tests.architecture.tree import ROOT, Nodes, handwritten_files, modules, one_per_line


@pytest.mark.parametrize("rule", RULES)
def test_nothing_breaks_a_rule(rule: str) -> None:
    breaches = [str(offender) for offender in RULES[rule]()]
    assert not breaches, one_per_line(breaches)


README_LINES = 150


def test_the_readme_fits_its_limit() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= README_LINES


NAMELESS_PLACES = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
NAMELESS_VALUES = {"data", "flag", "info", "obj"}
NAMELESS_DEEDS = re.compile(r"_*(do|handle|process)_(?!id$)")


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    def words(path: Path) -> set[str]:
        return {Path(part).stem.lower() for part in path.parts}

    assert [str(path) for path in handwritten_files() if words(path) & NAMELESS_PLACES] == []


def bound_names(nodes: Nodes) -> Iterator[tuple[int, str]]:
    """Yield each parameter and variable; a class's fields belong to the schemas and specs."""
    for node in nodes:
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def field_lines(nodes: Nodes) -> set[int]:
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    fields = (f for node in classes for f in node.body if isinstance(f, ast.Assign | ast.AnnAssign))
    return {field.lineno for field in fields}


def test_no_parameter_or_variable_has_a_name_that_says_nothing() -> None:
    breaches = [
        f"{path}:{line} {name}"
        for path, nodes in modules()
        for line, name in bound_names(nodes)
        if name in NAMELESS_VALUES and line not in field_lines(nodes)
    ]
    assert not breaches, one_per_line(breaches)


def test_no_function_only_says_that_it_does_something() -> None:
    breaches = [
        f"{path}:{node.lineno} {node.name}"
        for path, nodes in modules()
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and NAMELESS_DEEDS.match(node.name)
    ]
    assert not breaches, one_per_line(breaches)


def test_the_glossary_explains_each_word_once() -> None:
    rows = Path(__file__).parents[2].joinpath("docs/glossary.md").read_text("utf-8").splitlines()
    words = [row.split("|")[1].strip() for row in rows if row.startswith("| **")]
    assert len(words) > 20
    assert sorted(words) == sorted(set(words))


LISTING = "import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
HEAVY = {"sklearn", "sqlalchemy", "starlette", "torch", "torchvision", "uvicorn"}
# The page's commands are the command line's own; its server is a process.
PROCESSES = {"coordinator", "dashboard_api.core", "dashboard_api.shell", "gpu_node"}


def loaded_by(module: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after importing one."""
    argv = [sys.executable, "-c", LISTING.format(module=module)]
    answer = subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
    return set(json.loads(answer.stdout))


def test_the_command_line_starts_without_what_only_processes_need() -> None:
    assert loaded_by("hypergpu.user.cli.main") & {*HEAVY, *PROCESSES, "grpc", "numpy"} == set()


@pytest.mark.parametrize("module", ["coordinator.__main__", "gpu_node.__main__"])
def test_a_light_process_starts_without_torch(module: str) -> None:
    assert loaded_by(module) & {"sklearn", "torch", "torchvision"} == set()


@pytest.mark.parametrize(
    "module", ["hypergpu.ids", "coordinator.core.training.transition", "gpu_node.core"]
)
def test_a_core_loads_no_tensor_library(module: str) -> None:
    assert loaded_by(module) & {*HEAVY, "grpc", "numpy"} == set()


PICKLERS = {
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "multiprocessing",
    "pickle",
    "shelve",
}
UNPICKLING_CALLS = {
    f"{module}.{name}" for module in ("np", "numpy", "torch") for name in ("load", "save", "savez")
}
IN_TESTS = {
    "mock", "monkeypatch.setattr", "pytest.importorskip", "pytest.mark.skip", "pytest.mark.skipif",
    "pytest.skip", "time.sleep", "unittest.mock", "unittest.skip",
}  # fmt: skip
LOCKS = ("locks/*", "package-lock.json")


def imported_names(nodes: Nodes) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def names_used(nodes: Nodes, wanted: set[str]) -> set[str]:
    """Return which of these dotted names a file imports or writes out."""
    last = {name.rpartition(".")[2] for name in wanted}
    attributes = (node for node in nodes if isinstance(node, ast.Attribute) and node.attr in last)
    return {*map(ast.unparse, attributes), *imported_names(nodes)} & wanted


def test_nothing_imports_a_pickler() -> None:
    breaches = [
        f"{path} {name}"
        for path, nodes in modules()
        for name in imported_names(nodes)
        if name.partition(".")[0] in PICKLERS
    ]
    assert not breaches, one_per_line(breaches)


def test_nothing_calls_a_loader_that_unpickles() -> None:
    breaches = [
        f"{path} {name}"
        for path, nodes in modules()
        for name in names_used(nodes, UNPICKLING_CALLS)
    ]
    assert not breaches, one_per_line(breaches)


def test_no_test_sleeps_skips_or_patches() -> None:
    breaches = [
        f"{path} {name}"
        for path, nodes in modules()
        if path.parts[0] == "tests"
        for name in names_used(nodes, IN_TESTS)
    ]
    assert not breaches, one_per_line(breaches)


def test_the_coordinator_waits_for_what_happens_and_sleeps_for_nothing() -> None:
    breaches = [
        str(path)
        for path, nodes in modules()
        if path.parts[0] == "coordinator" and names_used(nodes, {"time.sleep"})
    ]
    assert not breaches, one_per_line(breaches)


def test_no_lock_file_names_an_address() -> None:
    locks = [path for path in handwritten_files() if any(path.match(pattern) for pattern in LOCKS)]
    assert locks
    assert [str(p) for p in locks if "://" in (ROOT / p).read_text(encoding="utf-8")] == []


def test_only_an_issue_may_be_left_to_do() -> None:
    words = ("TO" + "DO", "FIX" + "ME", "X" * 3)
    sources = [
        path
        for path in handwritten_files()
        if path.suffix in {".proto", ".py", ".sol", ".svelte", ".ts"}
    ]
    breaches = [
        str(p) for p in sources if any(w in (ROOT / p).read_text(encoding="utf-8") for w in words)
    ]
    assert not breaches, one_per_line(breaches)


def test_importing_the_root_package_imports_no_other_part_of_it() -> None:
    program = "import sys, hypergpu; print(*(each for each in sys.modules if 'hypergpu.' in each))"
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout.strip() == b""
