"""Keys of links, churn and faults in TOML, as structs. Profiles and world files share them."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import asdict, replace

from hypergpu.jobfile.toml import Duration
from hypergpu.units import Microseconds, Milliseconds
from netsim.link import CongestionControl, Episodes, Link, LinkDirection, RateShape, Variation
from netsim.link.error import NetsimError
from netsim.network.churn import Churn, SpanDistribution, SpanKind, SpanPhase

_Ms = Annotated[float, msgspec.Meta(ge=0, le=60_000)]
_WholeMs = Annotated[int, msgspec.Meta(ge=1, le=60_000)]
_Mbit = Annotated[float, msgspec.Meta(ge=0, le=100_000)]
_Percent = Annotated[float, msgspec.Meta(ge=0, le=99.9)]
_Factor = Annotated[float, msgspec.Meta(ge=0, le=10_000)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
NODES_MAX = 20_000
_OPEN = LinkDirection(delay_us=Microseconds(0), bits_per_s=0)


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    """A table of TOML. Fields of the type `Duration` are text with a unit."""


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
        found = {name: getattr(self, name) for name in names}
        for name in ("loss", "reordering", "duplication"):
            percent = getattr(self, f"{name}_percent")
            found[name] = None if percent is None else percent / 100
        return {name: value for name, value in found.items() if value is not None}


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


class RateKeys(_Keys, kw_only=True):
    """The table ``rate``: how the rates vary."""

    every: Duration | None = None
    variation: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    correlation: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    factors: tuple[_Factor, ...] = ()
    evening: _Factor = 1.0

    def shape(self) -> RateShape:
        """Build the shape."""
        return RateShape(
            every_ms=Milliseconds(1000 if self.every is None else self.every.ms),
            variation=self.variation,
            correlation=self.correlation,
            factors=self.factors,
            evening=self.evening,
        )


class EpisodeKeys(_Keys, kw_only=True):
    """One entry of ``episodes``."""

    every: Duration
    least: Duration
    most: Duration
    regular: bool = False
    stalled: bool = False
    loss_factor: _Factor = 1.0
    delay_ms: _Ms = 0.0

    def episodes(self) -> Episodes:
        """Build the episodes."""
        return Episodes(
            every_ms=Milliseconds(self.every.ms),
            least_ms=Milliseconds(self.least.ms),
            most_ms=Milliseconds(self.most.ms),
            is_regular=self.regular,
            is_stalled=self.stalled,
            loss_factor=self.loss_factor,
            delay_us=Microseconds(round(self.delay_ms * 1000)),
        )


class VaryingLinkKeys(LinkKeys, kw_only=True):
    """A link and what varies by itself. Each key replaces all that the profile has there."""

    rate: RateKeys | None = None
    episodes: tuple[EpisodeKeys, ...] | None = None
    delay_step_ms: _Ms | None = None
    delay_step_every: Duration | None = None

    def variation(self, base: Variation) -> Variation:
        """Build the variation on top of ``base``."""
        if self.rate is not None:
            base = replace(base, rate=self.rate.shape())
        if self.episodes is not None:
            base = replace(base, episodes=tuple(each.episodes() for each in self.episodes))
        if self.delay_step_ms is not None:
            base = replace(base, delay_step_us=Microseconds(round(self.delay_step_ms * 1000)))
        if self.delay_step_every is not None:
            base = replace(base, delay_step_every_ms=Milliseconds(self.delay_step_every.ms))
        return base


class PhaseKeys(_Keys, kw_only=True):
    """One entry of ``phases``."""

    share: _Positive
    mean: Duration


class SpanKeys(_Keys, kw_only=True):
    """The tables ``session`` and ``absence``."""

    kind: SpanKind = SpanKind.EXPONENTIAL
    scale: Duration | None = None
    shape: _Positive = 1.0
    phases: tuple[PhaseKeys, ...] = ()

    def span(self) -> SpanDistribution:
        """Build the distribution."""
        return SpanDistribution(
            kind=self.kind,
            scale_s=0.0 if self.scale is None else self.scale.ms / 1000,
            shape=self.shape,
            phases=tuple(SpanPhase(each.share, each.mean.ms / 1000) for each in self.phases),
        )


class ChurnKeys(_Keys, kw_only=True):
    """The table ``churn``."""

    session: SpanKeys
    absence: SpanKeys

    def churn(self) -> Churn:
        """Build the churn."""
        return Churn(self.session.span(), self.absence.span())


class FaultKeys(_Keys, kw_only=True, tag_field="kind"):
    """Keys of every ``[[faults]]``."""

    nodes: str | tuple[str, ...]
    at: Duration

    @property
    def kind(self) -> str:
        """The kind that the file names."""
        return str(self.__struct_config__.tag)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of nodes and groups."""
        return (self.nodes,) if isinstance(self.nodes, str) else self.nodes


class HealKeys(FaultKeys, kw_only=True, tag="heal"):
    """Ends the faults of its nodes that have begun."""


class LastingKeys(FaultKeys, kw_only=True):
    """A fault that lasts; without ``for`` until a heal, or for good."""

    lasts: Duration | None = msgspec.field(default=None, name="for")

    def numbers(self) -> dict[str, Any]:
        """Fields of a `Fault` that only some kinds have."""
        return {
            field: convert(getattr(self, key))
            for key, (field, convert) in _NUMBERS.items()
            if hasattr(self, key)
        }


_NUMBERS: Mapping[str, tuple[str, Callable[[Any], float]]] = {
    "every": ("every_us", lambda every: max(2, every.ms * 1000)),
    "mib_per_s": ("bytes_per_s", lambda rate: round(rate * (1 << 20))),
    "by_s": ("jump_ms", lambda seconds: round(seconds * 1000)),
    "percent": ("share", lambda percent: percent / 100),
    "factor": ("factor", float),
}


class CrashKeys(LastingKeys, kw_only=True, tag="crash"):
    """The process is killed."""


class PartitionKeys(LastingKeys, kw_only=True, tag="partition"):
    """The link is cut."""


class FlapKeys(LastingKeys, kw_only=True, tag="flap"):
    """The link is cut for half of each period."""

    every: Duration


class SlowDiskKeys(LastingKeys, kw_only=True, tag="slow_disk"):
    """The disk is slow."""

    mib_per_s: Annotated[float, msgspec.Meta(ge=0.001, le=1e6)]


class ClockJumpKeys(LastingKeys, kw_only=True, tag="clock_jump"):
    """The wall clock jumps."""

    by_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class CorruptKeys(LastingKeys, kw_only=True, tag="corrupt"):
    """Updates arrive with other bytes than were sent."""

    percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 100.0


class LieKeys(LastingKeys, kw_only=True, tag="lie"):
    """The node multiplies its pseudo-gradient."""

    factor: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] = -1.0


class SlowDeviceKeys(LastingKeys, kw_only=True, tag="slow_device"):
    """Inner steps take longer."""

    factor: Annotated[float, msgspec.Meta(ge=1, le=1e4)]


AnyFaultKeys = (
    HealKeys
    | CrashKeys
    | PartitionKeys
    | FlapKeys
    | SlowDiskKeys
    | ClockJumpKeys
    | CorruptKeys
    | LieKeys
    | SlowDeviceKeys
)


class NodeKeys(VaryingLinkKeys, kw_only=True):
    """One ``[[nodes]]``: a node, or a group of equal ones."""

    name: str = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] = 1
    profile: str | None = None
    trace: str | None = None
    trace_up: str | None = None
    trace_down: str | None = None
    churn: str | ChurnKeys | None = None
    step_floor_ms: Annotated[float, msgspec.Meta(ge=0, le=3_600_000)] = 0.0
    memory_mib: Annotated[int, msgspec.Meta(ge=1, le=1 << 22)] = 0


class WorldKeys(_Keys, kw_only=True):
    """A whole world file."""

    name: str = ""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    hour: Annotated[float, msgspec.Meta(ge=0, le=24)] = 12.0
    churn: str | ChurnKeys = "none"
    churn_speed: Annotated[float, msgspec.Meta(ge=0.001, le=1e6)] = 1.0
    job: str | dict[str, Any] | None = None
    coordinator: LinkKeys | None = None
    nodes: list[NodeKeys] = []
    faults: list[AnyFaultKeys] = []
