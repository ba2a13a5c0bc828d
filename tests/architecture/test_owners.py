"""What counts as a type's name, and as an alias that hides a name's owner."""

import pytest

from tests.architecture.owners import alias_names, class_names, uncustomary_aliases
from tests.architecture.tree import nodes_of


@pytest.mark.parametrize(
    "line",
    [
        "Name = A | B",
        "Name = Callable[[int], str]",
        "Name = Annotated[str, 'a name']",
        "Name = Any",
        "Name: TypeAlias = 'A | B'",
        "Name = NewType('Name', int)",
        "Name = typing.TypeVar('Name')",
        "if TYPE_CHECKING:\n    Name = A\n",
    ],
)
def test_an_alias_of_a_type_is_seen_however_it_is_written(line: str) -> None:
    assert [name for _, name in alias_names(nodes_of(line))] == ["Name"]


def test_a_type_variable_of_one_letter_is_seen() -> None:
    assert list(alias_names(nodes_of("T = TypeVar('T')"))) == [(1, "T")]


@pytest.mark.parametrize(
    "line",
    ["_Name = A | B", "NAME = 1", "name = A", "T = 4", "def f():\n    Name = A", "table.Name = A"],
)
def test_constants_private_names_and_locals_are_no_public_types(line: str) -> None:
    assert list(alias_names(nodes_of(line))) == []


def test_a_nested_class_is_seen() -> None:
    assert list(class_names(nodes_of("class A:\n    class B: pass"))) == [(1, "A"), (2, "B")]


@pytest.mark.parametrize(
    "line", ["import numpy as np", "from torch.nn import functional as F", "from a import b as b"]
)
def test_customary_aliases_pass(line: str) -> None:
    assert list(uncustomary_aliases(nodes_of(line))) == []


@pytest.mark.parametrize(
    ("line", "breach"),
    [
        ("from a.b import run as wait_for", "a.b.run as wait_for"),
        ("import huggingface_hub as hub", "huggingface_hub as hub"),
        ("def f():\n    from a import b as _b", "a.b as _b"),
    ],
)
def test_an_alias_that_hides_an_owner_is_seen(line: str, breach: str) -> None:
    assert [text for _, text in uncustomary_aliases(nodes_of(line))] == [breach]
