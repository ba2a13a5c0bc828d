"""Small items on one device that two nodes share, beside one node that has it whole.

An item keeps one processor busy for some milliseconds, as a small program does that leaves most of
a device idle; workers have one thread each.
"""

import tempfile
import time
from pathlib import Path

from benchmarks.ours.cluster import ONE_THREAD, Running, running
from benchmarks.ours.table import PartFigures
from hypergpu.command_line import program
from hypergpu.user.cluster.processes import kill_group, start
from hypergpu.user.farm.request import MapSettings
from hypergpu.user.farm.starting import MapOrder, start_map

_ROUNDS = 20_000
"""Rounds of a checksum, which take 7 ms on a core of 2024."""
_WARM_UP_ITEMS = 64


def _join(cluster: Running, shares: int) -> None:
    state_dir = cluster.folder / "sharer"
    limits = ("--limit", "kinds=checksum", "--limit", f"shares={shares}")
    arguments = ("--state-dir", str(state_dir), "--worker", "numpy", *limits)
    command = program("gpu_node", "join", "--token-file", "-", *arguments)
    log = cluster.folder / "sharer.log"
    child = start(command, secret=cluster.node_token(), log=log, environment=ONE_THREAD)
    cluster.owner.callback(kill_group, child)


def job_seconds(items: int, shares: int) -> float:
    """Seconds of a job on one device, once its nodes have done another one."""
    settings = MapSettings(
        item_kind="checksum", parameters={"rounds": _ROUNDS}, checks=0.0, share=1 / shares
    )
    with tempfile.TemporaryDirectory() as name, running(Path(name), is_plaintext=True) as cluster:
        _join(cluster, shares)
        with cluster.client() as client:
            orders = [
                MapOrder(settings, [f"text {number}" for number in range(count)], Path(name) / out)
                for count, out in ((_WARM_UP_ITEMS, "first.jsonl"), (items, "second.jsonl"))
            ]
            start_map(client, orders[0]).wait()
            begin_s = time.monotonic()
            start_map(client, orders[1]).wait()
            return time.monotonic() - begin_s


def share_figures(items: int) -> PartFigures:
    """Measure a job on a device that two nodes share against one that has it whole."""
    whole_s, shared_s = (job_seconds(items, shares) for shares in (1, 2))
    ratio = whole_s / shared_s
    return PartFigures(
        rows=[("two nodes on one device over one", f"{ratio:.2f}", f"{shared_s:.1f} s")],
        metrics={"share_over_whole_2": round(ratio, 3)},
        notes=[f"{items:,} small items, one thread a worker"],
    )
