"""What lies in the folder of one job: how it is read, and what becomes of what is damaged."""

import os
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from gpu_node.shell.state.places import OWNER_MARK
from hypergpu.files import write_durably
from hypergpu.ids import JobId, NodeId
from hypergpu.ledger.receipt import ReceiptCheck, SignedReceipt, Signers
from hypergpu.ledger.terms import Terms, kept_terms
from hypergpu.ledger.voucher import SignedVoucher, kept_voucher

log = structlog.get_logger()

TERMS_FILE = "terms.json"
RECEIPTS_FILE = "receipts.jsonl"
REST_FILE = "receipts.rest.jsonl"
VOUCHER_FILE = "voucher.json"
DAMAGED_VOUCHERS = "voucher.damaged-*.json"
CONFLICT_FILE = "conflict.json"
_FIX_OF_VOUCHER = (
    "none is needed while the coordinator is there: it is asked for the voucher; else put back a"
    " copy of the file"
)
_lines = msgspec.json.Decoder(SignedReceipt)


class Kept(NamedTuple):
    """What a node holds of one job."""

    terms: Terms
    receipts: tuple[SignedReceipt, ...]
    voucher: SignedVoucher | None
    fault: str = ""
    """Why the file of the voucher holds none; empty: it holds one, or is not there."""


def job_of(folder: Path) -> JobId:
    """Whose folder it is."""
    return JobId(folder.name.partition(OWNER_MARK)[0])


def kept_in(folder: Path, node: NodeId) -> Kept | None:
    """What is kept of one job, up to the first line that is not the next.

    Returns:
        None where its terms are missing, or damaged: none of several receipts was made for them.
    """
    try:
        terms = kept_terms((folder / TERMS_FILE).read_bytes(), job_of(folder))
    except (OSError, ValueError):
        return None
    receipts = _receipts(folder)
    if len(receipts) > 1 and contradiction(folder, terms):
        return None
    try:
        voucher = _voucher(folder / VOUCHER_FILE, terms, node)
    except (OSError, ValueError) as broken:
        return Kept(terms, receipts, None, str(broken))
    return Kept(terms, receipts, voucher)


def put_damaged_aside(folder: Path, kept: Kept) -> None:
    """Leave in their files what can be gone on with, and put what is damaged beside them."""
    _cut_back(folder, kept)
    if kept.fault:
        path = folder / VOUCHER_FILE
        log.error(
            "a voucher is damaged and put aside",
            file=str(path),
            put_aside=str(put_aside(path)),
            reason=kept.fault,
            fix=_FIX_OF_VOUCHER,
        )


def put_aside(path: Path) -> Path:
    """Give a damaged file another name, which no file has, and return that."""
    names = (path.with_name(f"{path.stem}.damaged-{number}{path.suffix}") for number in count(1))
    aside = next(each for each in names if not each.exists())
    return path.rename(aside)


def contradiction(folder: Path, terms: Terms) -> str:
    """Why what lies in a job's folder was not made for such terms; empty: it was, or nothing does.

    One sound receipt is enough, since others may be damaged: mostly the first is, in 0.2 ms.
    """
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    check, fault = ReceiptCheck(signers), ""
    for signed in _receipts(folder):
        if not (found := check.fault(signed)):
            return ""
        fault = fault or found
    return fault


def _receipts(folder: Path) -> tuple[SignedReceipt, ...]:
    """Those that follow on."""
    try:
        lines = (folder / RECEIPTS_FILE).read_bytes().split(b"\n")
    except FileNotFoundError:
        lines = []
    receipts: list[SignedReceipt] = []
    for line in lines[:-1]:
        try:
            signed = _lines.decode(line)
        except (msgspec.MsgspecError, UnicodeError):
            break
        if signed.receipt.sequence != len(receipts) or msgspec.json.encode(signed) != line:
            break
        receipts.append(signed)
    return tuple(receipts)


def _voucher(path: Path, terms: Terms, node: NodeId) -> SignedVoucher | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    signed = kept_voucher(content, terms)
    if signed.voucher.node != node:
        raise ValueError(f"it is for the node {signed.voucher.node}")
    return signed


def _cut_back(folder: Path, kept: Kept) -> None:
    """Leave the receipts that follow on in their file, and put aside what lies behind them."""
    path, rest = folder / RECEIPTS_FILE, folder / REST_FILE
    whole = sum(len(msgspec.json.encode(each)) + 1 for each in kept.receipts)
    if not path.exists() or path.stat().st_size == whole:
        return
    behind, _, _ = path.read_bytes()[whole:].rpartition(b"\n")
    if behind:
        before = rest.read_bytes() if rest.exists() else b""
        write_durably(rest, before + behind + b"\n")
    log.warning(
        "receipts are damaged: those that are missing are asked for again",
        file=str(path),
        kept=len(kept.receipts),
        put_aside=len(behind.splitlines()),
    )
    os.truncate(path, whole)
