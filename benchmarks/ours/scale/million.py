"""What a fleet of nodes needs of its operator, by formula from figures that were measured.

Nothing is measured here. Left out: the machine of the database, which writes a few rows for each
update.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.ours.cluster import BenchmarkError
from benchmarks.ours.table import PartFigures, read_rows

RESULTS = Path(__file__).parents[2] / "results" / "scale.json"
WRITE_USD, READ_USD = 4.50e-6, 0.36e-6
"""A request of Cloudflare R2, whose bytes cost nothing:
https://developers.cloudflare.com/r2/pricing/, read in November 2026.
"""


class NodeFleet(NamedTuple):
    """Nodes that all take part in each round."""

    nodes: int
    parameters: int
    round_s: float
    """From one model to the next."""
    fold_s: float
    """How long the fold of a round may take."""


class UnitCosts(NamedTuple):
    """What one of something costs, as measured."""

    sessions_per_core: float
    """Sessions that one core of gateways holds."""
    bytes_per_update: float
    idle_bytes_per_s: float
    """Bytes that an idle node and its coordinator exchange in a second."""
    folded_per_core_s: float
    """Parameters of updates that one process folds in a second."""
    decided_per_core_s: float
    """Updates that fill a core of coordinators."""


class FleetNeeds(NamedTuple):
    """What a fleet takes of its operator."""

    gateway_cores: float
    coordinator_cores: float
    fold_cores: float
    control_bits_per_s: float
    """Mean, of all gateways together."""
    usd_per_round: float
    """Requests to the bucket."""


def fleet_needs(fleet: NodeFleet, costs: UnitCosts) -> FleetNeeds:
    """Compute what a fleet needs. Each node writes its update, and two read for it: itself a delta,
    the fold its update; one more write is the model.
    """
    bytes_per_s = fleet.nodes * (costs.idle_bytes_per_s + costs.bytes_per_update / fleet.round_s)
    return FleetNeeds(
        gateway_cores=fleet.nodes / costs.sessions_per_core,
        coordinator_cores=fleet.nodes / fleet.round_s / costs.decided_per_core_s,
        fold_cores=fleet.nodes * fleet.parameters / costs.folded_per_core_s / fleet.fold_s,
        control_bits_per_s=8 * bytes_per_s,
        usd_per_round=(fleet.nodes + 1) * WRITE_USD + 2 * fleet.nodes * READ_USD,
    )


def unit_costs(figures: Mapping[str, float]) -> UnitCosts:
    """Take the costs from the figures of `scale`.

    Raises:
        BenchmarkError: Some are not measured yet.
    """
    try:
        return UnitCosts(
            sessions_per_core=figures["sessions"] / figures["gateway_cpu_cores"],
            bytes_per_update=figures["coordinator_bytes_per_update"],
            idle_bytes_per_s=figures["coordinator_idle_bytes_per_s"],
            folded_per_core_s=figures["fold_parameters_per_core_s"],
            decided_per_core_s=1000 / figures["coordinator_cpu_ms_per_update"],
        )
    except KeyError as error:
        raise BenchmarkError(f"{error} is not in {RESULTS.name}: run the other parts") from None


def million_figures() -> PartFigures:
    """Return the needs of ten thousand and of a million nodes, by the newest recorded figures."""
    costs = unit_costs({row.key: row.value for row in read_rows(RESULTS)})
    rows = []
    for nodes in (10_000, 1_000_000):
        fleet = NodeFleet(nodes, 25_000_000, 600.0, 60.0)
        needs = fleet_needs(fleet, costs)
        rows += [
            [f"{nodes:,} nodes: cores of gateways", f"{needs.gateway_cores:,.1f}"],
            ["cores of coordinators", f"{needs.coordinator_cores:,.1f}"],
            ["cores of folds", f"{needs.fold_cores:,.0f}"],
            ["control line, Mbit/s", f"{needs.control_bits_per_s / 1e6:,.1f}"],
            ["requests to the bucket, dollars a round", f"{needs.usd_per_round:,.4g}"],
        ]
    return PartFigures(
        rows=rows,
        notes=["25M parameters, rounds of 10 minutes, folds of one, all nodes in each round."],
    )
