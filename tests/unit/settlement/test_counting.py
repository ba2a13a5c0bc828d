import pytest
from msgspec.structs import replace

from coordinator.core.settlement.counting import SeenEpoch, SeenShare, doubt, unrecorded
from coordinator.core.settlement.epoch import Epoch
from hypergpu.ids import JobId, NodeId

ONE, TWO = NodeId("0x" + "11" * 20), NodeId("0x" + "22" * 20)
EPOCH = Epoch(job_id=JobId("job-00000000000a"), number=4, receipts=2, nodes=(ONE, TWO))
CLOSED = SeenEpoch(total_score=100, pool=50, closed_at_s=7)
SHARE = SeenShare(is_recorded=True, score=50, reward=25, paid=25)
NONE = SeenShare(is_recorded=False, score=0, reward=0, paid=0)


@pytest.mark.parametrize(
    ("seen", "shares", "sent", "why"),
    [
        (CLOSED, (SHARE, SHARE), {}, ""),
        # A voucher had paid before, and somebody else has forced receipts in.
        (CLOSED._replace(total_score=900), (SHARE, SHARE._replace(paid=0)), {}, ""),
        # Nothing that was sent was worth anything.
        (CLOSED._replace(total_score=0, pool=0), (SHARE._replace(score=0, reward=0, paid=0),) * 2,
         {}, ""),
        # Its receipts are in another epoch: this one's score lacks them.
        (CLOSED._replace(total_score=50), (SHARE, NONE), {TWO: 50}, ""),
        (CLOSED._replace(total_score=99), (SHARE, NONE), {TWO: 50}, ""),
        (CLOSED, (NONE, SHARE), {ONE: 0}, ""),
        (CLOSED, (SHARE, NONE), {TWO: 50}, "1 node has no share"),
        (CLOSED._replace(closed_at_s=0), (SHARE, SHARE), {}, "is open, and a block holds what"),
        (CLOSED._replace(total_score=99), (SHARE, SHARE), {}, "has a score of 99, and its shares"),
        (CLOSED._replace(pool=49), (SHARE, SHARE), {}, "a pool of 49, and its shares are 50"),
        (CLOSED, (SHARE, SHARE._replace(paid=26)), {}, "a pool of 50"),
        (CLOSED, (SHARE, NONE._replace(score=50)), {TWO: 50}, "is not recorded"),
        (SeenEpoch(0, 0, 0), (NONE, NONE), {ONE: 50, TWO: 50}, "is open"),
    ],
)  # fmt: skip
def test_what_cannot_be_so_is_doubted(
    seen: SeenEpoch, shares: tuple[SeenShare, ...], sent: dict[NodeId, int], why: str
) -> None:
    said = doubt(EPOCH, seen, shares, sent)
    assert why in said
    assert bool(why) == bool(said)


def test_who_has_no_share_is_named() -> None:
    assert unrecorded(EPOCH, (SHARE, NONE)) == (TWO,)
    assert unrecorded(replace(EPOCH, nodes=()), ()) == ()
