"""An order for an escrow binds only while it is wanted, and a pause is waited for."""

import asyncio

import pytest
from coordinator.shell.metering.settling import Settling
from msgspec.structs import replace
from tests.scenarios.test_metering import PAID, training

from coordinator.config import Settings
from coordinator.core.job import BlobRef, Job, LedgerSays, Model
from coordinator.shell.journal.memory import MemoryJournal
from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.signature import IdentityKey
from hypergpu.units import Bytes, Wei
from tests.chain.ground import WITHIN_S, Ground
from tests.chain.refused.tokens import PAUSED_SLOT
from tests.chain.test_long_faults import turned, until_opened

JOB = replace(training(PAID), model=Model(0, BlobRef(digest_of(b"model"), Bytes(8))))
OTHER = replace(JOB, job_id=JobId("job-0000000000ff"))
ESCROW = PAID.escrow


class Desk:
    """What settles on the ground's chain, for a key of its own."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.journal = MemoryJournal()
        settings = Settings(data_dir=ground.folder / "new", chain="anvil", chain_url=ground.url)
        self.settling = Settling(settings, IdentityKey.generate(), self.journal)

    def opened(self, job: Job) -> Wei | None:
        """Go on until a job is open. Returns what the ledger then has left of its escrow."""
        until_opened(self.ground, self.settling, self.journal, job.job_id)
        self.turn()
        says = self.settling.says(job)
        return says.left if says is not None else None

    def turn(self) -> str:
        """What is complained of after a turn that has seen all that was ordered."""
        turned(lambda: self.settling.state, self.settling.wake)
        return turned(lambda: self.settling.state, self.settling.wake).complaint

    def set_paused(self, *, is_paused: bool) -> None:
        contract = self.settling.state.contract
        value = "0x" + f"{int(is_paused):064x}"
        self.ground.ask("anvil_setStorageAt", contract, PAUSED_SLOT, value)
        self.ground.mine()


def with_escrow(escrow: int) -> Job:
    return replace(JOB, spec=replace(PAID, pay=replace(PAID.pay, escrow=escrow)))


def test_a_raise_that_came_too_late_is_not_paid_in_by_a_later_start_of_the_chain(
    ground: Ground,
) -> None:
    desk = Desk(ground)
    desk.settling.order(JOB)
    # Nobody asks the chain yet.
    with pytest.raises(HyperGPUError, match="is not on the ledger yet") as late:
        asyncio.run(desk.settling.deposit(JOB, ESCROW + 200, within_s=0))
    assert late.value.reason is Reason.ESCROW_SHORT
    desk.settling.start(least_s=WITHIN_S)
    assert desk.opened(JOB) == ESCROW
    desk.settling.stop()


def test_who_wants_less_before_anything_is_signed_pays_in_less(ground: Ground) -> None:
    desk = Desk(ground)
    desk.settling.order(with_escrow(2**96 + 5))
    desk.settling.order(JOB)
    desk.settling.start(least_s=WITHIN_S)
    assert desk.opened(JOB) == ESCROW
    # What is there stays there.
    desk.settling.order(with_escrow(ESCROW - 100))
    desk.turn()
    assert desk.opened(JOB) == ESCROW
    desk.settling.stop()


def test_a_raise_that_was_refused_leaves_nothing_behind(ground: Ground) -> None:
    desk = Desk(ground)
    desk.settling.order(JOB)
    desk.settling.start(least_s=WITHIN_S)
    desk.opened(JOB)
    with pytest.raises(HyperGPUError, match="96 bits") as refused:
        asyncio.run(desk.settling.deposit(JOB, 2**96 + ESCROW + 5, within_s=WITHIN_S))
    assert refused.value.reason is Reason.ESCROW_SHORT
    assert desk.turn() == ""
    desk.settling.stop()


def test_a_job_that_is_not_open_when_its_ledger_is_paused_goes_on_and_is_opened_behind_it(
    ground: Ground,
) -> None:
    desk = Desk(ground)
    desk.settling.order(JOB)
    desk.settling.start(least_s=WITHIN_S)
    desk.opened(JOB)
    desk.set_paused(is_paused=True)
    desk.settling.order(OTHER)
    assert "the ledger's guardian has paused it. Fix: what is due is paid" in desk.turn()
    assert desk.settling.unpaid(OTHER) == ""
    assert desk.settling.says(OTHER) == LedgerSays()
    desk.set_paused(is_paused=False)
    assert desk.opened(OTHER) == ESCROW
    desk.settling.stop()
