"""Files of receipts, as ``ledger export`` writes them and ``ledger verify --file`` reads them.

A file is JSON lines: a header, then one signed receipt a line, ordered by node and sequence. The
encoding leaves no choice (field order as declared, no blanks, signatures in base64), so the same
receipts give the same bytes.
"""

from collections.abc import Iterable

import msgspec

from hypergpu.errors import HyperGPUError, Reason
from hypergpu.ids import JobId
from hypergpu.statements.domain import Terms
from hypergpu.statements.receipt import SignedReceipt
from hypergpu.units import Wei

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
    ordered = sorted(file.receipts, key=receipt_order)
    header = _Header(FORMAT, file.job_id, file.terms, file.unit_price, len(ordered))
    return msgspec.json.Encoder().encode_lines([header, *ordered])


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
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as broken:
        raise _unusable(source, 1, f"no header of receipts: {broken}") from broken
    if header.format != FORMAT:
        raise _unusable(source, 1, f"format {header.format[:40]!r} instead of {FORMAT!r}")
    if not header.terms.match(header.job_id):
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
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as broken:
            raise _unusable(source, number, f"no receipt: {broken}") from broken


def _unusable(source: str, line: int, why: str) -> HyperGPUError:
    return HyperGPUError(Reason.FILE_UNUSABLE, f"{source}, line {line}: {why}")
