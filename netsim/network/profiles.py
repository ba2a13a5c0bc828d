"""Links that people really have, by name; their numbers and sources are in ``profiles.toml``."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from hypergpu.jobfile.toml import KeyLines, load_toml, read_struct
from netsim.link import Shape
from netsim.network.churn import known_as
from netsim.network.keys import VaryingLinkKeys, replace_durations

_TABLE = Path(__file__).with_name("profiles.toml")
_ALSO_KNOWN_AS = {
    "3g": "3g-moving",
    "4g": "lte-moving",
    "5g": "5g-moving",
    "adsl": "home-dsl",
    "cable": "home-cable",
    "dsl": "home-dsl",
    "fiber": "home-fibre",
    "fibre": "home-fibre",
    "hostile": "stress",
    "lte": "lte-moving",
    "satellite": "geo-sat",
    "wifi": "wifi-bad",
}


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A link that somebody really has, by name."""

    name: str
    shape: Shape
    churn: str = ""
    """A name of `CHURN_CLASSES`; empty: such machines stay. Worlds use it only when asked."""
    source: str
    """Where the numbers come from, in words."""


class _ProfileKeys(VaryingLinkKeys, kw_only=True):
    churn: str = ""
    source: str


def _profile(name: str, table: Mapping[str, object]) -> Profile:
    lines = KeyLines(_TABLE.name)
    keys = read_struct(replace_durations(table, lines), _ProfileKeys, lines)
    return Profile(name=name, shape=keys.shape(), churn=keys.churn, source=keys.source)


PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        name: _profile(name, table)
        for name, table in load_toml(_TABLE.read_text("utf-8"), _TABLE.name).items()
    }
)
"""By name, from the best wire to the worst radio, then our own."""


def profile(name: str) -> Profile:
    """Return the profile of this name.

    Raises:
        NetsimError: There is none; names the one that was probably meant.
    """
    return known_as(name, PROFILES, "profile", _ALSO_KNOWN_AS)
