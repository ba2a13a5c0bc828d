"""A world's picture shows each node, its numbers, its faults and the time."""

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from netsim.link.error import NetsimError
from netsim.network.picture import LANES_MAX, world_svg
from netsim.network.world_file import parse_world, read_world_file

WORLDS = Path(__file__).parents[3] / "examples" / "worlds"
SVG = "{http://www.w3.org/2000/svg}"
MINUTE_US = 60_000_000


def words_of(picture: str) -> set[str]:
    root = ET.fromstring(picture)  # noqa: S314 - our own text
    return {element.text or "" for element in root.iter(f"{SVG}text")}


def test_every_node_has_its_lane_with_scales_and_faults() -> None:
    words = words_of(world_svg(read_world_file(WORLDS / "hostile.toml"), 4 * MINUTE_US))
    assert {"steady", "storm-1", "storm-2", "bursts", "van", "liar", "coordinator"} <= words
    assert {"Mbit/s", "20", "500 ms", "5 %", "4 min", "time since the start"} <= words
    assert {"cut off", "flapping", "lies", "corrupts", "clock jump", "slow disk", "crash"} <= words
    assert "slow device" in words


def test_same_world_gives_the_same_picture() -> None:
    path = WORLDS / "five-homes.toml"
    first = world_svg(read_world_file(path), MINUTE_US)
    assert first == world_svg(read_world_file(path), MINUTE_US)


def test_picture_of_a_thousand_shows_the_first_and_says_so() -> None:
    picture = world_svg(read_world_file(WORLDS / "thousand.toml"), MINUTE_US)
    assert f"1000 nodes, the first {LANES_MAX} shown; begins at 12:00, seed 1000" in picture
    assert len(picture) < 2_000_000


def test_names_cannot_bend_the_picture() -> None:
    world = parse_world('name = "<b>&"\n[[nodes]]\nprofile = "A"\n', source="w.toml")
    assert "<b>&" in words_of(world_svg(world, MINUTE_US))


def test_unlimited_link_without_loss_says_so() -> None:
    text = "[[nodes]]\nrtt_ms = 0\nup_mbit_s = 0\ndown_mbit_s = 0\n"
    words = words_of(world_svg(parse_world(text, source="w.toml"), MINUTE_US))
    assert {"no limit on the rate", "no loss", "own link"} <= words


def test_picture_of_no_time_is_refused() -> None:
    with pytest.raises(NetsimError, match="above 0"):
        world_svg(read_world_file(WORLDS / "five-homes.toml"), 0)
