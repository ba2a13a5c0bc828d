"""Makes a ledger act on a dispute's bundle: anybody may, with a key of their own."""

from hypergpu.cli.ledger.acts.account import AccountOnChain
from hypergpu.cli.ledger.acts.done import Done
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger.audit.dispute import Claim, Dispute, dispute_fault
from hypergpu.ledger.typed import address_bytes, word_bytes
from hypergpu.terminal.transfer import step_bar
from hypergpu.units import are, several


def enforced(anybody: AccountOnChain, dispute: Dispute) -> Done:
    """Record receipts that were left out, or show two of one number.

    Raises:
        HyperGPUError: ARGUMENT_INVALID, the bundle proves nothing, or nothing that a ledger acts
            on, or the ledger refuses it.
    """
    if fault := dispute_fault(dispute):
        detail = f"the bundle does not prove that something is {dispute.claim.value}: {fault}"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix="ask for another one")
    if dispute.claim is Claim.UNRECORDED:
        return _recorded(anybody, dispute)
    if dispute.claim is Claim.EQUIVOCATION:
        return _shown(anybody, dispute)
    detail = f"a ledger cannot act on the claim {dispute.claim.value!r} by itself"
    fix = "show it to the ledger's arbiters, who look it up: hypergpu ledger check BUNDLE"
    raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)


def _recorded(anybody: AccountOnChain, dispute: Dispute) -> Done:
    """Record what is missing, each receipt under its number."""
    receipts = sorted(
        (one.signed for one in dispute.receipts), key=lambda signed: signed.receipt.sequence
    )
    job, node = word_bytes(dispute.job), address_bytes(dispute.node)
    following = anybody.calls.account(anybody.asked("getAccount", job, node)).counted
    missing = [signed for signed in receipts if signed.receipt.sequence >= following]
    if not missing:
        count = len(receipts)
        said = f"all is recorded by now, {several(count, 'receipt')}: nothing was sent"
        return Done(anybody.owner, [], said)
    first = missing[0].receipt.sequence
    if first != following:
        detail = f"receipt {following} of {dispute.node} comes next, the bundle begins with {first}"
        fix = "enforce the bundle of the epoch before it first"
        raise HyperGPUError(Reason.ARGUMENT_INVALID, detail, fix=fix)
    epoch = _first_open(anybody, job, missing[-1].receipt.epoch)
    calls = [anybody.calls.record_one(signed, epoch).call for signed in missing]
    with step_bar("recording receipts") as report:
        hashes = anybody.acted_each(calls, "submitContribution", report)
    told = f"{several(len(missing), 'receipt')} of {dispute.node} {are(len(missing))} recorded"
    said = f"{told}, to be paid with epoch {epoch}"
    return Done(anybody.owner, hashes, said)


def _first_open(anybody: AccountOnChain, job: bytes, epoch: int) -> int:
    """The earliest epoch that still takes receipts of this one."""
    while anybody.calls.epoch(anybody.asked("getEpoch", job, epoch)).closed_at_s:
        epoch += 1
    return epoch


def _shown(anybody: AccountOnChain, dispute: Dispute) -> Done:
    """Show two receipts of one number, which costs the coordinator its bond."""
    coordinator = dispute.signers.coordinator
    answer = anybody.asked("bondOf", address_bytes(coordinator))
    bond, *_ = anybody.calls.abi.answer("bondOf", answer)
    if not bond:
        said = f"the coordinator {coordinator} has no bond to lose any more: nothing was sent"
        return Done(anybody.owner, [], said)
    call = anybody.calls.prove_equivocation([one.signed for one in dispute.receipts])
    name = anybody.acted(call, "proveEquivocation")
    said = f"the coordinator {coordinator} lost its bond of {bond}, a tenth of it to you"
    return Done(anybody.owner, [name], said)
