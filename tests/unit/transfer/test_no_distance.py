"""Paths without a round trip, as between programs of one machine."""

import random

import pytest

from coordinator.core.transfer.draw import transfer_us
from coordinator.core.transfer.forecast import forecast_transfer
from coordinator.core.transfer.path import CongestionControl, NetworkPath
from coordinator.core.transfer.steady import steady_packets_per_us
from coordinator.core.transfer.window import Window
from hypergpu.units import Bytes, Microseconds

SIZE = Bytes(10_000_000)


@pytest.mark.parametrize("control", list(CongestionControl))
@pytest.mark.parametrize("loss", [0.0, 0.01])
@pytest.mark.parametrize("bits_per_s", [0, 20_000_000])
def test_a_path_without_a_round_trip_has_a_forecast(
    control: CongestionControl, loss: float, bits_per_s: int
) -> None:
    path = NetworkPath(
        rtt_us=Microseconds(0), bits_per_s=bits_per_s, loss=loss, congestion_control=control
    )
    assert steady_packets_per_us(path) > 0
    dice = random.Random(1)
    assert Window(path, dice.random) is not None
    assert transfer_us(path, SIZE, dice.random) >= 0
    least_us = int(SIZE) * 8_000_000 // bits_per_s if bits_per_s else 0
    assert forecast_transfer(path, SIZE).median_us >= least_us


def test_a_sawtooth_without_a_round_trip_fills_the_whole_rate() -> None:
    path = NetworkPath(rtt_us=Microseconds(0), bits_per_s=20_000_000)
    assert steady_packets_per_us(path) == pytest.approx(1 / path.packet_us)
