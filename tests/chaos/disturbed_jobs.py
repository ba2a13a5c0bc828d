"""A job of each kind of work that lives through many deaths of processes, and counts as one that
nobody disturbed.
"""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hypergpu.jobfile.reading import spec_json
from hypergpu.jobfile.spec import Evaluation, JobSpec, Pay, RoundRule, TrainingSettings, Trust
from hypergpu.packed_work import pack_work
from hypergpu.units import Milliseconds
from hypergpu.user.client.asynchronous import AsyncCoordinator
from hypergpu.user.client.blocking import wait_for
from hypergpu.user.client.resume import ignore
from hypergpu.user.client.upload import send_folder
from hypergpu.v1 import job_pb2
from hypergpu.wire.work import work_message
from tests.kinds.echo.core.state import KIND, EchoRequest
from tests.kinds.farm.requests import farm_request
from tests.processes import Cluster, Happening, accepted_updates

ROUNDS = 30
NODES = 2
SPEC = JobSpec(
    workload="digits-softmax",
    strategy="diloco",
    training=TrainingSettings(rounds=ROUNDS, inner_steps=20, nodes=NODES),
    evaluation=Evaluation(every=2),
    pay=Pay(unit_price=1_000, rounds_per_epoch=7),
    round=RoundRule(quorum=1.0),
    trust=Trust(duplicates="none"),
)
ITEMS = 60
ITEM_MS = Milliseconds(100)
FARM_ITEMS, BUNDLE_ITEMS = 400, 1
ITEM_ROUNDS = 20_000
"""Work of an item: some milliseconds."""
KINDS = ("training", KIND, "checksum")
"""Kinds of work that the owners of the nodes allow."""


class DisturbedJob(Protocol):
    """One job that lives through deaths of processes."""

    def submit(self) -> None:
        """Submit, or find the job that an earlier try made."""

    def reach(self, part: float) -> None:
        """Wait until a part of the work is done."""

    def check(self, *, is_undisturbed_by_nodes: bool = True) -> None:
        """Let the job end, and find nothing lost and nothing counted twice.

        Args:
            is_undisturbed_by_nodes: No node was lost: training then ends with the very same model.
        """


class _Submitted:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._request_id = uuid.uuid4().hex
        self._job_id = ""

    def submit(self) -> None:
        """See `DisturbedJob`."""
        with self._cluster.coordinator.client() as client:
            self._job_id = wait_for(self._create(client.asynchronous))

    async def _create(self, client: AsyncCoordinator) -> str:
        request = await self._request(client)
        request.request_id = self._request_id
        return str((await client._call(client._jobs.CreateJob, request)).job_id)

    async def _request(self, client: AsyncCoordinator) -> job_pb2.CreateJobRequest:
        raise NotImplementedError

    def _outcome(self) -> tuple[Any, list[Happening]]:
        """The job once it has ended, and its events."""
        job = self._cluster.wait_until_finished(self._job_id)
        self._cluster.wait_for(self._job_id, lambda happening: happening.kind == "JobEnded")
        events = list(self._cluster.events(self._job_id))
        assert job.phase == "finished"
        assert [event.sequence for event in events] == list(range(len(events)))
        assert [event.kind for event in events].count("JobEnded") == 1
        assert events[-1].kind == "JobEnded"
        return job, events


class DisturbedTraining(_Submitted):
    """A training of `ROUNDS` rounds.

    Args:
        digest: Digest of its final model where nobody disturbs it.
        files: A folder that its workload does not need.
    """

    def __init__(self, cluster: Cluster, digest: str, files: Path | None = None) -> None:
        super().__init__(cluster)
        self._digest = digest
        self._files = files

    async def _request(self, client: AsyncCoordinator) -> job_pb2.CreateJobRequest:
        manifest = await send_folder(client._calls, self._files, ignore) if self._files else None
        return job_pb2.CreateJobRequest(spec_json=spec_json(SPEC), manifest=manifest)

    def reach(self, part: float) -> None:
        """See `DisturbedJob`."""
        number = int(part * ROUNDS)
        self._cluster.wait_for(
            self._job_id,
            lambda happening: (
                happening.kind == "RoundRecorded" and happening.fields["round"] >= number
            ),
        )

    def check(self, *, is_undisturbed_by_nodes: bool = True) -> None:
        """See `DisturbedJob`."""
        job, events = self._outcome()
        accepted_pairs = accepted_updates(events)
        leases = [lease for _, _, lease in accepted_pairs]
        assert len(leases) == len(set(leases))
        records = [event.fields for event in events if event.kind == "RoundRecorded"]
        assert [each["round"] for each in records] == list(range(ROUNDS))
        shard = SPEC.training.inner_steps * SPEC.training.batch_size
        assert (
            job.samples == sum(each["samples"] for each in records) == len(accepted_pairs) * shard
        )
        if is_undisturbed_by_nodes:
            assert len({(number, node) for number, node, _ in accepted_pairs}) == ROUNDS * NODES
            assert len(accepted_pairs) == job.updates_accepted == ROUNDS * NODES
            assert job.model == self._digest
            check_measurements(events)


class DisturbedEcho(_Submitted):
    """A job of `ITEMS` items."""

    async def _request(self, client: AsyncCoordinator) -> job_pb2.CreateJobRequest:
        items = tuple(f"text {number}" for number in range(ITEMS))
        work = pack_work(KIND, EchoRequest(items, keep_ms=ITEM_MS))
        return job_pb2.CreateJobRequest(work=work_message(work))

    def reach(self, part: float) -> None:
        """See `DisturbedJob`."""
        returns = _Counter("ItemReturned", int(part * ITEMS))
        if returns.most:
            self._cluster.wait_for(self._job_id, returns)

    def check(self, *, is_undisturbed_by_nodes: bool = True) -> None:
        """See `DisturbedJob`."""
        _, events = self._outcome()
        item_fields = [event.fields for event in events if event.kind == "ItemReturned"]
        assert sorted(each["number"] for each in item_fields) == list(range(ITEMS))
        leases = [each["lease"] for each in item_fields]
        assert len(leases) == len(set(leases))


class DisturbedFarm(_Submitted):
    """A farm job of `FARM_ITEMS` items in bundles of `BUNDLE_ITEMS` at most."""

    async def _request(self, client: AsyncCoordinator) -> job_pb2.CreateJobRequest:
        return await farm_request(
            client,
            [f"text {number}" for number in range(FARM_ITEMS)],
            parameters={"rounds": ITEM_ROUNDS},
            bundle_items_most=BUNDLE_ITEMS,
            checked_permille=200,
        )

    def reach(self, part: float) -> None:
        """See `DisturbedJob`."""
        bundles = _Counter("BundleAccepted", int(part * FARM_ITEMS / BUNDLE_ITEMS))
        if bundles.most:
            self._cluster.wait_for(self._job_id, bundles)

    def check(self, *, is_undisturbed_by_nodes: bool = True) -> None:
        """See `DisturbedJob`."""
        _, events = self._outcome()
        accepted_fields = [event.fields for event in events if event.kind == "BundleAccepted"]
        items = [
            item
            for each in accepted_fields
            for item in range(each["start"], each["start"] + each["items"])
        ]
        assert sorted(items) == list(range(FARM_ITEMS))
        assert sum(each["units"] for each in accepted_fields) == FARM_ITEMS
        leases = [each["lease"] for each in accepted_fields]
        assert len(leases) == len(set(leases))
        assert not [event for event in events if event.kind == "ItemDropped"]


class _Counter:
    """Whether an event of a kind has happened often enough."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind = kind
        self.most = most
        self._count = 0

    def __call__(self, happening: Happening) -> bool:
        self._count += happening.kind == self._kind
        return self._count >= self.most


def check_measurements(events: list[Happening]) -> None:
    """Every round is measured once and in order with all its updates, and then the job ends."""
    measured_rounds = [event.fields for event in events if event.kind == "RoundMeasured"]
    assert [fields["round"] for fields in measured_rounds] == list(range(ROUNDS))
    for fields in measured_rounds:
        nodes = [update["contribution"]["node"] for update in fields["updates"]]
        assert len(nodes) == len(set(nodes)) == NODES


MakeJob = Callable[[], DisturbedJob]
