"""How large a world virtual time carries, and whether it is the same world each time."""

import os
import time

from benchmarks.ours.scale.world import timed_run
from benchmarks.ours.table import ResultTable
from netsim.virtual.simulation import Simulation
from netsim.virtual.worlds import SimulatedWorld, calm_world

NODES, ROUNDS = 1000, 100
SAME = 20


def run(is_quick: bool) -> ResultTable:
    """Simulate a thousand nodes with drawn links once, and a small world twenty times."""
    rounds = ROUNDS // 5 if is_quick else ROUNDS
    # Fewer rounds take their share of the time and the whole cost of learning the links.
    outcome, seconds = timed_run(calm_world(1, NODES, rounds))
    same, small_s = _digests(calm_world(2, 20, 5 if is_quick else 20))
    metrics = {
        f"world_{NODES}x{rounds}_s": seconds,
        "world_same_of_20": float(same),
    }
    rows = [
        (f"{NODES} nodes x {rounds} rounds, s", f"{seconds:.1f}"),
        ("its virtual time, s", f"{outcome.virtual_ms / 1000:.0f}"),
        ("its events", f"{outcome.callbacks:,}"),
        ("an event, us", f"{seconds * 1e6 / outcome.callbacks:.1f}"),
        (f"equal journals of {SAME}", f"{same}"),
    ]
    return ResultTable(
        title="A world in virtual time",
        columns=("", "measured"),
        rows=rows,
        metrics=metrics,
        notes=(
            "Each node's link has delay, jitter, rate and bursts of loss; all share 100 Mbit/s.",
            f"{SAME} small worlds of one seed took {small_s:.1f} s.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )


def _digests(world: SimulatedWorld) -> tuple[int, float]:
    """How many of twenty runs give the journal of the first."""
    started_s = time.monotonic()
    journals = [Simulation(world).run().journals for _ in range(SAME)]
    return sum(each == journals[0] for each in journals), time.monotonic() - started_s
