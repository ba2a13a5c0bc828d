import ast
from collections.abc import Iterator
from pathlib import Path

from benchmarks.house.tree import ROOT, handwritten_files, modules, one_per_line

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


def imported_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_nothing_imports_a_pickler() -> None:
    found = [
        f"{path} {name}"
        for path, tree in modules()
        for name in imported_names(tree)
        if name.partition(".")[0] in PICKLERS
    ]
    assert not found, one_per_line(found)


def test_nothing_calls_a_loader_that_unpickles() -> None:
    found = [
        f"{path} {name}"
        for path, tree in modules()
        for name in {*dotted_names(tree), *imported_names(tree)} & UNPICKLING_CALLS
    ]
    assert not found, one_per_line(found)


def test_no_test_sleeps_skips_or_patches() -> None:
    found = [
        f"{path} {name}"
        for path, tree in modules()
        if path.parts[0] == "tests"
        for name in {*dotted_names(tree), *imported_names(tree)} & IN_TESTS
    ]
    assert not found, one_per_line(found)


def test_the_coordinator_waits_for_what_happens_and_sleeps_for_nothing() -> None:
    found = [
        str(path)
        for path, tree in modules()
        if path.parts[0] == "coordinator" and "time.sleep" in dotted_names(tree)
    ]
    assert not found, one_per_line(found)


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
    found = [
        str(p) for p in sources if any(w in (ROOT / p).read_text(encoding="utf-8") for w in words)
    ]
    assert not found, one_per_line(found)


def test_the_root_package_stays_empty() -> None:
    assert (ROOT / Path("hypergpu/__init__.py")).stat().st_size == 0
