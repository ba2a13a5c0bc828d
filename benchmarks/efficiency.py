"""What network-aware training costs: bytes, samples, accuracy, idle time, failures, forecasts."""

from collections.abc import Callable

from benchmarks.ours.awareness.economy import accuracy_figures, economy_figures
from benchmarks.ours.awareness.failures import failure_figures, flower_failure_figures
from benchmarks.ours.awareness.figures import COLUMNS, Figures, figures_of, merged
from benchmarks.ours.awareness.runs import Runs
from benchmarks.ours.awareness.work import scaling_figures, spread_figures, utilisation_figures
from benchmarks.table import Table


def run(is_quick: bool) -> Table:
    """Measure every part; a part whose target was never reached says so and has no figure.

    Raises:
        BenchmarkError: This machine cannot build the tunnel, or a run broke.
    """
    runs = Runs()
    seeds, rounds = (1, 6) if is_quick else (3, 8)
    parts: list[tuple[str, Callable[[], Figures]]] = [
        ("bytes and samples", lambda: economy_figures(runs, seeds=seeds)),
        ("failures", lambda: failure_figures(runs, seeds=seeds)),
        ("utilisation", lambda: utilisation_figures(runs, rounds=rounds)),
        ("spread", lambda: spread_figures(runs, rounds=rounds)),
        ("scaling", lambda: scaling_figures(runs, is_quick=is_quick)),
    ]
    if not is_quick:
        parts.append(("Flower's failures", flower_failure_figures))
        parts.append(("accuracy", lambda: accuracy_figures(runs, seeds=seeds)))
    found = merged(figures_of(name, part) for name, part in parts)
    return Table(
        title="What network-aware training costs",
        columns=COLUMNS,
        rows=found.rows,
        metrics=found.metrics,
        notes=[*found.notes, f"{seeds} seeds; the tunnel unless said.", runs.note()],
    )
