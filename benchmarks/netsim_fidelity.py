"""Compares configured and measured behaviour of the netsim backends, and what they carry."""

import asyncio
import os

from benchmarks.ours.fidelity.proxy import proxy_figures
from benchmarks.ours.fidelity.tunnel import tunnel_figures
from benchmarks.ours.fidelity.world import world_figures
from benchmarks.table import ResultTable


def run(is_quick: bool) -> ResultTable:
    """Measure every backend; each gives rows and metrics of its own."""
    measured = [
        asyncio.run(measure(is_quick)) for measure in (tunnel_figures, proxy_figures, world_figures)
    ]
    return ResultTable(
        title="Networks asked for and measured",
        columns=("", "asked", "measured", "error"),
        rows=[row for figures in measured for row in figures.rows],
        metrics={key: value for figures in measured for key, value in figures.metrics.items()},
        notes=(
            *(note for figures in measured for note in figures.notes()),
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )
