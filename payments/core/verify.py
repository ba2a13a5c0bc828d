"""Recompute a job's pay from its receipts and compare it with the ledger's records.

Anyone can run this: it needs the receipts and any RPC. A *fault* contradicts the receipts or the
rule; something *open* is not done yet or cannot be told from the receipts at hand. Files of
receipts, as ``ledger export`` writes them and ``ledger verify --file`` reads them, are JSON lines:
a header, then one signed receipt a line, ordered by node and sequence. The encoding leaves no
choice (field order as declared, no blanks, signatures in base64), so the same receipts give the
same bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

import msgspec

from hypergpu.crypto import keccak
from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Digest, JobId, JobKey, NodeId
from hypergpu.journal.worth import worth
from hypergpu.ledger_terms import Terms, address_bytes, word_bytes
from hypergpu.statements import Receipt, SignedReceipt, receipt_fault
from hypergpu.units import Wei
from hypergpu.work_units import WorkUnit
from payments.core.settlement import NO_RECEIPTS, leaf, merkle_root
from payments.core.transactions import AccountView, JobOnLedger, ShareState, TotalsEntry

FORMAT = "hypergpu-receipts/2"
FILE_BYTES_MAX = 256 << 20
LINE_BYTES_MAX = 4096


class ReceiptFile(msgspec.Struct, frozen=True):
    """All receipts of one job with what is needed to check them."""

    job_id: JobId
    terms: Terms
    unit_price: Wei
    receipts: tuple[SignedReceipt, ...]


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    job_id: JobId
    terms: Terms
    unit_price: Wei
    count: int


_headers = msgspec.json.Decoder(_Header)
_lines = msgspec.json.Decoder(SignedReceipt)


def receipt_order(signed: SignedReceipt) -> tuple[str, int]:
    """Sort key of a file's receipts."""
    return signed.receipt.node, signed.receipt.sequence


def encode_file(file: ReceiptFile) -> bytes:
    """Encode a file: the same bytes for the same receipts in any order."""
    ordered_receipts = sorted(file.receipts, key=receipt_order)
    header = _Header(FORMAT, file.job_id, file.terms, file.unit_price, len(ordered_receipts))
    return msgspec.json.Encoder().encode_lines([header, *ordered_receipts])


def decode_file(content: bytes, *, source: str) -> ReceiptFile:
    """Read a file back. Signatures are not checked; see `payments.core.verify`.

    Args:
        content: The whole file.
        source: Name of the file in errors.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is too large, or not what `encode_file` writes.
    """
    if len(content) > FILE_BYTES_MAX:
        detail = f"{source} has {len(content)} bytes, at most {FILE_BYTES_MAX} are read"
        raise HyperGPUError(Reason.FILE_UNUSABLE, detail)
    first, *rest = content.splitlines() or [b""]
    try:
        header = _headers.decode(first)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _unusable(source, 1, f"no header of receipts: {error}") from error
    if header.format != FORMAT:
        raise _unusable(source, 1, f"format {header.format[:40]!r} instead of {FORMAT!r}")
    try:
        is_own = header.terms.match(header.job_id)
    except ValueError as error:
        raise _unusable(source, 1, f"the terms are malformed: {error}") from error
    if not is_own:
        raise _unusable(source, 1, f"the terms are not those of {header.job_id[:40]!r}")
    if header.count != len(rest):
        raise _unusable(source, 1, f"{header.count} receipts announced, {len(rest)} present")
    receipts = tuple(_decode_lines(rest, source))
    file = ReceiptFile(header.job_id, header.terms, header.unit_price, receipts)
    if encode_file(file) != content:
        raise _unusable(source, 1, "the receipts are in another order or encoding")
    return file


def _decode_lines(lines: list[bytes], source: str) -> Iterable[SignedReceipt]:
    for number, line in enumerate(lines, start=2):
        if len(line) > LINE_BYTES_MAX:
            raise _unusable(source, number, f"{len(line)} bytes are more than a receipt has")
        try:
            yield _lines.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise _unusable(source, number, f"no receipt: {error}") from error


def _unusable(source: str, line: int, why: str) -> HyperGPUError:
    return HyperGPUError(Reason.FILE_UNUSABLE, f"{source}, line {line}: {why}")


class BatchRecord(NamedTuple):
    """A batch as the chain has it: the event's root and the call's entries."""

    epoch: int
    sequence: int
    root: bytes
    entries: tuple[TotalsEntry, ...]


class SingleRecord(NamedTuple):
    """A receipt that was recorded by itself."""

    epoch: int
    entry: TotalsEntry

    @property
    def entries(self) -> tuple[TotalsEntry, ...]:
        """As a batch of one."""
        return (self.entry,)


class LedgerRecords(NamedTuple):
    """Everything that the ledger holds about a job, at one block."""

    block: int
    view: JobOnLedger
    """With every node that was ever recorded, and every epoch with a record."""
    records: Sequence[BatchRecord | SingleRecord] = ()
    """In the chain's order."""


class NodeFinding(msgspec.Struct, frozen=True):
    """A node's pay by its receipts and by the ledger."""

    node: NodeId
    receipts: int
    total_score: int
    worth: Wei
    """By the receipts."""
    recorded_score: int = 0
    allotted: Wei = Wei(0)
    paid: Wei = Wei(0)
    void: Wei = Wei(0)


class Verification(NamedTuple):
    """Result of a check."""

    nodes: tuple[NodeFinding, ...]
    faults: tuple[str, ...]
    open: tuple[str, ...]
    block: int | None = None
    """Block of the ledger's records; None: no chain was asked."""


def receipt_faults(terms: Terms, receipts: Sequence[SignedReceipt]) -> list[str]:
    """The fault of each receipt by itself; empty: it is sound. About 0.2 ms a receipt."""
    return [
        receipt_fault(signed_receipt, terms.domain, terms.coordinator)
        if signed_receipt.receipt.job == terms.job
        else "it is of another job"
        for signed_receipt in receipts
    ]


def verify(
    file: ReceiptFile,
    ledger: LedgerRecords | None = None,
    known_faults: Sequence[str] | None = None,
) -> Verification:
    """Check every receipt of a job, and that the ledger's records follow from them.

    Args:
        file: The job's receipts.
        ledger: Records of the ledger that the receipts are signed for; None: receipts alone.
        known_faults: What `receipt_faults` says of the file's receipts; None: it is asked here.
    """
    if known_faults is None:
        known_faults = receipt_faults(file.terms, file.receipts)
    faults = list(_receipt_faults(file.receipts, known_faults))
    chains: dict[NodeId, dict[int, Receipt]] = defaultdict(dict)
    for signed_receipt in file.receipts:
        chains[signed_receipt.receipt.node].setdefault(
            signed_receipt.receipt.sequence, signed_receipt.receipt
        )
    open_: list[str] = []
    for node, own in sorted(chains.items()):
        faults.extend(_chain_faults(node, own))
        if file.terms.unit is WorkUnit.SAMPLES:
            faults.extend(_order_faults(node, own))
        else:
            faults.extend(_lease_faults(node, own))
        if missing_count := max(own) + 1 - len(own):
            open_.append(
                f"{node}: {missing_count} of its {max(own) + 1} receipts are not in the file"
            )
    if ledger:
        faults.extend(_ledger_faults(file, chains, ledger))
        open_.extend(_open_records(file, chains, ledger.view))
    view = ledger.view if ledger else None
    nodes = sorted({*chains, *(view.accounts if view else ())})
    return Verification(
        nodes=tuple(_finding(node, chains.get(node, {}), file.unit_price, view) for node in nodes),
        faults=tuple(faults),
        open=tuple(open_),
        block=ledger.block if ledger else None,
    )


def _receipt_faults(
    receipts: Sequence[SignedReceipt], known_faults: Sequence[str]
) -> Iterator[str]:
    seen_receipts: dict[tuple[NodeId, int], SignedReceipt] = {}
    for signed_receipt, fault in zip(receipts, known_faults, strict=True):
        receipt = signed_receipt.receipt
        name = f"{receipt.node}: receipt {receipt.sequence} of round {receipt.round}"
        if fault:
            yield f"{name}: {fault}"
        other = seen_receipts.setdefault((receipt.node, receipt.sequence), signed_receipt)
        if other is not signed_receipt:
            yield f"{name}: round {other.receipt.round} has the same sequence"


def _chain_faults(node: NodeId, own: Mapping[int, Receipt]) -> Iterator[str]:
    """Faults in the running totals of a node."""
    for sequence in sorted(own):
        receipt, before = own[sequence], own.get(sequence - 1)
        if before is None and sequence:
            continue
        total = (before.total_score if before else 0) + receipt.score
        if receipt.total_score != total:
            complaint = f"its total score is {receipt.total_score}, the receipts give {total}"
            yield f"{node}: receipt {sequence}: {complaint}"


def _order_faults(node: NodeId, own: Mapping[int, Receipt]) -> Iterator[str]:
    """Faults in the order of a node's rounds, of a training."""
    for sequence in sorted(own):
        receipt, before = own[sequence], own.get(sequence - 1)
        if before and receipt.round <= before.round:
            yield f"{node}: receipt {sequence}: round {receipt.round} follows {before.round}"


def _lease_faults(node: NodeId, own: Mapping[int, Receipt]) -> Iterator[str]:
    """Leases of a node that two receipts are for, or that no work is counted of; of a farm job."""
    sequences: dict[int, int] = {}
    for sequence in sorted(own):
        receipt = own[sequence]
        first = sequences.setdefault(receipt.round, sequence)
        if first != sequence:
            yield f"{node}: receipt {sequence}: lease {receipt.round} has receipt {first} already"
        if not receipt.samples:
            yield f"{node}: receipt {sequence}: it is for no work"


def _ledger_faults(
    file: ReceiptFile, chains: Mapping[NodeId, Mapping[int, Receipt]], ledger: LedgerRecords
) -> Iterator[str]:
    view = ledger.view
    if view.is_open and view.unit_price != file.unit_price:
        yield f"the ledger's unit price is {view.unit_price}, the job's {file.unit_price}"
    yield from _batch_faults(chains, ledger)
    for node, account in sorted(view.accounts.items()):
        proven_receipts = chains.get(node, {})
        newest = max(proven_receipts, default=-1)
        total = proven_receipts[newest].total_score if proven_receipts else 0
        if account.total_score > total or account.counted > newest + 1:
            record_text = f"{account.counted} receipts of score {account.total_score} are recorded"
            yield f"{node}: {record_text}, {newest + 1} of score {total} are proven"
        most = worth(view.unit_price, account.total_score)
        if account.earned > most:
            yield f"{node}: {account.earned} is allotted for a score that is worth {most}"
        shares = sum(
            epoch.shares[node].amount for epoch in view.epochs.values() if node in epoch.shares
        )
        if shares != account.earned:
            yield f"{node}: its shares come to {shares}, {account.earned} is allotted"


def _batch_faults(
    chains: Mapping[NodeId, Mapping[int, Receipt]], ledger: LedgerRecords
) -> Iterator[str]:
    """Check each batch's root and totals against the receipts that it covers.

    A batch covers of each node the receipts after its previous batch. A coordinator that lost its
    database goes by the ledger instead, where single records count too: both are right.
    """
    batched_counts: dict[NodeId, int] = {}
    recorded_counts: dict[NodeId, int] = {}
    for record in ledger.records:
        if isinstance(record, BatchRecord):
            name = f"batch {record.sequence} of epoch {record.epoch}"
            roots = {
                _root(chains, record.entries, counts)
                for counts in (batched_counts, recorded_counts)
            }
            if record.root not in roots:
                yield f"{name}: its root is not that of its receipts"
            batched_counts.update(
                (each.node, max(each.count, batched_counts.get(each.node, 0)))
                for each in record.entries
            )
        else:
            name = f"the single record of epoch {record.epoch}"
        for each in record.entries:
            receipt = chains.get(each.node, {}).get(each.count - 1)
            if receipt and receipt.total_score != each.total_score:
                score_text = f"score {each.total_score} for {each.count} receipts of {each.node}"
                yield f"{name}: {score_text}, which come to {receipt.total_score}"
            recorded_counts[each.node] = max(each.count, recorded_counts.get(each.node, 0))


def _root(
    chains: Mapping[NodeId, Mapping[int, Receipt]],
    entries: Sequence[TotalsEntry],
    counts: Mapping[NodeId, int],
) -> bytes:
    leaves = [
        leaf(own[sequence])
        for entry in entries
        if (own := chains.get(entry.node))
        for sequence in range(counts.get(entry.node, 0), entry.count)
        if sequence in own
    ]
    return merkle_root(leaves) if leaves else NO_RECEIPTS


def _open_records(
    file: ReceiptFile, chains: Mapping[NodeId, Mapping[int, Receipt]], view: JobOnLedger
) -> Iterator[str]:
    for node, own in sorted(chains.items()):
        account = view.accounts.get(node, AccountView())
        total = own[max(own)].total_score
        recorded_amount = worth(file.unit_price, account.total_score)
        if (missing_amount := worth(file.unit_price, total) - recorded_amount) > 0:
            yield f"{node}: {missing_amount} of its work is not recorded"
        if (short := recorded_amount - account.earned) > 0:
            yield f"{node}: {short} is recorded, and the escrow was short of it"
    for number, epoch in sorted(view.epochs.items()):
        if due := sum(epoch.shares[node].amount for node in epoch.nodes_due()):
            state = "closed, in its window or unpaid" if epoch.closed_at_s else "open"
            yield f"epoch {number}: {due} is due ({state})"


def _finding(
    node: NodeId, own: Mapping[int, Receipt], unit_price: Wei, view: JobOnLedger | None
) -> NodeFinding:
    total = own[max(own)].total_score if own else 0
    account = view.accounts.get(node, AccountView()) if view else AccountView()
    shares = (
        [epoch.shares[node] for epoch in view.epochs.values() if node in epoch.shares]
        if view
        else []
    )
    amounts = {
        state: Wei(sum(share.amount for share in shares if share.state is state))
        for state in (ShareState.PAID, ShareState.VOID)
    }
    return NodeFinding(
        node,
        len(own),
        total,
        worth(unit_price, total),
        account.total_score,
        account.earned,
        amounts[ShareState.PAID],
        amounts[ShareState.VOID],
    )


_TYPE = keccak(b"Verdict(bytes32 job,uint32 epoch,address node,uint128 penalty,bytes32 evidence)")
_WORDS = Struct(">32s32s28xI12x20s16x16s32s")


class VoidVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a node in an epoch is void, and its stake loses a penalty."""

    job: JobKey
    epoch: int
    node: NodeId
    penalty: Wei
    """Most that is taken from free stake on top of the share."""
    evidence: Digest
    """Digest of a document that says why."""

    def encode_data(self) -> bytes:
        """See `hypergpu.crypto.Statement`."""
        return _WORDS.pack(
            _TYPE,
            word_bytes(self.job),
            self.epoch,
            address_bytes(self.node),
            self.penalty.to_bytes(16, "big"),
            word_bytes(self.evidence),
        )
