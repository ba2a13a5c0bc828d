"""After an operator's commands have used the key, settling goes on by itself, and exactly once."""

import signal
import subprocess
import threading

import pytest
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.pump import HaltError
from coordinator.shell.chain.sending import is_act
from coordinator.shell.journal.ledger.records import OutboxRow
from coordinator.shell.metering.settling import Settling
from msgspec.structs import replace

from coordinator.config import Settings
from hypergpu.chain.rpc.chain import Reception
from hypergpu.chain.sent.acts import ActFile, act_of
from hypergpu.chain.signer import Draft, Signer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobId
from tests.chain.acts.hands import Hands, refused, told
from tests.chain.ground import JOB, ORDER, PROFILE, WAITING, WITHIN_S, Ground
from tests.chain.misbehaving_rpc import misbehaving
from tests.chain.public.faucet import environment
from tests.signed_receipts import COORDINATOR

BOND = "2000000"
SECOND = replace(ORDER, job_id=JobId("job-00000000000b"))


@pytest.fixture
def acts(ground: Ground, hands: Hands) -> ActFile:
    """Where a coordinator that starts from now on looks for what its operator has signed."""
    kept = ActFile(hands.data, PROFILE.chain_id)
    ground.start_with(acts=kept)
    return kept


def posted(hands: Hands) -> list[str]:
    """Post more while no coordinator runs; what was sent for it, each in a block of its own."""
    hands.ground.crash()
    hands.ground.ask("evm_setAutomine", True)
    hashes = told(hands.as_operator("bond", BOND, "--json"))["hashes"]
    hands.ground.ask("evm_setAutomine", False)
    assert isinstance(hashes, list)
    return hashes


def bond(hands: Hands) -> None:
    """Post more: play money is made, approved and posted."""
    assert len(posted(hands)) == 3


def rows(ground: Ground) -> list[OutboxRow]:
    """What operators' commands have signed, as far as the outbox has it."""
    account = ground.settler.site.account
    found = ground.journal.transactions(account, states=tuple(TransactionState))
    return [row for row in found if is_act(row.transaction)]


def settle_both(ground: Ground) -> None:
    """Earn, see every receipt paid once, and open another job."""
    ground.trust_rpc()
    ground.turn()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.settle()
    ground.turn(SECOND)
    ground.rest()
    assert ground.settler.site.job(SECOND.job_id) is not None
    ground.check_exact(2)


def test_settling_goes_on_at_once_after_commands_and_at_each_later_start(
    hands: Hands, ground: Ground, acts: ActFile
) -> None:
    bond(hands)
    assert ground.turn().mined == 3
    assert posted(hands) == []
    settle_both(ground)
    ground.crash()
    ground.turn()
    states = [(row.transaction.purpose.split("/")[1], row.state.value) for row in rows(ground)]
    assert states == [("mint", "final"), ("approve", "final"), ("postBond", "final")]
    assert len(acts.of(Address(COORDINATOR.node_id))) == 3


def test_a_coordinator_takes_its_operators_transactions_for_its_own(
    hands: Hands, ground: Ground
) -> None:
    bond(hands)
    for folder, halted in ((hands.node, "chain 31337 has seen"), (hands.data, "")):
        settings = Settings(data_dir=folder, chain="anvil", chain_url=ground.url)
        settling = Settling(settings, COORDINATOR, ground.journal)
        settling.start(least_s=WITHIN_S)
        settling.stop()
        assert settling.state.halted.startswith(halted)
        assert bool(settling.state.halted) == bool(halted)
    assert len(rows(ground)) == 3


def test_a_command_that_takes_the_nonce_of_what_waited_halts_nothing(
    hands: Hands, ground: Ground, acts: ActFile
) -> None:
    ground.earn(0, range(2))
    ground.turn()
    (batch,) = ground.journal.transactions(
        ground.settler.site.account, states=[TransactionState.WAITING]
    )
    assert not batch.is_sent
    bond(hands)
    assert acts.of(Address(COORDINATOR.node_id))[0].draft.nonce == batch.transaction.nonce
    ground.trust_rpc()
    assert "has used nonce" in "".join(ground.turn().complaints)
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)
    given_up = ground.journal.transactions(
        ground.settler.site.account, states=[TransactionState.ABANDONED]
    )
    assert [row.transaction.nonce for row in given_up] == [batch.transaction.nonce]


def test_a_command_that_was_not_sent_under_the_nonce_of_what_waited_is_told(
    ground: Ground, acts: ActFile
) -> None:
    ground.earn(0, range(2))
    ground.turn()
    signer, site = Signer(COORDINATOR), ground.settler.site
    draft = Draft(
        chain_id=PROFILE.chain_id,
        nonce=ground.chain.next_nonce(signer.address),
        to=site.contract,
        call=site.calls.post_bond(1).call,
        gas=200_000,
        max_fee_wei=10**11,
        tip_wei=10**9,
    )
    ground.crash()
    ground.ask("evm_setAutomine", False)
    acts.hand_over(act_of(signer, draft, "postBond"), ground.chain)
    ground.ask("anvil_dropAllTransactions")
    said = f"is not sent: batch/{JOB}/0 has its nonce {draft.nonce}. Where"
    assert said in "".join(ground.turn().complaints)
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)
    assert said not in "".join(ground.turn().complaints)


def test_a_command_that_was_killed_before_the_chain_had_it_is_sent_by_the_next_start(
    hands: Hands, ground: Ground, acts: ActFile
) -> None:
    ground.ask("evm_setAutomine", False)
    arrived = threading.Event()
    with misbehaving(ground.url) as rpc:
        rpc.script = lambda calls, _truth: (
            arrived.set() if calls[0]["method"] == "eth_sendRawTransaction" else None
        )
        command = environment(ground.folder)["PATH"].split(":")[0] + "/hypergpu"
        where = ["--data-dir", str(hands.data), "--ledger-contract", hands.contract]
        child = subprocess.Popen(
            [command, "ledger", "bond", BOND, *where, "--chain-url", rpc.url],
            env=environment(ground.folder),
        )
        assert arrived.wait(WITHIN_S)
        child.send_signal(signal.SIGKILL)
        child.wait()
    (act,) = acts.of(Address(COORDINATOR.node_id))
    ground.ask("anvil_dropTransaction", f"0x{act.hash.hex()}")
    assert ground.ask("txpool_status") == {"pending": "0x0", "queued": "0x0"}
    settle_both(ground)
    assert [(row.hash, row.state) for row in rows(ground)] == [(act.hash, TransactionState.FINAL)]
    # The money that it made is there: the rest alone is left to be done.
    assert len(posted(hands)) == 2


def test_a_reorganisation_takes_nothing_away_that_a_command_has_sent(
    hands: Hands, ground: Ground, acts: ActFile
) -> None:
    ground.mine(PROFILE.depth)
    bond(hands)
    ground.turn()
    ground.ask("anvil_reorg", 2, [])
    address = Signer(COORDINATOR).address
    lost = len(acts.of(Address(COORDINATOR.node_id))) - len(
        [row for row in rows(ground) if row.transaction.nonce < ground.chain.next_nonce(address)]
    )
    assert lost == 2
    settle_both(ground)
    assert posted(hands) == []


def test_a_command_whose_transaction_fails_in_its_block_stops_nothing_else(
    ground: Ground, acts: ActFile
) -> None:
    signer, site = Signer(COORDINATOR), ground.settler.site
    draft = Draft(
        chain_id=PROFILE.chain_id,
        nonce=ground.chain.next_nonce(signer.address),
        to=site.contract,
        call=site.calls.post_bond(10**9).call,
        gas=60_000,
        max_fee_wei=10**11,
        tip_wei=10**9,
    )
    ground.crash()
    act = act_of(signer, draft, "postBond")
    ground.ask("evm_setAutomine", False)
    assert acts.hand_over(act, ground.chain).reception is Reception.TAKEN
    ground.mine()
    (place,) = ground.chain.inclusions([act.hash])
    assert place is not None
    assert not place.is_success
    settle_both(ground)
    (row,) = rows(ground)
    assert row.state is TransactionState.ABANDONED


def test_what_the_chain_does_not_take_is_not_sent_later(
    hands: Hands, ground: Ground, acts: ActFile
) -> None:
    ground.ask("evm_setAutomine", False)
    ground.earn(0, range(2))
    ground.turn()
    ground.turn()
    ground.crash()
    said = refused(hands.as_operator("bond", BOND), Reason.CHAIN_UNREACHABLE)
    assert "underpriced. Fix: wait until what" in said
    assert acts.of(Address(COORDINATOR.node_id)) == ()


@pytest.mark.parametrize("is_before", [True, False])
def test_somebody_elses_nonce_beside_a_commands_is_still_told_loudly(
    hands: Hands, ground: Ground, acts: ActFile, *, is_before: bool
) -> None:
    known = ground.journal.next_nonce(ground.settler.site.account)
    assert known is not None
    ground.crash()
    if is_before:
        ground.spend_nonce()
    bond(hands)
    if not is_before:
        ground.spend_nonce()
    ground.mine(PROFILE.depth)
    with pytest.raises(HyperGPUError) as ahead:
        ground.turn()
    assert ahead.value.reason is Reason.LEDGER_AHEAD
    # What is known for the operator's own is taken in first.
    assert f"; the journal knows {known if is_before else known + 3}" in ahead.value.detail
    assert len(acts.of(Address(COORDINATOR.node_id))) == 3
    ground.retry_failed()
    settle_both(ground)


def test_somebody_elses_nonce_behind_those_that_a_command_took_is_not_mended_unseen(
    hands: Hands, ground: Ground, acts: ActFile
) -> None:
    ground.earn(0, range(2))
    ground.turn(SECOND)
    waiting = ground.journal.transactions(ground.settler.site.account, states=WAITING)
    taken = [row.transaction.nonce for row in waiting]
    bond(hands)
    assert [act.draft.nonce for act in acts.of(Address(COORDINATOR.node_id))] == taken[:3]
    ground.spend_nonce()
    ground.trust_rpc()
    for _ in range(2):
        with pytest.raises(HaltError, match=rf"nonce {taken[3]} of .* did not sign"):
            ground.until(lambda _turn: False)
        ground.crash()
        ground.trust_rpc()
    ground.retry_failed()
    ground.trust_rpc()
    ground.rest()
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)
