"""The quality rule: bounded, never falling with better work, and blind to what a node says."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hypergpu.ledger.quality import Measured, quality_of
from hypergpu.units import Milliseconds

anything = st.one_of(st.none(), st.floats())
figures = st.one_of(st.none(), st.floats(-1e6, 1e6))
times = st.integers(0, 10**9).map(Milliseconds)


def measured_by(numbers: st.SearchStrategy[float | None]) -> st.SearchStrategy[Measured]:
    return st.builds(
        Measured,
        agreement=numbers,
        typical_agreement=numbers,
        gain=numbers,
        round_gain=numbers,
        took_ms=times,
        allowed_ms=times,
    )


@given(measured=measured_by(anything))
def test_a_quality_is_between_nothing_and_the_whole_and_has_a_reason(measured: Measured) -> None:
    quality = quality_of(measured)
    assert 0 <= quality.bps <= 10_000
    assert quality.reason
    assert quality.evaluator.startswith("quality/1 ")


@given(measured=measured_by(figures), better=st.floats(0, 1e6))
def test_better_work_is_never_worse(measured: Measured, better: float) -> None:
    before = quality_of(measured).bps
    if measured.agreement is not None:
        agreed = replace(measured, agreement=measured.agreement + better)
        assert quality_of(agreed).bps >= before
    if measured.gain is not None:
        assert quality_of(replace(measured, gain=measured.gain + better)).bps >= before


@given(measured=measured_by(figures), less=times)
def test_less_time_is_never_worse(measured: Measured, less: Milliseconds) -> None:
    sooner = replace(measured, took_ms=Milliseconds(max(0, measured.took_ms - less)))
    assert quality_of(sooner).bps >= quality_of(measured).bps


@given(typical=st.floats(1e-6, 1), gain=st.floats(1e-6, 10))
def test_updates_without_worth_earn_nothing(typical: float, gain: float) -> None:
    for own in (0.0, -typical, math.nan, -math.inf):
        for judged in (None, 0.0, -gain, math.nan, -math.inf):
            worthless = Measured(
                agreement=own, typical_agreement=typical, gain=judged, round_gain=gain
            )
            assert quality_of(worthless).bps == 0


@given(typical=st.floats(1e-6, 1), gain=st.floats(1e-6, 10))
def test_honest_updates_earn_the_whole(typical: float, gain: float) -> None:
    for share in (0.5, 0.8, 3.0):
        honest = Measured(
            agreement=typical * share,
            typical_agreement=typical,
            gain=gain * share,
            round_gain=gain,
        )
        assert quality_of(honest).bps >= 9_999


@pytest.mark.parametrize(
    ("measured", "bps", "evaluator", "reason"),
    [
        (Measured(), 10_000, "unmeasured", "nothing to compare it with"),
        (
            Measured(agreement=0.01, typical_agreement=0.04),
            5_000,
            "agreement",
            "agrees by 0.01 where the round's median is 0.04",
        ),
        (
            Measured(agreement=0.04, typical_agreement=0.04, gain=-0.1, round_gain=0.2),
            5_000,
            "agreement+held-out",
            "median is 0.04; lowers the held-out loss by -0.1, the round by 0.2",
        ),
        (
            Measured(gain=0.05, round_gain=0.2),
            5_000,
            "held-out",
            "lowers the held-out loss by 0.05",
        ),
        (Measured(gain=0.1), 10_000, "held-out", "lowers the held-out loss by 0.1"),
        (Measured(gain=0.0, round_gain=0.0), 5_000, "held-out", "and so does the round"),
        (
            Measured(agreement=1.0, typical_agreement=1.0, gain=-1.0, round_gain=-1.0),
            10_000,
            "agreement",
            "the round itself lowered no loss",
        ),
        (Measured(gain=math.nan), 0, "held-out", "the loss with it is not finite"),
        # Where honest updates do not agree either, agreement says nothing.
        (Measured(agreement=0.5, typical_agreement=-0.1), 10_000, "unmeasured", "nothing to"),
        (
            Measured(took_ms=Milliseconds(1_500), allowed_ms=Milliseconds(1_000)),
            7_500,
            "unmeasured",
            "500 ms after the deadline",
        ),
        (
            Measured(took_ms=Milliseconds(99_000), allowed_ms=Milliseconds(1_000)),
            5_000,
            "unmeasured",
            "98000 ms after the deadline",
        ),
        (Measured(took_ms=Milliseconds(99_000)), 10_000, "unmeasured", "nothing to"),
    ],
    ids=str,
)
def test_the_rule_by_example(measured: Measured, bps: int, evaluator: str, reason: str) -> None:
    quality = quality_of(measured)
    assert (quality.bps, quality.evaluator) == (bps, f"quality/1 {evaluator}")
    assert reason in quality.reason
