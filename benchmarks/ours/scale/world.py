"""A world of ten thousand virtual nodes: the real cores, on virtual time, in one process."""

import os
import time

from benchmarks.ours.table import PartFigures
from netsim.virtual.simulation import Simulation, WorldOutcome
from netsim.virtual.worlds import SimulatedWorld, calm_world

_SEED = 1


def world_figures(nodes: int, small: int, rounds: int) -> PartFigures:
    """Simulate a large world and, for the ratio, a small one of as many rounds before and after.

    Args:
        nodes: Nodes of the large world.
        small: Nodes of the small one.
        rounds: Rounds of both.
    """
    first_s = timed_run(calm_world(_SEED, small, rounds))[1]
    outcome, seconds = timed_run(calm_world(_SEED, nodes, rounds))
    small_s = (first_s + timed_run(calm_world(_SEED, small, rounds))[1]) / 2
    node_round_us = 1e6 * seconds / nodes / rounds
    small_us = 1e6 * small_s / small / rounds
    return PartFigures(
        rows=[
            [f"{nodes:,} virtual nodes x {rounds} rounds, s", f"{seconds:.1f}"],
            ["its virtual time, s", f"{outcome.virtual_ms / 1000:,.0f}"],
            ["its events", f"{outcome.callbacks:,}"],
            ["a node's round, us", f"{node_round_us:.0f}"],
            [f"the same among {small:,} nodes, us", f"{small_us:.0f}"],
        ],
        metrics={
            f"world_{nodes}x{rounds}_s": seconds,
            f"world_{nodes}_over_{small}_node_round": node_round_us / small_us,
        },
        notes=[
            "One process. Links and transfers are simulated; the cores are the real ones.",
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ],
    )


def timed_run(world: SimulatedWorld) -> tuple[WorldOutcome, float]:
    """Run a world.

    Returns:
        Its outcome, and the seconds that it took.

    Raises:
        AssertionError: An invariant broke.
    """
    started_s = time.monotonic()
    outcome = Simulation(world).run()
    seconds = time.monotonic() - started_s
    if outcome.violations:
        raise AssertionError("; ".join(outcome.violations))
    return outcome, seconds
