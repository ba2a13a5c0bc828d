import pytest

from netsim.measure.lateness import (
    BUCKETS,
    Lateness,
    LatenessCounter,
    allowed_us,
    bucket,
    bucket_end_us,
)


def reading_of(late_us: list[int], limit_us: int = 1000) -> Lateness:
    counter = LatenessCounter()
    for each in late_us:
        counter.add(each, limit_us)
    return counter.reading()


@pytest.mark.parametrize(("delay_us", "allowed"), [(0, 1000), (50_000, 1000), (150_000, 3000)])
def test_a_packet_may_be_late_by_a_millisecond_or_two_percent(delay_us: int, allowed: int) -> None:
    assert allowed_us(delay_us) == allowed


def test_a_run_is_invalid_when_more_than_one_packet_in_a_hundred_is_too_late() -> None:
    assert reading_of([10] * 99 + [1001]).is_valid
    assert not reading_of([10] * 98 + [1001] * 2).is_valid
    assert reading_of([10] * 98 + [1001] * 2).verdict().sentence.startswith("INVALID: ")


def test_a_percentile_is_at_most_an_eighth_too_high_and_never_too_low() -> None:
    for late_us in [*range(5000), 123_456, 10**9]:
        assert late_us <= bucket_end_us(bucket(late_us)) <= late_us * 1.125
        assert bucket(late_us) < BUCKETS


def test_the_percentile_of_many_is_the_one_of_the_sorted_list() -> None:
    assert reading_of(list(range(1, 101)), 1000).percentile_us(0.5) == pytest.approx(50, rel=0.125)
    assert reading_of([5] * 99 + [700]).percentile_us(0.99) == 5


def test_a_reading_since_an_earlier_one_holds_only_what_came_after() -> None:
    counter = LatenessCounter()
    counter.add(5000, 1000)
    earlier = counter.reading()
    counter.add(7, 1000)
    added = counter.reading().since(earlier)
    assert added == Lateness(packets=1, late_packets=0, total_us=7, buckets={7: 1})
    assert added.is_valid


def test_nothing_carried_is_valid() -> None:
    assert Lateness().verdict().sentence.startswith("VALID: ")
