"""How well a node is, for people: one number, its band, and a sentence that names what is weak.

Nothing is scheduled by it. When a node will be done is its forecast; whether it will be there, its
availability; how far its updates are believed, its trust. A score that mixes the three would keep
honest nodes with bad lines, and the data that only they hold, out of the model.
"""

from enum import Enum
from math import prod

import msgspec

from coordinator.core.measure.forecast import transfer_forecast
from coordinator.core.measure.line import likely_loss
from coordinator.core.measure.observing import availability
from coordinator.core.measure.reading import Direction, NodeReading
from hypergpu.units import Bytes, Milliseconds

HIGH, NORMAL, LOW = 0.8, 0.5, 0.3
"""A band begins above its number."""
WEIGHTS = {"compute": 0.4, "network": 0.3, "updates": 0.2, "uptime": 0.1}
EXCHANGE_BYTES = Bytes(1 << 20)
"""Each way, to compare lines by: small enough for round trips to matter, large enough for rates."""


class Band(Enum):
    """What a score is called. Nodes of the two lower ones tend to get less work, or to rest for a
    while; but by their forecasts and presence, which a plan names, and not by this word.
    """

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"
    POOR = "poor"


class HealthParts(msgspec.Struct, frozen=True):
    """Each in [0, 1]; None: not known, and left out of the score."""

    compute: float | None
    """Speed of a step over that of the fleet's median, at most 1."""
    network: float | None
    """Speed of moving a mebibyte each way over that of a typical line, at most 1; 0 while the node
    is not connected.
    """
    updates: float | None
    """Share of recent updates that were accepted."""
    uptime: float
    """Availability."""


class Health(msgspec.Struct, frozen=True):
    """A node's score with its reason."""

    score: float
    band: Band
    parts: HealthParts
    reason: str
    """``0.42 low: network 0.20 (uplink 0.8 Mbit/s)``."""


def health(reading: NodeReading, typical: NodeReading, now_ms: Milliseconds) -> Health:
    """A weighted geometric mean: a part that is 0 makes all of it 0, so that a node which cannot be
    reached scores nothing however fast its processor is; a sum would have left it half.

    What is not known of a node is left out, and the others' weights grow.

    Args:
        reading: Of the node.
        typical: Of its fleet (`fleet.typical`), itself included.
        now_ms: For its availability.
    """
    parts = HealthParts(
        compute=_compute(reading, typical),
        network=_network(reading, typical) if reading.is_present else 0.0,
        updates=_updates(reading),
        uptime=availability(reading, now_ms),
    )
    known = {name: value for name in WEIGHTS if (value := getattr(parts, name)) is not None}
    weight = sum(WEIGHTS[name] for name in known)
    score = float(prod(value ** (WEIGHTS[name] / weight) for name, value in known.items()))
    band = _band(score)
    weakest = min(known, key=lambda name: known[name])
    told = f"{weakest} {known[weakest]:.2f} ({_detail(weakest, reading, typical)})"
    if len(known) == 1 and known[weakest] > NORMAL:
        told = "nothing of it measured yet"
    elif known[weakest] > 0.95:
        told = "no part below the fleet's middle"
    return Health(score, band, parts, f"{score:.2f} {band.value}: {told}")


def _band(score: float) -> Band:
    if score > HIGH:
        return Band.HIGH
    if score > NORMAL:
        return Band.NORMAL
    return Band.LOW if score > LOW else Band.POOR


def _compute(reading: NodeReading, typical: NodeReading) -> float | None:
    if not reading.step_us.count or not typical.step_us.count:
        return None
    return min(1.0, typical.step_us.mean / reading.step_us.mean)


def _network(reading: NodeReading, typical: NodeReading) -> float | None:
    estimates = (reading.round_trip_us, reading.up_bits_per_s, reading.down_bits_per_s)
    if not any(estimate.count for estimate in estimates):
        return None
    own, usual = _exchange_us(reading, typical), _exchange_us(typical, typical)
    return min(1.0, sum(usual.values()) / max(1e-9, sum(own.values())))


def _exchange_us(reading: NodeReading, typical: NodeReading) -> dict[str, float]:
    """What moving a mebibyte up and down takes, and asking for both."""
    trips = reading.round_trip_us if reading.round_trip_us.count else typical.round_trip_us
    moved = {
        name: transfer_forecast(reading, direction, EXCHANGE_BYTES, typical=typical).mean_us
        for name, direction in (("uplink", Direction.UP), ("downlink", Direction.DOWN))
    }
    return {**moved, "round trip": 2 * trips.mean}


def _updates(reading: NodeReading) -> float | None:
    """With one accepted update as prior: a single refusal is no verdict on a node."""
    if reading.updates_judged <= 0:
        return None
    return min(1.0, (reading.updates_accepted + 1) / (reading.updates_judged + 1))


def _detail(part: str, reading: NodeReading, typical: NodeReading) -> str:
    match part:
        case "compute":
            own_ms, usual_ms = reading.step_us.mean / 1000, typical.step_us.mean / 1000
            return f"a step takes {own_ms:.0f} ms, typically {usual_ms:.0f} ms"
        case "network":
            return _network_detail(reading, typical) if reading.is_present else "not connected"
        case "updates":
            share = reading.updates_accepted / reading.updates_judged
            return f"{share:.0%} of recent updates accepted"
        case _:
            return "often away"


def _network_detail(reading: NodeReading, typical: NodeReading) -> str:
    """What costs the most beyond a typical line."""
    own, usual = _exchange_us(reading, typical), _exchange_us(typical, typical)
    worst = max(own, key=lambda name: own[name] - usual[name])
    if worst == "round trip":
        return f"round trip {reading.round_trip_us.mean / 1000:.0f} ms"
    rate = reading.up_bits_per_s if worst == "uplink" else reading.down_bits_per_s
    if rate.count and worst == "uplink" and rate.mean < typical.up_bits_per_s.mean:
        return f"uplink {_megabits(rate.mean)}"
    if rate.count and worst == "downlink" and rate.mean < typical.down_bits_per_s.mean:
        return f"downlink {_megabits(rate.mean)}"
    if likely_loss(reading) > likely_loss(typical):
        return f"{likely_loss(reading):.1%} of packets lost"
    return f"round trip {reading.round_trip_us.mean / 1000:.0f} ms"


def _megabits(bits_per_s: float) -> str:
    return (
        f"{bits_per_s / 1e6:.2g} Mbit/s" if bits_per_s < 1e7 else f"{bits_per_s / 1e6:.0f} Mbit/s"
    )
