"""The share of the coordinator's line that hidden states have, and what goes before them."""

import asyncio

import pytest

from coordinator.shell.kinds.serving.relay_limit import RelayLimit
from hypergpu.wire.outbox import MessageOutbox


def test_states_take_their_share_of_the_line_in_the_order_in_which_they_come() -> None:
    limit = RelayLimit(line_mbit_s=10, percent=50)  # 625 bytes a millisecond
    assert [limit.reserve_ms(62_500, now_ms=1_000) for _ in range(3)] == [0, 100, 200]
    assert limit.reserve_ms(0, now_ms=1_000) == 0
    assert limit.reserve_ms(62_500, now_ms=5_000) == 0


def test_where_too_much_waits_further_calls_are_refused_with_the_figures() -> None:
    limit = RelayLimit(line_mbit_s=10, percent=50)
    limit.reserve_ms(6 * 625_000, now_ms=0)
    assert "50 % of the coordinator's line, 5 Mbit/s, and 6 s of them wait" in limit.refusal(0)
    assert not limit.refusal(1_000)


@pytest.mark.parametrize("limit", [RelayLimit(), RelayLimit(0, 50)])
def test_nothing_waits_where_the_line_is_not_known(limit: RelayLimit) -> None:
    assert limit.reserve_ms(1 << 30, now_ms=0) == limit.reserve_ms(1 << 30, now_ms=0) == 0
    assert not limit.refusal(0)


async def test_signs_of_life_go_before_frames_that_wait_and_the_end_comes_last() -> None:
    outbox = MessageOutbox[str]()
    outbox.put("frame 1")
    outbox.put("frame 2")
    outbox.end()
    outbox.put("heartbeat", goes_first=True)
    assert outbox.messages == 4
    messages = [await outbox.get() for _ in range(4)]
    assert messages == ["heartbeat", "frame 1", "frame 2", None]
    with pytest.raises(asyncio.QueueEmpty):
        outbox.get_nowait()
