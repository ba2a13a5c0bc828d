"""A nonce that nothing stored has keeps nothing waiting for ever, and is told."""

from collections.abc import Iterator

import pytest
from coordinator.core.settlement.gaps import FILLS_MOST
from coordinator.core.settlement.sending import TransactionState
from coordinator.shell.chain.pump import HaltError

from hypergpu.chain.sent.acts import ActFile, act_of
from hypergpu.chain.signer import Draft, Signer
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from tests.chain.ground import PROFILE, Ground
from tests.chain.misbehaving_rpc import MisbehavingRpc, lies_about, misbehaving
from tests.chain.paid_once.test_mending import SCANT, said_until_settled
from tests.signed_receipts import COORDINATOR

GAP = " waits for nonces "


@pytest.fixture
def rpc(ground: Ground) -> Iterator[MisbehavingRpc]:
    with misbehaving(ground.url) as between:
        ground.url = between.url
        yield between


def passed_over(ground: Ground, rpc: MisbehavingRpc, too_many: int) -> int:
    """An operator retries while the RPC counts too many; gives the nonces that are used."""
    ground.opened()
    used = ground.chain.next_nonce(Signer(COORDINATOR).address)
    rpc.script = lies_about("eth_getTransactionCount", lambda told: hex(int(told, 16) + too_many))
    ground.crash()
    with pytest.raises(HyperGPUError) as refused:
        ground.turn()
    assert refused.value.reason is Reason.LEDGER_AHEAD
    ground.retry_failed()
    ground.turn()
    rpc.script = lambda _calls, _truth: None
    ground.start_with(retries_failed=False)
    return used


def begun_anew(ground: Ground) -> None:
    """The chain has none of its blocks any more, and as many others."""
    height = ground.chain.head().number
    ground.anvil.kill()
    ground.anvil.start()
    ground.mine(height + 2 * PROFILE.depth)
    ground.start_with(retries_failed=False)


def check_settles(ground: Ground) -> None:
    """What is earned from now on is paid, to the last unit."""
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.settle()
    ground.check_exact(2)


@pytest.mark.parametrize("crashes", [False, True])
def test_nonces_that_an_rpc_counted_and_nobody_used_are_filled_and_told(
    ground: Ground, rpc: MisbehavingRpc, *, crashes: bool
) -> None:
    used = passed_over(ground, rpc, 7)
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    (said,) = [each for each in ground.turn().complaints if GAP in each]
    assert f"waits for nonces {used} to {used + 6} of {COORDINATOR.node_id}" in said
    assert said.endswith(": they are spent on nothing")
    if crashes:
        ground.crash()
    ground.settle()
    ground.check_exact(2)
    assert not [each for each in ground.turn().complaints if GAP in each]


def test_what_fills_a_nonce_and_is_in_no_block_is_sent_again_for_more(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    passed_over(ground, rpc, 1)
    for _ in range(3):
        ground.turn()
        ground.ask("anvil_dropAllTransactions")
        ground.mine(PROFILE.bump_blocks)
    check_settles(ground)


def test_a_gap_is_filled_once_it_is_as_deep_as_final_blocks_by_two_answers(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    used = passed_over(ground, rpc, 2)
    ground.mine(PROFILE.depth)
    height = hex(ground.chain.head().number - PROFILE.depth)
    rpc.script = lambda calls, truth: (
        lies_about("eth_getTransactionCount", lambda told: hex(int(told, 16) - 1))(calls, truth)
        if calls[0]["params"][-1:] == [height]
        else None
    )
    (said,) = [each for each in ground.turn().complaints if GAP in each]
    assert "once that is so as deep as final blocks lie" in said
    ground.mine()
    assert ground.chain.next_nonce(Signer(COORDINATOR).address) == used
    check_settles(ground)


def test_what_a_command_has_signed_within_a_gap_is_sent_as_it_is(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    used = passed_over(ground, rpc, 3)
    signer, site = Signer(COORDINATOR), ground.settler.site
    draft = Draft(
        chain_id=PROFILE.chain_id,
        nonce=used + 1,
        to=site.token(),
        call=site.calls.mint(Address(COORDINATOR.node_id), 7).call,
        gas=200_000,
        max_fee_wei=10**11,
        tip_wei=10**9,
    )
    kept = ActFile(ground.folder, PROFILE.chain_id)
    act = act_of(signer, draft, "mint")
    # The chain has it, and loses it.
    kept.hand_over(act, ground.chain)
    ground.ask("anvil_dropAllTransactions")
    ground.start_with(acts=kept)
    had = ground.wallet(signer.address)
    (said,) = [each for each in ground.turn().complaints if GAP in each]
    assert f"has signed is sent ({used + 1}), others are spent on nothing" in said
    check_settles(ground)
    assert ground.wallet(signer.address) == had + 7


def test_more_nonces_than_anybody_can_have_used_are_told_and_not_filled(
    ground: Ground, rpc: MisbehavingRpc
) -> None:
    used = passed_over(ground, rpc, FILLS_MOST + 1)
    ground.mine(PROFILE.depth)
    for _ in range(3):
        assert any("restore the chain's state" in each for each in ground.turn().complaints)
        ground.mine()
    assert ground.chain.next_nonce(Signer(COORDINATOR).address) == used


def test_somebody_elses_nonce_that_a_chain_begun_anew_lacks_is_filled(ground: Ground) -> None:
    ground.opened()
    ground.earn(0, range(1))
    ground.end(0)
    ground.rest()
    ground.spend_nonce()
    ground.mine(PROFILE.depth)
    ground.retry_failed()
    ground.turn()
    ground.earn(1, range(1, 2))
    ground.end(1, is_last=True)
    ground.rest()
    begun_anew(ground)
    assert any(GAP in each for each in said_until_settled(ground))
    ground.check_exact(2)


def test_what_was_given_up_is_not_sent_to_a_chain_begun_anew_and_its_nonce_is_filled(
    ground: Ground,
) -> None:
    ground.opened()
    ground.earn(0, range(2))
    ground.end(0, is_last=True)
    ground.start_with(profile=SCANT)
    with pytest.raises(HaltError, match="it failed in block"):
        ground.rest()
    ground.start_with(profile=PROFILE, retries_failed=True)
    ground.settle()
    account = ground.settler.site.account
    given_up = ground.journal.transactions(account, states=[TransactionState.ABANDONED])
    assert given_up
    begun_anew(ground)
    assert any(GAP in each for each in said_until_settled(ground))
    ground.check_exact(2)
    names = [each.attempt.hash for row in given_up for each in row.attempts]
    assert ground.chain.inclusions(names) == [None] * len(names)
