"""`ledger void`: arbiters void a node's share and slash its stake."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, NodeId
from hypergpu.signature import SIGNATURE_BYTES, IdentityKey
from hypergpu.statements.domain import AMOUNT_MOST, Domain, Terms, word_bytes
from hypergpu.statements.signing import chain_form, sign, signer
from hypergpu.terminal.output import confirm, say_json_line
from hypergpu.units import Wei
from payments.cli.account import LedgerAccount, OpenLedger, open_account
from payments.cli.accounts import open_keystore
from payments.cli.outcome import say_act
from payments.cli.service import Where, open_payments_client, run
from payments.cli.verifying import read_receipt_file
from payments.core.calls import ShareState
from payments.core.verdict import Verdict


class JobSource(NamedTuple):
    """Where the job's terms come from."""

    job: str | None
    file: Path | None
    """Receipts; None: the coordinator is asked."""
    where: Where

    async def terms(self) -> Terms:
        """The job's terms."""
        if self.file is not None:
            return read_receipt_file(self.file).terms
        async with open_payments_client(self.where, self.job) as payments:
            return await payments.terms()


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
    """Of arbiters elsewhere."""


class SignedVerdict(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="schema", tag="hypergpu/verdict/2"
):
    """A verdict and one arbiter's signature of it."""

    verdict: Verdict
    arbiter: str
    signature: str
    """Hex, r | s | v, v 0 or 1."""


def make_verdict(terms: Terms, epoch: int, node: NodeId, penalty: int, evidence: Path) -> Verdict:
    """The verdict on a node's share, with the digest of a document that says why."""
    try:
        content = evidence.read_bytes()
    except OSError as broken:
        detail = f"the evidence {evidence} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
    if not 0 <= penalty <= AMOUNT_MOST:
        raise HyperGPUError(Reason.ARGUMENT_INVALID, f"--penalty {penalty} is no amount")
    return Verdict(
        job=terms.job,
        epoch=epoch,
        node=node,
        penalty=Wei(penalty),
        evidence=digest_of(content),
    )


def sign_verdict(
    verdict: Verdict, domain: Domain, keys: Sequence[IdentityKey]
) -> list[SignedVerdict]:
    """Signatures of arbiters whose keys are at hand."""
    separator = domain.separator()
    return [
        SignedVerdict(
            verdict=verdict,
            arbiter=key.address,
            signature=sign(key, separator, verdict).hex(),
        )
        for key in keys
    ]


async def void(
    sender: LedgerAccount, verdict: Verdict, own: Sequence[SignedVerdict], others: Sequence[str]
) -> None:
    """Void a node's share of a closed epoch inside its challenge window, and slash its stake.

    Args:
        sender: Any account with gas money.
        verdict: The decision.
        own: Signatures made here.
        others: Signatures of other arbiters, as hex.
    """
    signatures = await _arbiters_signatures(sender.ledger, verdict, own, others)
    job = word_bytes(verdict.job)
    share = await sender.ledger.read("getContribution", job, verdict.epoch, verdict.node)
    state = ShareState(share["state"])
    if state not in {ShareState.DUE, ShareState.PAID}:
        detail = f"{verdict.node} has no share of epoch {verdict.epoch} to void: {state.name}"
        fix = "see its shares: hypergpu ledger show JOB"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    before, *_ = await sender.ledger.read("stakeOf", verdict.node)
    in_order = [chain_form(signatures[arbiter]) for arbiter in sorted(signatures)]
    arguments = (job, verdict.epoch, verdict.node, verdict.penalty, word_bytes(verdict.evidence))
    await sender.act("voidContribution", arguments, in_order)
    after, *_ = await sender.ledger.read("stakeOf", verdict.node)
    slashed = before - after
    shown = sender.ledger.amount
    sender.amounts.update(void=str(share["amount"]), slashed=str(slashed))
    sender.done.append(
        f"voided {shown(share['amount'])} of {verdict.node} in epoch {verdict.epoch};"
        f" its stake lost {shown(slashed)}"
    )


def sign_share(order: VoidOrder, source: JobSource) -> None:
    """Print the signatures of the arbiters at hand, one JSON line each, and send nothing."""

    async def work() -> None:
        terms = await source.terms()
        keys = [open_keystore(path, order.passphrase_file) for path in order.keys]
        for each in sign_verdict(_verdict(order, terms), terms.domain, keys):
            say_json_line(each)

    run(work)


def void_share(
    order: VoidOrder, source: JobSource, chain_url: str, *, yes: bool, as_json: bool
) -> None:
    """Void a share and print what came of it."""

    async def work() -> None:
        terms = await source.terms()
        if not terms.domain.chain_id:
            detail = "the job is signed for no chain: there is nothing to void"
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail)
        verdict = _verdict(order, terms)
        keys = [open_keystore(path, order.passphrase_file) for path in order.keys]
        signed = sign_verdict(verdict, terms.domain, keys)
        async with open_account(terms.domain, chain_url, keys[0]) as sender:
            question = f"void the share of {order.node} in epoch {order.epoch} for good?"
            confirm(question, yes=yes)
            await void(sender, verdict, signed, order.signatures)
            say_act(sender.result(), as_json=as_json)

    run(work)


def _verdict(order: VoidOrder, terms: Terms) -> Verdict:
    return make_verdict(terms, order.epoch, NodeId(order.node), order.penalty, order.evidence)


async def _arbiters_signatures(
    ledger: OpenLedger, verdict: Verdict, own: Sequence[SignedVerdict], others: Sequence[str]
) -> dict[str, bytes]:
    """Signatures by arbiter, at least as many as the ledger asks for."""
    separator = ledger.domain.separator()
    signatures = {}
    for text in [*(each.signature for each in own), *others]:
        try:
            signature = bytes.fromhex(text.removeprefix("0x"))
        except ValueError:
            signature = b""
        arbiter = (
            signer(separator, verdict, signature) if len(signature) == SIGNATURE_BYTES else None
        )
        if arbiter is None or not await ledger.read("isArbiter", arbiter):
            detail = f"a signature of this verdict is {arbiter or 'nobody'}'s, who is no arbiter"
            fix = (
                "have an arbiter sign the same job, epoch, node, penalty and evidence: --sign-only"
            )
            raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
        signatures[arbiter] = signature
    if len(signatures) < (quorum := await ledger.read("QUORUM")):
        detail = f"{len(signatures)} arbiters signed, the ledger asks for {quorum}"
        fix = "add keys with --key, or other arbiters' signatures with --signature"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    return signatures
