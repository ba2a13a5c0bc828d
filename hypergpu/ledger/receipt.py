"""Receipts with their signatures, what makes one sound, and the files that they are published in.

A file is JSON lines: a header, then one signed receipt a line, ordered by job, epoch, node and
sequence, encoded without a choice (field order as declared, no blanks, signatures in base64). The
same receipts, as of the same block, so give the same bytes.
"""

from collections.abc import Iterable

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import Address
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.pay import WHOLE_BPS
from hypergpu.ledger.typed import Contribution, Domain, Receipt, signer, struct_hash
from hypergpu.units import are, several

FORMAT = "hypergpu-receipts/1"
FILE_BYTES_MAX = 256 << 20
LINE_BYTES_MAX = 4096
_KEPT = ("job", "epoch", "round", "node")


class SignedReceipt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A receipt, what it is for, and who answers for either."""

    receipt: Receipt
    signature: bytes
    """The coordinator's, of the receipt."""
    contribution: Contribution
    contribution_signature: bytes
    """The node's, of the contribution."""


class Signers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose signatures count, and where."""

    coordinator: Address
    domain: Domain
    """Of the receipts."""
    made_in: Domain
    """Of the contributions: another one where a chain was configured after the work was done."""


class AsOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block that was there before receipts were read: what it has recorded is among them."""

    block: int
    hash: str
    """In hex."""


class ReceiptFile(msgspec.Struct, frozen=True):
    """The contents of a file."""

    signers: Signers
    receipts: tuple[SignedReceipt, ...]
    settled_on: Domain | None = None
    """The ledger that pays for them, where they were signed for none."""
    as_of: AsOf | None = None
    """None: no chain was asked, so nothing says which records of one it is sure to hold."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    format: str
    signers: Signers
    count: int
    settled_on: Domain | None = None
    as_of: AsOf | None = None


_headers = msgspec.json.Decoder(_Header)
_lines = msgspec.json.Decoder(SignedReceipt)


def leaf(receipt: Receipt) -> bytes:
    """A receipt's leaf in the tree of its batch. It is the same in every domain.

    Raises:
        ValueError: a number does not fit its field.
    """
    return leaf_of(struct_hash(receipt))


def leaf_of(hashed: bytes) -> bytes:
    """A receipt's leaf, where its `struct_hash` is at hand already."""
    return keccak(keccak(hashed))


def order(signed: SignedReceipt) -> tuple[str, int, str, int]:
    """The key that receipts are ordered by."""
    receipt = signed.receipt
    return receipt.job, receipt.epoch, receipt.node, receipt.sequence


class ReceiptCheck:
    """Finds out whether signed receipts are sound. Each takes about 0.2 ms: two signatures."""

    def __init__(self, signers: Signers) -> None:
        self._coordinator = signers.coordinator
        self._separator = signers.domain.separator()
        self._made_in = signers.made_in.separator()

    def fault(self, signed: SignedReceipt) -> str:
        """What is wrong with a receipt; empty: nothing."""
        receipt, contribution = signed.receipt, signed.contribution
        try:
            named = struct_hash(contribution).hex()
        except ValueError as broken:
            return f"its contribution cannot be encoded: {broken}"
        if receipt.contribution != named:
            return "it is for another contribution"
        if any(getattr(receipt, name) != getattr(contribution, name) for name in _KEPT):
            return "its job, epoch, round or node is not its contribution's"
        if receipt.samples > contribution.samples:
            return f"{receipt.samples} samples were checked, {contribution.samples} assigned"
        if receipt.quality_bps > WHOLE_BPS:
            return f"its quality is {receipt.quality_bps} of {WHOLE_BPS}"
        if signer(self._separator, receipt, signed.signature) != self._coordinator:
            return f"the coordinator {self._coordinator} did not sign it"
        if signer(self._made_in, contribution, signed.contribution_signature) != receipt.node:
            return f"the node {receipt.node} did not sign its contribution"
        return ""


def encoded(file: ReceiptFile) -> bytes:
    """The bytes of a file, the same for the same receipts in whatever order they come."""
    ordered = sorted(file.receipts, key=order)
    header = _Header(FORMAT, file.signers, len(ordered), file.settled_on, file.as_of)
    return msgspec.json.Encoder().encode_lines([header, *ordered])


def decoded(content: bytes, *, source: str) -> ReceiptFile:
    """Read a file back. Signatures are not looked at; see `ReceiptCheck`.

    Args:
        content: Of the whole file.
        source: What to call it in the refusal.

    Raises:
        HyperGPUError: FILE_UNUSABLE, it is too large, or not what `encoded` writes.
    """
    if len(content) > FILE_BYTES_MAX:
        what = f"{source} has {len(content)} bytes, at most {FILE_BYTES_MAX} are read"
        raise HyperGPUError(Reason.FILE_UNUSABLE, what)
    head, *rest = content.splitlines() or [b""]
    try:
        header = _headers.decode(head)
    except (msgspec.MsgspecError, UnicodeError) as broken:
        raise _unusable(source, 1, f"it is no header of receipts: {broken}") from broken
    if header.format != FORMAT:
        raise _unusable(source, 1, f"its format is {header.format[:40]!r}, not {FORMAT!r}")
    if header.count != len(rest):
        told = f"{several(header.count, 'receipt')} {are(header.count)} announced"
        raise _unusable(source, 1, f"{told}, {len(rest)} there")
    receipts = tuple(_decoded_lines(rest, source))
    file = ReceiptFile(header.signers, receipts, header.settled_on, header.as_of)
    if encoded(file) != content:
        raise _unusable(source, 1, "its receipts are not in their order or encoding")
    return file


def _decoded_lines(lines: list[bytes], source: str) -> Iterable[SignedReceipt]:
    for number, line in enumerate(lines, start=2):
        if len(line) > LINE_BYTES_MAX:
            raise _unusable(source, number, f"it has {len(line)} bytes")
        try:
            yield _lines.decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as broken:
            raise _unusable(source, number, f"it is no receipt: {broken}") from broken


def _unusable(source: str, line: int, why: str) -> HyperGPUError:
    return HyperGPUError(Reason.FILE_UNUSABLE, f"{source}, line {line}: {why}")
