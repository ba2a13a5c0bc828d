"""Secret second copies go to another join token and another address, also after a replay."""

import pytest
from msgspec.structs import replace

from coordinator.core.farm.checks import may_take_copy
from coordinator.core.farm.kind import FARM
from coordinator.core.farm.state import CheckRule, FarmJob
from coordinator.core.work import work_events
from coordinator.shell.service.gates import address_digest
from hypergpu.ids import NodeId
from hypergpu.units import Milliseconds
from tests.kinds.farm.walk import created_job, join_event, result_of

ANN, BEN, CAT = (NodeId(f"node-{name}") for name in ("ann", "ben", "cat"))


def join_from(node: NodeId, address: str) -> work_events.NodeJoined:
    """A node that is there, by a token of its own and from an address."""
    return replace(join_event(node), address=address)


RULES = pytest.mark.parametrize("rule", CheckRule)


def job_after(rule: CheckRule, *events: object) -> FarmJob:
    """A job in which all is checked, after these events."""
    first = created_job(1_000, checked_permille=1_000, check_rule=rule)
    job: FarmJob = FARM.transition(None, first).job
    for event in events:
        assert not FARM.rejection(job, event)
        job = FARM.transition(job, event).job
    return job


def checkers(job: FarmJob, bundle: int) -> set[NodeId]:
    """Nodes that have a bundle, or the part of it that is checked."""
    return {*job.bundles[bundle].holders, *job.bundles[bundle].checkers}


@RULES
def test_a_copy_goes_to_no_node_of_the_same_address_while_one_has_the_bundle(
    rule: CheckRule,
) -> None:
    events = (join_from(ANN, "home"), join_from(BEN, "home"), join_from(CAT, "office"))
    job = job_after(rule, *events)
    bundle = job.leases[ANN].bundle
    assert not may_take_copy(job, bundle, BEN)
    job = FARM.transition(job, result_of(job, ANN)).job
    job = FARM.transition(job, result_of(job, BEN)).job
    assert BEN not in checkers(job, bundle)
    while bundle in job.bundles and CAT not in checkers(job, bundle):
        job = FARM.transition(job, result_of(job, CAT)).job
    assert BEN not in checkers(job, bundle)


@RULES
def test_a_result_keeps_the_address_that_it_came_from(rule: CheckRule) -> None:
    job = job_after(rule, join_from(ANN, "home"), join_from(BEN, "home"))
    bundle = job.leases[ANN].bundle
    job = FARM.transition(job, result_of(job, ANN)).job
    loss = work_events.NodeLost(at_ms=Milliseconds(0), node=ANN, reason="silent")
    job = FARM.transition(job, loss).job
    # Ann has moved: what she returned is still from home.
    job = FARM.transition(job, join_from(ANN, "office")).job
    if bundle in job.bundles:
        assert not may_take_copy(job, bundle, BEN)
        assert may_take_copy(FARM.transition(job, join_from(CAT, "office")).job, bundle, CAT)


@RULES
def test_addresses_that_are_not_known_keep_nobody_apart(rule: CheckRule) -> None:
    job = job_after(rule, join_from(ANN, ""), join_from(BEN, ""))
    bundle = job.leases[ANN].bundle
    if rule is CheckRule.PARTS:
        job = FARM.transition(job, result_of(job, ANN)).job
        job = FARM.transition(job, result_of(job, BEN)).job
    assert BEN in checkers(job, bundle)


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
