"""Nodes and a coordinator that a command owns, killed at awkward moments."""

import time
from pathlib import Path

from hypergpu.cli.cluster.cluster import Cluster

JOIN_WITHIN_S = 90.0


def test_a_node_killed_before_it_joined_joins_when_started_again(tmp_path: Path) -> None:
    with Cluster(tmp_path, "null") as cluster:
        cluster.start_coordinator()
        cluster.start_nodes({"attic": {}})
        # Python has not even begun to import the daemon.
        first = cluster.kill("attic")
        assert cluster.kill("attic") == first  # its group may be somebody else's by now
        assert cluster.dead() == ["attic"]
        joined = tmp_path / "state" / "attic" / "coordinator.json"
        assert not joined.exists()
        assert cluster.restart("attic") != first
        give_up_at_s = time.monotonic() + JOIN_WITHIN_S
        while not joined.exists() and not cluster.dead() and time.monotonic() < give_up_at_s:
            time.sleep(0.1)
        assert joined.exists()
        assert cluster.dead() == []
