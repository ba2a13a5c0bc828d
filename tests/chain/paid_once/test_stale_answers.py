"""What contracts say comes from a replica that is behind, or is wrong: no epoch is over by that."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from coordinator.core.settlement.epoch import EpochState
from coordinator.core.settlement.patience import STILL_MS, standstill
from hypergpu.chain.moments import moment
from hypergpu.chain.rpc.errors import RpcError
from hypergpu.ids import JobId
from hypergpu.ledger.settlement.state import ShareState
from hypergpu.units import Milliseconds
from tests.chain.ground import JOB, NODES, ORDER, PROFILE, Ground
from tests.chain.misbehaving_rpc import (
    Answer,
    Behind,
    MisbehavingRpc,
    Script,
    lies_about,
    misbehaving,
    zeros,
)
from tests.chain.paid_once.test_mending import STRANGER, close_of, outgrown

_TURNS = 12
SECOND = JobId("job-00000000000c")


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    with misbehaving(ground.url) as server:
        ground.url = server.url
        yield server


def turned(ground: Ground, count: int) -> list[str]:
    """Take turns, whatever the RPC says, and give what it was found to say."""
    said: list[str] = []
    for _ in range(count):
        try:
            said += ground.turn().complaints
        except RpcError as error:
            said.append(str(error))
        ground.mine()
    return said


LIES: dict[str, Callable[[], Script]] = {
    "all zeros": lambda: lies_about("eth_call", zeros),
    "epochs and shares of zeros": lambda: lies_about(
        "eth_call", zeros, like=("getContribution", "getEpoch")
    ),
    "shares of zeros": lambda: lies_about("eth_call", zeros, like=("getContribution",)),
    "behind": lambda: Behind(4, knows_better=False),
    "behind, and answers all the same": lambda: Behind(4, knows_better=True),
}


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_no_epoch_is_final_by_what_cannot_be(
    ground: Ground, rpc: MisbehavingRpc, lie: str, *, crashes: bool
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    rpc.script = LIES[lie]()
    assert turned(ground, _TURNS)
    assert [epoch.state is EpochState.FINAL for epoch in ground.epochs()] == [False]
    rpc.script = lambda _calls, _truth: None
    if crashes:
        ground.crash()
    ground.settle()
    ground.check_exact(2)


def test_who_is_said_to_be_paid_and_is_not_is_found_by_the_block_that_stays(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    paid = f"{ShareState.PAID.value:064x}"
    rpc.script = lies_about(
        "eth_call", lambda result: "0x" + paid + result[66:], like=("getContribution",)
    )
    ground.until(lambda _turn: any(epoch.counted for epoch in ground.epochs()))
    rpc.script = lambda _calls, _truth: None
    ground.rest()
    (epoch,) = ground.epochs()
    assert (epoch.state, epoch.deferred) == (EpochState.CONFIRMED, len(NODES))
    ground.settle()
    ground.check_exact(2)


def test_what_was_sent_is_not_sent_again_by_counts_of_a_replica_that_is_behind(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.mine(9)
    ground.earn(0, range(2))
    ground.rest()
    ground.crash()
    rpc.script = Behind(9, knows_better=True)
    ground.earn(1, range(2, 3))
    ground.end(0)
    (said, *_) = turned(ground, 3)
    assert "counts no receipt of 0x" in said
    assert len(ground.journal.batches(JOB)) == 1
    rpc.script = lambda _calls, _truth: None
    ground.end(1, is_last=True)
    ground.settle()
    ground.check_exact(3)
    assert len(ground.journal.batches(JOB)) == 2


def test_an_epoch_that_is_doubtful_does_not_keep_others_from_going_on(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0)
    ground.until(lambda turn: turn.waiting == 3)
    rpc.script = lies_about("eth_call", zeros, like=("getContribution",))
    ground.mine()
    (said,) = ground.turn().complaints
    assert said.startswith(f"epoch 0 of {JOB} waits at block ")
    assert "have no share in epoch 0" in said
    ground.earn(1, range(2, 3))
    ground.end(1, is_last=True)
    result = ground.settler.turn([replace(ORDER, job_id=SECOND)])
    assert result.turn.complaints == (said,)
    assert [order.job_id for order in result.taken] == [SECOND]
    assert [batch.epoch for batch in ground.journal.batches(JOB)] == [0, 1]
    rpc.script = lambda _calls, _truth: None
    ground.settle()
    ground.check_exact(3)


def test_a_close_by_others_that_a_replica_has_not_seen_is_no_failure(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    outgrown(ground)
    ground.act_as(STRANGER, close_of(ground, 0))
    ground.earn(0, range(2, 3))
    ground.end(0, is_last=True)
    rpc.script = Behind(4, knows_better=False)
    # It would stop for good, had it believed that the epoch is open.
    assert turned(ground, _TURNS)
    rpc.script = lambda _calls, _truth: None
    ground.settle()
    ground.check_exact(3)


def same_head() -> Script:
    """The newest block stays what it was when this was first asked."""
    first: list[bytes] = []

    def script(calls: list[dict[str, Any]], truth: bytes) -> Answer | None:
        is_head = calls[0]["method"] == "eth_getBlockByNumber" and calls[0]["params"][0] == "latest"
        if not is_head:
            return None
        first.append(truth)
        return Answer(json.dumps(json.loads(first[0]) | {"id": calls[0]["id"]}).encode())

    return script


def test_a_newest_block_that_stays_the_same_is_told_while_something_waits_for_another(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    now = [Milliseconds(0)]
    ground.start_with(now_ms=lambda: now[0])
    ground.opened()

    def told(after_ms: int) -> tuple[str, ...]:
        ground.mine()
        now[0] = Milliseconds(now[0] + after_ms)
        return ground.turn().complaints

    rpc.script = same_head()
    # Nothing waits: a chain need not make blocks for nobody.
    assert [told(0), told(STILL_MS)] == [(), ()]
    ground.earn(0, range(1))
    ground.turn()
    head = ground.turn().head
    still = (standstill(head.number, moment(head.time_s), STILL_MS, PROFILE.block_ms),)
    assert [told(0), told(STILL_MS - 1), told(1), told(STILL_MS)] == [(), (), still, still]
    rpc.script = lambda _calls, _truth: None
    assert told(STILL_MS) == ()

    ground.earn(0, range(1, 2))
    ground.turn()
    rpc.script = same_head()
    assert [told(0), told(STILL_MS - 1)] == [(), ()]
    assert "stands still" in "".join(told(1))
    rpc.script = lambda _calls, _truth: None
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)


def test_a_slow_chain_has_ten_blocks_time_before_it_is_said_to_stand_still() -> None:
    slow_ms = 60_000
    assert standstill(7, "noon", 10 * slow_ms - 1, slow_ms) == ""
    assert standstill(7, "noon", 10 * slow_ms, slow_ms) == (
        "no new block since noon (block 7): the chain or its RPC stands still"
    )
    assert standstill(7, "noon", STILL_MS - 1, 1) == ""
    assert standstill(7, "noon", STILL_MS, 1) != ""
