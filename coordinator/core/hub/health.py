"""Health of a node: one number in [0, 1] with four parts, for every node, under every strategy.

    health = 0.4 speed + 0.3 reliability + 0.2 quality + 0.1 uptime

Each part is in [0, 1] and begins at `NEWCOMER`, 0.75. The number decides the order in which nodes
are asked and who gets spare work, nothing else. A node is excluded for its reliability or its
quality alone, each by a limit and for a time of its own (`PartLimit`), never for its speed.

A record is kept by the node's key, outlives restarts, and is bounded: eight workloads, one byte a
minute for a day. docs/adaptation.md explains the rules to users.
"""

from collections.abc import Iterable
from enum import StrEnum
from math import exp, isfinite, log, log2
from statistics import fmean, median
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from coordinator.core.training.job.events import AggregateReady, Event
from coordinator.core.training.job.state import Job, Participant, Round
from coordinator.core.training.trust.weights import WHOLE
from coordinator.core.work.leases import WorkState
from coordinator.core.work.work_events import NodeLost
from hypergpu.ids import NodeId

NEWCOMER = 0.75
"""Value of a part of which nothing was measured yet."""
SLOWEST, DOUBLINGS = 64, 8
"""A part of the speed is 0 at one 64th of the fleet's median; each doubling adds one eighth."""
WINDOW_ROUNDS = 16
"""Reliability and quality are averages in which each round counts one 16th of what is left."""
HISTORY_MINUTES = 24 * 60
PRIOR_MINUTES = 60
"""Minutes at `NEWCOMER` that the uptime of a node begins with."""
WORKLOADS_MOST = 8
POINTS_MOST = 240
_RATE_STEP = 0.25
"""How far one update moves the node's speed."""
_CONNECTED, _VALUE, _GAP = 0x80, 0x7F, 0x7F
"""A minute's byte: hundredths of the health, and whether the node was connected; or a gap, in which
no coordinator looked.
"""
_NOT_CONNECTED = bytes(range(_CONNECTED))


class HealthLevel(StrEnum):
    """A word for a range of the health."""

    HIGH = "high"
    """From 0.8."""
    NORMAL = "normal"
    """From 0.5."""
    LOW = "low"
    """From 0.3."""
    POOR = "poor"
    """Below 0.3."""


_LEVELS = ((0.8, HealthLevel.HIGH), (0.5, HealthLevel.NORMAL), (0.3, HealthLevel.LOW))


class HealthParts(NamedTuple):
    """The four parts, each in [0, 1]."""

    speed: float = NEWCOMER
    reliability: float = NEWCOMER
    quality: float = NEWCOMER
    uptime: float = NEWCOMER

    @property
    def value(self) -> float:
        """The health, in [0, 1], to four digits."""
        return round(
            sum(weight * part for weight, part in zip(WEIGHTS, self, strict=True)), ndigits=4
        )

    @property
    def level(self) -> HealthLevel:
        """The word for the health."""
        return level_of(self.value)


WEIGHTS = HealthParts(speed=0.4, reliability=0.3, quality=0.2, uptime=0.1)


def level_of(value: float) -> HealthLevel:
    """The word for a health in [0, 1]."""
    levels = (level for least, level in _LEVELS if value >= least)
    return next(levels, HealthLevel.POOR)


class PartLimit(NamedTuple):
    """When a part excludes its node, and for how long."""

    below: float
    """The part excludes below this value."""
    first_s: int
    """The first exclusion; each further one in a row lasts twice as long."""
    longest_s: int
    restart: float
    """Least value of the part once an exclusion ends: the node is tried again."""


RELIABILITY_LIMIT = PartLimit(below=0.2, first_s=600, longest_s=6 * 3600, restart=0.5)
QUALITY_LIMIT = PartLimit(below=0.2, first_s=3600, longest_s=24 * 3600, restart=0.5)


class TrackedPart(msgspec.Struct, frozen=True):
    """A part that is an average over rounds, and its exclusions."""

    value: float = NEWCOMER
    """In [0, 1]."""
    excluded_until_s: int = 0
    """Unix time; 0: it excludes nothing."""
    exclusions: int = 0
    """In a row: the part has not reached `NEWCOMER` since the first of them."""

    def at(self, limit: PartLimit, now_s: int) -> "TrackedPart":
        """The part at a time: what an exclusion that has ended leaves of it."""
        if not 0 < self.excluded_until_s <= now_s:
            return self
        return replace(self, value=max(self.value, limit.restart), excluded_until_s=0)

    def after(self, sample: float, limit: PartLimit, now_s: int) -> "TrackedPart":
        """The part after a round.

        Args:
            sample: What the round says of the node, in [0, 1].
            limit: The part's own.
            now_s: Unix time.
        """
        before = self.at(limit, now_s)
        value = before.value + (min(1.0, max(0.0, sample)) - before.value) / WINDOW_ROUNDS
        if value < limit.below and not before.excluded_until_s:
            lasts_s = min(limit.longest_s, limit.first_s << min(before.exclusions, 32))
            return TrackedPart(value, now_s + lasts_s, before.exclusions + 1)
        exclusions = 0 if value >= NEWCOMER else before.exclusions
        return replace(before, value=value, exclusions=exclusions)


class HealthRecord(msgspec.Struct, frozen=True):
    """Figures and history of one node."""

    rates: dict[str, float] = {}
    """Samples a second by workload, the newest last; at most `WORKLOADS_MOST`."""
    up_bits_per_s: float = 0.0
    """Goodput as last measured; 0: not known."""
    down_bits_per_s: float = 0.0
    loss: float = 0.0
    """Share of packets lost as last measured, in [0, 1]."""
    reliability: TrackedPart = TrackedPart()
    quality: TrackedPart = TrackedPart()
    minutes: bytes = b""
    """One byte a minute, the newest last; at most `HISTORY_MINUTES`."""
    minute: int = 0
    """Unix minute of the newest byte."""
    seen_minute: int = 0
    """Unix minute in which the node was there last; 0: never yet."""


class FleetMedians(NamedTuple):
    """What speeds are held against: geometric medians over all nodes; 0: no node is known."""

    rates: dict[str, float]
    """Samples a second by workload."""
    up_bits_per_s: float = 0.0
    down_bits_per_s: float = 0.0


def fleet_medians(records: Iterable[HealthRecord]) -> FleetMedians:
    """Medians over the fleet, each node's own figures included."""
    rates: dict[str, list[float]] = {}
    up: list[float] = []
    down: list[float] = []
    for record in records:
        for workload, rate in record.rates.items():
            rates.setdefault(workload, []).append(rate)
        up.append(record.up_bits_per_s)
        down.append(record.down_bits_per_s)
    medians = {workload: _geometric_median(values) for workload, values in rates.items()}
    return FleetMedians(medians, _geometric_median(up), _geometric_median(down))


def _geometric_median(values: Iterable[float]) -> float:
    logs = [log(value) for value in values if value > 0]
    return exp(median(logs)) if logs else 0.0


def relative_score(value: float, usual: float) -> float:
    """Score in [0, 1] of a rate against the fleet's median: log2(64 r) / 8.

    0 at one 64th of the median, 0.75 at the median, 1 at four times it.

    Args:
        value: More than 0.
        usual: The median, more than 0.
    """
    return min(1.0, max(0.0, log2(SLOWEST * value / usual) / DOUBLINGS))


def speed_part(record: HealthRecord, medians: FleetMedians) -> float:
    """Mean of the scores of computing and of the line, as far as they are known, in [0, 1].

    Computing: samples a second of the workload that the node trained last. The line: the mean of
    the scores of its goodput up and down.
    """
    line = [
        relative_score(value, usual)
        for value, usual in (
            (record.up_bits_per_s, medians.up_bits_per_s),
            (record.down_bits_per_s, medians.down_bits_per_s),
        )
        if value > 0 and usual > 0
    ]
    scores = [fmean(line)] if line else []
    workload = next(reversed(record.rates), "")
    if (usual := medians.rates.get(workload, 0.0)) > 0:
        scores.append(relative_score(record.rates[workload], usual))
    return fmean(scores) if scores else NEWCOMER


def uptime_part(minutes: bytes) -> float:
    """Share of the last day's minutes in which the node was connected, in [0, 1].

    Minutes in which no coordinator looked are left out. A node begins with an hour at `NEWCOMER`.
    """
    looks = len(minutes) - minutes.count(_GAP)
    connected_minutes = len(minutes.translate(None, delete=_NOT_CONNECTED))
    return (connected_minutes + NEWCOMER * PRIOR_MINUTES) / (looks + PRIOR_MINUTES)


def health_parts(record: HealthRecord, medians: FleetMedians, now_s: int) -> HealthParts:
    """The four parts of a node's health at a time, Unix seconds."""
    return HealthParts(
        speed=speed_part(record, medians),
        reliability=record.reliability.at(RELIABILITY_LIMIT, now_s).value * (1.0 - record.loss),
        quality=record.quality.at(QUALITY_LIMIT, now_s).value,
        uptime=uptime_part(record.minutes),
    )


class Exclusion(NamedTuple):
    """Why a node gets no work for a while though it is there."""

    part: str
    """``reliability`` or ``quality``."""
    until_s: int
    """Unix time of its end."""
    reason: str
    """For people."""


def exclusion(record: HealthRecord, now_s: int) -> Exclusion | None:
    """The node's exclusion at a time, Unix seconds; of two the one that ends later; None: there is
    none. Neither speed nor the health as a whole has a say.
    """
    exclusions = [
        Exclusion(name, part.excluded_until_s, _exclusion_reason(name, part, limit, now_s))
        for name, part, limit in (
            ("reliability", record.reliability, RELIABILITY_LIMIT),
            ("quality", record.quality, QUALITY_LIMIT),
        )
        if part.excluded_until_s > now_s
    ]
    return max(exclusions, key=lambda each: each.until_s, default=None)


def _exclusion_reason(name: str, part: TrackedPart, limit: PartLimit, now_s: int) -> str:
    minutes = -(-(part.excluded_until_s - now_s) // 60)
    return f"excluded for {minutes} min: its {name} fell below {limit.below:.2g}"


def health_reason(parts: HealthParts, excluded: Exclusion | None) -> str:
    """What lowers a health most, for people."""
    if excluded is not None:
        return excluded.reason
    costs = zip(HealthParts._fields, WEIGHTS, parts, strict=True)
    name, _, part = max(costs, key=lambda each: each[1] * (1.0 - each[2]))
    return f"{name} {part:.2f} lowers it most" if part < 1.0 else "nothing lowers it"


def after_rate(record: HealthRecord, workload: str, samples_per_s: float) -> HealthRecord:
    """The record after an accepted update.

    Args:
        record: The node's.
        workload: Key of workload and model: speeds of different ones are not compared.
        samples_per_s: As the node states; what is not finite and positive is passed over.
    """
    if not (isfinite(samples_per_s) and samples_per_s > 0):
        return record
    before = record.rates.get(workload, samples_per_s)
    others = {each: rate for each, rate in record.rates.items() if each != workload}
    newest = list(others.items())[-(WORKLOADS_MOST - 1) :]
    rate = before + _RATE_STEP * (samples_per_s - before)
    return replace(record, rates={**dict(newest), workload: rate})


def after_line(record: HealthRecord, up: float, down: float, loss: float | None) -> HealthRecord:
    """The record with the line's newest readings.

    Args:
        record: The node's.
        up: Goodput in bits a second; 0: not known, and what was known stays.
        down: The same of the other way.
        loss: Share of packets lost; None: not known.
    """
    return replace(
        record,
        up_bits_per_s=up if isfinite(up) and up > 0 else record.up_bits_per_s,
        down_bits_per_s=down if isfinite(down) and down > 0 else record.down_bits_per_s,
        loss=record.loss if loss is None else min(1.0, max(0.0, loss)),
    )


AT_WORK = 0.5
"""What a round says of the reliability of a node that was at work and not done, or that gave its
work back in order: a slow node alone never falls to a limit.
"""


def arrival_sample(
    participant: Participant, *, has_progress: bool, is_interrupted: bool = False
) -> float | None:
    """What a closed round says of a participant's reliability, in [0, 1]; None: nothing.

    Args:
        participant: As the round was closed.
        has_progress: Whether it said that it had taken steps under this lease.
        is_interrupted: Whether the job was paused or the coordinator started again meanwhile: then
            a missing update says nothing.
    """
    match participant.work:
        case WorkState.RECEIVED:
            return 1.0
        case _ if is_interrupted:
            return None
        case WorkState.HANDED_BACK:
            return AT_WORK
        case WorkState.LATE | WorkState.PASSED_OVER | WorkState.CUT:
            return AT_WORK if has_progress else 0.0
        case WorkState.LOST:
            return 0.0
        case _:
            return None


def quality_sample(round_: Round, node: NodeId) -> float | None:
    """What a folded round says of the quality of a node's update, in [0, 1]: its share of full
    pay, in which trust, copies and pairs of duplicates are; None: nothing was measured of it.
    """
    weighing, participant = round_.weighing, round_.participants.get(node)
    if weighing is None or weighing.no_evidence:
        return None
    if participant is None or participant.work is not WorkState.RECEIVED:
        return None
    return 0.0 if node in weighing.useless else weighing.pay_shares.get(node, WHOLE) / WHOLE


class HealthEvidence(NamedTuple):
    """What one event says of a node's health."""

    node: NodeId
    participant: Participant
    quality: float | None
    """By `quality_sample`."""
    is_interrupted: bool = False
    """See `arrival_sample`."""


def health_evidence(before: Job, event: Event, after: Job) -> list[HealthEvidence]:
    """What an event says of nodes' health: a fold of each participant of the round that it closed,
    a loss of the node whose lease over several rounds it ends.

    Args:
        before: The job before the event.
        event: A legal one.
        after: The job after it.
    """
    if isinstance(event, NodeLost):
        lease = before.long_leases.get(event.node)
        if lease is None or not lease.is_open:
            return []
        return [HealthEvidence(event.node, replace(lease, work=WorkState.LOST), None)]
    round_ = after.closed
    if not isinstance(event, AggregateReady) or before.lost_model or round_ is None:
        return []
    return [
        HealthEvidence(node, each, quality_sample(round_, node), round_.is_interrupted)
        for node, each in round_.participants.items()
    ]


def after_round(
    record: HealthRecord, arrival: float | None, quality: float | None, now_s: int
) -> HealthRecord:
    """The record after a round that the node had a part in.

    Args:
        record: The node's.
        arrival: By `arrival_sample`.
        quality: By `quality_sample`.
        now_s: Unix time.
    """
    if arrival is not None:
        reliability = record.reliability.after(arrival, RELIABILITY_LIMIT, now_s)
        record = replace(record, reliability=reliability)
    if quality is not None:
        record = replace(record, quality=record.quality.after(quality, QUALITY_LIMIT, now_s))
    return record


def after_minute(
    record: HealthRecord, minute: int, value: float, *, is_connected: bool
) -> HealthRecord:
    """The record with one minute more of its history.

    Args:
        record: The node's.
        minute: Unix minute; one that the record has already is passed over.
        value: The health, in [0, 1].
        is_connected: Whether the node is there.
    """
    if minute <= record.minute:
        return record
    byte = min(100, max(0, round(100 * value))) | (_CONNECTED if is_connected else 0)
    gap = min(minute - record.minute - 1, HISTORY_MINUTES) if record.minutes else 0
    minutes = (record.minutes + bytes([_GAP]) * gap + bytes([byte]))[-HISTORY_MINUTES:]
    return replace(record, minutes=minutes, minute=minute)


class HealthHistory(NamedTuple):
    """The health of up to a day."""

    step_minutes: int
    """Minutes from one point to the next."""
    points: tuple[float | None, ...]
    """Means, the newest last, at most `POINTS_MOST`; None: no coordinator looked."""


def health_history(record: HealthRecord) -> HealthHistory:
    """The history in as few points as people see: one a minute for the first four hours."""
    minutes = record.minutes
    step = max(1, -(-len(minutes) // POINTS_MOST))
    # The newest point covers a whole step; the oldest what is left.
    starts = range(-(-len(minutes) % step), len(minutes), step)
    spans = (minutes[max(0, start) : start + step] for start in starts)
    return HealthHistory(step, tuple(_mean_value(span) for span in spans))


def _mean_value(span: bytes) -> float | None:
    values = [(minute & _VALUE) / 100 for minute in span if minute != _GAP]
    return fmean(values) if values else None
