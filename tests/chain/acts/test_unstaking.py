"""Stake comes back: asked for once, waited for, and taken, whatever is repeated meanwhile."""

from hypergpu.chain.moments import moment
from hypergpu.errors import Reason
from tests.chain.acts.hands import EACH, NODE, WINDOW_S, Hands, refused, told
from tests.chain.ground import Ground

STAKE = 5_000_000


def shown(amount: int) -> str:
    return f"{amount} ({amount / 10**6:.6f})"


def staked(hands: Hands) -> None:
    done = told(hands.as_node("register", "--stake", str(STAKE), "--json"))
    assert (done["said"], done["amounts"]) == (
        f"registered with a stake of {shown(STAKE)}",
        {"staked": str(STAKE)},
    )


def test_stake_is_asked_back_waited_for_and_taken(hands: Hands) -> None:
    staked(hands)
    asked = told(hands.as_node("unstake", "2000000", "--json"))
    ready_at_s = hands.ground.chain.head().time_s + WINDOW_S
    assert (len(asked["hashes"]), asked["ready_at_s"]) == (1, ready_at_s)
    assert asked["amounts"] == {"unbonding": "2000000", "staked": "3000000"}
    assert asked["said"] == (
        f"{shown(2_000_000)} is unbonding and buys no pay at once any more; run this again from"
        f" {moment(ready_at_s)} on to take it. {shown(3_000_000)} stays staked"
    )

    # Neither the same again nor more starts the wait anew.
    for amount in ("2000000", "all"):
        early = told(hands.as_node("unstake", amount, "--json"))
        assert (early["hashes"], early["ready_at_s"]) == ([], ready_at_s)
        assert f"is unbonding until {moment(ready_at_s)}: nothing was sent" in early["said"]

    hands.pass_time()
    taken = told(hands.as_node("unstake", "2000000", "--json"))
    assert taken["said"] == (
        f"{shown(2_000_000)} of stake is in the wallet; {shown(3_000_000)} stays staked"
    )
    assert (hands.has(), taken["ready_at_s"]) == (2_000_000, None)

    told(hands.as_node("unstake", "all", "--json"))
    hands.pass_time()
    told(hands.as_node("unstake", "all", "--json"))
    assert hands.has() == STAKE
    said = refused(hands.as_node("unstake", "all"), Reason.ARGUMENT_INVALID)
    assert f"{NODE.node_id} has no stake on {hands.contract}" in said


def test_what_payments_lock_is_not_given_back_before_their_window(
    hands: Hands, ground: Ground
) -> None:
    staked(hands)
    ground.ask("evm_setAutomine", False)
    ground.earn(0, range(1))
    ground.end(0)
    ground.rest()
    assert hands.has() == EACH
    ground.ask("evm_setAutomine", True)
    said = refused(hands.as_node("unstake", str(STAKE)), Reason.ARGUMENT_INVALID)
    free = shown(STAKE - EACH)
    assert said == (
        f"error 6002: {free} of the stake of {shown(STAKE)} is free, the rest is locked by payments"
        f" inside their challenge window. Fix: ask for at most {free}, or wait: what was paid is"
        f" unlocked within {2 * WINDOW_S} s\n"
    )
    hands.pass_time(2 * WINDOW_S)
    told(hands.as_node("unstake", str(STAKE), "--json"))


def test_staking_twice_by_mistake_is_refused_and_no_amount_is_guessed(hands: Hands) -> None:
    staked(hands)
    again = told(hands.as_node("register", "--json"))
    assert (again["hashes"], again["said"]) == (
        [],
        "it is registered already, as node 1: nothing was sent",
    )
    said = refused(hands.as_node("register", "--stake", "5"), Reason.ARGUMENT_INVALID)
    fix = f"Fix: add to its stake: hypergpu ledger stake 5 --state-dir {hands.node}"
    assert said.endswith(f"{fix}\n")
    more = told(hands.as_node("stake", "5", "--json"))
    assert more["amounts"] == {"added": "5", "staked": str(STAKE + 5)}
    for wrong in ("0", "-1", "1.5", "some"):
        ended = hands.as_node("unstake", "--", wrong)
        assert ended.exit_code == Reason.ARGUMENT_INVALID.exit_code
        assert "nothing was sent" not in ended.stdout


def test_who_never_registered_is_told_how(hands: Hands) -> None:
    said = refused(hands.as_node("stake", "5"), Reason.ARGUMENT_INVALID)
    assert said == (
        f"error 6002: {NODE.node_id} is not registered on {hands.contract}. Fix: register it with"
        f" its stake: hypergpu ledger register --stake 5 --state-dir {hands.node}\n"
    )
    assert hands.nonce == 0
