import pytest

from netsim.link.link import Direction
from netsim.tc.queues import FRAME_BYTES, LINE_BITS_PER_S, Netem, caveats, queues
from tests.unit.netsim.tc.worlds import way


def netem(direction: Direction) -> Netem:
    planned = queues(direction).netem
    assert planned is not None
    return planned


def test_a_perfect_direction_needs_no_queue() -> None:
    assert queues(way()).netem is None
    assert queues(way()).bucket is None


def test_a_rate_alone_needs_no_netem() -> None:
    planned = queues(way(mbit_s=20))
    assert planned.netem is None
    assert planned.bucket is not None


def test_a_rate_counts_ip_packets_where_the_kernel_counts_frames() -> None:
    bucket = queues(way(mbit_s=15)).bucket
    assert bucket is not None
    assert bucket.bits_per_s == 15_140_000


def test_the_bottleneck_queues_as_long_as_was_asked() -> None:
    bucket = queues(way(mbit_s=15)).bucket
    assert bucket is not None
    assert bucket.limit_bytes == bucket.bits_per_s * 100 // 8000


def test_the_slowest_bottleneck_holds_two_frames_at_least() -> None:
    bucket = queues(way(mbit_s=0.01)).bucket
    assert bucket is not None
    assert bucket.limit_bytes == bucket.burst_bytes == 2 * FRAME_BYTES


@pytest.mark.parametrize("delay_ms", [1, 50, 300])
def test_netem_never_drops_for_want_of_room(delay_ms: int) -> None:
    under_way = delay_ms * LINE_BITS_PER_S // (8000 * FRAME_BYTES)
    assert netem(way(delay_ms)).limit_packets > under_way


def test_jitter_makes_netem_keep_the_order() -> None:
    assert netem(way(50, jitter_us=5000)).bits_per_s == LINE_BITS_PER_S
    assert netem(way(50)).bits_per_s == 0


def test_bursts_become_the_probabilities_of_the_chain() -> None:
    loss = netem(way(50, loss=0.02, burst_packets=4)).loss
    assert loss is not None
    assert loss.r == 0.25
    assert loss.p == pytest.approx(0.25 * 0.02 / 0.98)


def test_nothing_is_said_of_what_netem_does_exactly() -> None:
    assert list(caveats(way(50, 20, loss=0.01, duplication=0.1))) == []


@pytest.mark.parametrize(
    ("direction", "words"),
    [
        (way(50, jitter_us=5000), "forgets at once instead of after 200 ms"),
        (way(50, loss=0.1, burst_packets=4), "a pause does not end one"),
        (way(50, reordering=0.1), "skips the whole delay"),
        (way(0, reordering=0.1), "nothing is overtaken"),
    ],
)
def test_what_netem_does_otherwise_is_said(direction: Direction, words: str) -> None:
    assert words in " ".join(caveats(direction))
