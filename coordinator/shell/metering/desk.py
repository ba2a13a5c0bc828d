"""The coordinator's own key, and what is said with it: whose jobs these are, and what they owe."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from coordinator.core.events import EpochEnded, MeasuredUpdate, RoundMetered
from coordinator.core.job import Job
from coordinator.core.metering.accounts import account_of
from coordinator.shell.journal.ledger.records import Earnings, EpochEnd, ReceiptRecord
from hypergpu.ids import Address, JobId, Keccak, NodeId
from hypergpu.jobfile.spec import Pay
from hypergpu.keys.keyfile import passphrase_beside, stored_secret
from hypergpu.keys.passphrase import passphrase_of_file
from hypergpu.ledger.receipt import SignedReceipt, leaf_of
from hypergpu.ledger.terms import Terms, separator_of, terms_of
from hypergpu.ledger.typed import (
    Domain,
    Receipt,
    Voucher,
    digest_in,
    keccak_of,
    sign,
    struct_hash,
)
from hypergpu.ledger.voucher import SignedVoucher
from hypergpu.signature import IdentityKey

KEY_FILE = Path("identity/coordinator.key")


class _Due(NamedTuple):
    """A receipt that is to be made."""

    separator: bytes
    job_id: JobId
    update: MeasuredUpdate


class LedgerDesk:
    """Signs receipts and vouchers. Its secret never leaves it."""

    def __init__(self, key: IdentityKey) -> None:
        """Sign with a key; until it is told otherwise, for no chain."""
        self._key = key
        self.domain_for: Callable[[Pay], Domain] = _no_chain
        """Which ledger a job is for that is created from now on, or a refusal."""

    @property
    def address(self) -> Address:
        """Of the key: owner of the jobs that this coordinator creates."""
        return Address(self._key.node_id)

    def terms(self, job_id: JobId, pay: Pay) -> Terms:
        """For whom and where the work of a new job counts.

        Raises:
            HyperGPUError: it pays, on a ledger that nobody knows yet or that nothing settles on.
        """
        return terms_of(self.address, job_id, self.domain_for(pay))

    def countersigned(
        self, earned: Sequence[tuple[Terms, JobId, RoundMetered | EpochEnded]]
    ) -> Earnings:
        """Receipts of measured rounds, and the ends of epochs. About 0.1 ms a receipt.

        Raises:
            ValueError: a number does not fit its field in a receipt.
        """
        due: list[_Due] = []
        ends: list[EpochEnd] = []
        for terms, job_id, record in earned:
            if isinstance(record, EpochEnded):
                ends.append(EpochEnd(job_id, record.epoch, record.is_last))
                continue
            separator = separator_of(terms.domain)
            due += [_Due(separator, job_id, update) for update in record.updates]
        return Earnings(tuple(self._signed(due)), tuple(ends))

    def _signed(self, due: Sequence[_Due]) -> Iterator[ReceiptRecord]:
        """The receipts of updates, all signed in a row.

        Signing is what lets go of the interpreter's lock; other threads wait the less for it, the
        less is done between two signatures.
        """
        receipts = [_receipt(each.update) for each in due]
        hashes = [struct_hash(each) for each in receipts]
        digests = [
            digest_in(each.separator, hashed) for each, hashed in zip(due, hashes, strict=True)
        ]
        signatures = [self._key.sign_digest(each) for each in digests]
        made = zip(due, receipts, hashes, signatures, strict=True)
        for (_, job_id, update), receipt, hashed, signature in made:
            signed = SignedReceipt(
                receipt=receipt,
                signature=signature,
                contribution=update.due.contribution,
                contribution_signature=update.due.signature,
            )
            yield ReceiptRecord(job_id, signed, leaf_of(hashed))

    def voucher(self, job: Job, node: NodeId) -> SignedVoucher | None:
        """What a node has earned in a job by now; None where nothing is paid."""
        if job.terms is None or not job.spec.pay.unit_price:
            return None
        account = account_of(job.metering, node)
        voucher = Voucher(
            job=job.terms.job, node=node, sequence=account.receipts, amount=account.vouched
        )
        return SignedVoucher(voucher, sign(self._key, separator_of(job.terms.domain), voucher))


def _receipt(update: MeasuredUpdate) -> Receipt:
    due = update.due.contribution
    return Receipt(
        job=due.job,
        epoch=due.epoch,
        round=due.round,
        node=due.node,
        sequence=update.sequence,
        contribution=Keccak(struct_hash(due).hex()),
        samples=due.samples,
        quality_bps=update.quality_bps,
        evaluator=keccak_of(update.evaluator),
    )


def _no_chain(_pay: Pay) -> Domain:
    return Domain()


def coordinator_key(data_dir: Path, passphrase_file: Path | None = None) -> IdentityKey:
    """The key in a coordinator's folder, made on the first start. It lies there encrypted. Blocks.

    Args:
        data_dir: The coordinator's folder.
        passphrase_file: Holds the key's passphrase; None: one that is made for it and kept beside
            the folder.

    Raises:
        HyperGPUError: FILE_UNUSABLE, the key or its passphrase is damaged or missing, the
            passphrase is another one, or others can read either.
    """
    path = data_dir / KEY_FILE
    passphrase = (
        passphrase_beside(data_dir, path)
        if passphrase_file is None
        else passphrase_of_file(passphrase_file)
    )
    return IdentityKey(stored_secret(path, passphrase))
