"""`ledger void`: arbiters void a node's share and slash its stake."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.digest import digest_of
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address, NodeId
from hypergpu.statements.domain import Terms, word_bytes
from hypergpu.statements.signing import chain_form, sign, signer
from hypergpu.terminal.output import confirm, say_json_line
from hypergpu.units import Wei
from payments.cli.account import LedgerAccount, OpenLedger, open_account
from payments.cli.accounts import open_keystore
from payments.cli.outcome import say_act
from payments.cli.service import JobAt, run
from payments.core.calls import ShareState
from payments.core.verdict import VoidVerdict


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


def void_share(order: VoidOrder, at: JobAt, chain_url: str, *, yes: bool, as_json: bool) -> None:
    """Void a share and print what came of it; ``--sign-only`` prints signatures instead."""

    async def work() -> None:
        terms = (await at.receipts()).terms
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
    except OSError as broken:
        detail = f"the evidence {order.evidence} cannot be read: {broken.strerror}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail) from broken
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
    shown, slashed = sender.ledger.amount, before - after
    sender.amounts.update(void=str(share["amount"]), slashed=str(slashed))
    voided = f"voided {shown(share['amount'])} of {verdict.node} in epoch {verdict.epoch}"
    sender.done.append(f"{voided}; its stake lost {shown(slashed)}")


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
