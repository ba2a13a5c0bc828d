"""Losses come at the rate and in the bursts asked for, and no pause freezes them."""

import random
from itertools import groupby

import pytest

from netsim.link import LossChain, loss_events_per_packet, transitions

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
        lost = losses(loss, burst, seed=seed)
        assert sum(lost) / PACKETS == pytest.approx(loss, abs=0.002)
        assert mean_burst(lost) == pytest.approx(burst, rel=0.1)


def test_long_bursts_come_out_in_the_mean() -> None:
    runs = [losses(0.05, 16, seed=seed) for seed in range(20)]
    assert sum(map(sum, runs)) / PACKETS / 20 == pytest.approx(0.05, abs=0.002)
    assert sum(map(mean_burst, runs)) / 20 == pytest.approx(16, rel=0.05)


def test_burst_lengths_are_geometric() -> None:
    lost = [lost for seed in range(10) for lost in losses(0.05, 4, seed=seed)]
    lengths = [len(list(run)) for is_lost, run in groupby(lost) if is_lost]
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
    again, found, now_us = 0, 0, 0
    for _ in range(200_000):
        now_us += 1000
        if chain.is_lost(now_us):
            now_us += 200_000
            found += 1
            again += chain.is_lost(now_us)
    assert found > 100
    assert again / found < 0.2


def test_sparse_packets_keep_the_mean_loss() -> None:
    assert sum(losses(0.05, 8, gap_us=500_000)) / PACKETS == pytest.approx(0.05, abs=0.006)


def test_loss_can_change_on_the_way() -> None:
    chain = LossChain(0.5, 4, dice=random.Random(1))
    assert any(chain.is_lost(number) for number in range(100))
    chain.change(0.0, 4)
    assert not any(chain.is_lost(number) for number in range(1000))
    chain.change(0.4, 4)
    lost = sum(chain.is_lost(number) for number in range(PACKETS))
    assert lost / PACKETS == pytest.approx(0.4, abs=0.03)


def test_closed_forms_follow_from_loss_and_burst() -> None:
    p, r = transitions(0.02, 4)
    assert p / (p + r) == pytest.approx(0.02)
    assert 1 / r == 4
    assert loss_events_per_packet(0.02, 4) == pytest.approx((1 - 0.02) * p)
