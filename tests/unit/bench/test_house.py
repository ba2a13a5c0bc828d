import subprocess
from pathlib import Path

from benchmarks.house import lines_before
from benchmarks.house.imports import both_way_pairs, circular_modules
from benchmarks.house.lines import code_lines, count_lines
from benchmarks.house.participles import is_bare_participle
from benchmarks.house.tree import ROOT

SOURCE = '''"""What a module says."""

import os  # a comment

HELD = """
text that is code
"""
"""What a constant says,
in two lines."""


def held(
    path: str,
) -> None:
    """A docstring."""
    os.remove(path)
'''


def make_tree(root: Path, **sources: str) -> Path:
    for name, source in sources.items():
        path = root / "hypergpu" / f"{name.replace('_in_', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return root


def test_only_lines_with_code_count() -> None:
    assert code_lines(SOURCE) == 1 + 3 + 4


def test_an_empty_module_has_no_lines() -> None:
    assert code_lines("") == 0


def test_a_bare_participle_is_recognised() -> None:
    assert all(map(is_bare_participle, ("held", "_told", "asked", "unsettled")))
    assert not any(map(is_bare_participle, ("hold", "speed", "need", "held_job", "bound", "embed")))


def test_folders_that_import_each_other_are_found(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        first_in_a="import hypergpu.second.b",
        second_in_b="from hypergpu.first import c",
        first_in_c="",
    )
    assert [(pair.one, pair.other) for pair in both_way_pairs(root)] == [
        ("hypergpu/first", "hypergpu/second")
    ]
    assert circular_modules(root) == []


def test_an_import_circle_is_found(tmp_path: Path) -> None:
    root = make_tree(
        tmp_path,
        a="from hypergpu import b",
        b="from hypergpu.c import x",
        c="import hypergpu.a\nimport hypergpu.d",
        d="",
    )
    assert circular_modules(root) == ["hypergpu/a.py", "hypergpu/b.py", "hypergpu/c.py"]


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True).stdout


def test_a_part_of_the_tree_before_counts_as_stored(tmp_path: Path) -> None:
    """A shallow clone lacks the commit; there is nothing to count again then."""
    before = lines_before()
    has_commit = subprocess.run(
        ["git", "cat-file", "-e", before.commit], cwd=ROOT, check=False, capture_output=True
    )
    if has_commit.returncode == 0:
        archive = git("archive", before.commit, "gpu_node")
        subprocess.run(["tar", "x", "-C", tmp_path], check=True, input=archive)
        names = git("ls-tree", "-r", "--name-only", before.commit, "gpu_node").decode().split()
        assert (
            count_lines(tmp_path, names).packages["gpu_node"] == (before.lines.packages["gpu_node"])
        )
