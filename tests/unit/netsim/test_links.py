"""A link that cannot be is refused with what is wrong and the fix."""

from typing import Any

import pytest

from hypergpu.units import Microseconds
from netsim.link import LinkDirection
from netsim.link.error import NetsimError


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
