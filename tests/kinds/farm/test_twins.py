"""Secret second copies go to another join token and another address, also after a replay."""

from msgspec.structs import replace

from coordinator.core.farm.checks import may_take_copy
from coordinator.core.farm.kind import FARM
from coordinator.core.farm.state import FarmJob
from coordinator.core.work import work_events
from coordinator.shell.service.gates import address_digest
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.kinds.farm.walk import created_job, join_event, result_of

ANN, BEN, CAT = (NodeId(f"node-{name}") for name in ("ann", "ben", "cat"))


def join_from(node: NodeId, address: str) -> work_events.NodeJoined:
    """A node that is there, by a token of its own and from an address."""
    return replace(join_event(node), address=address)


def job_after(*events: object) -> FarmJob:
    """A job in which all is checked, after these events."""
    job: FarmJob = FARM.transition(None, created_job(1_000, checked_permille=1_000)).job
    for event in events:
        assert not FARM.rejection(job, event)
        job = FARM.transition(job, event).job
    return job


def test_a_copy_goes_to_no_node_of_the_same_address_while_one_has_the_bundle() -> None:
    job = job_after(join_from(ANN, "home"), join_from(BEN, "home"), join_from(CAT, "office"))
    bundle = job.leases[ANN].bundle
    assert job.bundles[bundle].copies == 2
    assert not may_take_copy(job, bundle, BEN)
    assert job.leases[CAT].bundle == bundle
    assert job.leases[BEN].bundle != bundle


def test_a_result_keeps_the_address_that_it_came_from() -> None:
    job = job_after(join_from(ANN, "home"), join_from(BEN, "home"))
    bundle = job.leases[ANN].bundle
    job = FARM.transition(job, result_of(job, ANN)).job
    loss = work_events.NodeLost(at_ms=Milliseconds(0), node=ANN, reason="silent")
    job = FARM.transition(job, loss).job
    # Ann has moved: what she returned is still from home.
    job = FARM.transition(job, join_from(ANN, "office")).job
    if bundle in job.bundles:
        assert not may_take_copy(job, bundle, BEN)
        assert may_take_copy(FARM.transition(job, join_from(CAT, "office")).job, bundle, CAT)


def test_addresses_that_are_not_known_keep_nobody_apart() -> None:
    job = job_after(join_from(ANN, ""), join_from(BEN, ""))
    assert job.leases[ANN].bundle == job.leases[BEN].bundle


def test_an_address_is_that_of_the_line() -> None:
    def digest(peer: str) -> str:
        return address_digest(peer, is_gateway=False)

    assert digest("ipv4:203.0.113.7:4711") == digest("ipv4:203.0.113.7:9")
    assert digest("ipv4:203.0.113.7:4711") != digest("ipv4:203.0.113.8:4711")
    one, same = "ipv6:%5B2001:db8:1:2::3%5D:5", "ipv6:[2001:db8:1:2:ffff::9]:6"
    assert digest(one) == digest(same) != digest("ipv6:[2001:db8:1:3::3]:5")
    for peer in ("ipv4:127.0.0.1:5", "ipv6:[::1]:5", "unix:/tmp/socket", "nonsense"):
        assert digest(peer) == ""
    assert address_digest("ipv4:203.0.113.7:4711", is_gateway=True) == ""
