"""`hypergpu status` of a real node names the kind that waits, and the line of node.toml."""

import time
from pathlib import Path

import msgspec

from hypergpu.node_report import REPORT_FILE, NodeReport
from hypergpu.v1 import job_pb2
from tests.kinds.farm.wire_bundles import ask, create
from tests.polling import first_true
from tests.processes import Cluster

_WITHIN_S = 60.0


def idle_sentences(cluster: Cluster, job_id: str, folder: Path) -> tuple[str, ...]:
    """What the node's report says once it says something."""
    until_s = time.monotonic() + _WITHIN_S

    def newest_sentences() -> tuple[str, ...]:
        assert cluster.job(job_id).job.phase == "working"
        assert time.monotonic() < until_s, "the node says nothing of what waits"
        contents = [path.read_bytes() for path in folder.rglob(REPORT_FILE)]
        reports = [msgspec.json.decode(each, type=NodeReport) for each in contents]
        return next((report.idle for report in reports if report.idle), ())

    return first_true(newest_sentences)


def test_a_node_that_trains_only_says_which_job_it_lets_wait(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        job_id = create(cluster, ["one", "two"])
        cluster.add_nodes(1)
        (sentence,) = idle_sentences(cluster, job_id, tmp_path)
        assert "a job of kind checksum waits" in sentence
        assert 'kinds = ["training", "checksum"]' in sentence
        ask(cluster, "StopJob", job_pb2.StopJobRequest(job_id=job_id))
