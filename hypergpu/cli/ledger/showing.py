"""A job's accounts from its coordinator and its chain, and the tables of them."""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hypergpu.cli.ledger.account import (
    LedgerView,
    columns,
    ledger_lines,
    ledger_view,
    paid_in_all,
    rows,
    unpaid,
    waiting_lines,
    with_standings,
)
from hypergpu.cli.ledger.tiers.standing import PayView
from hypergpu.cli.ledger.tiers.table import COLUMNS as PAY_COLUMNS
from hypergpu.cli.ledger.tiers.table import due_lines, pay_lines, pay_rows
from hypergpu.cli.ledger.transactions import transaction_lines
from hypergpu.cli.ledger.verifying import (
    Verification,
    audited,
    not_audited,
    received,
    verified,
)
from hypergpu.client import Coordinator
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.terminal.output import note, say, say_whole_table
from hypergpu.wire.ledger import terms_value

TRANSACTIONS_SHOWN = 20
_NO_CHAIN = "no chain was asked what it recorded and paid: the coordinator has none now"
_NOT_NAMED = (
    "the coordinator does not say by which RPC it reaches its chain: there may be a secret in the"
    " address"
)
_NAME_ONE = "name one of your own: --chain-url URL"
_NOT_FOUND = (
    "what was recorded and paid is not known: the job is signed for no chain, and no block of the"
    " one that its coordinator has holds the opening that it names,"
)
_NOT_YET = "nothing is recorded or paid: the opening of the job is in no block yet, by the ledger"
_NOT_OPENED = (
    "nothing is recorded or paid: the job is signed for no chain, and its coordinator has not"
    " opened it on the one it has"
)


class Listed(NamedTuple):
    """Which transactions are told."""

    most: int
    """The newest so many."""
    all_are_in: str
    """Where the others are: a command, or a file."""


def ledger_of(coordinator: Coordinator, job_id: str, chain_url: str = "") -> LedgerView:
    """What a job owes by its coordinator, and has paid by its chain, where that answers.

    Args:
        coordinator: Of the job.
        job_id: Whose.
        chain_url: RPC of the chain; empty: the one that the coordinator names.
    """
    view, why = _asked_of(coordinator, job_id, chain_url)
    if why:
        name_one = f". {_NAME_ONE}" if why == _NOT_NAMED else ""
        note(f"what was paid is not known: {why}{name_one}")
    return view


def _asked_of(coordinator: Coordinator, job_id: str, chain_url: str) -> tuple[LedgerView, str]:
    """The same, and why its chain does not say what was paid; empty: it does, or there is none."""
    answer = coordinator.ledger(job_id)
    view, terms = ledger_view(job_id, answer), terms_value(answer.terms)
    url = chain_url or (view.chain.url if view.chain is not None else "")
    if not url:
        return view, "" if view.chain is None else _NOT_NAMED
    # What talks to a chain is an extra, and slow to import.
    from hypergpu.chain.recognition import recognised
    from hypergpu.cli.ledger.reading import ledger_at, settled_on, standings, token_decimals
    from hypergpu.cli.ledger.tiers.asking import PayReader
    from hypergpu.cli.ledger.tiers.payments import last_payments

    try:
        with ledger_at(url) as chain:
            ledger = settled_on(chain, terms, openings(view))
            if ledger is None:
                return view, ""
            recognised(chain, ledger)
            nodes = [node.id for node in view.nodes]
            vouched = {node.id: int(node.vouched) for node in view.nodes}
            pay = PayReader(chain, ledger).pay(terms.job, vouched, _epochs(view))
            paid_by = last_payments(chain, ledger, terms.job, nodes, payments(view))
            told = with_standings(view, standings(chain, ledger, terms.job, nodes), paid_by)
            return replace(told, pay=pay, decimals=token_decimals(chain, ledger)), ""
    except HyperGPUError as unreachable:
        return view, unreachable.detail


def verification_of(coordinator: Coordinator, job_id: str, chain_url: str = "") -> Verification:
    """What a job's receipts prove of what its coordinator says, and of what its chain does.

    Args:
        coordinator: Has the receipts.
        job_id: Whose.
        chain_url: RPC of the chain; empty: the one that the coordinator uses.

    Raises:
        HyperGPUError: CHAIN_UNREACHABLE, the chain does not answer, or nobody names an RPC of it.
    """
    answer = coordinator.ledger(job_id)
    view, terms = ledger_view(job_id, answer), terms_value(answer.terms)
    if view.unit_price == "0":
        return _told_of(coordinator, job_id)[0]
    url = chain_url or (view.chain.url if view.chain is not None else "")
    if not url and view.chain is not None:
        raise HyperGPUError(Reason.CHAIN_UNREACHABLE, _NOT_NAMED, fix=_NAME_ONE)
    if not url:
        return not_audited(_told_of(coordinator, job_id)[0], _NO_CHAIN)
    from hypergpu.cli.ledger.reading import job_fact, ledger_at, second_look, settled_on

    with ledger_at(url) as chain:
        ledger = settled_on(chain, terms, openings(view))
        if ledger is None:
            why = f"{_unopened(openings(view))} (chain {chain.chain_id()})"
            return not_audited(_told_of(coordinator, job_id)[0], why)
        # Before the receipts: a job that goes on meanwhile then has all that the chain knows.
        try:
            fact = job_fact(chain, ledger, terms.job)
        except HyperGPUError as unknown:
            if unknown.reason is not Reason.JOB_UNKNOWN:
                raise
            return not_audited(_told_of(coordinator, job_id)[0], f"{_NOT_YET} {ledger.contract}")
        found, receipts = _told_of(coordinator, job_id)
        whole = audited(found, fact, receipts, signed_for=terms.domain)
        if len(whole.faults) == len(found.faults):
            return whole
        return audited(found, second_look(chain, fact), receipts, signed_for=terms.domain)


def _told_of(coordinator: Coordinator, job_id: str) -> tuple[Verification, list[SignedReceipt]]:
    """A job's receipts, held against the accounts of before and after they were read."""
    before = coordinator.ledger(job_id)
    receipts = received(coordinator.receipts(job_id))
    view, later = (ledger_view(job_id, told) for told in (before, coordinator.ledger(job_id)))
    return verified(view, terms_value(before.terms), receipts, later), receipts


def _unopened(opened_by: Sequence[str]) -> str:
    return f"{_NOT_FOUND} {' or '.join(opened_by)}" if opened_by else _NOT_OPENED


def owed_by(coordinator: Coordinator, job_id: str) -> str:
    """What a job owes its nodes still, for whoever is about to remove it; empty: nothing.

    A job that no ledger can have opened has paid nothing, whether its chain answers or not.
    """
    try:
        if coordinator.ledger(job_id).unit_price in {"", "0"}:
            return ""
        view, why = _asked_of(coordinator, job_id, "")
    except HyperGPUError:
        # An unreadable job has no accounts.
        return ""
    left = unpaid(view)
    if not left:
        return ""
    keep = f"Keep its receipts before: hypergpu ledger export {job_id} FILE"
    if paid_in_all(view) is None and (view.chain_id or openings(view)):
        see = f"hypergpu ledger show {job_id} --chain-url URL"
        told = f"its nodes have earned {left}; what of it is paid is not known"
        return f"{told}: {why}. See it: {see}. {keep}" if why else f"{told}: {see}. {keep}"
    return f"{left} that its nodes have earned is not paid yet. {keep}"


def openings(view: LedgerView) -> list[str]:
    """The hashes that the transaction that opened a job may have, by its coordinator."""
    purpose = f"open/{view.job}"
    return [name for one in view.transactions if one.purpose == purpose for name in one.attempts]


def payments(view: LedgerView) -> list[str]:
    """The hashes of the transactions in blocks that paid a job's shares, the newest first."""
    paying = [one for one in view.transactions if one.purpose.startswith(f"pay/{view.job}/")]
    return [one.hash for one in reversed(paying) if one.block]


def _epochs(view: LedgerView) -> range:
    """Those that may have been recorded in: the one after the last may hold what was forced in."""
    return range(max((one.epoch for one in view.transactions), default=0) + 2)


def say_ledger(view: LedgerView, decimals: int | None = None, listed: Listed | None = None) -> None:
    """The sums, the nodes, the newest transactions, and how far the pay is.

    Args:
        view: Of a job.
        decimals: To show amounts with; None: those of the token, where they are known.
        listed: Which transactions; None: as `hypergpu ledger show` does.
    """
    decimals = view.decimals if decimals is None else decimals
    listed = listed or Listed(TRANSACTIONS_SHOWN, f"hypergpu ledger show {view.job} --all")
    for line in ledger_lines(view, decimals):
        say(line)
    say()
    say_whole_table(columns(view), rows(view), empty="nobody has worked for it yet")
    for line in waiting_lines(view.nodes, decimals):
        say(line)
    if view.transactions:
        newest = view.transactions[-listed.most :]
        say()
        say("transactions, in the order of their nonces")
        for line in transaction_lines(view.job, newest):
            say(line)
        if older := len(view.transactions) - len(newest):
            say(f"and {older} older: {listed.all_are_in}")
    if view.pay is not None:
        say()
        _say_pay(view.pay)


def _say_pay(pay: PayView) -> None:
    for line in pay_lines(pay):
        say(line)
    say_whole_table(PAY_COLUMNS, pay_rows(pay), empty="")
    for line in due_lines(pay):
        say(line)
