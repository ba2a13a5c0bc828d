"""What a node on this machine holds: its key, its receipts and its vouchers. Nobody is asked."""

from pathlib import Path

import msgspec

from hypergpu.cli.ledger.account import shown
from hypergpu.cli.output import Column
from hypergpu.keys.keyfile import is_encrypted, stored_address
from hypergpu.ledger import pay
from hypergpu.ledger.receipt import ReceiptCheck, SignedReceipt, Signers
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.voucher import SignedVoucher

COLUMNS = (
    Column("job"),
    Column("signed for by"),
    Column("chain"),
    Column("receipts", is_number=True),
    Column("unsound", is_number=True),
    Column("score", is_number=True),
    Column("voucher", is_number=True),
)
KEY_FILE = "identity.key"
"""The daemon's names for its files; see docs/node.md."""
LEDGER_FOLDER, TERMS_FILE = "ledger", "terms.json"
RECEIPTS_FILE, VOUCHER_FILE = "receipts.jsonl", "voucher.json"
CONFLICT_FILE = "conflict.json"
_lines = msgspec.json.Decoder(SignedReceipt)


class WalletJob(msgspec.Struct, frozen=True):
    """What is held of one job. Amounts are whole units, as text: they may be long."""

    job: str
    key: str
    coordinator: str
    chain_id: int
    contract: str
    receipts: int
    unsound: int
    """Receipts with a signature that is not what it should be."""
    samples: int
    score: str
    vouched: str
    damaged: str = ""
    """Why its files cannot be read; the figures are 0 then. Empty: they can."""


class WalletView(msgspec.Struct, frozen=True, tag_field="schema", tag="hypergpu/wallet/1"):
    """A node's wallet."""

    node: str
    key_file: str
    is_encrypted: bool
    jobs: list[WalletJob]


def wallet_view(state_dir: Path) -> WalletView:
    """Read a node's state folder; the daemon may be running. Checks each receipt: 0.2 ms.

    A job whose files are damaged says so, and the others are told all the same.

    Raises:
        RefusalError: FILE_UNUSABLE, the key is missing or damaged.
    """
    key = state_dir / KEY_FILE
    folders = sorted((state_dir / LEDGER_FOLDER).glob(f"*/{TERMS_FILE}"))
    return WalletView(
        node=stored_address(key),
        key_file=str(key),
        is_encrypted=is_encrypted(key),
        jobs=[_job(path.parent) for path in folders],
    )


def wallet_lines(view: WalletView) -> list[str]:
    """Whose key it is and where it lies, and what cannot be told."""
    how = "encrypted" if view.is_encrypted else "plain: encrypted when the daemon starts again"
    damaged = [f"damaged: {job.job}: {job.damaged}" for job in view.jobs if job.damaged]
    return [f"node  {view.node}", f"key   {view.key_file} ({how})", *damaged, *_tiers(view)]


def _tiers(view: WalletView) -> list[str]:
    """What a voucher is worth, and who knows the rest."""
    if not any(job.vouched != "0" for job in view.jobs):
        return []
    return [
        "pay   a voucher is T0 vouched; what is recorded, paid and final, the chain knows:",
        "      hypergpu ledger show says that, and when the rest is due",
    ]


def wallet_rows(view: WalletView, decimals: int) -> list[list[str]]:
    """The table of `COLUMNS`."""
    return [
        [
            job.job,
            job.coordinator[:10],
            str(job.chain_id) if job.chain_id else "none",
            str(job.receipts),
            str(job.unsound),
            job.score,
            shown(job.vouched, decimals),
        ]
        for job in view.jobs
        if not job.damaged
    ]


def _job(folder: Path) -> WalletJob:
    try:
        terms = msgspec.json.decode((folder / TERMS_FILE).read_bytes(), type=Terms)
        receipts = kept_receipts(folder / RECEIPTS_FILE)
        path = folder / VOUCHER_FILE
        signed = (
            msgspec.json.decode(path.read_bytes(), type=SignedVoucher) if path.exists() else None
        )
    except (OSError, msgspec.MsgspecError, UnicodeError) as broken:
        return _damaged(folder.name, str(broken))
    signers = Signers(coordinator=terms.coordinator, domain=terms.domain, made_in=terms.domain)
    check = ReceiptCheck(signers)
    plain = [signed.receipt for signed in receipts]
    return WalletJob(
        job=folder.name,
        key=terms.job,
        coordinator=terms.coordinator,
        chain_id=terms.domain.chain_id,
        contract=terms.domain.contract,
        receipts=len(receipts),
        unsound=sum(bool(check.fault(signed)) for signed in receipts),
        samples=sum(one.samples for one in plain),
        score=str(sum(pay.score(one.samples, one.quality_bps) for one in plain)),
        vouched=str(signed.voucher.amount if signed else 0),
    )


def _damaged(job: str, why: str) -> WalletJob:
    return WalletJob(
        job=job,
        key="",
        coordinator="",
        chain_id=0,
        contract="",
        receipts=0,
        unsound=0,
        samples=0,
        score="0",
        vouched="0",
        damaged=why,
    )


def kept_receipts(path: Path) -> list[SignedReceipt]:
    """The receipts in a file; the daemon may be writing its last line at this moment."""
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [_lines.decode(line) for line in whole.splitlines()]
