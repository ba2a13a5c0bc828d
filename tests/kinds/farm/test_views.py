"""Pages of results, and of items that were given up."""

from msgspec.structs import replace

from coordinator.core.farm.events import BundleAccepted, ItemDropped
from coordinator.core.farm.state import FarmPhase
from coordinator.core.farm.transition import transition
from coordinator.shell.kinds.farm.runtime import FarmRuntime
from coordinator.shell.kinds.farm.views import RESULTS_MOST, accepted_results
from hypergpu.blobs import BlobRef
from hypergpu.digests import digest_of
from hypergpu.ids import NodeId
from hypergpu.units import Bytes, Milliseconds
from hypergpu.v1 import farm_pb2
from tests.kinds.farm.walk import created_job

DROPPED = 2 * RESULTS_MOST + 5


def runtime_of(accepted: int, dropped: int) -> FarmRuntime:
    """A job that is over, with so many results and items given up."""
    job = transition(None, created_job(accepted + dropped)).job
    runtime = FarmRuntime(replace(job, phase=FarmPhase.FINISHED), 0)
    blob = BlobRef(digest_of(b"result"), Bytes(6))
    runtime.accepted += [
        BundleAccepted(
            at_ms=Milliseconds(0),
            node=NodeId("node"),
            bundle=number,
            lease=number + 1,
            start=number,
            items=1,
            failures=0,
            units=1,
            blob=blob,
            tries=1,
        )
        for number in range(accepted)
    ]
    runtime.dropped += [
        ItemDropped(at_ms=Milliseconds(0), item=accepted + number, reason=f"reason {number}")
        for number in range(dropped)
    ]
    return runtime


def test_each_item_that_was_given_up_is_told_once() -> None:
    runtime = runtime_of(3, DROPPED)
    items: list[int] = []
    pages: list[farm_pb2.ListResultsResponse] = []
    while not pages or not pages[-1].is_over:
        request = farm_pb2.ListResultsRequest(from_number=3, from_dropped=len(items))
        pages.append(accepted_results(runtime, request))
        items += [each.item for each in pages[-1].dropped_items]
    assert items == list(range(3, 3 + DROPPED))
    assert [len(page.dropped_items) for page in pages] == [RESULTS_MOST, RESULTS_MOST, 5]
    request = farm_pb2.ListResultsRequest(from_number=3, from_dropped=DROPPED)
    assert not accepted_results(runtime, request).dropped_items


def test_a_page_of_results_is_not_the_last_while_items_are_left() -> None:
    runtime = runtime_of(RESULTS_MOST + 1, 1)
    request = farm_pb2.ListResultsRequest(from_dropped=0)
    assert not accepted_results(runtime, request).is_over
    request = farm_pb2.ListResultsRequest(from_number=RESULTS_MOST, from_dropped=0)
    assert accepted_results(runtime, request).is_over


def test_a_client_of_before_gets_all_that_were_given_up_with_each_page() -> None:
    answer = accepted_results(runtime_of(1, DROPPED), farm_pb2.ListResultsRequest(from_number=1))
    assert len(answer.dropped_items) == DROPPED
    assert answer.is_over
