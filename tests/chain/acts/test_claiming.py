"""What a node is owed reaches its wallet by `hypergpu ledger claim` alone."""

from typing import Any

from gpu_node.shell.state.wallet import Wallet

from gpu_node.shell.state.places import Places
from hypergpu.chain.moments import moment
from hypergpu.errors import Reason
from hypergpu.ids import Address
from hypergpu.ledger.terms import terms_of
from tests.chain.acts.hands import EACH, NODE, WINDOW_S, Hands, refused, told
from tests.chain.ground import ESCROW, JOB, Ground
from tests.signed_receipts import COORDINATOR, Work, node_key, receipt_record

OTHER = node_key(77)
REFUSES = "0x5f5ffd"
"""A contract that reverts, whatever it is asked."""


def claim(hands: Hands, *words: str) -> dict[str, Any]:
    return told(hands.as_node("claim", *words, "--json"))


def test_a_voucher_without_stake_is_paid_after_its_window_and_only_once(hands: Hands) -> None:
    hands.vouch(2 * EACH)
    first = claim(hands)
    assert first["amounts"] == {
        "redeemed": str(2 * EACH),
        "paid": "0",
        "pending": str(2 * EACH),
        "credit": "0",
    }
    ready_at_s = hands.ground.chain.head().time_s + WINDOW_S
    assert first["ready_at_s"] == ready_at_s
    until = moment(ready_at_s)
    shown = f"{2 * EACH} (0.00{2 * EACH})"
    assert first["said"] == (
        f"a voucher of {shown} was redeemed; {shown} is pending until {until}: run this again from"
        " then on to take it"
    )

    early = claim(hands)
    assert (early["hashes"], early["ready_at_s"], hands.nonce) == ([], ready_at_s, 1)

    hands.pass_time()
    last = claim(hands)
    assert last["said"] == f"{shown} of an earlier claim was paid"
    assert (hands.has(), hands.nonce, last["ready_at_s"]) == (2 * EACH, 2, None)
    again = hands.as_node("claim")
    assert again.stdout == (
        f"{NODE.node_id}: nothing is left to be claimed: {shown} was paid, the newest voucher is"
        f" for {shown}\n"
    )
    assert hands.nonce == 2


def test_a_newer_voucher_is_redeemed_in_the_run_that_releases_the_claim_before(
    hands: Hands,
) -> None:
    hands.vouch(EACH)
    claim(hands)
    hands.vouch(3 * EACH)
    said = claim(hands)["said"]
    assert f"; {2 * EACH} (0.00{2 * EACH}) more can be claimed after that" in said
    hands.pass_time()
    both = claim(hands)
    assert len(both["hashes"]) == 2
    assert (hands.has(), both["amounts"]["pending"]) == (EACH, str(2 * EACH))
    hands.pass_time()
    claim(hands)
    assert hands.has() == 3 * EACH


def test_what_was_done_before_a_step_fails_is_told(hands: Hands) -> None:
    hands.vouch(ESCROW)
    claim(hands)
    hands.pass_time()
    hands.vouch(2 * ESCROW)
    said = refused(hands.as_node("claim"), Reason.ESCROW_SHORT)
    assert f"; before that: {ESCROW} (1000.000000) of an earlier claim was paid; 0x" in said
    assert hands.has() == ESCROW


def test_a_damaged_voucher_is_named_and_what_needs_none_is_taken(hands: Hands) -> None:
    hands.vouch(EACH)
    claim(hands)
    hands.pass_time()
    hands.vouch(3 * EACH, signer=OTHER)
    ended = hands.as_node("claim")
    assert ended.exit_code == 0, ended.output
    assert f"{JOB}@{COORDINATOR.node_id}/voucher.json: the coordinator" in ended.stderr
    assert "did not sign it. A node that starts puts it aside" in ended.stderr
    assert f"{EACH} (0.00{EACH}) of an earlier claim was paid" in ended.stdout
    assert hands.has() == EACH


def test_shares_that_nobody_pays_are_taken_and_the_voucher_claims_only_the_rest(
    hands: Hands,
) -> None:
    hands.leave_unpaid(2)
    works = [Work(node=NODE, sequence=number) for number in range(2)]
    hands.hold(*(receipt_record(JOB, work, domain=hands.domain).signed for work in works))
    hands.vouch(2 * EACH)
    early = claim(hands)
    assert f"{2 * EACH} (0.00{2 * EACH}) for epoch 0 can be paid from " in early["said"]
    assert (early["hashes"], early["amounts"]["pending"]) == ([], "0")
    hands.vouch(3 * EACH)
    hands.pass_time()
    late = claim(hands)
    assert late["said"].startswith(f"{2 * EACH} (0.00{2 * EACH}) was paid for epoch 0; a voucher")
    assert (hands.has(), late["amounts"]["pending"]) == (2 * EACH, str(EACH))
    hands.pass_time()
    claim(hands)
    assert hands.has() == 3 * EACH


def left_open(ground: Ground, hands: Hands) -> None:
    """The coordinator is gone; its ledger has two receipts of the node in an open epoch."""
    ground.ask("evm_setAutomine", False)
    ground.earn(0, range(2))
    ground.rest()
    ground.crash()
    ground.ask("evm_setAutomine", True)
    works = [Work(node=NODE, sequence=number) for number in range(2)]
    hands.hold(*(receipt_record(JOB, work, domain=hands.domain).signed for work in works))


def test_an_epoch_that_its_coordinator_left_open_is_closed_once_anyone_may(
    ground: Ground, hands: Hands
) -> None:
    left_open(ground, hands)
    early = claim(hands)
    assert early["said"].startswith("epoch 0 is open: if its coordinator does not close it, this")
    assert early["hashes"] == []
    ground.let_pass(early["ready_at_s"] - ground.chain.head().time_s)
    ground.mine()
    closing = claim(hands)
    told_so = "epoch 0, which its coordinator had left open, was closed; "
    assert closing["said"].startswith(f"{told_so}{2 * EACH} (0.00{2 * EACH}) for epoch 0 can be")
    hands.pass_time()
    assert claim(hands)["amounts"]["shares"] == str(2 * EACH)
    assert hands.has() == 2 * EACH


def test_no_epoch_is_closed_where_the_voucher_brings_as_much(ground: Ground, hands: Hands) -> None:
    left_open(ground, hands)
    hands.vouch(2 * EACH)
    assert len(claim(hands)["hashes"]) == 1
    hands.pass_time()
    assert len(claim(hands)["hashes"]) == 1
    assert "nothing is left to be claimed" in claim(hands)["said"]
    assert hands.has() == 2 * EACH


def test_credit_that_the_token_refused_is_taken_by_the_node_or_elsewhere(
    ground: Ground, hands: Hands
) -> None:
    hands.vouch(EACH)
    claim(hands)
    hands.pass_time()
    token = f"0x{ground.settler.site.token().hex()}"
    code = ground.ask("eth_getCode", token, "latest")
    ground.ask("anvil_setCode", token, REFUSES)
    stuck = claim(hands)
    assert stuck["amounts"]["credit"] == str(EACH)
    said = stuck["said"]
    assert f"{EACH} of an earlier claim became credit, the token refused it" in said
    assert f"{EACH} stays credit, the token refuses to transfer it to {NODE.node_id}" in said
    disputed = hands.as_node("dispute").stdout
    assert f"{EACH} is credit: hypergpu ledger claim takes it" in disputed
    assert claim(hands)["hashes"] == []

    ground.ask("anvil_setCode", token, code)
    shown = f"{EACH} (0.00{EACH})"
    paid = claim(hands, "--to", OTHER.node_id)
    assert paid["said"] == f"credit of {shown} went to {OTHER.node_id}"
    assert (hands.has(), hands.has(OTHER)) == (0, EACH)
    assert "nothing is left to be claimed" in claim(hands)["said"]


def test_what_is_pending_is_said_where_nothing_is_to_be_disputed(hands: Hands) -> None:
    hands.vouch(2 * EACH)
    shown = f"{2 * EACH} (0.00{2 * EACH})"
    unclaimed = hands.as_node("dispute").stdout
    assert f"{shown} of its voucher is not claimed: hypergpu ledger claim takes it" in unclaimed
    claim(hands)
    at_s = hands.ground.chain.head().time_s + WINDOW_S
    pending = told(hands.as_node("dispute", "--json"))
    assert (pending["pending"], pending["pending_until_s"]) == (str(2 * EACH), at_s)
    assert (pending["paid"], pending["credit"], pending["unclaimed"]) == ("0", "0", "0")
    said = hands.as_node("dispute").stdout
    assert f"{shown} of its voucher is pending until {moment(at_s)}: hypergpu ledger claim" in said


def test_an_escrow_with_less_than_the_voucher_pays_what_it_has_and_then_says_so(
    hands: Hands,
) -> None:
    hands.vouch(ESCROW + EACH)
    first = claim(hands)
    assert first["amounts"]["pending"] == str(ESCROW)
    assert "the escrow had no more: " in first["said"]
    hands.pass_time()
    said = refused(hands.as_node("claim"), Reason.ESCROW_SHORT)
    assert f"the escrow of {JOB} has nothing left to claim it from" in said
    assert hands.has() == ESCROW
    assert "Fix: wait until its owner raises it" in said


def test_a_job_whose_id_another_coordinator_has_too_is_claimed_by_who_signs_for_it(
    hands: Hands,
) -> None:
    hands.vouch(EACH)
    with Places(hands.node) as places:
        others = terms_of(Address(OTHER.node_id), JOB, hands.domain)
        Wallet(places, NODE.node_id).agree(JOB, others)
    said = refused(hands.as_node("claim", JOB), Reason.JOB_UNKNOWN)
    whole = f"{JOB}@{COORDINATOR.node_id}"
    assert whole in said
    assert claim(hands, whole)["amounts"]["redeemed"] == str(EACH)


def test_wrong_use_is_refused_with_what_mends_it(hands: Hands, ground: Ground) -> None:
    said = refused(hands.as_node("claim"), Reason.ARGUMENT_INVALID)
    assert f"this node holds no voucher of {JOB}, and nothing is due" in said
    hands.vouch(EACH)
    said = refused(hands.as_node("claim", "--to", "home"), Reason.ARGUMENT_INVALID)
    assert said == (
        "error 6002: 'home' is no address. Fix: name it like this: --to 0x and 40 hex digits\n"
    )
    (hands.node / "identity.key").write_text(OTHER.secret.hex())
    (hands.node.parent / "node.passphrase").unlink(missing_ok=True)
    said = refused(hands.as_node("claim"), Reason.ARGUMENT_INVALID)
    assert "the ledger refuses redeemVoucher: NotNode(). Fix: use the key that it is of" in said
    url, ground.url = ground.url, "http://127.0.0.1:9"
    said = refused(hands.as_node("claim"), Reason.CHAIN_UNREACHABLE)
    assert "http://127.0.0.1:9" in said
    ground.url = url


def test_a_ledger_that_is_not_there_or_another_chain_is_not_asked_for_money(
    hands: Hands, ground: Ground
) -> None:
    hands.vouch(EACH)
    ground.ask("anvil_setCode", hands.contract, "0x")
    said = refused(hands.as_node("claim"), Reason.LEDGER_WRONG)
    assert f"there is no contract at {hands.contract}" in said
    ground.ask("anvil_setChainId", 5)
    said = refused(hands.as_node("claim"), Reason.CHAIN_WRONG)
    assert "is of chain 5, not of 31337" in said
