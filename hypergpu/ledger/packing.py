"""The bytes in which batches of receipts go to the contract, and the digests that they come to.

Two forms say the same of a batch::

    packed     for each node  node[20] | first sequence u48 | receipts u16
               then for each receipt  round u32 | samples u32 | quality u16 | contribution[6]
    aggregate  for each node  node | first sequence | receipts | samples | score: 32 bytes each

Big-endian; nodes ascend by address, and a node's receipts by sequence without a gap. The contract
keeps one digest of all batches of a job, so that whoever has the files can recompute it.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from struct import Struct
from struct import error as struct_error

import msgspec

from hypergpu.ids import JobKey, NodeId
from hypergpu.keys.keccak import keccak
from hypergpu.ledger.pay import score
from hypergpu.ledger.typed import Receipt, address_bytes, word_bytes
from hypergpu.units import BasisPoints, Samples

RUN_RECEIPTS_MAX = 0xFFFF
"""Of one node under one head."""
NO_DIGEST = bytes(32)
"""Of a job without a batch."""
_HEAD = Struct(">20s6sH")
_RECORD = Struct(">IIH6s")
_WORDS = Struct(">12x20s26x6s28xI24xQ22x10s")
_LINK = Struct(">32s28xI28xI32s32s")


class NodeTotals(msgspec.Struct, frozen=True):
    """What a batch adds for one node: the receipts [first_sequence, first_sequence + receipts)."""

    node: NodeId
    first_sequence: int
    receipts: int
    samples: Samples
    score: int


class PackedRun(msgspec.Struct, frozen=True):
    """One node's part of packed bytes."""

    node: NodeId
    first_sequence: int
    records: tuple["PackedRecord", ...]


class PackedRecord(msgspec.Struct, frozen=True):
    """What packed bytes hold of one receipt."""

    round: int
    samples: Samples
    quality_bps: BasisPoints
    contribution: str
    """The first 6 bytes, as 12 hex digits."""


def batch_totals(receipts: Iterable[Receipt]) -> tuple[NodeTotals, ...]:
    """The sums that go on chain for a batch, in whatever order its receipts come.

    Raises:
        ValueError: a node's sequences have a gap or come twice, or the receipts are of several jobs
            or epochs.
    """
    return tuple(
        NodeTotals(
            node=run[0].node,
            first_sequence=run[0].sequence,
            receipts=len(run),
            samples=Samples(sum(one.samples for one in run)),
            score=sum(score(one.samples, one.quality_bps) for one in run),
        )
        for run in _runs(receipts)
    )


def packed(receipts: Iterable[Receipt]) -> bytes:
    """A batch with every receipt in it: 28 bytes a node and 16 a receipt.

    Raises:
        ValueError: as `batch_totals`; or a number does not fit its field.
    """
    parts: list[bytes] = []
    try:
        for whole in _runs(receipts):
            for start in range(0, len(whole), RUN_RECEIPTS_MAX):
                run = whole[start : start + RUN_RECEIPTS_MAX]
                first = run[0].sequence.to_bytes(6, "big")
                parts.append(_HEAD.pack(address_bytes(run[0].node), first, len(run)))
                parts.extend(map(_record, run))
    except (struct_error, OverflowError) as broken:
        raise ValueError(f"a number does not fit its field: {broken}") from broken
    return b"".join(parts)


def unpacked(content: bytes) -> tuple[PackedRun, ...]:
    """Read packed bytes back.

    Raises:
        ValueError: they end within a run, or a run is empty.
    """
    runs: list[PackedRun] = []
    offset = 0
    while offset < len(content):
        try:
            node, first, count = _HEAD.unpack_from(content, offset)
            offset += _HEAD.size
            records = tuple(
                PackedRecord(round_, Samples(samples), BasisPoints(bps), contribution.hex())
                for round_, samples, bps, contribution in _RECORD.iter_unpack(
                    content[offset : offset + count * _RECORD.size]
                )
            )
        except struct_error as broken:
            raise ValueError(f"the packed bytes end within a run: {broken}") from broken
        if not records or len(records) != count:
            raise ValueError(f"a run of {count} receipts holds {len(records)}")
        offset += count * _RECORD.size
        named = NodeId("0x" + node.hex())
        runs.append(PackedRun(named, int.from_bytes(first, "big"), records))
    return tuple(runs)


def totals_words(totals: Iterable[NodeTotals]) -> bytes:
    """The sums as words, five a node, as they lie in call data.

    Raises:
        ValueError: a number does not fit its field.
    """
    try:
        return b"".join(
            _WORDS.pack(
                address_bytes(one.node),
                one.first_sequence.to_bytes(6, "big"),
                one.receipts,
                one.samples,
                one.score.to_bytes(10, "big"),
            )
            for one in totals
        )
    except (struct_error, OverflowError) as broken:
        raise ValueError(f"a number does not fit its field: {broken}") from broken


def next_digest(digest: bytes, *, seq: int, epoch: int, root: bytes, content: bytes) -> bytes:
    """A job's digest after one more batch.

    Args:
        digest: Before it; `NO_DIGEST` at first.
        seq: The batch's number in the job.
        epoch: Where it is settled.
        root: Of the tree of its receipts.
        content: Its packed bytes, or its sums' words.
    """
    return keccak(_LINK.pack(digest, seq, epoch, root, keccak(content)))


def _runs(receipts: Iterable[Receipt]) -> Iterable[Sequence[Receipt]]:
    """Each node's receipts, nodes ascending."""
    ordered = sorted(receipts, key=attrgetter("node", "sequence"))
    places: set[tuple[JobKey, int]] = {(one.job, one.epoch) for one in ordered}
    if len(places) > 1:
        raise ValueError("a batch is of one job and epoch")
    for node, items in groupby(ordered, key=attrgetter("node")):
        run = list(items)
        if any(b.sequence != a.sequence + 1 for a, b in pairwise(run)):
            raise ValueError(f"the sequences of {node} are not dense")
        yield run


def _record(receipt: Receipt) -> bytes:
    contribution = word_bytes(receipt.contribution)[:6]
    return _RECORD.pack(receipt.round, receipt.samples, receipt.quality_bps, contribution)
