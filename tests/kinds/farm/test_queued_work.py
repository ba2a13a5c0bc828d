"""Two bundles of one node at a real coordinator, and at a real node, through kills of each."""

import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from hypergpu.farm.bundles import Bundle
from hypergpu.v1 import node_pb2
from tests.kinds.farm.wire_bundles import KIND, create, next_bundle, return_bundle
from tests.node_client import NOBODY_LOST, WireNode
from tests.processes import Cluster, Happening, NodeProcess

TEXTS = [f"text {number}" for number in range(60)]
SMALL = {"checked_permille": 0, "bundle_items_most": 4}
_Work = tuple[node_pb2.WorkAssignment, Bundle]


async def two_works(stream: AsyncIterator[node_pb2.ControlResponse]) -> tuple[_Work, _Work]:
    """The next two assignments on a stream."""
    return await next_bundle(stream), await next_bundle(stream)


async def joined_node(cluster: Cluster) -> WireNode:
    """A node that queues work, reduced to its wire."""
    node = WireNode(cluster.coordinator.address, cluster.coordinator.node_address)
    node.queues_work = True
    await node.join(cluster.coordinator.node_token())
    return node


def accepted_items(happenings: list[Happening]) -> Counter[int]:
    """How often each item was accepted."""
    fields = [each.fields for each in happenings if each.kind == "BundleAccepted"]
    return Counter(
        item for each in fields for item in range(each["start"], each["start"] + each["items"])
    )


async def test_both_bundles_outlive_a_kill_of_the_coordinator_and_a_lost_stream(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path, *NOBODY_LOST) as cluster:
        node = await joined_node(cluster)
        stream = node.control([(KIND, 1)])
        job_id = create(cluster, TEXTS, **SMALL)
        first, bundle = await next_bundle(stream)
        assert first.after_lease == 0
        await return_bundle(node, first, bundle, TEXTS)
        works = await two_works(stream)
        assert works[1][0].after_lease == works[0][0].lease.number
        cluster.coordinator.kill()
        cluster.coordinator.start()
        stream = node.control([(KIND, 1)])
        assert await two_works(stream) == works
        for work, bundle in works:
            await return_bundle(node, work, bundle, TEXTS)
        stream = node.control([(KIND, 1)], working=[work.lease for work, _ in works])
        while cluster.job(job_id).job.phase == "working":
            work, bundle = await next_bundle(stream)
            await return_bundle(node, work, bundle, TEXTS)
        await node.close()
        counts = accepted_items(list(cluster.events(job_id)))
        assert counts == Counter(range(len(TEXTS)))


def kill_worker(node: NodeProcess) -> None:
    """SIGKILL the worker of a node, and what is around it."""
    for child in psutil.Process(node.child.pid).children():
        for process in (*child.children(recursive=True), child):
            process.send_signal(signal.SIGKILL)


class _Reach:
    """Waits until so many items of a job were accepted, whatever restarts meanwhile."""

    def __init__(self, cluster: Cluster, job_id: str) -> None:
        self._cluster, self._job_id = cluster, job_id

    def __call__(self, items: int) -> None:
        count = 0

        def is_reached(event: Happening) -> bool:
            nonlocal count
            count += event.fields["items"] if event.kind == "BundleAccepted" else 0
            return count >= items

        self._cluster.wait_for(self._job_id, is_reached)


@pytest.mark.full
def test_a_real_node_with_two_bundles_loses_and_doubles_nothing_through_kills(
    tmp_path: Path,
) -> None:
    texts = [f"text {number}" for number in range(400)]
    with Cluster(tmp_path) as cluster:
        (node,) = cluster.add_nodes(1, kinds=("training", "checksum"))
        job_id = create(cluster, texts, parameters={"rounds": 20_000}, **SMALL)
        reach = _Reach(cluster, job_id)
        reach(40)
        bundles = cluster.job(job_id).job.bundles
        assert bundles is not None
        assert bundles.open_bundles == 2
        kill_worker(node)
        reach(100)
        node.kill()
        node.run()
        reach(160)
        cluster.coordinator.kill()
        cluster.coordinator.start()
        reach(220)
        node.terminate()
        node.run()
        cluster.wait_until_finished(job_id)
        happenings = list(cluster.events(job_id))
    assert accepted_items(happenings) == Counter(range(len(texts)))
    accepted_fields = [each.fields for each in happenings if each.kind == "BundleAccepted"]
    assert sum(each["units"] for each in accepted_fields) == len(texts)
    leases = [each["lease"] for each in accepted_fields]
    assert len(leases) == len(set(leases))
