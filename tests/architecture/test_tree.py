"""What the rules read: lines of code, imports, participles, the walk of a reader."""

from pathlib import Path

from hypergpu.jobfile.spec import RoundRule
from tests.architecture.participles import (
    is_bare_participle,
    is_participle_of_a_value,
    locals_of,
)
from tests.architecture.tree import both_way_pairs, circular_modules, code_lines, nodes_of
from tests.architecture.walk import Walk, walk_of

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


def test_a_participle_of_a_value_is_recognised() -> None:
    assert all(map(is_participle_of_a_value, ("found", "_kept", "waiting", "owed")))
    nouns = ("row", "is_found", "missing_blobs", "reading", "weighing", "string", "speed")
    assert not any(map(is_participle_of_a_value, nouns))


LOCALS = """
kept = 1
def outer(held, *sent, made=None):
    told: int = 2
    held = told
    with open(held) as opened:
        first, *left = (each for each in opened)
    def inner(known):
        if taken := known:
            made = taken
    try:
        match held:
            case [shown, *hidden]:
                pass
    except OSError as broken:
        pass
class Row:
    stored = 1
"""


def test_locals_are_all_names_that_functions_give_but_parameters() -> None:
    names = sorted(name for _, name in locals_of(nodes_of(LOCALS)))
    assert names == [
        *("broken", "each", "first", "hidden", "left", "made", "opened", "shown", "taken"),
        "told",
    ]


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


def test_a_walk_counts_how_often_it_leads_back_to_a_module() -> None:
    alone = walk_of(lambda: RoundRule().updates_needed(3), "hypergpu/jobfile")
    assert alone.stops == ("hypergpu/jobfile/spec.py",)
    assert Walk(("a", "b", "a", "c", "b")).returns == 2
