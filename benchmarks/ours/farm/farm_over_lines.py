"""Our farm at the ends of the lines that netsim holds open: a daemon at each node's end.

Run by `netsim shape`; prints items a second of the second of two jobs.
"""

import sys
import tempfile
import time
from pathlib import Path

import msgspec

from benchmarks.ours.adaptive.process_nodes import wait_for_nodes
from benchmarks.ours.cluster import ONE_THREAD
from benchmarks.peers.line_items import WARM_UP_ITEMS, LineRate, line_texts
from hypergpu.command_line import program
from hypergpu.sites import Sites, told_sites
from hypergpu.user.cluster.children import ChildStart, OwnedProcesses
from hypergpu.user.cluster.cluster import LocalCluster, join_token
from hypergpu.user.farm.request import MapSettings
from hypergpu.user.farm.starting import MapOrder, start_map

_JOB = MapSettings(item_kind="checksum", checks=0.0)


def start_nodes(sites: Sites, folder: Path, token: str, floor_ms: int) -> OwnedProcesses:
    """Let a daemon join at each end that does this kind alone."""
    nodes = OwnedProcesses(folder / "logs")
    settings = {**ONE_THREAD, "HYPERGPU_NODE_WORKER_STEP_FLOOR_MS": str(floor_ms)}
    for name, site in sites.nodes.items():
        state = ("--state-dir", str(folder / name), "--worker", "numpy")
        command = program(
            "gpu_node", "join", "--token-file", "-", *state, "--limit", "kinds=checksum"
        )
        nodes.start(name, ChildStart(site.command(command), settings, secret=token))
    return nodes


def measured_items_per_s(sites: Sites, folder: Path, items: int, floor_ms: int) -> float:
    """Have a small job done, then one of all items."""
    with LocalCluster(folder, "numpy", sites) as cluster:
        cluster.start_coordinator()
        token = join_token(cluster.ready, ttl_s=0, uses=0, label="benchmark")
        nodes = start_nodes(sites, folder, token, floor_ms)
        try:
            with cluster.operator() as client:
                wait_for_nodes(client, len(sites.nodes))
                warm_up_texts = line_texts(WARM_UP_ITEMS * len(sites.nodes), first=items)
                start_map(client, MapOrder(_JOB, warm_up_texts, folder / "first.jsonl")).wait()
                texts = line_texts(items)
                begin_s = time.monotonic()
                start_map(client, MapOrder(_JOB, texts, folder / "second.jsonl")).wait()
                return items / (time.monotonic() - begin_s)
        finally:
            nodes.end()


def main(items: int, floor_ms: int) -> None:
    """Measure over the lines of the environment."""
    sites = told_sites()
    if sites is None:
        raise SystemExit("no lines are open: run it by `hypergpu netsim shape`")
    with tempfile.TemporaryDirectory() as name:
        rate = measured_items_per_s(sites, Path(name), items, floor_ms)
    sys.stdout.write(msgspec.json.encode(LineRate(rate)).decode() + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
