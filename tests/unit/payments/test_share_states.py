"""The state of a node's share that its owner is told."""

from hypergpu.ids import NodeId
from hypergpu.units import Wei
from payments.core.transactions import EpochView, JobOnLedger
from payments.shell.service import share_state

NODE = NodeId("0x" + "a1" * 20)


def ledger(**fields: object) -> JobOnLedger:
    view = JobOnLedger(time_s=10, window_s=60, balance=Wei(0), is_open=True)
    return view._replace(**fields)  # type: ignore[arg-type]


def test_a_share_stays_paid_after_the_last_epoch_was_settled_and_forgotten() -> None:
    settled_ledger = ledger(epochs={}, paid_below=3)
    assert [share_state(NODE, number, settled_ledger)[0] for number in range(4)] == [
        *("paid", "paid", "paid"),
        "measured",
    ]


def test_a_share_that_no_epoch_records_is_measured_whatever_epochs_there_are() -> None:
    later = ledger(epochs={5: EpochView()}, paid_below=0)
    assert share_state(NODE, 2, later) == ("measured", "")


def test_before_the_job_is_open_a_share_is_measured() -> None:
    assert share_state(NODE, 0, None) == ("measured", "")
