"""docs/netsim/README.md says what the code does: its table of profiles, its example, its keys."""

import re
from pathlib import Path

import pytest

from netsim.link import LinkCourse, Variation
from netsim.network.churn import CHURN_CLASSES
from netsim.network.course import WorldCourse
from netsim.network.profiles import PROFILES, Profile
from netsim.network.world import FaultKind
from netsim.network.world_file import parse_world

PAGE = (Path(__file__).parents[3] / "docs" / "netsim" / "README.md").read_text("utf-8")


def shown(number: float) -> str:
    return f"{number:.6g}"


def row_of(entry: Profile) -> str:
    up, down = entry.link.up, entry.link.down
    cells = (
        f"`{entry.name}`",
        shown(entry.link.rtt_us / 1000),
        shown(round((up.jitter_us**2 + down.jitter_us**2) ** 0.5 / 1000, 2)),
        f"{shown(up.loss * 100)} / {shown(up.burst_packets)}",
        f"{shown(down.bits_per_s / 1e6)} / {shown(up.bits_per_s / 1e6)}",
        str(up.queue_ms),
        "yes" if entry.variation != Variation() else "",
        entry.churn,
        entry.source,
    )
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("entry", PROFILES.values(), ids=list(PROFILES))
def test_page_has_the_profile_as_the_code_has_it(entry: Profile) -> None:
    assert row_of(entry).replace("|  |", "| |").replace("|  |", "| |") in PAGE


def test_page_has_no_profile_that_is_gone() -> None:
    table = PAGE.partition("## Profiles")[2].partition("Churn by name")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(PROFILES)


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
    assert [kind for kind in FaultKind if f"| `{kind}` |" not in PAGE] == []
    assert [name for name in CHURN_CLASSES if f"`{name}`" not in PAGE] == []


def test_drawn_rates_of_a_profile_keep_its_mean_over_hours() -> None:
    entry = PROFILES["lte-moving"]
    variation = Variation(rate=entry.variation.rate)
    course = LinkCourse(entry.link, variation, key="page")
    rates = [course.at(second * 1_000_000).down.bits_per_s for second in range(20_000)]
    assert sum(rates) / len(rates) == pytest.approx(12_800_000, rel=0.06)
