"""What network-aware training costs: bytes, samples, accuracy, idle time, failures, forecasts."""

from collections.abc import Callable

from benchmarks.ours.awareness.economy import accuracy_figures, economy_figures
from benchmarks.ours.awareness.failures import failure_figures, flower_failure_figures
from benchmarks.ours.awareness.figures import COLUMNS
from benchmarks.ours.awareness.runs import Runs
from benchmarks.ours.awareness.work import scaling_figures, spread_figures, utilisation_figures
from benchmarks.table.parts import BenchmarkParts, PartFigures


def parts(is_quick: bool) -> BenchmarkParts:
    """Its parts; one whose target was never reached says so and has no figure."""
    runs = Runs()
    seeds, rounds = (1, 6) if is_quick else (3, 8)
    measures: dict[str, Callable[[], PartFigures]] = {
        "economy": lambda: economy_figures(runs, seeds=seeds),
        "failures": lambda: failure_figures(runs, seeds=seeds),
        "utilisation": lambda: utilisation_figures(runs, rounds=rounds),
        "spread": lambda: spread_figures(runs, rounds=rounds),
        "scaling": lambda: scaling_figures(runs, is_quick=is_quick),
    }
    if not is_quick:
        measures["flower"] = flower_failure_figures
        measures["accuracy"] = lambda: accuracy_figures(runs, seeds=seeds)
    return BenchmarkParts(
        title="What network-aware training costs",
        columns=COLUMNS,
        parts=measures,
        notes=lambda: [f"{seeds} seeds; the tunnel unless said.", runs.note()],
    )
