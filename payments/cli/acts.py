"""What accounts do on their ledger by themselves: a node claims, registers and stakes, arbiters
void.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.crypto import chain_form, keccak, sign, signer
from hypergpu.digests import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, JobKey, NodeId
from hypergpu.journal.worth import worth
from hypergpu.ledger_terms import Terms, word_bytes
from hypergpu.units import Wei
from hypergpu.user.terminal.output import confirm, say_json_line
from payments.cli.account import LedgerAccount, OpenLedger, open_account
from payments.cli.held_jobs import HeldJob, held_jobs, one_ledger, worker_facts
from payments.cli.keys import NODE_KEY, folder_named, open_key, open_keystore
from payments.cli.options import JobAt, NodeOptions
from payments.cli.service import read_receipts, run
from payments.cli.show import say_act, time_text
from payments.core.transactions import EpochView, ShareState
from payments.core.verify import VoidVerdict
from payments.shell.ledger_reader import JobReader
from payments.shell.signing import receipt_tuple

_MIB = 1 << 20
_EPOCHS_AT_ONCE = 50


class DueShare(NamedTuple):
    """A share of the node that is not paid."""

    epoch: int
    amount: int
    opened_at_s: int
    closed_at_s: int
    """0: the epoch is open."""


def act_as_node(options: NodeOptions, work: Callable[[LedgerAccount], Awaitable[None]]) -> None:
    """Open the node's account on the one ledger of its jobs, act, and print what was done."""
    folder = folder_named("state_dir", options.state_dir)
    domain = one_ledger(held_jobs(folder, options.job))
    key = open_key(folder, NODE_KEY, options.passphrase_file)

    async def act_and_say() -> None:
        async with open_account(domain, options.chain_url, key) as account:
            await work(account)
            say_act(account.result(), as_json=options.as_json)

    run(act_and_say)


async def claim_job(node: LedgerAccount, held: HeldJob, to: Address | None) -> None:
    """Take everything that a job owes a node and that is to be had now, without its coordinator.

    The node's newest receipt is recorded if it states more than the ledger does; epochs that the
    coordinator left open are closed once anybody may; shares are paid.

    Args:
        node: Account of the node, open on the job's ledger.
        held: The job.
        to: Payee of credit, where the token refuses to pay the node itself.
    """
    job = word_bytes(held.terms.job)
    ledger_job = await node.ledger.read_or_none("getJob", job)
    if ledger_job is None:
        raise HyperGPUError(
            Reason.JOB_UNKNOWN,
            f"{held.job_id} is not on the ledger: its coordinator has put no escrow in",
            fix="wait for the coordinator to open it; nothing can be paid before",
        )
    await _record_newest(node, held, ledger_job)
    newest_epoch = held.newest.receipt.epoch if held.newest else 0
    async for share in due_shares(node, held.terms.job, newest_epoch):
        await _take_share(node, held, share)
    await _take_credit(node, to)
    if not node.done:
        node.done.append(f"{held.job_id}: nothing is due")


async def due_shares(
    node: LedgerAccount, job: JobKey, newest_epoch: int
) -> AsyncIterator[DueShare]:
    """Shares of a node in a job that are not paid, in order of epochs.

    Args:
        node: The account.
        job: The job's key.
        newest_epoch: Epoch of the node's newest receipt; its share may be in a later one.
    """
    ledger = node.ledger
    reader = JobReader(ledger.chain, ledger.domain.contract, job, ledger.block)
    first, epochs = 0, {0: EpochView()}
    while epochs or first <= newest_epoch:
        epochs = await reader.epochs(range(first, first + _EPOCHS_AT_ONCE), [NodeId(node.address)])
        for epoch, view in epochs.items():
            for share in view.shares.values():
                if share.state is ShareState.DUE:
                    yield DueShare(epoch, share.amount, view.opened_at_s, view.closed_at_s)
        first += _EPOCHS_AT_ONCE


async def register_node(node: LedgerAccount, state_dir: Path, stake_amount: int) -> None:
    """Register a node with what its worker said of the machine, and with stake."""
    facts, content = worker_facts(state_dir)
    if number := (await node.ledger.read("getNodeMetrics", node.address, []))["id"]:
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"{node.address} is registered already, as node {number}",
            fix="add to its stake: hypergpu ledger stake AMOUNT",
        )
    if stake_amount:
        await node.approve(stake_amount)
    memory_mb = min(facts.memory_bytes // _MIB, 2**32 - 1)
    capabilities = word_bytes(digest_of(content))
    meta = (capabilities, keccak(facts.device.encode()), memory_mb)
    await node.act("registerNode", meta, stake_amount)
    stake_text = node.ledger.amount(stake_amount)
    node.done.append(f"registered {node.address} ({facts.device}) with a stake of {stake_text}")
    node.amounts["staked"] = str(stake_amount)


async def add_stake(node: LedgerAccount, amount: int) -> None:
    """Add to a node's stake."""
    if not (await node.ledger.read("getNodeMetrics", node.address, []))["id"]:
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"{node.address} is not registered on {node.ledger.domain.contract}",
            fix=f"register it: hypergpu ledger register --stake {amount}",
        )
    await node.approve(amount)
    await node.act("stake", amount)
    staked_amount, *_ = await node.ledger.read("stakeOf", node.address)
    node.amounts.update(added=str(amount), staked=str(staked_amount))
    show_amount = node.ledger.amount
    node.done.append(f"staked {show_amount(amount)}, {show_amount(staked_amount)} in all")


async def take_stake_back(node: LedgerAccount, amount: int | None) -> None:
    """Ask for stake back; take what was asked for once its wait is over.

    Args:
        node: The account.
        amount: None: all that no payment locks.
    """
    show_amount = node.ledger.amount
    staked_amount, locked_amount, unbonding_amount, release_at_s = await node.ledger.read(
        "stakeOf", node.address
    )
    if unbonding_amount and node.ledger.block.time_s >= release_at_s:
        await node.act("withdrawStake")
        node.amounts["withdrawn"] = str(unbonding_amount)
        node.done.append(f"took {show_amount(unbonding_amount)} of stake back")
    elif unbonding_amount and amount is None:
        node.done.append(
            f"{show_amount(unbonding_amount)} is unbonding until {time_text(release_at_s)}"
        )
        node.again_at_s.append(release_at_s)
    else:
        await _request_unstake(node, staked_amount - locked_amount, amount)


async def _request_unstake(node: LedgerAccount, free: int, amount: int | None) -> None:
    show_amount = node.ledger.amount
    asked_amount = free if amount is None else amount
    if not free or asked_amount > free:
        window_s = await node.ledger.read("CHALLENGE_WINDOW")
        raise HyperGPUError(
            Reason.ARGUMENT_INVALID,
            f"{show_amount(free)} of the stake of {node.address} is free; payments lock the rest",
            fix=f"ask for that at most, or wait: a payment's lock ends within {2 * window_s} s",
        )
    await node.act("unstake", asked_amount)
    *_, unbonding_amount, release_at_s = await node.ledger.read("stakeOf", node.address)
    node.amounts["unbonding"] = str(unbonding_amount)
    node.done.append(
        f"{show_amount(unbonding_amount)} is unbonding until {time_text(release_at_s)}"
    )
    node.again_at_s.append(release_at_s)


async def _record_newest(node: LedgerAccount, held: HeldJob, job: dict[str, object]) -> None:
    """Record the node's newest receipt if the ledger has less, or was short of escrow."""
    if held.newest is None:
        return
    receipt, price = held.newest.receipt, Wei(int(str(job["terms"]["unitPrice"])))  # type: ignore[index]
    account = await node.ledger.read("getAccount", word_bytes(held.terms.job), node.address)
    is_newer = receipt.total_score > account["score"] or receipt.sequence >= account["counted"]
    is_short = worth(price, account["score"]) > account["earned"] and bool(job["free"])
    if not (is_newer or is_short):
        return
    ends_at_s = int(str(job["endsAt"]))
    window_s = await node.ledger.read("CHALLENGE_WINDOW")
    if ends_at_s and node.ledger.block.time_s >= ends_at_s - window_s:
        last = time_text(ends_at_s - window_s)
        node.done.append(f"{held.job_id} ended on the ledger: it took receipts until {last}")
        return
    await node.act(
        "submitContribution",
        receipt_tuple(receipt),
        chain_form(held.newest.contribution_signature),
        chain_form(held.newest.signature),
        receipt.epoch,
    )
    now = await node.ledger.read("getAccount", word_bytes(held.terms.job), node.address)
    added_amount = now["earned"] - account["earned"]
    node.amounts["recorded"] = str(added_amount + int(node.amounts.get("recorded", "0")))
    receipts = f"receipts up to number {receipt.sequence + 1}"
    node.done.append(
        f"{held.job_id}: recorded {receipts}, {node.ledger.amount(added_amount)} more is due"
    )
    if missing_amount := worth(price, now["score"]) - now["earned"]:
        missing_text = node.ledger.amount(missing_amount)
        node.done.append(
            f"{held.job_id}: its escrow is short of {missing_text} that the receipts prove"
        )


async def _take_share(node: LedgerAccount, held: HeldJob, share: DueShare) -> None:
    """Close a share's epoch if need be and have the share paid, or say from when it can be."""
    job = word_bytes(held.terms.job)
    name = f"{held.job_id}, epoch {share.epoch}: {node.ledger.amount(share.amount)}"
    window_s = await node.ledger.read("CHALLENGE_WINDOW")
    closed_at_s = share.closed_at_s
    if not closed_at_s:
        may_close = await node.ledger.read_or_none("closeEpoch", job, share.epoch)
        if may_close is None:
            closes_at_s = share.opened_at_s + await node.ledger.read("UNBONDING")
            node.done.append(f"{name} waits for its epoch, which you may close later")
            node.again_at_s.append(closes_at_s)
            return
        await node.act("closeEpoch", job, share.epoch)
        node.done.append(f"{held.job_id}: closed epoch {share.epoch}, which was left open")
        closed_at_s = (await node.ledger.read("getEpoch", job, share.epoch))["closedAt"]
    payment = (job, share.epoch, [node.address])
    if not await node.ledger.read("distributePayments", *payment):
        node.done.append(f"{name} is paid after its challenge window; stake would have it paid now")
        node.again_at_s.append(closed_at_s + window_s)
        return
    await node.act("distributePayments", *payment)
    node.amounts["paid"] = str(share.amount + int(node.amounts.get("paid", "0")))
    node.done.append(f"{name} was paid")


async def _take_credit(node: LedgerAccount, to: Address | None) -> None:
    credit = await node.ledger.read("creditOf", node.address)
    if not credit:
        return
    payee = to or node.address
    credit_text = node.ledger.amount(credit)
    try:
        await node.act("withdrawCredit", payee)
    except HyperGPUError as error:
        detail = f"the token refuses to pay credit of {credit_text} to {payee}: {error.detail}"
        fix = "name another address: hypergpu ledger claim --to ADDRESS"
        raise HyperGPUError(error.reason, detail, fix=fix) from error
    node.amounts["credit"] = str(credit)
    node.done.append(f"took credit of {credit_text} to {payee}")


class VoidOrder(NamedTuple):
    """A share to void, and the arbiters at hand."""

    node: Address
    epoch: int
    penalty: int
    evidence: Path
    keys: tuple[Path, ...]
    """Keystores; the first one's account sends."""
    passphrase_file: Path
    signatures: tuple[str, ...] = ()
    """Signatures of arbiters elsewhere, in hex."""
    is_signed_only: bool = False


class SignedVerdict(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/verdict/2"):
    """A verdict and one arbiter's signature of it."""

    verdict: VoidVerdict
    arbiter: str
    signature: str
    """Hex, r | s | v, v 0 or 1."""


def void_share(
    order: VoidOrder,
    receipts: tuple[JobAt, Path | None],
    chain_url: str,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Void a share and print what came of it; ``--sign-only`` prints signatures instead."""

    async def work() -> None:
        terms = (await read_receipts(*receipts)).terms
        verdict = _make_verdict(order, terms)
        keys = [open_keystore(path, order.passphrase_file) for path in order.keys]
        signatures = [sign(key, terms.domain.separator(), verdict).hex() for key in keys]
        if order.is_signed_only:
            for key, signature in zip(keys, signatures, strict=True):
                say_json_line(SignedVerdict(verdict, key.address, signature))
            return
        async with open_account(terms.domain, chain_url, keys[0]) as sender:
            question = f"void the share of {order.node} in epoch {order.epoch} for good?"
            confirm(question, yes=yes)
            await _void(sender, verdict, [*signatures, *order.signatures])
            say_act(sender.result(), as_json=as_json)

    run(work)


def _make_verdict(order: VoidOrder, terms: Terms) -> VoidVerdict:
    """The verdict, with the digest of the document that says why."""
    if not terms.domain.chain_id:
        detail = "the job is signed for no chain: there is nothing to void"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)
    try:
        content = order.evidence.read_bytes()
    except OSError as error:
        detail = f"the evidence {order.evidence} cannot be read: {error.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from error
    return VoidVerdict(
        job=terms.job,
        epoch=order.epoch,
        node=NodeId(order.node),
        penalty=Wei(order.penalty),
        evidence=digest_of(content),
    )


async def _void(sender: LedgerAccount, verdict: VoidVerdict, texts: Sequence[str]) -> None:
    """Void a node's share of a closed epoch inside its challenge window, and slash its stake."""
    signatures = await _arbiters_signatures(sender.ledger, verdict, texts)
    job = word_bytes(verdict.job)
    share = await sender.ledger.read("getContribution", job, verdict.epoch, verdict.node)
    if (state := ShareState(share["state"])) not in {ShareState.DUE, ShareState.PAID}:
        detail = f"{verdict.node} has no share of epoch {verdict.epoch} to void: {state.name}"
        fix = "see its shares: hypergpu ledger show JOB"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    before, *_ = await sender.ledger.read("stakeOf", verdict.node)
    words = (job, verdict.epoch, verdict.node, verdict.penalty, word_bytes(verdict.evidence))
    in_order = [chain_form(signatures[arbiter]) for arbiter in sorted(signatures)]
    await sender.act("voidContribution", words, in_order)
    after, *_ = await sender.ledger.read("stakeOf", verdict.node)
    show_amount, slashed_amount = sender.ledger.amount, before - after
    sender.amounts.update(void=str(share["amount"]), slashed=str(slashed_amount))
    void_text = f"voided {show_amount(share['amount'])} of {verdict.node} in epoch {verdict.epoch}"
    sender.done.append(f"{void_text}; its stake lost {show_amount(slashed_amount)}")


async def _arbiters_signatures(
    ledger: OpenLedger, verdict: VoidVerdict, texts: Sequence[str]
) -> dict[str, bytes]:
    """Signatures by arbiter, at least as many as the ledger asks for."""
    signatures = {}
    for text in texts:
        try:
            signature = bytes.fromhex(text.removeprefix("0x"))
        except ValueError:
            signature = b""
        arbiter = signer(ledger.domain.separator(), verdict, signature)
        if arbiter is None or not await ledger.read("isArbiter", arbiter):
            detail = f"a signature of this verdict is {arbiter or 'nobody'}'s, who is no arbiter"
            fix = "sign the same job, epoch, node, penalty and evidence as an arbiter: --sign-only"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        signatures[arbiter] = signature
    if len(signatures) < (quorum := await ledger.read("QUORUM")):
        detail = f"{len(signatures)} arbiters signed, the ledger asks for {quorum}"
        fix = "add keys with --key, or other arbiters' signatures with --signature"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    return signatures
