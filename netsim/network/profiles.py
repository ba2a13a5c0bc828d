"""Links that people really have, by name, and the keys that describe links and nodes in TOML.

The numbers and their sources are in ``profiles.toml``. World files share the keys.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict, replace

from hypergpu.jobfile.toml import (
    DurationError,
    JobFileError,
    KeyLines,
    Problem,
    duration_ms,
    read_struct,
)
from hypergpu.jobfile.toml_text import load_toml
from hypergpu.units import Microseconds, Milliseconds
from netsim.link import (
    CongestionControl,
    Episodes,
    Link,
    LinkDirection,
    NatKind,
    NetsimError,
    RateShape,
    Shape,
    Variation,
)
from netsim.network.world import Churn, FaultEntry, known_as

_Ms = Annotated[float, msgspec.Meta(ge=0, le=60_000)]
_WholeMs = Annotated[int, msgspec.Meta(ge=1, le=60_000)]
_Mbit = Annotated[float, msgspec.Meta(ge=0, le=100_000)]
_Percent = Annotated[float, msgspec.Meta(ge=0, le=99.9)]
NODES_MAX = 20_000
_OPEN = LinkDirection(delay_us=Microseconds(0), bits_per_s=0)


_IN_MILLISECONDS = {"at", "for", "every", "least", "most", "delay_step_every"}
_IN_SECONDS = {"scale", "mean"}


def replace_durations(tree: Any, lines: KeyLines, path: str = "") -> Any:
    """Return a table with its lengths of time as numbers; they are text with a unit in TOML.

    Raises:
        JobFileError: One of them is no length of time; with its place.
    """
    if isinstance(tree, list):
        return [
            replace_durations(each, lines, f"{path}.{number}") for number, each in enumerate(tree)
        ]
    if not isinstance(tree, dict):
        return tree
    numbers = {}
    for key, value in tree.items():
        place = f"{path}.{key}".lstrip(".")
        if place == "job":
            numbers[key] = value
        elif key in _IN_MILLISECONDS:
            numbers[key] = _duration(value, place, lines)
        elif key in _IN_SECONDS:
            numbers[key] = _duration(value, place, lines) / 1000
        else:
            numbers[key] = replace_durations(value, lines, place)
    return numbers


def _duration(value: object, place: str, lines: KeyLines) -> int:
    try:
        return duration_ms(value)
    except DurationError as wrong:
        raise JobFileError([Problem(place, wrong.what, wrong.fix, lines.of(place))]) from None


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    """A table of TOML, its lengths of time replaced by numbers."""


class DirectionKeys(_Keys, kw_only=True):
    """Keys that each direction of a link has. None leaves the value of the profile."""

    jitter_ms: _Ms | None = None
    jitter_memory_ms: _WholeMs | None = None
    jitter_is_clamped: bool | None = None
    loss_percent: _Percent | None = None
    burst_packets: Annotated[float, msgspec.Meta(ge=1, le=1e6)] | None = None
    reordering_percent: _Percent | None = None
    duplication_percent: _Percent | None = None
    queue_ms: _WholeMs | None = None

    def fields(self) -> dict[str, float]:
        """Fields of a `LinkDirection` that are given, the jitter and the delay left out."""
        names = ("burst_packets", "queue_ms", "jitter_memory_ms", "jitter_is_clamped")
        field_values = {name: getattr(self, name) for name in names}
        for name in ("loss", "reordering", "duplication"):
            percent = getattr(self, f"{name}_percent")
            field_values[name] = None if percent is None else percent / 100
        return {name: value for name, value in field_values.items() if value is not None}


class OneWayKeys(DirectionKeys, kw_only=True):
    """The tables ``up`` and ``down``: values of one direction."""

    delay_ms: _Ms | None = None
    mbit_s: _Mbit | None = None

    def fields(self) -> dict[str, float]:
        """Fields of the `LinkDirection` that are given."""
        return DirectionKeys.fields(self) | _scale(
            ("delay_us", self.delay_ms, 1e3),
            ("jitter_us", self.jitter_ms, 1e3),
            ("bits_per_s", self.mbit_s, 1e6),
        )


class LinkKeys(DirectionKeys, kw_only=True):
    """A link that does not vary. Round-trip figures are divided between the two directions."""

    rtt_ms: _Ms | None = None
    up_mbit_s: _Mbit | None = None
    down_mbit_s: _Mbit | None = None
    congestion_control: CongestionControl | None = None
    up: OneWayKeys | None = None
    down: OneWayKeys | None = None

    def link(self, base: Link | None = None) -> Link:
        """Build the link from these keys on top of ``base``.

        Raises:
            NetsimError: Without a base keys are missing, or no link can be like that.
        """
        both = self.fields() | _scale(
            ("delay_us", self.rtt_ms, 500), ("jitter_us", self.jitter_ms, 1000 / math.sqrt(2))
        )
        control = self.congestion_control or (base or Link(up=_OPEN, down=_OPEN)).congestion_control
        return Link(
            up=self._direction("up", both, base.up if base else None),
            down=self._direction("down", both, base.down if base else None),
            congestion_control=control,
        )

    def _direction(
        self, way: str, both: dict[str, float], base: LinkDirection | None
    ) -> LinkDirection:
        fields = ({} if base is None else asdict(base)) | both
        fields |= _scale(("bits_per_s", getattr(self, f"{way}_mbit_s"), 1e6))
        own: OneWayKeys | None = getattr(self, way)
        fields |= {} if own is None else own.fields()
        for field, key in (("delay_us", "rtt_ms"), ("bits_per_s", f"{way}_mbit_s")):
            if field not in fields:
                raise NetsimError(f"{key} is missing", f"give {key}, or a profile")
        return msgspec.convert(fields, LinkDirection)


def _scale(*values: tuple[str, float | None, float]) -> dict[str, float]:
    return {name: round(value * factor) for name, value, factor in values if value is not None}


class VaryingLinkKeys(LinkKeys, kw_only=True):
    """A link and what varies by itself. Each key replaces all that the profile has there."""

    nat: NatKind | None = None
    rate: RateShape | None = None
    episodes: tuple[Episodes, ...] | None = None
    delay_step_ms: _Ms | None = None
    delay_step_every_ms: Milliseconds | None = msgspec.field(default=None, name="delay_step_every")

    def shape(self, base: Shape | None = None) -> Shape:
        """Build the link and its variation on top of ``base``.

        Raises:
            NetsimError: Without a base keys are missing, or no link can be like that.
        """
        variation_values = {name: getattr(self, name) for name in Variation.__struct_fields__}
        changes = {name: value for name, value in variation_values.items() if value is not None}
        variation = replace(base.variation if base else Variation(), **changes)
        return Shape(
            link=self.link(base.link if base else None),
            variation=variation,
            nat=self.nat or (base.nat if base else None),
        )


class NodeKeys(VaryingLinkKeys, kw_only=True):
    """One ``[[nodes]]``: a node, or a group of equal ones."""

    name: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] = 1
    profile: str | None = None
    trace: str | None = None
    trace_up: str | None = None
    trace_down: str | None = None
    churn: str | Churn | None = None
    step_floor_ms: Annotated[float, msgspec.Meta(ge=0, le=3_600_000)] = 0.0
    memory_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)] = 0
    micro_batch_max: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 0


class PairKeys(_Keys, kw_only=True):
    """One ``[[pairs]]``: two nodes or groups of nodes."""

    between: Annotated[tuple[str, ...], msgspec.Meta(min_length=2, max_length=2)]
    """The same group twice: all nodes of it with each other."""
    delay_ms: _Ms
    """One way, from node to node."""


class WorldKeys(_Keys, kw_only=True):
    """A whole world file."""

    name: str = ""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    hour: Annotated[float, msgspec.Meta(ge=0, le=24)] = 12.0
    churn: str | Churn = "none"
    churn_speed: Annotated[float, msgspec.Meta(ge=0.001, le=1e6)] = 1.0
    job: str | dict[str, Any] | None = None
    coordinator: LinkKeys | None = None
    nodes: list[NodeKeys] = []
    pairs: list[PairKeys] = []
    faults: list[FaultEntry] = []


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
