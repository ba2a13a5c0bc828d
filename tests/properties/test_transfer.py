import random

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coordinator.core.transfer.draw import transfer_us
from coordinator.core.transfer.forecast import forecast_transfer
from coordinator.core.transfer.path import CongestionControl, NetworkPath
from coordinator.core.transfer.steady import steady_packets_per_us
from hypergpu.units import Bytes, Microseconds, Milliseconds

CLEAN = st.builds(
    NetworkPath,
    rtt_us=st.integers(100, 600_000).map(Microseconds),
    bits_per_s=st.sampled_from((0, 500_000, 5_000_000, 50_000_000, 1_000_000_000)),
    queue_ms=st.integers(1, 1000).map(Milliseconds),
    congestion_control=st.sampled_from(CongestionControl),
)
PATHS = st.builds(
    lambda path, loss, burst: replace(path, loss=loss, burst_packets=burst),
    CLEAN,
    st.floats(0, 0.15),
    st.floats(1, 20),
)
SIZES = st.integers(1, 200_000_000).map(Bytes)


def drawn_us(path: NetworkPath, size_bytes: Bytes) -> Microseconds:
    return transfer_us(path, size_bytes, random.Random(7).random)


@given(path=PATHS, size_bytes=SIZES)
@settings(deadline=None)
def test_no_transfer_beats_light_or_the_bottleneck(path: NetworkPath, size_bytes: Bytes) -> None:
    took_us = drawn_us(path, size_bytes)
    assert took_us >= path.rtt_us // 2
    if path.bits_per_s:
        assert took_us >= size_bytes * 8e6 / path.bits_per_s * 0.99


@given(path=PATHS, size_bytes=SIZES)
@settings(deadline=None)
def test_equal_dice_give_equal_times(path: NetworkPath, size_bytes: Bytes) -> None:
    assert drawn_us(path, size_bytes) == drawn_us(path, size_bytes)


@given(path=CLEAN, size_bytes=SIZES, factor=st.floats(1.1, 10))
@settings(deadline=None)
def test_more_bytes_take_no_less_time(path: NetworkPath, size_bytes: Bytes, factor: float) -> None:
    more = Bytes(round(size_bytes * factor))
    assert (
        forecast_transfer(path, more).median_us
        >= 0.98 * forecast_transfer(path, size_bytes).median_us
    )


@given(path=CLEAN, size_bytes=SIZES)
@settings(deadline=None)
def test_a_faster_bottleneck_takes_no_more_time(path: NetworkPath, size_bytes: Bytes) -> None:
    slow = replace(path, bits_per_s=2_000_000)
    fast = replace(path, bits_per_s=20_000_000)
    assert (
        forecast_transfer(fast, size_bytes).median_us
        <= 1.02 * forecast_transfer(slow, size_bytes).median_us
    )


@given(path=PATHS)
@settings(deadline=None)
def test_the_steady_rate_is_positive_and_within_the_bottleneck(path: NetworkPath) -> None:
    rate = steady_packets_per_us(path)
    assert rate > 0
    if path.bits_per_s:
        assert rate <= 1 / path.packet_us


@given(path=PATHS)
@settings(deadline=None)
def test_the_same_loss_in_longer_bursts_is_no_slower(path: NetworkPath) -> None:
    longer = replace(path, burst_packets=path.burst_packets * 3)
    assert steady_packets_per_us(longer) >= 0.99 * steady_packets_per_us(path)
