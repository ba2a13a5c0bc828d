"""Link keys of a world file: a profile's numbers, replaced one by one."""

import math
from enum import StrEnum
from typing import TypeVar

import msgspec

from hypergpu.jobfile.problem import join_words
from hypergpu.units import Microseconds, Milliseconds
from netsim.link import CongestionControl, Direction, Episodes, Link, RateShape, Variation
from netsim.network.worldfile.table import Table

_Fields = dict[str, float | int | bool]
_Word = TypeVar("_Word", bound=StrEnum)
_MOST_MS = 60_000
_MOST_MBIT_S = 100_000


def read_link(table: Table, link: Link | None) -> Link:
    """A link from a table's keys on top of ``link``, or from nothing.

    Raises:
        NetsimError: Keys are missing or wrong, or no link can be like that.
    """
    up: _Fields = {} if link is None else msgspec.structs.asdict(link.up)
    down: _Fields = {} if link is None else msgspec.structs.asdict(link.down)
    both = _both(table)
    for way, fields in (("up", up), ("down", down)):
        fields.update(both)
        rate = table.number(f"{way}_mbit_s", 0, _MOST_MBIT_S)
        if rate is not None:
            fields["bits_per_s"] = round(rate * 1e6)
        if (own := table.table(way)) is not None:
            fields.update(_one(own))
            own.finish()
        for field, key in (("delay_us", "rtt_ms"), ("bits_per_s", f"{way}_mbit_s")):
            if field not in fields:
                raise table.refused("", f"{key} is missing", f"give {key}, or a profile")
    with table.placed():
        control = word(table, "congestion_control", CongestionControl)
        return Link(
            up=msgspec.convert(up, Direction),
            down=msgspec.convert(down, Direction),
            congestion_control=control or (link or _CUBIC).congestion_control,
        )


def read_variation(table: Table, variation: Variation) -> Variation:
    """What varies by itself: each of the keys replaces the whole of what the profile has there."""
    if (rate := table.table("rate")) is not None:
        variation = msgspec.structs.replace(variation, rate=_rate(rate))
    if (episodes := table.tables("episodes")) is not None:
        variation = msgspec.structs.replace(
            variation, episodes=tuple(_episodes(each) for each in episodes)
        )
    step_ms = table.number("delay_step_ms", 0, _MOST_MS)
    every_us = table.span_us("delay_step_every")
    with table.placed("delay_step_ms"):
        if step_ms is not None:
            step_us = Microseconds(round(step_ms * 1000))
            variation = msgspec.structs.replace(variation, delay_step_us=step_us)
        if every_us is not None:
            every_ms = Milliseconds(every_us // 1000)
            variation = msgspec.structs.replace(variation, delay_step_every_ms=every_ms)
    return variation


def word(table: Table, key: str, kinds: type[_Word]) -> _Word | None:
    """One of a few words; None when it is not given."""
    said = table.text(key)
    if said is None:
        return None
    if said not in list(kinds):
        raise table.refused(key, f'"{said}" is unknown', f"choose one of {join_words(kinds)}")
    return kinds(said)


def _both(table: Table) -> _Fields:
    """Keys that hold for both ways; a round trip's figures are dealt out to the two."""
    fields = _quality(table)
    if (rtt_ms := table.number("rtt_ms", 0, _MOST_MS)) is not None:
        fields["delay_us"] = round(rtt_ms * 500)
    if (jitter_ms := table.number("jitter_ms", 0, _MOST_MS)) is not None:
        fields["jitter_us"] = round(jitter_ms * 1000 / math.sqrt(2))
    return fields


def _one(table: Table) -> _Fields:
    fields = _quality(table)
    for key, field, factor, most in (
        ("delay_ms", "delay_us", 1e3, _MOST_MS),
        ("jitter_ms", "jitter_us", 1e3, _MOST_MS),
        ("mbit_s", "bits_per_s", 1e6, _MOST_MBIT_S),
    ):
        if (number := table.number(key, 0, most)) is not None:
            fields[field] = round(number * factor)
    return fields


def _quality(table: Table) -> _Fields:
    fields: _Fields = {}
    for key in ("loss", "reordering", "duplication"):
        if (percent := table.number(f"{key}_percent", 0, 99.9)) is not None:
            fields[key] = percent / 100
    if (burst := table.number("burst_packets", 1, 1e6)) is not None:
        fields["burst_packets"] = burst
    for key in ("queue_ms", "jitter_memory_ms"):
        if (span_ms := table.whole(key, 1, _MOST_MS)) is not None:
            fields[key] = span_ms
    if (is_clamped := table.truth("jitter_is_clamped")) is not None:
        fields["jitter_is_clamped"] = is_clamped
    return fields


def _rate(table: Table) -> RateShape:
    every_us = table.span_us("every")
    numbers = {
        key: number
        for key in ("variation", "correlation", "evening")
        if (number := table.number(key, 0, 1000)) is not None
    }
    factors = table.numbers("factors") or ()
    table.finish()
    with table.placed():
        every_ms = Milliseconds(1000 if every_us is None else every_us // 1000)
        return RateShape(every_ms=every_ms, factors=factors, **numbers)


def _episodes(table: Table) -> Episodes:
    spans_ms = {}
    for key in ("every", "least", "most"):
        if (span_us := table.span_us(key)) is None:
            raise table.refused(key, f"{key} is missing", f'give {key}, for example "20s"')
        spans_ms[f"{key}_ms"] = Milliseconds(span_us // 1000)
    is_regular, is_stalled = table.truth("regular"), table.truth("stalled")
    loss_factor = table.number("loss_factor", 0, 10_000)
    delay_ms = table.number("delay_ms", 0, _MOST_MS)
    table.finish()
    with table.placed():
        return Episodes(
            **spans_ms,
            is_regular=bool(is_regular),
            is_stalled=bool(is_stalled),
            loss_factor=1.0 if loss_factor is None else loss_factor,
            delay_us=Microseconds(round((delay_ms or 0) * 1000)),
        )


_OPEN = Direction(delay_us=Microseconds(0), bits_per_s=0)
_CUBIC = Link(up=_OPEN, down=_OPEN)
