"""Delay and rate wander as asked: mean, spread, memory, gaps; and alike for whoever asks when."""

from statistics import correlation, fmean, pstdev

import pytest

from hypergpu.units import Microseconds, Milliseconds
from netsim.link import (
    NEVER_US,
    Episodes,
    EpisodeTimes,
    LinkDirection,
    RateProcess,
    RateShape,
    WanderingDelay,
)

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
    found = delays(5_000)
    assert fmean(found) == pytest.approx(50_000, rel=0.01)
    assert pstdev(found) == pytest.approx(5_000, rel=0.05)
    assert correlation(found[:-20], found[20:]) == pytest.approx(0.37, abs=0.06)


def test_jitter_of_half_the_delay_keeps_the_mean() -> None:
    found = delays(25_000)
    assert min(found) >= 0
    assert fmean(found) == pytest.approx(50_000, rel=0.05)


def test_clamped_jitter_is_never_negative() -> None:
    found = delays(40_000, delay_us=10_000, is_clamped=True)
    assert min(found) >= 0
    assert fmean(found) > 10_000


def test_no_jitter_is_the_delay() -> None:
    assert set(delays(0)) == {50_000}


def test_steady_rate_never_changes() -> None:
    rate = RateProcess(RateShape(), 5_000_000, key="x")
    assert rate.factor_at(123) == 1
    assert rate.next_change_us(123) == NEVER_US


def test_drawn_rate_has_its_mean_variation_and_correlation() -> None:
    shape = RateShape(variation=0.78, correlation=0.82)
    rate = RateProcess(shape, 10_000_000, key="seed/rate")
    found = [rate.factor_at(second * SECOND_US) for second in range(40_000)]
    assert fmean(found) == pytest.approx(1, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(0.78, rel=0.1)
    assert correlation(found[:-1], found[1:]) == pytest.approx(0.82, abs=0.05)


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
