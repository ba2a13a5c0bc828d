"""Which ledger a node's command is for, also of a job that was signed for none and settled later.

Shares of such a job are paid as all are. Its receipts and vouchers are worthless to a contract.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hypergpu.chain.addresses import address_of
from hypergpu.chain.rpc.chain import EvmChain
from hypergpu.cli.ledger.account import LedgerView, ledger_view
from hypergpu.cli.ledger.asking import nodes_rpc
from hypergpu.cli.ledger.holding import Held
from hypergpu.cli.ledger.reading import ledger_at, settled_on
from hypergpu.cli.ledger.showing import openings
from hypergpu.client import connect
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger.typed import Domain
from hypergpu.terminal.output import note


class Where(NamedTuple):
    """What a command was given; empty: nothing."""

    chain_url: str = ""
    contract: str = ""


@contextmanager
def ledger_meant(held: Held, where: Where) -> Iterator[tuple[EvmChain, Domain]]:
    """The ledger of a job, and its chain.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, the job is another ledger's, or nobody says which it is; as
            `nodes_rpc` and `ledger_at`.
    """
    named = address_of(where.contract, "--ledger-contract") if where.contract else None
    ledger = held.terms.domain
    if ledger.chain_id:
        if named not in {None, ledger.contract}:
            detail = f"{held.job_id} is signed for the ledger {ledger.contract}, not for {named}"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="leave out --ledger-contract")
        with ledger_at(nodes_rpc(where.chain_url, ledger, held.job_id)) as chain:
            yield chain, ledger
        return
    told = None if named and where.chain_url else _told(held)
    url = where.chain_url or (told.chain.url if told is not None and told.chain is not None else "")
    if not url:
        raise _unknown(held, "no chain is named")
    with ledger_at(url) as chain:
        if named is None:
            found = None if told is None else settled_on(chain, held.terms, openings(told))
        else:
            found = Domain(chain.chain_id(), named)
        if found is None:
            raise _unknown(held, f"no opening of it on chain {chain.chain_id()} is known")
        if held.voucher is not None:
            note(
                f"{held.job_id} was signed for no chain: its voucher is worth nothing to the ledger"
                f" {found.contract}, its shares are paid there once they are recorded"
            )
        yield chain, found


def counts_nowhere(held: Held) -> HyperGPUError:
    """Why nothing can be shown to a ledger of a job that was signed for none."""
    detail = (
        f"{held.job_id} was signed for no chain: a ledger acts on no receipt of it, whichever"
        " settles it later"
    )
    fix = (
        f"see what that recorded and paid: hypergpu ledger verify {held.job_id}; have its shares"
        f" paid: hypergpu ledger claim {held.job_id} --chain-url URL --ledger-contract ADDRESS"
    )
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)


def _unknown(held: Held, why: str) -> HyperGPUError:
    detail = (
        f"{held.job_id} was signed for no chain, and its coordinator, if it is reached from here,"
        f" does not say which settles it: {why}"
    )
    fix = (
        "name both: --chain-url URL --ledger-contract ADDRESS; `up` says them where the coordinator"
        " runs. Until one settles the job, nothing of it can be paid"
    )
    return HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)


def _told(held: Held) -> LedgerView | None:
    """What the job's coordinator says, where this machine has a token of it."""
    try:
        with connect() as coordinator:
            view = ledger_view(held.job_id, coordinator.ledger(held.job_id))
    except HyperGPUError:
        return None
    return view if view.key == held.terms.job else None
