"""A world as plain data, the one input of every backend, and how long its machines stay.

Parameters of the volunteers after Javadi, Kondo, Vincent and Anderson, "Discovering statistical
models of availability in large distributed systems" (230,000 SETI@home hosts; six clusters of
similar ones and all together). Most absences of the stable clusters last a minute or two, the rest
half a day: an exponential distribution is wrong at both ends.
"""

import math
import random
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from hypergpu.jobfile.spec import JobSpec
from hypergpu.jobfile.toml import join_words, nearest
from hypergpu.units import Bytes, Milliseconds
from netsim.link import NEVER_US, Link, NetsimError, PairDelay, Shape

_HOUR_S = 3600.0
_Known = TypeVar("_Known")


class SpanKind(StrEnum):
    """A distribution of lengths of time."""

    EXPONENTIAL = "exponential"
    WEIBULL = "weibull"
    LOGNORMAL = "lognormal"
    GAMMA = "gamma"
    HYPEREXPONENTIAL = "hyperexponential"


class SpanPhase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the exponential distributions that a hyper-exponential one mixes."""

    share: float
    mean_s: float = msgspec.field(name="mean")


class SpanDistribution(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A distribution of lengths of time, as a world file gives it.

    Raises:
        ValueError: There is no such distribution.
    """

    kind: SpanKind = SpanKind.EXPONENTIAL
    scale_s: float = msgspec.field(default=0.0, name="scale")
    """The mean of an exponential, the median of a lognormal, else the usual scale parameter."""
    shape: float = 1.0
    """Shape of a Weibull or gamma; of a lognormal the deviation of its logarithm."""
    phases: tuple[SpanPhase, ...] = ()
    """Phases of a hyper-exponential; their shares count relative to their sum."""

    def __post_init__(self) -> None:
        is_mixed = self.kind is SpanKind.HYPEREXPONENTIAL
        numbers = [number for each in self.phases for number in (each.share, each.mean_s)]
        if not is_mixed:
            numbers = [self.scale_s, self.shape]
        if is_mixed != bool(self.phases):
            fix = "give phases to a hyperexponential, and scale and shape to the others"
            raise ValueError(f"a {self.kind} span with {len(self.phases)} phases\n{fix}")
        if not all(0 < number < 1e9 for number in numbers):
            what = f"a {self.kind} span of {', '.join(f'{number:g}' for number in numbers)}"
            raise ValueError(f"{what}\ngive numbers above 0 and below 1e9")

    def draw_us(self, dice: random.Random) -> int:
        """Draw a length of time of at least a microsecond."""
        return max(1, round(self._draw_s(dice) * 1e6))

    def _draw_s(self, dice: random.Random) -> float:
        match self.kind:
            case SpanKind.EXPONENTIAL:
                return dice.expovariate(1 / self.scale_s)
            case SpanKind.WEIBULL:
                return dice.weibullvariate(self.scale_s, self.shape)
            case SpanKind.LOGNORMAL:
                return dice.lognormvariate(math.log(self.scale_s), self.shape)
            case SpanKind.GAMMA:
                return dice.gammavariate(self.shape, self.scale_s)
            case SpanKind.HYPEREXPONENTIAL:
                (phase,) = dice.choices(self.phases, [phase.share for phase in self.phases])
                return dice.expovariate(1 / phase.mean_s)


class Churn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions and absences that follow each other."""

    session: SpanDistribution
    absence: SpanDistribution


class Absence(NamedTuple):
    """A node's daemon is killed, and started again with what it had on disk."""

    from_us: int
    until_us: int


def absences(churn: Churn, *, key: str, speed: float = 1.0) -> Iterator[Absence]:
    """Yield a machine's absences in order of time, without end. It is present at time 0.

    Args:
        churn: Its lengths of time.
        key: Seeds them; equal keys give equal absences.
        speed: Divides all lengths, so that hours of churn fit into minutes.
    """
    dice = random.Random(key)
    now_us = 0
    while True:
        from_us = now_us + max(1, round(churn.session.draw_us(dice) / speed))
        now_us = from_us + max(1, round(churn.absence.draw_us(dice) / speed))
        yield Absence(from_us, now_us)


def _gamma(shape: float, scale_h: float) -> SpanDistribution:
    return SpanDistribution(kind=SpanKind.GAMMA, shape=shape, scale_s=scale_h * _HOUR_S)


def _weibull(shape: float, scale_h: float) -> SpanDistribution:
    return SpanDistribution(kind=SpanKind.WEIBULL, shape=shape, scale_s=scale_h * _HOUR_S)


def _exponential(mean_s: float) -> SpanDistribution:
    return SpanDistribution(kind=SpanKind.EXPONENTIAL, scale_s=mean_s)


def _mixture(*phases: tuple[float, float]) -> SpanDistribution:
    """Mix shares and rates an hour, as the study gives them."""
    kind = SpanKind.HYPEREXPONENTIAL
    return SpanDistribution(
        kind=kind, phases=tuple(SpanPhase(share, _HOUR_S / rate) for share, rate in phases)
    )


CHURN_CLASSES: Mapping[str, Churn] = {
    "c1": Churn(_gamma(0.289, 311.7), _mixture((0.141, 0.008), (0.683, 37.8), (0.176, 1.01))),
    "c2": Churn(_gamma(0.340, 152.2), _mixture((0.142, 0.013), (0.660, 30.6), (0.198, 0.777))),
    "c3": Churn(_weibull(0.431, 1.682), _mixture((0.398, 0.031), (0.305, 11.6), (0.298, 1.32))),
    "c4": Churn(_gamma(0.357, 371.6), _mixture((0.106, 0.009), (0.743, 45.2), (0.151, 0.961))),
    "c5": Churn(_gamma(0.342, 89.2), _mixture((0.179, 0.016), (0.566, 27.6), (0.255, 0.536))),
    "c6": Churn(_gamma(0.357, 43.7), _mixture((0.338, 0.029), (0.390, 30.1), (0.272, 1.07))),
    # Medians of the lognormal in hours are exp(mu). Its sigma is given as 2.444 in one place.
    "seti": Churn(
        _weibull(0.393, 2.964),
        SpanDistribution(kind=SpanKind.LOGNORMAL, shape=2.444, scale_s=0.5565 * _HOUR_S),
    ),
    "spot": Churn(_exponential(8 * _HOUR_S), _exponential(300.0)),
    "stress": Churn(
        SpanDistribution(kind=SpanKind.WEIBULL, shape=0.43, scale_s=600.0), _exponential(120.0)
    ),
}
"""By the name that a world file gives."""


def churn_class(name: str) -> Churn:
    """Return the churn of this name.

    Raises:
        NetsimError: There is none; names the one that was probably meant.
    """
    return known_as(name, CHURN_CLASSES, "churn")


def known_as(
    name: str, known: Mapping[str, _Known], word: str, aliases: Mapping[str, str] | None = None
) -> _Known:
    """Look a name up, or say which one was probably meant.

    Raises:
        NetsimError: There is none of this name.
    """
    if name in known:
        return known[name]
    names_by_lower = {each.lower(): each for each in known}
    alias = (aliases or {}).get(name.lower(), "")
    nearest_name = (
        alias if alias in known else names_by_lower.get(nearest(name, list(names_by_lower)), "")
    )
    fix = (
        f'did you mean "{nearest_name}"?' if nearest_name else f"choose one of {join_words(known)}"
    )
    raise NetsimError(f'there is no {word} "{name}"', fix)


COORDINATOR = "coordinator"
"""The name under which faults reach the coordinator. No node may have it."""


class _AnyEntry(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    nodes: str | tuple[str, ...]
    """Names of nodes and groups; of a fault in a `WorldDescription` its one target."""
    at_ms: Milliseconds = msgspec.field(name="at")

    @property
    def kind(self) -> str:
        """Word for the kind in a world file."""
        return str(self.__struct_config__.tag)

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of nodes and groups."""
        return (self.nodes,) if isinstance(self.nodes, str) else self.nodes

    @property
    def at_us(self) -> int:
        """When it happens."""
        return self.at_ms * 1000


class HealEntry(_AnyEntry, frozen=True, kw_only=True, tag="heal"):
    """Ends the faults of its nodes that have begun."""


class WorldFault(_AnyEntry, frozen=True, kw_only=True):
    """One thing that goes wrong for nodes, or for the coordinator."""

    lasts_ms: Milliseconds | None = msgspec.field(default=None, name="for")
    """None: until a heal, or for good."""

    @property
    def target(self) -> str:
        """The one node that a fault of a `WorldDescription` is for."""
        return str(self.nodes)

    @property
    def until_us(self) -> int:
        """When it ends; `NEVER_US`: it is not healed."""
        return NEVER_US if self.lasts_ms is None else self.at_us + self.lasts_ms * 1000


class CrashFault(WorldFault, frozen=True, kw_only=True, tag="crash"):
    """The process is killed, and started again at the end."""


class PartitionFault(WorldFault, frozen=True, kw_only=True, tag="partition"):
    """The link is cut."""


class FlapFault(WorldFault, frozen=True, kw_only=True, tag="flap"):
    """The link is cut for half of each period."""

    every_ms: Annotated[Milliseconds, msgspec.Meta(ge=1)] = msgspec.field(name="every")
    """Time from one cut to the next."""


class SlowDiskFault(WorldFault, frozen=True, kw_only=True, tag="slow_disk"):
    """The disk is slow."""

    mib_per_s: Annotated[float, msgspec.Meta(ge=0.001, le=1e6)]

    @property
    def bytes_per_s(self) -> int:
        """Rate of the disk."""
        return round(self.mib_per_s * (1 << 20))


class ClockJumpFault(WorldFault, frozen=True, kw_only=True, tag="clock_jump"):
    """The wall clock jumps forward, or back when the number is negative."""

    by_s: Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class CorruptFault(WorldFault, frozen=True, kw_only=True, tag="corrupt"):
    """A share of the node's updates arrives with other bytes than were sent."""

    percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 100.0


class LieFault(WorldFault, frozen=True, kw_only=True, tag="lie"):
    """The node multiplies its pseudo-gradient; -1 turns it round."""

    factor: Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)] = -1.0


class SilentFault(WorldFault, frozen=True, kw_only=True, tag="silent"):
    """The node heartbeats and takes work, and no update of it comes."""


class SlowDeviceFault(WorldFault, frozen=True, kw_only=True, tag="slow_device"):
    """Inner steps take ``factor`` times as long."""

    factor: Annotated[float, msgspec.Meta(ge=1, le=1e4)]


FaultEntry = (
    HealEntry
    | CrashFault
    | PartitionFault
    | FlapFault
    | SlowDiskFault
    | ClockJumpFault
    | CorruptFault
    | LieFault
    | SilentFault
    | SlowDeviceFault
)
"""One entry of a world file's ``[[faults]]``."""


class NodeDescription(msgspec.Struct, frozen=True, kw_only=True):
    """One node: its link, its device, how it comes and goes."""

    name: str
    group: str
    profile: str = ""
    shape: Shape
    churn: Churn | None = None
    step_floor_ms: float = 0.0
    """An inner step takes this long at least, so that a fast machine can play a slow GPU."""
    memory_bytes: Bytes = Bytes(0)
    """What the node says its device has; 0: what it really has."""
    micro_batch_max: int = 0
    """In virtual time, the most samples that fit into its device's memory at once; 0: all do."""
    features: Mapping[str, str | int] = {}
    """What jobs may require of it in virtual time: properties and labels."""

    @property
    def link(self) -> Link:
        """The node's link where nothing varies it."""
        return self.shape.link


class WorldDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a backend needs. Equal descriptions give equal networks."""

    name: str
    seed: int = 0
    starts_at_hour: float = 12.0
    job: JobSpec | None = None
    coordinator: Link
    """The coordinator's own line, shared by all nodes."""
    nodes: tuple[NodeDescription, ...]
    faults: tuple[WorldFault, ...] = ()
    """In order of their beginning."""
    churn_speed: float = 1.0
    """Divides all lengths of churn."""
    pairs: tuple[PairDelay, ...] = ()
    """Nodes between which the way is another than through the middle; each pair once."""

    def node(self, name: str) -> NodeDescription:
        """The node of this name.

        Raises:
            KeyError: There is none.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def key(self, stream: str, entity: str) -> str:
        """The seed of one stream of dice of one entity: no other moves when one is added."""
        return f"{self.seed}/{stream}/{entity}"
