import pytest

from coordinator.core.settlement.epoch import Epoch, EpochEnded, transition
from coordinator.core.settlement.sealing import Metering
from coordinator.shell.chain.batches import groups, parted, spans
from coordinator.shell.journal.ledger.records import EpochRecord, UnsealedReceipt
from hypergpu.chain.gas import NODES_MAX
from hypergpu.ids import JobId, NodeId

JOB = JobId("job-00000000000a")


def waiting(node: int, sequence: int, epoch: int = 0) -> UnsealedReceipt:
    name = NodeId(f"0x{node:040x}")
    leaf = b"%16d%16d" % (node, sequence)
    return UnsealedReceipt(JOB, name, sequence, epoch, sequence, 100, 9_000, leaf, bytes(32))


def record(number: int, *, ended: bool = False, last: bool = False) -> EpochRecord:
    epoch = Epoch(job_id=JOB, number=number)
    closed = transition(epoch, EpochEnded()) if ended else epoch
    return EpochRecord(closed, is_left=ended, is_last=last)


def test_receipts_go_into_their_own_epochs_earliest_first() -> None:
    found = groups([waiting(1, 1, 1), waiting(2, 0, 0)], [record(0), record(1)])
    assert [(group.epoch.number, len(group.receipts)) for group in found] == [(0, 1), (1, 1)]


def test_one_whose_epoch_is_closed_goes_into_the_next_with_its_nodes_later_ones() -> None:
    found = groups([waiting(1, 0, 0), waiting(1, 1, 1)], [record(0, ended=True), record(1)])
    assert [group.epoch.number for group in found] == [1]
    assert [receipt.sequence for receipt in found[0].receipts] == [0, 1]


def test_one_of_a_round_that_was_measured_late_goes_with_those_numbered_before_it() -> None:
    late = [waiting(1, 0, 0), waiting(1, 1, 1), waiting(1, 2, 0), waiting(2, 0, 0)]
    found = groups(late, [record(0), record(1)])
    numbers = [[(each.node[-1], each.sequence) for each in group.receipts] for group in found]
    assert numbers == [[("1", 0), ("2", 0)], [("1", 1), ("1", 2)]]


def test_one_that_comes_after_the_last_epoch_gets_an_epoch_of_its_own() -> None:
    (late,) = groups([waiting(1, 0, 0)], [record(0, ended=True, last=True)])
    assert (late.epoch.number, late.is_left) == (1, True)


def test_batches_are_cut_by_receipts_and_by_nodes() -> None:
    many = [waiting(node, 0) for node in range(NODES_MAX + 3)]
    assert [len(part) for part in parted(many, Metering.BATCHED, 5_000)] == [NODES_MAX, 3]
    assert [len(part) for part in parted(many[:5], Metering.PACKED, 2)] == [2, 2, 1]
    assert [len(part) for part in parted(many[:3], Metering.EACH, 5_000)] == [1, 1, 1]


def test_a_nodes_receipts_stay_in_order_across_batches() -> None:
    of_one = [waiting(1, sequence) for sequence in range(5)]
    parts = list(parted(of_one, Metering.BATCHED, 2))
    assert [span.first for part in parts for span in spans(part)] == [0, 2, 4]


def test_a_span_sums_what_a_node_did() -> None:
    (span,) = spans([waiting(1, 4), waiting(1, 5)])
    assert (span.first, span.receipts, span.samples, span.score) == (4, 2, 200, 2 * 900_000)


def test_a_span_has_no_gap() -> None:
    with pytest.raises(ValueError, match="do not follow on each other"):
        spans([waiting(1, 4), waiting(1, 6)])
