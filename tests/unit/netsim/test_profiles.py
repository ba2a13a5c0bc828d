"""Every profile is a possible link with a source; churn has the moments that were measured."""

import random
from itertools import islice
from statistics import fmean

import pytest

from netsim.link import LinkCourse
from netsim.link.error import NetsimError
from netsim.network.churn import CHURN_CLASSES, SpanDistribution, SpanKind, absences, churn_class
from netsim.network.profiles import PROFILES, Profile, profile

DAY_US = 86_400_000_000


@pytest.mark.parametrize("entry", PROFILES.values(), ids=list(PROFILES))
def test_profile_is_possible_over_minutes_and_says_its_source(entry: Profile) -> None:
    course = LinkCourse(entry.shape.link, entry.shape.variation, key="seed/node")
    assert all(link.rtt_us >= 500 for _, link in course.changes(300_000_000))
    assert entry.source
    assert entry.churn in {"", *CHURN_CLASSES}


def test_starlink_loses_more_for_half_a_second_each_fifteen() -> None:
    entry = profile("starlink")
    course = LinkCourse(entry.shape.link, entry.shape.variation, key="seed/node")
    assert course.at(15_100_000).up.loss == pytest.approx(0.14)
    assert course.at(15_600_000).up.loss == pytest.approx(0.007)
    assert course.at(1_000_000).down.bits_per_s != course.at(16_000_000).down.bits_per_s


def test_cable_is_slower_in_the_evening() -> None:
    entry = profile("home-cable")
    course = LinkCourse(entry.shape.link, entry.shape.variation, key="k", starts_at_hour=20.0)
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
        drawn = [span.draw_us(dice) for _ in range(60_000)]
        assert fmean(drawn) / 3.6e9 == pytest.approx(mean_h, rel=0.06)


def test_absences_follow_each_other_and_repeat_with_their_key() -> None:
    churn = churn_class("c6")
    found = list(islice(absences(churn, key="seed/churn/attic"), 100))
    assert found == list(islice(absences(churn, key="seed/churn/attic"), 100))
    borders = [at for absence in found for at in absence]
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
