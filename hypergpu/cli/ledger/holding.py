"""What a node's folder holds of one job, and the keys in folders of this machine."""

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import msgspec

from hypergpu.cli.ledger.stored import stored_receipts, stored_voucher
from hypergpu.cli.ledger.wallet import (
    CONFLICT_FILE,
    KEY_FILE,
    job_folders,
    job_of,
    terms_in,
)
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.keys.keyfile import passphrase_beside, stored_secret
from hypergpu.keys.passphrase import passphrase_of_file
from hypergpu.ledger.receipt import SignedReceipt
from hypergpu.ledger.terms import Terms
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.signature import IdentityKey

COORDINATOR_KEY_FILE = Path("identity/coordinator.key")
JOBS_FOLDER = "jobs"


class Held(NamedTuple):
    """What a node holds of one job."""

    job_id: str
    terms: Terms
    receipts: list[SignedReceipt]
    """In order; behind them one that contradicts another, if the coordinator signed such a one."""
    voucher: SignedVoucher | None
    incomplete: str = ""
    """What is missing of the receipts; empty: nothing."""
    damaged: str = ""
    """Which file holds no voucher, why, and what mends it; empty: none is damaged."""


def node_key(state_dir: Path, passphrase_file: Path | None = None) -> IdentityKey:
    """The node's key, opened by its passphrase file, or by the one beside its folder.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is none, or it does not open.
    """
    path = state_dir / KEY_FILE
    if not path.exists():
        detail = f"there is no node's key in {state_dir}"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix="name its folder: --state-dir")
    return opened(state_dir, path, passphrase_file)


def coordinator_key(data_dir: Path, passphrase_file: Path | None = None) -> IdentityKey:
    """The coordinator's key, as `node_key`.

    Raises:
        HyperGPUError: FILE_UNUSABLE, there is none, or it does not open.
    """
    path = data_dir / COORDINATOR_KEY_FILE
    if not path.exists():
        detail = f"there is no coordinator's key in {data_dir}"
        fix = "name its folder: --data-dir; the first hypergpu up makes folder and key"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail, fix=fix)
    return opened(data_dir, path, passphrase_file)


def jobs_of(data_dir: Path) -> list[JobId]:
    """Jobs whose files a coordinator's folder has."""
    return sorted(JobId(path.name) for path in (data_dir / JOBS_FOLDER).glob("job-*"))


def opened(folder: Path, path: Path, passphrase_file: Path | None) -> IdentityKey:
    """A key by its passphrase file, or by the one beside its folder; made where there is none."""
    passphrase = (
        passphrase_of_file(passphrase_file)
        if passphrase_file is not None
        else passphrase_beside(folder, path)
    )
    return IdentityKey(stored_secret(path, passphrase))


def held_on_ledger(state_dir: Path, job: str | None) -> Held:
    """What is held of a job; of any where none is named and all that count on one share a ledger.

    Raises:
        HyperGPUError: as `held_of`.
    """
    if job is None:
        sound = [each.name for each in job_folders(state_dir) if _has_terms(each)]
        held = [held_of(state_dir, name) for name in sound]
        there = [each for each in held if each.terms.domain.chain_id]
        if len({each.terms.domain for each in there}) == 1:
            return there[-1]
    return held_of(state_dir, job)


def held_of(state_dir: Path, job: str | None) -> Held:
    """What a node holds of a job; of its only one when none is named.

    Args:
        state_dir: Of the node.
        job: Its id, or the beginning of it with or without its ``job-``; where several coordinators
            have a job of that id, with ``@`` and the address that signs for it.

    Raises:
        HyperGPUError: JOB_UNKNOWN, it holds nothing of it, or of several; FILE_UNUSABLE, a file is
            damaged.
    """
    folders = job_folders(state_dir)
    meant = [each for each in folders if each.name == job or (job is None and _has_terms(each))]
    meant = meant or [folder for folder in folders if job_of(folder) == job]
    meant = meant or [folder for folder in folders if job and _begins(folder.name, job)]
    if len(meant) != 1:
        ids = Counter(job_of(folder) for folder in folders)
        named = [job_of(each) if ids[job_of(each)] == 1 else each.name for each in folders]
        names = ", ".join(named) or "nothing"
        detail = f"the wallet in {state_dir} holds {names}: name one job of it"
        raise HyperGPUError(Reason.JOB_UNKNOWN, detail, fix="see hypergpu node wallet")
    folder = meant[0]
    terms = terms_in(folder)
    try:
        voucher, damaged = stored_voucher(folder, terms)
        kept = stored_receipts(folder, voucher.voucher.sequence if voucher else 0)
        receipts = kept.receipts
        if (folder / CONFLICT_FILE).exists():
            stored = (folder / CONFLICT_FILE).read_bytes()
            receipts.append(msgspec.json.decode(stored, type=SignedReceipt))
    except (OSError, msgspec.MsgspecError, UnicodeError) as broken:
        raise HyperGPUError(Reason.FILE_UNUSABLE, f"{folder}: {broken}") from broken
    return Held(job_of(folder), terms, receipts, voucher, kept.damage, damaged)


def _has_terms(folder: Path) -> bool:
    try:
        terms_in(folder)
    except HyperGPUError:
        return False
    return True


def _begins(job_id: str, given: str) -> bool:
    return job_id.startswith(given) or job_id.removeprefix("job-").startswith(given)
