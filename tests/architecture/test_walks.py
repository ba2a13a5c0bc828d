"""A plan and an update can be read from top to bottom, and the document says by which way."""

import re
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT
from tests.architecture.walk import Walk, aggregate_walk, plan_walk, receipt_walk, update_walk

PLAN_RETURNS_MOST = 10
AGGREGATE_RETURNS_MOST = 5
DOCUMENT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STAGES = ("round_speeds", "round_shape", "node_shares", "close_plan")


@pytest.fixture(scope="module")
def plan() -> Walk:
    return plan_walk()


def document_walk(title: str) -> list[tuple[str, str]]:
    """Return the module and the name of each function of a walk in the document."""
    section = re.search(rf"^## {title}$(.*?)^## ", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert section, f"docs/architecture.md has no section {title!r}"
    lines = re.findall(r"^\d+\. `([\w.]+)` \(`([\w/.]+)`\): ", section[1], re.MULTILINE)
    return [(path, name) for name, path in lines]


def assert_is_taken(functions: list[tuple[str, str]], walk: Walk) -> None:
    """Assert that ten functions are called for the first time in this order."""
    missing_functions = [function for function in functions if function not in walk.functions]
    assert not missing_functions, f"not called: {missing_functions}"
    places = [walk.functions.index(function) for function in functions]
    assert len(places) == 10
    assert places == sorted(places)


def test_the_walk_of_a_plan_leads_back_to_few_modules(plan: Walk) -> None:
    assert plan.returns <= PLAN_RETURNS_MOST, "\n".join(plan.stops)


def test_the_stages_of_a_plan_are_entered_one_after_another(plan: Walk) -> None:
    names = [name for _, name in plan.functions]
    stages = [names.index(stage) for stage in STAGES]
    assert stages == sorted(stages)


def test_the_walk_of_a_fold_through_the_commands_leads_back_to_few_modules(tmp_path: Path) -> None:
    walk = aggregate_walk(tmp_path)
    assert walk.returns <= AGGREGATE_RETURNS_MOST, "\n".join(walk.stops)


def test_the_documented_walk_of_a_plan_is_the_one_that_it_takes(plan: Walk) -> None:
    assert_is_taken(document_walk("Walk of one plan"), plan)


def test_the_documented_walk_of_an_update_is_the_one_that_it_takes(tmp_path: Path) -> None:
    assert_is_taken(document_walk("Walk of one update"), update_walk(tmp_path))


def test_the_documented_walk_of_a_receipt_is_the_one_that_it_takes(tmp_path: Path) -> None:
    assert_is_taken(document_walk("Walk of one receipt"), receipt_walk(tmp_path))
