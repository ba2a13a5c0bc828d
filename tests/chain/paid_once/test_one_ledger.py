"""A job is settled on one ledger, whatever its coordinator is started with later."""

from msgspec.structs import replace

from coordinator.core.settlement.epoch import EpochState
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.escrow import EscrowBook
from coordinator.shell.chain.founding import deploy
from coordinator.shell.chain.sending import Account
from coordinator.shell.chain.settler import Settler, SettlingOptions
from hypergpu.chain.local.in_process import InProcessRpc
from hypergpu.chain.profiles import chain_profile
from hypergpu.chain.signer import Signer
from hypergpu.ids import Address, JobId
from hypergpu.ledger.typed import Domain
from tests.chain.ground import JOB, ORDER, RULE, Ground
from tests.signed_receipts import COORDINATOR, node_key

OTHER = Address("0x" + "12" * 20)
TURNS = 6


def test_a_job_that_is_signed_for_another_ledger_is_not_opened(ground: Ground) -> None:
    ground.opened(replace(ORDER, job_id=JobId("job-00000000000b")))
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    turn = ground.turn(replace(ORDER, signed_for=Domain(31337, OTHER)))
    ground.rest()
    assert f"{JOB} is not settled: it is signed for the ledger {OTHER} of chain 31337. Fix: " in (
        "".join(turn.complaints)
    )
    assert ground.turn().complaints == turn.complaints
    assert not ground.settler.site.is_opened(JOB)
    assert ground.journal.batches(JOB) == ()


def test_receipts_for_no_ledger_are_settled_on_the_first_one_and_on_no_other(
    ground: Ground,
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0)
    ground.settle()
    ground.earn(1, range(2, 3))
    ground.end(1, is_last=True)

    profile = chain_profile("tester")
    options = SettlingOptions(profile=profile, rule=RULE, lock_folder=ground.folder)
    account = Account(Signer(COORDINATOR), ground.journal, profile)
    rpc, escrow = InProcessRpc(profile.chain_id), EscrowBook(ground.journal)
    elsewhere = Settler(rpc, account, ground.journal, options, escrow)
    said = [elsewhere.turn([ORDER])[0].complaints, *(elsewhere.turn([])[0] for _ in range(TURNS))]
    assert f"{JOB} is not settled: it is recorded on chain 31337 by " in str(said)
    assert elsewhere.site.job(JOB) is None
    assert ground.journal.purposes(account.name, "batch/") == ()

    ground.settle()
    ground.check_exact(3)
    assert {one.state for one in ground.epochs()} == {EpochState.FINAL}


def test_a_job_that_is_open_on_one_ledger_of_a_chain_is_not_opened_on_a_second(
    ground: Ground,
) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0, is_last=True)
    first = ground.settler.site.domain
    # Another account deploys the ledger that the coordinator is then started with.
    ground.ask("anvil_setBalance", node_key(9).node_id, hex(10**20))
    stranger = Account(Signer(node_key(9)), ground.journal, ground.options.profile)
    second = deploy(stranger, ground.journal, ground.options.profile, ground.chain.head())
    for row in ground.journal.transactions(stranger.name, states=list(TransactionState)):
        ground.chain.send([(row.attempts[0].attempt.hash, row.attempts[0].raw)])
    ground.mine(2)
    ground.crash()
    ground.options = replace(ground.options, contract=Address(f"0x{second.hex()}"))
    turn = ground.turn(ORDER)
    assert f"it is open on the ledger {first.contract} of chain 31337" in "".join(turn.complaints)
    ground.rest()
    assert ground.journal.batches(JOB) == ()

    ground.crash()
    ground.options = replace(ground.options, contract=first.contract)
    ground.turn(ORDER)
    ground.settle()
    ground.check_exact(1)
