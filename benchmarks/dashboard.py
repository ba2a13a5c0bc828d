"""The page: its server under load, and what a person before a browser waits for."""

import os
from collections.abc import Callable
from functools import partial

from benchmarks.ours.page.history import history_figures
from benchmarks.ours.page.load import client_figures, feed_figures, lag_figures
from benchmarks.ours.page.pixels import pixel_figures
from benchmarks.ours.page.submit import submit_figures
from benchmarks.ours.page.weight import axe_figures, export_figures, weight_figures
from benchmarks.ours.table import BenchmarkParts, PartFigures


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts."""
    measured_s = 8.0 if is_quick else 30.0
    measures: dict[str, Callable[[], PartFigures]] = {
        "loop_lag": partial(lag_figures, measured_s=measured_s),
        "client_mb": partial(client_figures, measured_s=measured_s),
        "feed_mb": partial(feed_figures, measured_s=measured_s),
        "pixels": partial(pixel_figures, measured_s=measured_s),
        "history": partial(history_figures, points=100_000 if is_quick else 1_000_000),
        "submit": submit_figures,
        "page_weight": weight_figures,
        "axe": axe_figures,
        "export": export_figures,
    }
    return BenchmarkParts(
        title="The page",
        columns=("", "figure", "beside"),
        parts=measures,
        notes=lambda: [f"Load at the end: {os.getloadavg()[0]:.1f} over {os.cpu_count()} cores."],
    )
