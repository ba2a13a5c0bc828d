"""An epoch's dust is swept once, by its coordinator or by anybody else."""

from coordinator.core.settlement.epoch import EpochState
from coordinator.core.settlement.sending import TransactionState
from tests.chain.ground import JOB, NODES, TURNS_MOST, Ground
from tests.signed_receipts import node_key

STRANGER = node_key(99)


def sweep_sealed(ground: Ground) -> None:
    """An epoch with a sweep that is signed, and that nobody has sent."""
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0)
    for _ in range(TURNS_MOST):
        ground.turn()
        if ground.epochs()[0].sweep.sealed:
            break
        ground.let_pass(5)
        ground.mine()
    assert not ground.epochs()[0].sweep.sent


def sweep_of(ground: Ground) -> bytes:
    site = ground.settler.site
    return site.calls.sweep(site.job_key(JOB), 0, [node.node_id for node in NODES]).call


def is_swept(ground: Ground) -> bool:
    return ground.settler.site.epoch(ground.epochs()[0]).is_swept


def test_a_sweep_by_others_neither_halts_nor_is_repeated(ground: Ground) -> None:
    sweep_sealed(ground)
    ground.act_as(STRANGER, sweep_of(ground))
    ground.earn(1, range(2, 3))
    ground.end(1, is_last=True)
    ground.settle()
    first, second = ground.epochs()
    assert (first.state, first.is_swept_by_others) == (EpochState.FINAL, True)
    assert (second.state, second.sweep.final) == (EpochState.FINAL, 1)
    given_up = ground.journal.transactions(
        ground.settler.site.account, states=[TransactionState.ABANDONED]
    )
    assert [row.transaction.part for row in given_up if row.transaction.epoch == 0] == ["sweep"]
    ground.check_exact(3)


def test_a_sweep_that_is_given_up_is_signed_again_unless_the_dust_is_swept(
    ground: Ground,
) -> None:
    sweep_sealed(ground)
    ground.spend_nonce()
    ground.retry_failed()
    ground.trust_rpc()
    ground.until(lambda _turn: is_swept(ground))
    ground.settle()
    (epoch,) = ground.epochs()
    assert (epoch.state, epoch.sweep.final) == (EpochState.FINAL, 1)
    assert not epoch.is_swept_by_others
    ground.check_exact(2)
