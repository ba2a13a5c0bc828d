"""The quality rule: bounded, never lower for better work, and blind to what a node says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.training.trust.quality import LATE_LEAST, quality_of
from coordinator.core.training.trust.weights import WHOLE
from hypergpu.statements import WHOLE_BPS
from hypergpu.units import Milliseconds

votes = st.integers(0, WHOLE)
times = st.integers(0, 10**9).map(Milliseconds)
NONE = Milliseconds(0)


@given(vote=st.integers(), took_ms=times, allowed_ms=times)
def test_a_quality_is_between_nothing_and_the_whole_and_has_a_reason(
    vote: int, took_ms: Milliseconds, allowed_ms: Milliseconds
) -> None:
    quality = quality_of(vote, "", took_ms, allowed_ms)
    assert 0 <= quality.bps <= WHOLE_BPS
    assert quality.reason


@given(vote=votes, better=votes, took_ms=times, allowed_ms=times)
def test_a_larger_vote_is_never_worse(
    vote: int, better: int, took_ms: Milliseconds, allowed_ms: Milliseconds
) -> None:
    before = quality_of(vote, "", took_ms, allowed_ms).bps
    assert quality_of(min(WHOLE, vote + better), "", took_ms, allowed_ms).bps >= before


@given(vote=votes, took_ms=times, less=times, allowed_ms=times)
def test_less_time_is_never_worse(
    vote: int, took_ms: Milliseconds, less: Milliseconds, allowed_ms: Milliseconds
) -> None:
    sooner = Milliseconds(max(0, took_ms - less))
    before = quality_of(vote, "", took_ms, allowed_ms).bps
    assert quality_of(vote, "", sooner, allowed_ms).bps >= before


@given(took_ms=times, allowed_ms=times)
def test_updates_without_a_vote_earn_nothing_however_fast_they_came(
    took_ms: Milliseconds, allowed_ms: Milliseconds
) -> None:
    assert quality_of(0, "it is empty", took_ms, allowed_ms).bps == 0


@given(took_ms=times, allowed_ms=times)
def test_a_full_vote_in_time_earns_the_whole_and_a_late_one_no_less_than_half(
    took_ms: Milliseconds, allowed_ms: Milliseconds
) -> None:
    quality = quality_of(WHOLE, "", took_ms, allowed_ms)
    if took_ms <= allowed_ms or not allowed_ms:
        assert quality == (WHOLE_BPS, "it counted in full")
    else:
        assert LATE_LEAST <= quality.bps <= WHOLE_BPS


@pytest.mark.parametrize(
    ("vote", "why", "took_ms", "bps", "reason"),
    [
        (WHOLE, "", 0, 10_000, "it counted in full"),
        (WHOLE, "", 1_000, 10_000, "it counted in full"),
        (WHOLE // 4, "it helped less", 900, 2_500, "it helped less"),
        (WHOLE, "", 1_500, 7_500, "500 ms after the deadline"),
        (WHOLE, "", 99_000, 5_000, "98000 ms after the deadline"),
        (WHOLE // 2, "it is a copy", 2_000, 2_500, "it is a copy; 1000 ms after the deadline"),
        (0, "it is empty", 0, 0, "it is empty"),
    ],
)
def test_the_rule_by_example(vote: int, why: str, took_ms: int, bps: int, reason: str) -> None:
    assert quality_of(vote, why, Milliseconds(took_ms), Milliseconds(1_000)) == (bps, reason)


def test_without_a_deadline_nothing_is_late() -> None:
    assert quality_of(WHOLE, "", Milliseconds(99_000), NONE) == (10_000, "it counted in full")
