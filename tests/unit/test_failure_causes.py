"""Why work is handed back, on the wire: a cause, and the text of nodes that send none."""

import pytest

from hypergpu.assignment import FailureCause
from hypergpu.v1 import node_pb2
from hypergpu.wire.messages import cause_value, hand_back_message

LEASE = node_pb2.Lease(job_id="job-000000000001", round=3, number=7)


@pytest.mark.parametrize("cause", FailureCause)
def test_a_cause_comes_back_as_it_was_whatever_the_text_says(cause: FailureCause) -> None:
    for reason in ("too hot", "out of memory: 2 GiB", "OWNER_DISK (7103): 9 bytes"):
        payload = hand_back_message(LEASE, reason, cause).SerializeToString()
        message = node_pb2.HandBack.FromString(payload)
        assert (message.lease, message.reason) == (LEASE, reason)
        assert cause_value(message) is cause


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("out of memory: 2 GiB. Fix: use a larger device", FailureCause.OUT_OF_MEMORY),
        ("OWNER_DISK (7103): its files take 9 bytes", FailureCause.OWNER),
        ("the worker died 4 times: out of memory", FailureCause.OTHER),
        ("too hot", FailureCause.OTHER),
        ("", FailureCause.OTHER),
    ],
)
def test_an_older_node_tells_the_cause_by_how_its_text_begins(
    reason: str, cause: FailureCause
) -> None:
    assert cause_value(node_pb2.HandBack(lease=LEASE, reason=reason)) is cause


def test_a_cause_of_a_newer_node_is_another_one() -> None:
    message = node_pb2.HandBack(lease=LEASE, reason="out of memory")
    message.MergeFromString(b"\x18\x63")  # field 3, a number that no cause has here
    assert message.cause == 99
    assert cause_value(message) is FailureCause.OTHER
