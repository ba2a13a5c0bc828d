"""Links: what can be one, profiles, traces, shapes; how delay, rate and losses wander."""

import random
from itertools import groupby, islice
from statistics import correlation, fmean, pstdev
from typing import Any

import pytest
from msgspec.structs import replace

from hypergpu.units import Microseconds, Milliseconds
from netsim.link import (
    NEVER_US,
    STALLED_BITS_PER_S,
    TRACE_BYTES_MAX,
    Episodes,
    EpisodeTimes,
    Link,
    LinkCourse,
    LinkDirection,
    LinkTrace,
    LossChain,
    NetsimError,
    RateProcess,
    RateShape,
    Shape,
    TraceRow,
    WanderingDelay,
    csv_trace,
    loss_events_per_packet,
    mahimahi_trace,
    transitions,
)
from netsim.link.course import SHORTEST_QUEUE_BYTES, mean_bits_per_s
from netsim.network.profiles import PROFILES, Profile, profile
from netsim.network.world import CHURN_CLASSES, SpanDistribution, SpanKind, absences, churn_class


def direction(**fields: Any) -> LinkDirection:
    return LinkDirection(**{"delay_us": Microseconds(25_000), "bits_per_s": 10_000_000, **fields})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits_per_s": -1}, "bits_per_s is -1. Fix: give 0 or more"),
        ({"delay_us": -5}, "delay_us is -5. Fix: give 0 or more"),
        ({"queue_ms": 0}, "queue_ms is 0. Fix: give 1 or more"),
        ({"jitter_memory_ms": 0}, "jitter_memory_ms is 0. Fix: give 1 or more"),
        ({"loss": 1.2}, r"loss is 1.2. Fix: give a share in \[0, 1\)"),
        ({"loss": float("nan")}, r"loss is nan. Fix: give a share"),
        ({"reordering": -0.1}, r"reordering is -0.1. Fix: give a share"),
        ({"duplication": 1.0}, r"duplication is 1. Fix: give a share"),
        ({"burst_packets": 0.5}, "burst_packets is 0.5. Fix: give 1"),
        ({"burst_packets": float("inf")}, "burst_packets is inf"),
        ({"loss": 0.6}, "a loss of 0.6 cannot come in bursts of 1 packets.*to 0.5 at most"),
        ({"jitter_us": 25_001}, "exceeds the delay of 25000 us. Fix: lower the jitter.*clamp"),
    ],
)
def test_impossible_link_is_refused(fields: dict[str, float], said: str) -> None:
    with pytest.raises(NetsimError, match=said):
        direction(**fields)


def test_clamped_jitter_may_exceed_the_delay() -> None:
    assert direction(jitter_us=50_000, jitter_is_clamped=True).jitter_us == 50_000


def test_much_loss_is_possible_in_long_bursts() -> None:
    assert direction(loss=0.6, burst_packets=2.0).loss == 0.6


@pytest.mark.parametrize("entry", PROFILES.values(), ids=list(PROFILES))
def test_profile_is_possible_over_minutes_and_says_its_source(entry: Profile) -> None:
    course = LinkCourse(entry.shape, key="seed/node")
    assert all(link.rtt_us >= 500 for _, link in course.changes(300_000_000))
    assert entry.source
    assert entry.churn in {"", *CHURN_CLASSES}


def test_starlink_loses_more_for_half_a_second_each_fifteen() -> None:
    entry = profile("starlink")
    course = LinkCourse(entry.shape, key="seed/node")
    assert course.at(15_100_000).up.loss == pytest.approx(0.14)
    assert course.at(15_600_000).up.loss == pytest.approx(0.007)
    assert course.at(1_000_000).down.bits_per_s != course.at(16_000_000).down.bits_per_s


def test_cable_is_slower_in_the_evening() -> None:
    entry = profile("home-cable")
    course = LinkCourse(replace(entry.shape, starts_at_hour=20.0), key="k")
    assert course.at(0).down.bits_per_s == 140_000_000


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("home-fiber", 'did you mean "home-fibre"'),
        ("5g", 'did you mean "5g-moving"'),
        ("hostile", 'did you mean "stress"'),
        ("c", 'did you mean "C"'),
        ("modem", "choose one of lan, cloud-near"),
    ],
)
def test_unknown_profile_is_answered_with_what_was_meant(name: str, meant: str) -> None:
    with pytest.raises(NetsimError, match=meant):
        profile(name)


@pytest.mark.parametrize(
    ("name", "session_h", "absence_h"), [("c3", 4.6, 13.1), ("spot", 8, 1 / 12)]
)
def test_machines_come_and_go_as_measured(name: str, session_h: float, absence_h: float) -> None:
    churn, dice = churn_class(name), random.Random(name)
    for span, mean_h in ((churn.session, session_h), (churn.absence, absence_h)):
        draws_us = [span.draw_us(dice) for _ in range(60_000)]
        assert fmean(draws_us) / 3.6e9 == pytest.approx(mean_h, rel=0.06)


def test_absences_follow_each_other_and_repeat_with_their_key() -> None:
    churn = churn_class("c6")
    absence_list = list(islice(absences(churn, key="seed/churn/attic"), 100))
    assert absence_list == list(islice(absences(churn, key="seed/churn/attic"), 100))
    borders = [at for absence in absence_list for at in absence]
    assert borders == sorted(borders)


def test_speed_makes_hours_minutes() -> None:
    churn = churn_class("c6")
    (slow,) = islice(absences(churn, key="k"), 1)
    (fast,) = islice(absences(churn, key="k", speed=60.0), 1)
    assert fast.from_us == pytest.approx(slow.from_us / 60, abs=1)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": SpanKind.WEIBULL, "scale_s": 0.0},
        {"kind": SpanKind.GAMMA, "scale_s": 5.0, "shape": -1.0},
        {"kind": SpanKind.HYPEREXPONENTIAL, "scale_s": 5.0},
    ],
)
def test_span_that_cannot_be_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"a (weibull|gamma|hyperexponential) span"):
        SpanDistribution(**fields)  # type: ignore[arg-type]


def link(bits_per_s: int, queue_ms: int = 100) -> Link:
    way = LinkDirection(
        delay_us=Microseconds(0), bits_per_s=bits_per_s, queue_ms=Milliseconds(queue_ms)
    )
    return Link(up=way, down=way)


def test_a_queue_holds_what_its_rate_sends_in_its_milliseconds() -> None:
    assert Shape(link=link(12_000_000)).room_bytes("up") == 150_000


def test_a_queue_holds_two_packets_however_slow_the_link() -> None:
    assert Shape(link=link(1000)).room_bytes("down") == SHORTEST_QUEUE_BYTES


def test_a_queue_under_a_trace_is_sized_by_the_mean_of_the_trace_and_not_by_its_gaps() -> None:
    rows = (
        TraceRow(at_us=Microseconds(0), up_bits_per_s=12_000_000),
        TraceRow(at_us=Microseconds(3_000_000), up_bits_per_s=4_000_000),
    )
    trace = LinkTrace(rows, Microseconds(4_000_000))
    assert mean_bits_per_s(trace, "up") == 10_000_000
    shape = Shape(link=link(1_000_000), traces=(trace,))
    assert shape.room_bytes("up") == 125_000
    assert shape.room_bytes("down") == 12_500


WAY = LinkDirection(delay_us=Microseconds(20_000), bits_per_s=1_000_000)
LINK = Link(up=WAY, down=WAY)


def test_mahimahi_bins_keep_the_volume() -> None:
    raw = b"0\n10\n10\n99\n250\n300\n340\n"
    trace = mahimahi_trace(raw, "t.up", way="up")
    rates = [row.up_bits_per_s for row in trace.rows]
    # 4 chances of 12,000 bits in the first 100 ms, none in the second; the last bin has 40 ms.
    assert rates == [480_000, STALLED_BITS_PER_S, 120_000, 600_000]
    assert trace.period_us == 340_000
    assert trace.rows[0].down_bits_per_s is None


def test_trace_begins_again_after_its_period() -> None:
    trace = csv_trace(b"time_s,up_mbit_s\n0,1\n1,2\n", "t.csv")
    assert trace.period_us == 2_000_000
    assert trace.row_at(2_500_000) == trace.row_at(500_000)
    assert [trace.next_change_us(at) for at in (0, 1_500_000, 2_000_000)] == [
        1_000_000,
        2_000_000,
        3_000_000,
    ]


def test_csv_sets_what_it_names_and_leaves_the_rest() -> None:
    raw = b"time_s, down_mbit_s, delay_ms, loss_percent, burst_packets\n0, 8, 30, 2, 4\n\n1, 0,,,\n"
    course = LinkCourse(Shape(link=LINK, traces=(csv_trace(raw, "t.csv"),)), key="x")
    first, second = (link for _, link in course.changes(2_000_000))
    assert (first.down.bits_per_s, first.up.bits_per_s) == (8_000_000, 1_000_000)
    assert (first.up.delay_us, first.up.loss, first.up.burst_packets) == (30_000, 0.02, 4)
    assert second.down.bits_per_s == STALLED_BITS_PER_S
    assert second.up == WAY


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "t.csv:1|does not begin|columns"),
        (b"time_s,up_kbit_s\n0,1\n", "t.csv:1: the columns"),
        (b"up_mbit_s\n1\n", "t.csv:1: the columns"),
        (b"time_s,up_mbit_s\n0,1\n1,fast\n", 't.csv:3: up_mbit_s is "fast"'),
        (b"time_s,up_mbit_s\n0,-1\n", 't.csv:2: up_mbit_s is "-1"'),
        (b"time_s,loss_percent\n0,120\n", "t.csv:2: loss_percent"),
        (b"time_s,up_mbit_s\n0,1,2\n", "t.csv:2: 3 cells under 2 columns"),
        (b"time_s,up_mbit_s\n,1\n", "t.csv:2: time_s is empty"),
        (b"time_s,up_mbit_s\n1,1\n", "does not begin at time_s 0"),
        (b"time_s,up_mbit_s\n0,1\n0,2\n", "row 2 is not after row 1"),
        (b"time_s\n\xff\n", "is no text"),
        (b"x" * (TRACE_BYTES_MAX + 1), "bytes, more than"),
    ],
)
def test_wrong_table_is_refused_with_its_line(raw: bytes, said: str) -> None:
    with pytest.raises(NetsimError, match=said):
        csv_trace(raw, "t.csv")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"0\nfive\n", 't.up:2: "five" is no millisecond'),
        (b"5\n4\n", "row 2 is not after row 1"),
        (b"0\n0\n", "holds no time above 0"),
        (b"0\n9999999999\n", "lasts 9999999999 ms. Fix: end it by 100000000 ms"),
        (b"", "holds no time above 0"),
    ],
)
def test_wrong_packet_trace_is_refused_with_its_line(raw: bytes, said: str) -> None:
    with pytest.raises(NetsimError, match=said):
        mahimahi_trace(raw, "t.up", way="up")


SECOND_US = 1_000_000
HOUR_US = 3600 * SECOND_US


def delays(jitter_us: int, *, delay_us: int = 50_000, is_clamped: bool = False) -> list[int]:
    direction = LinkDirection(
        delay_us=Microseconds(delay_us),
        jitter_us=Microseconds(jitter_us),
        jitter_is_clamped=is_clamped,
        bits_per_s=0,
    )
    wander = WanderingDelay(direction, key="seed/jitter")
    return [wander.at(number * 10_000) for number in range(200_000)]


def test_jitter_has_its_mean_spread_and_memory() -> None:
    delay_list = delays(5_000)
    assert fmean(delay_list) == pytest.approx(50_000, rel=0.01)
    assert pstdev(delay_list) == pytest.approx(5_000, rel=0.05)
    assert correlation(delay_list[:-20], delay_list[20:]) == pytest.approx(0.37, abs=0.06)


def test_jitter_of_half_the_delay_keeps_the_mean() -> None:
    delay_list = delays(25_000)
    assert min(delay_list) >= 0
    assert fmean(delay_list) == pytest.approx(50_000, rel=0.05)


def test_clamped_jitter_is_never_negative() -> None:
    delay_list = delays(40_000, delay_us=10_000, is_clamped=True)
    assert min(delay_list) >= 0
    assert fmean(delay_list) > 10_000


def test_no_jitter_is_the_delay() -> None:
    assert set(delays(0)) == {50_000}


def test_steady_rate_never_changes() -> None:
    rate = RateProcess(RateShape(), 5_000_000, key="x")
    assert rate.factor_at(123) == 1
    assert rate.next_change_us(123) == NEVER_US


def test_drawn_rate_has_its_mean_variation_and_correlation() -> None:
    shape = RateShape(variation=0.78, correlation=0.82)
    rate = RateProcess(shape, 10_000_000, key="seed/rate")
    factors = [rate.factor_at(second * SECOND_US) for second in range(40_000)]
    assert fmean(factors) == pytest.approx(1, rel=0.05)
    assert pstdev(factors) / fmean(factors) == pytest.approx(0.78, rel=0.1)
    assert correlation(factors[:-1], factors[1:]) == pytest.approx(0.82, abs=0.05)


def test_listed_factors_follow_each_other_and_begin_again() -> None:
    shape = RateShape(every_ms=Milliseconds(500), factors=(1.0, 0.25, 0.0))
    rate = RateProcess(shape, 8_000_000, key="x")
    assert [rate.factor_at(half * 500_000) for half in range(4)] == [1.0, 0.25, 0.0, 1.0]
    assert rate.next_change_us(500_000) == 1_000_000


def test_evening_lasts_from_eighteen_to_twenty_three() -> None:
    rate = RateProcess(RateShape(evening=0.7), 10_000_000, key="x", starts_at_hour=17.0)
    assert rate.next_change_us(0) == HOUR_US
    moments = (HOUR_US - 1, HOUR_US, 6 * HOUR_US)
    assert [rate.factor_at(at_us) for at_us in moments] == [1.0, 0.7, 1.0]
    assert rate.next_change_us(HOUR_US) == 6 * HOUR_US


GAPS = Episodes(
    every_ms=Milliseconds(20_000), least_ms=Milliseconds(500), most_ms=Milliseconds(4_000)
)


def test_each_stretch_has_one_spell_of_its_own_length() -> None:
    times = EpisodeTimes(GAPS, key="seed/gaps")
    spells = [times.spell(number) for number in range(200)]
    lengths = [spell.until_us - spell.from_us for spell in spells]
    assert min(lengths) >= 500_000
    assert max(lengths) <= 4_000_000
    assert len(set(lengths)) > 100
    assert all(
        number * 20_000_000 <= spell.from_us < spell.until_us <= (number + 1) * 20_000_000
        for number, spell in enumerate(spells)
    )


def test_changes_are_the_borders_of_spells() -> None:
    times = EpisodeTimes(GAPS, key="seed/gaps")
    now_us = 0
    for number in range(50):
        spell = times.spell(number)
        assert times.next_change_us(now_us) == spell.from_us
        assert times.is_on(spell.from_us)
        assert times.next_change_us(spell.from_us) == spell.until_us
        assert not times.is_on(spell.until_us)
        now_us = spell.until_us


def test_regular_spells_begin_on_the_mark() -> None:
    shape = Episodes(
        every_ms=Milliseconds(15_000),
        least_ms=Milliseconds(500),
        most_ms=Milliseconds(500),
        is_regular=True,
    )
    times = EpisodeTimes(shape, key="x")
    assert [times.is_on(at) for at in (0, 499_999, 500_000, 15_000_000)] == [1, 1, 0, 1]


def test_spells_longer_than_their_stretch_are_refused() -> None:
    with pytest.raises(ValueError, match="least <= most < every"):
        Episodes(every_ms=Milliseconds(10), least_ms=Milliseconds(5), most_ms=Milliseconds(10))


PACKETS = 20_000


def losses(loss: float, burst: float, *, seed: int = 0, gap_us: int = 1000) -> list[bool]:
    chain = LossChain(loss, burst, dice=random.Random(f"{seed}/loss"))
    return [chain.is_lost(number * gap_us) for number in range(PACKETS)]


def mean_burst(lost: list[bool]) -> float:
    lengths = [len(list(run)) for is_lost, run in groupby(lost) if is_lost]
    return sum(lengths) / len(lengths)


@pytest.mark.parametrize(("loss", "burst"), [(0.01, 1), (0.05, 1), (0.01, 4), (0.03, 4)])
def test_twenty_thousand_packets_show_the_loss_and_the_bursts(loss: float, burst: float) -> None:
    for seed in range(5):
        loss_list = losses(loss, burst, seed=seed)
        assert sum(loss_list) / PACKETS == pytest.approx(loss, abs=0.002)
        assert mean_burst(loss_list) == pytest.approx(burst, rel=0.1)


def test_long_bursts_come_out_in_the_mean() -> None:
    runs = [losses(0.05, 16, seed=seed) for seed in range(20)]
    assert sum(map(sum, runs)) / PACKETS / 20 == pytest.approx(0.05, abs=0.002)
    assert sum(map(mean_burst, runs)) / 20 == pytest.approx(16, rel=0.05)


def test_burst_lengths_are_geometric() -> None:
    loss_list = [is_lost for seed in range(10) for is_lost in losses(0.05, 4, seed=seed)]
    lengths = [len(list(run)) for is_lost, run in groupby(loss_list) if is_lost]
    for length in range(1, 8):
        share = sum(one >= length for one in lengths) / len(lengths)
        assert share == pytest.approx(0.75 ** (length - 1), abs=0.03)


def test_equal_seeds_lose_the_same_packets() -> None:
    assert losses(0.02, 3, seed=4) == losses(0.02, 3, seed=4)
    assert losses(0.02, 3, seed=4) != losses(0.02, 3, seed=5)


def test_loss_of_zero_loses_nothing() -> None:
    assert not any(losses(0.0, 5))


def test_pause_ends_a_burst() -> None:
    """Someone who waits 200 ms after each loss meets the mean loss, not the rest of the burst."""
    chain = LossChain(0.05, 50, dice=random.Random("pause"))
    again, loss_count, now_us = 0, 0, 0
    for _ in range(200_000):
        now_us += 1000
        if chain.is_lost(now_us):
            now_us += 200_000
            loss_count += 1
            again += chain.is_lost(now_us)
    assert loss_count > 100
    assert again / loss_count < 0.2


def test_sparse_packets_keep_the_mean_loss() -> None:
    assert sum(losses(0.05, 8, gap_us=500_000)) / PACKETS == pytest.approx(0.05, abs=0.006)


def test_loss_can_change_on_the_way() -> None:
    chain = LossChain(0.5, 4, dice=random.Random(1))
    assert any(chain.is_lost(number) for number in range(100))
    chain.change(0.0, 4)
    assert not any(chain.is_lost(number) for number in range(1000))
    chain.change(0.4, 4)
    lost_count = sum(chain.is_lost(number) for number in range(PACKETS))
    assert lost_count / PACKETS == pytest.approx(0.4, abs=0.03)


def test_closed_forms_follow_from_loss_and_burst() -> None:
    p, r = transitions(0.02, 4)
    assert p / (p + r) == pytest.approx(0.02)
    assert 1 / r == 4
    assert loss_events_per_packet(0.02, 4) == pytest.approx((1 - 0.02) * p)
