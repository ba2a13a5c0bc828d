"""`hypergpu ledger key` and `ledger deploy`: from the settings to what is said of it."""

from typing import NamedTuple

from hypergpu.chain.profiles.named import NamedChain
from hypergpu.cli.deployment.deploying import Deployed, Deployment
from hypergpu.cli.deployment.ground import KeyView, Place, ground, key_view, looked_at
from hypergpu.cli.deployment.offer import Offer, currency, offer_on, refuse_lacking
from hypergpu.cli.deployment.options import Given, LedgerOptions, options_of, remarks
from hypergpu.terminal.output import confirm, note, say, say_json
from hypergpu.units import are, several


class Manner(NamedTuple):
    """How it is gone about."""

    is_dry: bool = False
    """Nothing is sent."""
    is_again: bool = False
    """Another ledger is wanted beside one that is there."""
    yes: bool = False
    """Nobody is asked."""
    as_json: bool = False


def show_key(place: Place, *, as_json: bool) -> None:
    """Say whose key the coordinator has, and what it has on the chain that is named."""
    view = key_view(place)
    if as_json:
        say_json(view)
        return
    say(view.coordinator)
    note(_key_words(view))


def deploy(place: Place, given: Given, manner: Manner) -> None:
    """Make a ledger, or say what making one would take.

    Raises:
        HyperGPUError: something is lacking or does not fit; one is there already; the chain
        refuses.
    """
    found = place.named()
    if found.warning:
        note(f"warning: {found.warning}")
    here_by = looked_at if manner.is_dry else ground
    with here_by(place, found) as here:
        deployment = Deployment(here, place.folder)
        options = options_of(given, deployment.own, found.profile.window_s)
        if not manner.is_again:
            deployment.refuse_second(options)
        offer, lacks = offer_on(here.chain, here.profile, deployment.own, options)
        _say_plan(found, deployment, offer, options)
        refuse_lacking(lacks)
        if manner.is_dry:
            done = deployment.foreseen(offer, options)
        else:
            confirm(f"Make this ledger on chain {found.profile.chain_id}?", yes=manner.yes)
            done = deployment.made(offer, options)
    if manner.as_json:
        say_json(done)
    else:
        _say_done(done)


def _say_plan(
    found: NamedChain, deployment: Deployment, offer: Offer, options: LedgerOptions
) -> None:
    arbiters = ", ".join(options.arbiters)
    final_s = found.profile.depth * found.profile.block_ms // 1000
    cost = f"{currency(offer.most_wei)} of the chain's currency"
    for line in (
        f"a ledger on chain {found.profile.chain_id}, made by the coordinator {deployment.own}:",
        f"  token {options.token}, minimum bond {options.minimum_bond} of its smallest units",
        f"  challenge window {options.window_s} s, unbonding {options.unbonding_s} s",
        f"  arbiters {arbiters}, of whom {options.quorum} decide",
        f"  treasury {options.treasury}, guardian {options.guardian}",
        f"  gas {offer.gas} at most, at {offer.max_fee_wei} wei at most: {cost}",
        *(f"  mind: {each}" for each in remarks(options, deployment.own, final_s)),
    ):
        note(line)


def _say_done(done: Deployed) -> None:
    if not done.hash:
        say(f"nothing is lacking; it would lie at {done.address}")
        return
    say(f"the ledger is at {done.address} on chain {done.chain_id}")
    fee = currency(int(done.fee_wei))
    say(f"transaction {done.hash} in block {done.block}: gas {done.gas}, {fee} at most")
    on_top = f"{several(done.final_after, 'block')} {are(done.final_after)} on top"
    note(f"it is final once {on_top}; then name it for this coordinator:")
    note(f"  export HYPERGPU_COORDINATOR_LEDGER_CONTRACT={done.address}")
    note("and post the bond: hypergpu ledger bond")


def _key_words(view: KeyView) -> str:
    where = f"its key is {view.key_file}: keep a copy of it and of its passphrase"
    if view.balance_wei is None:
        return where
    has = currency(int(view.balance_wei))
    return f"{where}; it has {has} of the currency of chain {view.chain_id}"
