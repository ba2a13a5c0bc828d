"""Measured line and speed of a node, and the observations that they are made of. Pure values.

Nothing here is journalled: after a restart readings are made anew, and plans go on from the plan
before until there are some.
"""

from enum import Enum

import msgspec

from hypergpu.units import Bytes, Microseconds, Milliseconds


class Estimate(msgspec.Struct, frozen=True):
    """A quantity that wanders: its mean and mean deviation (Jacobson; RFC 6298)."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    """Observations since its level last changed at once; 0: not known."""
    at_ms: Milliseconds = Milliseconds(0)
    """Job time of the newest one."""
    drift: float = 0.0
    """Evidence in a row that the level has changed, in deviations; negative: downwards."""
    newest: float = 0.0
    """The newest observation as it was."""


class TransferDirection(Enum):
    """Way of a transfer, as the node sees it."""

    UP = "up"
    DOWN = "down"


class RoundTrip(msgspec.Struct, frozen=True):
    """A probe of the control stream came back."""

    at_ms: Milliseconds
    took_us: Microseconds


class PacketTrain(msgspec.Struct, frozen=True):
    """A train of datagrams was sent, and what of it was not echoed."""

    at_ms: Milliseconds
    sent: int
    lost: int
    bursts: int


class TransferTime(msgspec.Struct, frozen=True):
    """Bytes that got through, and how long they took once the first was there.

    One that broke off counts for the bytes that arrived: it is what a line that has become bad
    shows first.
    """

    at_ms: Milliseconds
    direction: TransferDirection
    size_bytes: Bytes
    took_us: Microseconds
    connections: int


class StepTime(msgspec.Struct, frozen=True):
    """Inner steps that were taken, counted in steps of the job's own batch."""

    at_ms: Milliseconds
    steps: float
    took_ms: Milliseconds


class Finish(msgspec.Struct, frozen=True):
    """An update arrived: what was forecast and what it took, from its assignment on."""

    at_ms: Milliseconds
    forecast_ms: Milliseconds
    took_ms: Milliseconds


class Presence(msgspec.Struct, frozen=True):
    """The node came or went."""

    at_ms: Milliseconds
    is_present: bool
    is_starting: bool = False
    """The node is there and its worker is not ready yet."""


class SocketReport(msgspec.Struct, frozen=True):
    """What the node says of its own sockets."""

    at_ms: Milliseconds
    congestion_control: str
    is_probing_blocked: bool
    coordinator_congestion_control: str = ""
    """That of the coordinator's sockets to nodes, which carry what goes down; empty: not known."""


class UpdateVerdict(msgspec.Struct, frozen=True):
    """An update was judged: it went into the aggregate or was refused for what it held."""

    at_ms: Milliseconds
    is_accepted: bool


Observation = (
    RoundTrip
    | PacketTrain
    | TransferTime
    | StepTime
    | Finish
    | Presence
    | SocketReport
    | UpdateVerdict
)


class Conditions(msgspec.Struct, frozen=True):
    """What held while a goodput was measured, so that it can be carried over to other numbers."""

    round_trip_us: Microseconds = Microseconds(0)
    """0: not known."""
    connections: int = 1


class NodeReading(msgspec.Struct, frozen=True):
    """Everything that is known of one node."""

    round_trip_us: Estimate = Estimate()
    least_round_trip_us: Microseconds = Microseconds(0)
    """Least of the newest probes: the line without queues; 0: not known."""
    newest_round_trips_us: tuple[Microseconds, ...] = ()
    """Up to ten, the newest last."""
    up_bits_per_s: Estimate = Estimate()
    """Goodput once slow start is over. The mean is harmonic: times are predicted from it."""
    down_bits_per_s: Estimate = Estimate()
    up_conditions: Conditions = Conditions()
    """Under which the newest upload was measured, and to which all before were carried over."""
    down_conditions: Conditions = Conditions()
    step_us: Estimate = Estimate()
    """Time of a step with the job's own batch: a node with a smaller one is no faster for it."""
    packets_sent: float = 0.0
    """Probes, old ones forgotten bit by bit: with ``packets_lost`` a Beta posterior of losses."""
    packets_lost: float = 0.0
    bursts_lost: float = 0.0
    loss_at_ms: Milliseconds = Milliseconds(0)
    loss_bound: float = 0.0
    """The most that uploads so far leave room for; it stands in where probes are blocked."""
    correction: float = 1.0
    """What forecasts were off by: actual over predicted, in [0.5, 3]."""
    newest_ratios: tuple[float, ...] = ()
    """The same of single finishes, up to five, the newest last."""
    forecast_error: Estimate = Estimate()
    """Absolute error of forecasts over what it took."""
    present_share: float = 1.0
    """Share of the recent past in which it was there, in [0, 1]."""
    is_present: bool = True
    is_starting: bool = False
    """Its worker's process is a new one that is not ready yet."""
    presence_at_ms: Milliseconds = Milliseconds(0)
    updates_judged: float = 0.0
    """Old ones forgotten bit by bit."""
    updates_accepted: float = 0.0
    congestion_control: str = ""
    """That of the node's sockets, which carry what goes up."""
    coordinator_congestion_control: str = ""
    """That of the coordinator's sockets, which carry what goes down."""
    is_probing_blocked: bool = False
