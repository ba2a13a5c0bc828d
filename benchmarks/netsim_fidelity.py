"""How near the netsim backends come to what they are asked for, and what they carry."""

import asyncio
import os
from collections.abc import Sequence

from benchmarks.ours.fidelity.figures import Figures
from benchmarks.ours.fidelity.proxy import proxy_figures
from benchmarks.ours.fidelity.tunnel import tunnel_figures
from benchmarks.ours.fidelity.world import world_figures
from benchmarks.table import ResultTable


def run(is_quick: bool) -> ResultTable:
    """Measure every backend; each gives rows and metrics of its own."""
    measured: Sequence[Figures] = [
        asyncio.run(figures(is_quick)) for figures in (tunnel_figures, proxy_figures, world_figures)
    ]
    return ResultTable(
        title="Networks asked for and measured",
        columns=("", "asked", "measured", "error"),
        rows=[row for figures in measured for row in figures.rows],
        metrics={key: value for figures in measured for key, value in figures.metrics.items()},
        notes=(
            *(note for figures in measured for note in figures.notes),
            f"Load when it ended: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores.",
        ),
    )
