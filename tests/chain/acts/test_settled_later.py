"""What a node does by itself for a job that was signed for no chain, and settled by one later."""

import pytest
from gpu_node.shell.state.wallet import Wallet

from gpu_node.shell.state.places import Places
from hypergpu.errors import Reason
from hypergpu.ids import Address
from hypergpu.ledger.terms import terms_of
from hypergpu.ledger.typed import Domain
from tests.chain.acts.hands import EACH, NODE, Hands, refused, told
from tests.chain.ground import JOB
from tests.signed_receipts import COORDINATOR, Work, receipt_record

NOWHERE = Domain()


@pytest.fixture
def later(hands: Hands) -> Hands:
    """A ledger has two receipts of the node in a closed epoch; its folder names no chain."""
    hands.leave_unpaid(2)
    hands.domain = NOWHERE
    (folder,) = (hands.node / "ledger").iterdir()
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    works = [Work(node=NODE, sequence=number) for number in range(2)]
    with Places(hands.node) as places:
        wallet = Wallet(places, NODE.node_id)
        wallet.agree(JOB, terms_of(Address(COORDINATOR.node_id), JOB, NOWHERE))
        wallet.take(JOB, [receipt_record(JOB, work, domain=NOWHERE).signed for work in works])
    return hands


def test_its_shares_are_paid_once_the_ledger_is_named(later: Hands) -> None:
    later.vouch(3 * EACH)
    ledger = ["--ledger-contract", later.contract]
    early = later.as_node("claim", *ledger)
    assert f"{2 * EACH} (0.00{2 * EACH}) for epoch 0 can be paid from " in early.stdout
    assert f"its voucher is worth nothing to the ledger {later.contract}" in early.stderr
    later.pass_time()
    paid = told(later.as_node("claim", *ledger, "--json"))
    assert paid["said"] == f"{2 * EACH} (0.00{2 * EACH}) was paid for epoch 0"
    assert (later.has(), paid["amounts"]["pending"]) == (2 * EACH, "0")
    again = later.as_node("claim", *ledger)
    assert again.exit_code == Reason.ARGUMENT_INVALID.exit_code
    assert f"nothing is due on {later.contract}; the job was signed for no chain" in again.stderr


def test_its_node_registers_and_stakes_once_the_ledger_is_named(later: Hands) -> None:
    ledger = ["--ledger-contract", later.contract]
    told(later.as_node("register", *ledger, "--json"))
    assert told(later.as_node("stake", "5", *ledger, "--json"))["amounts"]["staked"] == "5"


def test_where_nobody_says_which_ledger_it_is_what_to_name_is_told(later: Hands) -> None:
    for act in ("claim", "register"):
        said = refused(later.as_node(act), Reason.ARGUMENT_INVALID)
        assert f"{JOB} was signed for no chain, and its coordinator" in said
        assert "name both: --chain-url URL --ledger-contract ADDRESS" in said


def test_a_job_of_one_ledger_is_not_claimed_on_another(hands: Hands) -> None:
    other = "0x" + "12" * 20
    said = refused(hands.as_node("claim", "--ledger-contract", other), Reason.ARGUMENT_INVALID)
    assert f"{JOB} is signed for the ledger {hands.contract}, not for {other}" in said
