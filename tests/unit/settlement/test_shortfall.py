import pytest

from coordinator.core.settlement.shortfall import ShortEpoch, shortfall
from hypergpu.ids import JobId
from hypergpu.ledger.advance import NodeMoney

JOB = JobId("job-00000000000a")


@pytest.mark.parametrize(
    ("money", "ahead", "lacking", "outstanding"),
    [
        # Nothing redeemed; 30 of 100 are in a closed epoch that fell short by 5.
        (NodeMoney(had=25, earned=25, rest=5), 0, 5, 0),
        # Redeemed 40 of them before any was closed.
        (NodeMoney(had=40, earned=0), 40, 0, 40),
        # 25 are due in a closed epoch, which makes 25 of it good.
        (NodeMoney(had=40, earned=0, due=25), 15, 0, 15),
        # What is ahead is the rest of a short epoch, or a part of it.
        (NodeMoney(had=30, earned=25, rest=5), 5, 0, 5),
        (NodeMoney(had=28, earned=25, rest=5), 3, 2, 3),
        # Guaranteed for work that turned out to be worth nothing.
        (NodeMoney(had=120, earned=0), 120, 0, 100),
        # A share of 60 was voided: 40 may be ahead of what is left.
        (NodeMoney(had=70, earned=0, voided=60), 70, 0, 40),
    ],
)
def test_what_is_ahead_is_no_longer_owed_and_what_is_short_is(
    money: NodeMoney, ahead: int, lacking: int, outstanding: int
) -> None:
    assert (money.ahead, money.lacking, money.outstanding(100)) == (ahead, lacking, outstanding)


@pytest.mark.parametrize(
    ("money", "coming"),
    [
        (NodeMoney(had=40, earned=0), 0),
        (NodeMoney(had=40, earned=0, due=25), 25),
        (NodeMoney(had=40, earned=10, due=70), 30),
        (NodeMoney(had=25, earned=25, due=70), 0),
        # A share whose payment was voided behind it.
        (NodeMoney(had=25, earned=30, due=70), 0),
    ],
)
def test_what_a_share_pays_again_comes_back(money: NodeMoney, coming: int) -> None:
    assert money.coming == coming


def test_what_is_short_is_said_until_nothing_is_lacking() -> None:
    epochs = (ShortEpoch(0, 70, 100), ShortEpoch(3, 9, 10))
    assert shortfall(JOB, epochs, 0, 5) == ""
    assert shortfall(JOB, epochs, 31, 5).startswith(
        f"{JOB} closed epoch 0 30 short (70 of 100), epoch 3 1 short (9 of 10): more was not free"
    )
