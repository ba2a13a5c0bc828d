"""docs/netsim/README.md says what the code does: its profiles, its examples, its faults."""

import re
from pathlib import Path
from typing import get_args

from netsim.network.churn import CHURN_CLASSES
from netsim.network.course import WorldCourse
from netsim.network.profiles import PROFILES
from netsim.network.world import FaultEntry
from netsim.network.world_file import parse_world

PAGE = (Path(__file__).parents[3] / "docs" / "netsim" / "README.md").read_text("utf-8")


def test_page_names_every_profile() -> None:
    assert [name for name in PROFILES if f"`{name}`" not in PAGE and name not in "BC"] == []


def test_example_of_a_world_file_is_one() -> None:
    (example,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    world = parse_world(example, source="docs/netsim/README.md")
    assert [node.name for node in world.nodes] == ["attic", "lab-1", "lab-2", "van"]
    assert world.job is not None


def test_example_of_the_python_interface_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(example, "docs/netsim/README.md", "exec"), names)  # noqa: S102 - our own page
    assert isinstance(names["course"], WorldCourse)
    assert str(names["picture"]).startswith("<svg")


def test_page_names_every_fault_and_every_churn() -> None:
    assert [
        each for each in get_args(FaultEntry) if f"| `{each.__struct_config__.tag}` |" not in PAGE
    ] == []
    assert [name for name in CHURN_CLASSES if f"`{name}`" not in PAGE] == []
