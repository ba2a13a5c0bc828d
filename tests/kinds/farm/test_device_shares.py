"""Nodes that have a share of a device do what needs no more, side by side, and nothing else."""

from collections import Counter
from pathlib import Path

import pytest

from coordinator.core.work.demand import JobDemand, NodeOffer, unfit_reason
from hypergpu.errors import HyperGPUError
from hypergpu.ids import JobId, NodeId
from hypergpu.user.farm.request import settings_of
from tests.kinds.farm.wire_bundles import create
from tests.processes import Cluster

TEXTS = [f"text {number}" for number in range(80)]


def demand(share_permille: int) -> JobDemand:
    """A job that needs a share of a device."""
    return JobDemand(
        job_id=JobId("job-1"),
        nodes_min=1,
        workload="map/checksum",
        workload_version=1,
        members=frozenset(),
        share_permille=share_permille,
    )


@pytest.mark.parametrize(
    ("node", "job", "reason"),
    [
        (1_000, 1_000, ""),
        (1_000, 250, ""),
        (250, 250, ""),
        (250, 1_000, "it has 25 % of its device, and the job needs 100 %"),
        (333, 500, "it has 33.3 % of its device, and the job needs 50 %"),
    ],
)
def test_a_node_fits_a_job_that_needs_no_more_of_a_device(node: int, job: int, reason: str) -> None:
    offer = NodeOffer(NodeId("node"), None, {"map/checksum": 1}, share_permille=node)
    assert unfit_reason(demand(job), offer) == reason


def test_a_share_is_stated_as_a_part_of_a_device() -> None:
    assert settings_of("checksum", {}).share_permille == 1_000
    assert settings_of("checksum", {"share": 0.25}).share_permille == 250
    for share in (0.0, 0.01, 1.5, float("nan")):
        with pytest.raises(HyperGPUError, match="give a share of 1/16 to 1"):
            settings_of("checksum", {"share": share}).check()


def test_nodes_that_share_a_device_take_work_side_by_side_and_no_work_of_a_whole_one(
    tmp_path: Path,
) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.add_nodes(1, kinds=("training", "checksum"), owner_lines="shares = 2\n")
        rounds = {"parameters": {"rounds": 20_000}, "bundle_items_most": 2}
        whole_id = create(cluster, TEXTS, **rounds)
        job_id = create(cluster, TEXTS, share_permille=500, **rounds)
        cluster.wait_until_finished(job_id)
        happenings = list(cluster.events(job_id))
        whole_job = cluster.job(whole_id)
        unfit_reasons = {each.reason for each in whole_job.unfit}
    accepted_fields = [each.fields for each in happenings if each.kind == "BundleAccepted"]
    counts = Counter(each["node"] for each in accepted_fields)
    assert len(counts) == 2
    assert sum(each["items"] for each in accepted_fields) == len(TEXTS)
    assert (whole_job.job.phase, whole_job.job.nodes) == ("working", 0)
    assert unfit_reasons == {"it has 50 % of its device, and the job needs 100 %"}
