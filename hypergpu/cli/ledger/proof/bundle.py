"""A dispute's bundle in the hands of a third party: who is right, by it and by the chain."""

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from hypergpu.chain.moments import moment
from hypergpu.cli.ledger.proof.files import file_content
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ledger.audit.dispute import (
    BYTES_MAX,
    Claim,
    Dispute,
    decoded_dispute,
    dispute_fault,
)
from hypergpu.ledger.audit.facts import JobFact
from hypergpu.ledger.audit.looked_up import chain_faults, claim_text, since
from hypergpu.terminal.transfer import step_bar

if TYPE_CHECKING:
    from hypergpu.chain.reading.history import JobReader
    from hypergpu.chain.rpc.answers import Block

_ENFORCEABLE = frozenset({Claim.UNRECORDED, Claim.EQUIVOCATION})


class BundleChecked(
    msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/bundle-checked/1"
):
    """Who is right."""

    claim: str
    node: str
    job: str
    coordinator: str
    chain_id: int
    contract: str
    block: int
    """That the bundle quotes."""
    is_right: bool | None
    """Whether the claim holds at that block; None: the chain was not asked."""
    faults: list[str]
    """Why it does not."""
    text: str
    """What is claimed, with its figures."""
    now_block: int | None
    """The newest one, where the chain was asked."""
    mended: str
    """Why it holds no longer by then; empty: it still does."""


def bundle_checked(path: Path, chain_url: str = "") -> BundleChecked:
    """Check a bundle by itself, and look up what it says of its chain.

    Args:
        path: Of the bundle.
        chain_url: RPC of the chain; empty: what the bundle quotes of it is taken as it stands.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is no bundle; CHAIN_WRONG, LEDGER_WRONG or JOB_UNKNOWN, the
            chain is another one; CHAIN_UNREACHABLE, it does not answer, or not for that block.
    """
    dispute = decoded_dispute(file_content(path, BYTES_MAX), source=str(path))
    if fault := dispute_fault(dispute):
        return _checked(dispute, [fault], is_right=False)
    if not chain_url:
        return _checked(dispute, [], is_right=None)
    if not dispute.signers.domain.chain_id:
        return _checked(dispute, ["it names no ledger that could be asked"], is_right=False)
    then, now = _facts(dispute, chain_url)
    faults = list(chain_faults(dispute, then))
    found = _checked(dispute, faults, is_right=not faults)
    mended = "" if faults else since(dispute, now)
    return msgspec.structs.replace(found, now_block=now.block, mended=mended)


def bundle_lines(found: BundleChecked) -> list[str]:
    """Who is right, in words."""
    where = f"block {found.block} of chain {found.chain_id}, ledger {found.contract}"
    lines = [
        f"claim        {found.claim}, by the node {found.node}",
        f"against      the coordinator {found.coordinator}, of the job {found.job}",
    ]
    if found.is_right is None:
        return [
            *lines,
            f"signatures, proofs and sums are right: {found.text}",
            f"not yet: whether {where}, says so was not looked up: --chain-url URL",
        ]
    if not found.is_right:
        told = [f"the node is not right: {fault}" for fault in found.faults]
        return [*lines, *told]
    lines.append(f"the node is right: {found.text} ({where})")
    if found.now_block is not None:
        lines.append(
            f"since then it was mended, by block {found.now_block}: {found.mended}"
            if found.mended
            else f"it is so still, by block {found.now_block}"
        )
    if Claim(found.claim) in _ENFORCEABLE and not found.mended:
        lines.append("the ledger acts on it: hypergpu ledger enforce")
    return lines


def _checked(dispute: Dispute, faults: list[str], *, is_right: bool | None) -> BundleChecked:
    return BundleChecked(
        claim=dispute.claim.value,
        node=dispute.node,
        job=dispute.job,
        coordinator=dispute.signers.coordinator,
        chain_id=dispute.signers.domain.chain_id,
        contract=dispute.signers.domain.contract,
        block=dispute.chain.block,
        is_right=is_right,
        faults=faults,
        text=claim_text(dispute) if is_right is not False else "",
        now_block=None,
        mended="",
    )


def _facts(dispute: Dispute, chain_url: str) -> tuple[JobFact, JobFact]:
    """What the chain says at the bundle's block, and at its newest."""
    # What talks to a chain is an extra, and slow to import.
    from hypergpu.chain.reading.history import JobReader
    from hypergpu.chain.recognition import recognised
    from hypergpu.cli.ledger.reading import ledger_at

    with ledger_at(chain_url) as chain:
        recognised(chain, dispute.signers.domain)
        (block,) = chain.blocks([dispute.chain.block])
        if block is None:
            detail = f"{chain.where} has no block {dispute.chain.block} yet"
            raise HyperGPUError(Reason.CHAIN_WRONG, detail, fix="ask an RPC that is not behind")
        with step_bar("reading the job's blocks") as report:
            reader = JobReader(chain, dispute.signers.domain, dispute.job, report)
            return _at(reader, block, chain.where), reader.fact()


def _at(reader: "JobReader", block: "Block", where: str) -> JobFact:
    from hypergpu.chain.rpc.errors import RpcRefusedError

    try:
        return reader.fact(block)
    except RpcRefusedError as refused:
        told = f"how block {block.number} of {moment(block.time_s)} was: {refused}"
        fix = "name an RPC that keeps the state of old blocks, an archive node: --chain-url URL"
        detail = f"{where} does not say {told}"
        raise HyperGPUError(Reason.CHAIN_UNREACHABLE, detail, fix=fix) from None
